"""Intercept attention that does not go through qkv: torch's functions, and products with weights that a model forms.

Two kinds of calls are intercepted: torch's attention functions, whose arguments are a complete call that qkv's kernel
computes in linear memory; and attention that a model writes out, which `Tracer` finds by what is computed. There the
model forms its scores, so the memory is quadratic. Modules whose weights cannot be read (scores in blocks or bands,
negative weights, heads that cannot be told) are listed as unreadable; nothing is guessed.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from qkv.engine import Call, Result
from qkv.errors import InputError
from qkv.profiler.capture import calls
from qkv.profiler.capture.caches import Installed, overridden
from qkv.profiler.capture.interventions import ACTIVE
from qkv.profiler.capture.modules import is_attention
from qkv.profiler.capture.receiver import Receiver
from qkv.profiler.capture.record import served, weights_of
from qkv.profiler.capture.tracing import FEATURES, UNKNOWN, Tracer, WeightedSum

SDPA, MULTI_HEAD = nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward
FAST_PATHS = {
    torch._native_multi_head_attention: nn.MultiheadAttention.forward.__code__,
    torch._transformer_encoder_layer_fwd: nn.TransformerEncoderLayer.forward.__code__,
}
"""Functions that compute a module of torch at once, and the code that calls them."""
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # of SDPA
_ENCODER = nn.TransformerEncoder.forward.__code__
SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nhead", "heads")
_SOFTMAX = re.compile("softmax", re.IGNORECASE)
_CALL = nn.Module._call_impl.__code__  # calls the hooks of a module and its forward


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, torch's functions are called directly, and without the autocast of the user.

    Passing them through an `Intercept`, which only needs those of the model, takes longer than most of them take on
    short texts.
    """
    with torch._C.DisableTorchFunction(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _stands_aside() -> AbstractContextManager[None]:
    """Inside, modules of torch that look for function modes before they take their fast path do not see `Intercept`.

    The fast path of `nn.TransformerEncoder` gives other numbers than its other path, at padding other ones altogether.
    """
    own = torch.overrides.has_torch_function

    def has_torch_function(arguments: Iterable[Any]) -> bool:
        modes = torch.overrides._get_current_function_mode_stack()
        if sys._getframe(1).f_code not in (*FAST_PATHS.values(), _ENCODER):
            return own(arguments)
        if not modes or not all(isinstance(mode, Intercept) and mode.stands_aside for mode in modes):
            return own(arguments)
        for _ in modes:
            torch._C._pop_torch_function_stack()
        try:
            return own(arguments)
        finally:
            for mode in modes:
                torch._C._push_on_torch_function_stack(mode)

    return overridden(torch.overrides, {"has_torch_function": has_torch_function})


standing_aside = Installed(_stands_aside)
NO_HEADS = "it has no attribute num_heads; set one"


class Intercept(TorchFunctionMode):
    """Inside, an observer receives every recognised attention call; other attention modules are its `unreadable` ones.

    If the model computes its attention itself, calls are only reported; otherwise torch's output is compared with the
    result of the first call.
    """

    def __init__(self, observer: Receiver, model_computes: bool) -> None:
        super().__init__()
        self.observer, self.names, self.unreadable = observer, observer.modules.names, observer.unreadable
        self.model_computes, self.model = model_computes, observer.modules.model
        self.tracer = Tracer(self._attends, self._cannot_read, self._module)
        self.sizes: list[tuple[set[int], set[int]]] = []  # first, and all, sizes of the inputs of running modules
        self.waiting: list[list[Waiting]] = []  # calls of one module; several are one, if their queries follow
        self.refused: set[str] = set()  # modules that cannot be read in the forward that runs
        self.other: dict[str, str] = {}  # attention modules with a softmax over features

    @property
    def stands_aside(self) -> bool:
        """Whether modules of torch may take their fast path, in which heads are read and not edited."""
        return self.model_computes and not ACTIVE.get(self.model)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._deliver()
        for product in self.tracer.unused.values():
            if product.module is not None and (product.formed or is_attention(product.module)):
                self._cannot_read("its weights are not multiplied with values by a matrix product", product.module)
        for name, reason in self.other.items():
            if name not in self.observer.sources:
                self.unreadable.setdefault(name, reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._attended(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        self.tracer.saw(func, args, kwargs, result)
        return result

    def _attended(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an attention function of torch; None for other functions."""
        if func is SDPA:
            module = self._module()
            query = kwargs["query"] if "query" in kwargs else args[0]
            heads = None if module is None else self._heads(module)
            if module is not None and query.ndim == 3 and heads is None:
                self._cannot_read(
                    f"its queries have shape {tuple(query.shape)}, and {NO_HEADS}"
                )  # maybe (batch · heads)
            elif module is not None:
                at = -3 if query.ndim <= 4 else self._head_dimension(query, heads)
                return None if at is None else self._sdpa(self.names[id(module)], heads, at, args, kwargs)
        elif func is MULTI_HEAD and (module := self._module()) is not None:
            self._deliver()
            multi_head = calls.multi_head_call(*args, **kwargs)
            if multi_head is None:
                self._cannot_read("its keys or values are projected outside of it")
            else:
                arguments, name = calls.multi_head_arguments(*args, **kwargs), self.names[id(module)]
                given = {
                    "keys": calls.real_keys(multi_head, *args, **kwargs),
                    "appended": (arguments["bias_k"] is not None) + arguments["add_zero_attn"],
                }
                if ACTIVE.get(self.model):
                    return self._edited(name, multi_head, arguments, given)
                self._report(name, "sdpa", multi_head, **given)
        elif isinstance(func, HigherOrderOperator) and func.name() == "flex_attention" and (module := self._module()):
            self._deliver()
            name, call, (out, *more) = self.names[id(module)], calls.flex_call(*args, **kwargs), func(*args, **kwargs)
            self.observer.checks.of_flex(name, out, call)
            return self._report(name, "sdpa", call, Result(out)).out, *more
        elif func in FAST_PATHS:
            self._fast_path(FAST_PATHS[func])
        elif func in SOFTMAX:
            self._softmax(*args, **kwargs)
        return None

    def _head_dimension(self, query: Tensor, heads: int | None) -> int | None:
        """Which of the first dimensions of queries are heads; they are unreadable if it cannot be told."""
        dims = self.tracer.of(query).dims[:-2]
        known = [i for i, own in enumerate(dims) if any(f.origin == FEATURES and f.size > 1 for f in own)]
        if any(f.origin == UNKNOWN for own in dims for f in own) or len(known) > 1:
            known = [i for i, n in enumerate(query.shape[:-2]) if i > 0 and n == heads]
        elif not known:  # there is one head
            known = [i for i, n in enumerate(query.shape[:-2]) if i > 0 and n == 1][:1]
        if len(known) == 1 and heads in (None, query.shape[known[0]]):
            return known[0]
        self._cannot_read(calls.heads_unknown("queries", query, heads))
        return None

    def _sdpa(
        self, name: str, heads: int | None, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:  # fmt: skip
        """The result of `scaled_dot_product_attention`, whose dimension `at` is that of the heads."""
        self._deliver()
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        n = given["query"].ndim

        def moved(x: Tensor, before: int, after: int) -> Tensor:
            return x if at % n == n - 3 else x.movedim(before, after)

        given |= {m: moved(given[m], at, -3) for m in ("query", "key", "value")}
        if (mask := given.get("attn_mask")) is not None and mask.ndim > 2:
            given["attn_mask"] = moved(mask[(None,) * (n - mask.ndim)], at, -3) if n > 4 else mask
        call, shape = calls.sdpa_call(heads, **given)
        if self.model_computes:
            out: Tensor = SDPA(*args, **kwargs)
            mine = moved(out, at, -3).reshape(*call.q.shape[:3], call.v.shape[3])
            made = self._report(name, "sdpa", call, Result(mine))
            return out if made.out is mine else moved(made.out.reshape(shape), -3, at)
        result = self._report(name, "sdpa", call)
        self.observer.checks.of_torch(
            name, lambda: moved(SDPA(*args, **kwargs), at, -3).reshape(result.out.shape), result
        )
        return moved(result.out.reshape(shape), -3, at)

    def _edited(
        self, name: str, call: Call, arguments: dict[str, Any], given: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The output and weights of `multi_head_attention_forward` after the edits of its heads."""
        weight, bias, batched = arguments["out_proj_weight"], arguments["out_proj_bias"], arguments["query"].ndim == 3
        alone = {"out_proj_weight": torch.eye(weight.shape[1]).to(weight), "out_proj_bias": None}
        own, weights = MULTI_HEAD(**arguments | alone | {"average_attn_weights": False})
        b, h, n, _ = call.q.shape
        own = own.reshape(n, b, h, -1).permute(1, 2, 0, 3)
        weights = None if weights is None else weights.reshape(b, h, n, -1)
        made = self._report(name, "sdpa", call, Result(own, None, weights), **given)
        heads = made.out.permute(2, 0, 1, 3).reshape(n * b, weight.shape[1])
        out = nn.functional.linear(heads, weight, bias).view(n, b, -1)
        weights = made.weights
        if weights is not None and arguments["average_attn_weights"]:
            weights = weights.mean(1)
        return (out, weights) if batched else (out[:, 0], None if weights is None else weights[0])

    def _fast_path(self, caller: CodeType) -> None:
        """Report a module of torch that is computed at once, from what its forward was given."""
        frame, encoder = _frame_of(caller), _frame_of(_ENCODER)
        if frame is None or id(frame["self"]) not in self.names:
            self._cannot_read("it calls the function of torch's fast path itself")
            return
        self._deliver()
        module = frame["self"]
        if isinstance(module, nn.MultiheadAttention):
            x, mask, padding = frame["query"], frame["attn_mask"], frame["key_padding_mask"]
        else:
            x, mask, padding = frame["src"], frame["src_mask"], frame["src_key_padding_mask"]
        padded = encoder is not None and x.is_nested and not encoder["src"].is_nested
        length = encoder["src"].shape[1] if padded and encoder is not None else None
        call, keys = calls.fast_path_call(module, x, mask, padding, length)
        name = self.names[id(getattr(module, "self_attn", module))]
        self._report(name, "sdpa", call, keys=keys, one_state=True)

    def _softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        """A softmax in a module that is called attention, but over features, is no attention that can be read."""
        if not isinstance(input, Tensor) or input.ndim < 3 or (input.shape[-1] == 1 != input.shape[-2]):
            return
        module = self._module()
        if module is not None and is_attention(module) and self.tracer.over_features(input, -1 if dim is None else dim):
            self.other[self.names[id(module)]] = f"its softmax over dimension {dim} of {input.ndim} is not over tokens"

    def _heads(self, module: nn.Module) -> int | None:
        """The number of heads, by an attribute of the module or of its configuration."""
        owners = (module, getattr(module, "config", None))
        return next((n for owner in owners for name in HEADS if isinstance(n := getattr(owner, name, None), int)), None)

    def _cannot_read(self, reason: str, module: nn.Module | None = None) -> None:
        module = self._module() if module is None else module
        if module is not None:
            name = self.names[id(module)]
            self.unreadable.setdefault(name, reason)
            self.refused.add(name)
            self.waiting = [part for part in self.waiting if part[0].name != name]

    def _attends(self, weighted: WeightedSum) -> None:
        """Weights are multiplied with values. Parts of the queries that follow one another are one call."""
        softmax, module = weighted.note.softmax, self._module()
        module = module if softmax is None or module is None or softmax.module is None else softmax.module
        if module is None or (name := self.names[id(module)]) in self.refused:
            return
        batches = set().union(*(first for first, _ in self.sizes))
        sizes = set().union(*(all_ for _, all_ in self.sizes))
        call = calls.call_of_weighted_sum(weighted, batches, sizes, self._heads(module))
        if isinstance(call, str):
            self._cannot_read(call, module)
            return
        values = weighted.values.movedim(weighted.values_keys, 0).detach()
        piece = Waiting(name, call, values, sizes)
        if self.waiting and self.waiting[-1][0].name != name:
            self._deliver()
        if self.waiting and piece.continues(self.waiting[-1][-1]):
            self.waiting[-1].append(piece)
        else:
            self.waiting.append([piece])

    def _deliver(self) -> None:
        """Report the calls of the module that attended last."""
        waiting, self.waiting = self.waiting, []
        whole = list[Call]()
        for part in waiting:
            total = sum(piece.call.q.shape[2] for piece in part)
            if len(part) > 1 and total in part[0].sizes:
                whole.append(calls.chunked([piece.call for piece in part]))
            elif len(part) == 1 or (total == len(part) and len({piece.call.k.shape[2] for piece in part}) == 1):
                whole += [piece.call for piece in part]  # of several, each is a step of a decoder
            else:
                total = -1
            if total < 0 or (len(waiting) > 1 and total not in part[0].sizes):
                reason = "it attends in parts, and the places of its queries and keys are not known"
                self.unreadable.setdefault(part[0].name, reason)
                return
        for call in whole:
            self._report(waiting[0][0].name, "softmax", call)

    def _report(self, name: str, source: str, call: Call, result: Result | None = None, **details: Any) -> Result:
        """Report a call, with its result if the model has computed it already; `details` are those of `Receiver`."""
        if result is None and self.model_computes:
            result = Result(call.v[:, :, :0])  # the model computes it later
        compute = served if result is None or result.weights is None else _with_weights
        return self.observer.received(name, source, call, compute, known=result, **details)

    def begins(self, inputs: Sequence[Any], *, outermost: bool) -> None:
        """The forward of a module begins."""
        read = [x for x in inputs if isinstance(x, Tensor) and x.ndim]
        if any(x.is_nested for x in read) and not self.stands_aside:
            raise InputError(
                "inputs has a nested tensor, which can only be watched; expected a padded tensor and its padding mask"
            )
        read = [x for x in read if not x.is_nested]
        if outermost:
            self.sizes.clear()
            self.tracer.begins(read)
        shape = next((tuple(x.shape) for x in read if x.ndim >= 2), ())
        pairs = itertools.pairwise(shape[1:]) if len(shape) == 4 else ()  # of an image, height × width
        tokens = shape[:2] if len(shape) == 2 else shape[:-1]
        windows = {math.prod(shape[1:-1])} if len(shape) > 4 else set()  # of an image, each with its tokens
        self.sizes.append(({*shape[:1]}, {*tokens, *(n * m for n, m in pairs), *windows}))

    def ends(self, module: nn.Module) -> None:
        """The forward of a module has ended."""
        name = self.names[id(module)]
        if len(self.sizes) == 1 or any(part[0].name == name for part in self.waiting):
            self._deliver()
        self.refused.discard(name)
        if self.sizes:
            self.sizes.pop()

    def _module(self) -> nn.Module | None:
        """The innermost running module; None inside qkv's kernels and in modules that report their calls themselves."""
        frame = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(
            ("qkv.attention", "qkv.kernels")
        ):
            module = frame.f_locals.get("self")
            known = isinstance(module, nn.Module) and id(module) in self.names
            if known and not _SOFTMAX.search(type(module).__name__):  # a softmax module counts as its owner
                return None if self.names[id(module)] in self.observer.modules.routed else module
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _with_weights(call: Call) -> Result:
    result = served(call)
    return Result(result.out, result.lse, weights_of(call).to(result.out.dtype))


def _frame_of(code: CodeType) -> dict[str, Any] | None:
    """The variables of the innermost running function with this code."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals


@dataclass(frozen=True, eq=False)
class Waiting:
    """A call whose queries may be a part of the queries."""

    name: str
    call: Call
    values: Tensor
    """With the keys as the first dimension."""
    sizes: set[int]
    """Of what the running modules have read."""

    def continues(self, before: Waiting) -> bool:
        """Whether these are queries over the same keys, or over more of them."""
        heads, own = before.call.q.shape[:2], self.call.q.shape[:2]
        n = min(len(before.values), len(self.values))
        return (
            heads == own and before.values.shape[1:] == self.values.shape[1:]
            and torch.equal(before.values[:n], self.values[:n])
        )  # fmt: skip


def calls_of_module(module: nn.Module) -> int:
    """How many calls of a module run, one inside of the other."""
    frame, calls = sys._getframe(1), 0
    while frame is not None:
        calls += frame.f_code is _CALL and frame.f_locals["self"] is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls
