"""Observe attention that a model computes without transformers' attention interface and without qkv.

Two kinds of calls are intercepted: torch's attention functions, whose arguments are a complete call that qkv's kernel
computes in linear memory; and, in modules with "attention" in their class name, one softmax over scores. There the
model forms its scores, so the memory is quadratic. Modules that cannot be read (several softmaxes in one forward,
scores in blocks or bands) are listed as unreadable; nothing is guessed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._engine.call import Result
from qkv.profiler.capture.torch_calls import as_scores, of_multi_head, of_scores, of_sdpa

SDPA, MULTI_HEAD = nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward
SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nhead", "heads")
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_SOFTMAX = re.compile("softmax", re.IGNORECASE)

OnCall = Callable[..., Result]
"""Module, source ("sdpa" or "softmax"), call, the output that the model has computed or None, and by name whether it
can be edited; returns the result of the call."""

OnOutput = Callable[[str, Callable[[], Tensor], Result], None]  # module, function that computes torch's output, result


def unwatched() -> AbstractContextManager[object]:
    """Inside, torch's functions are called directly: passing them through an `Intercept`, which only needs those of
    the model, takes longer than most of them take on short texts."""
    return torch._C.DisableTorchFunction()


class Intercept(TorchFunctionMode):
    """Inside, `on_call` receives every recognised attention call; other attention modules are added to `unreadable`.

    Args:
        model: the model whose calls are intercepted.
        names: names of its modules, by id.
        expected: modules that use transformers' attention interface, which is observed elsewhere.
        on_call: callback for every recognised call.
        check: callback that may compare torch's own output with the result of `on_call`.
        unreadable: gets the names of modules whose attention cannot be read, and the reasons.
        heads: the number of heads of modules that do not state it in an attribute, by name.
        beside: let torch's function compute, and only report the call.
    """

    def __init__(
        self,
        model: nn.Module,
        names: dict[int, str],
        expected: Collection[str],
        on_call: OnCall,
        check: OnOutput,
        unreadable: dict[str, str],
        heads: Mapping[str, int],
        *,
        beside: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.names, self.expected = model, names, frozenset(expected)
        self.beside = beside
        self.on_call, self.check, self.unreadable, self.stated = on_call, check, unreadable, heads
        self.scores: dict[int, list[Tensor | str]] = {}  # of modules whose forward is running, or why not readable
        self.handles: list[Any] = []

    def __enter__(self) -> Any:
        for module in self.model.modules():
            if _is_attention(module):
                self.handles.append(module.register_forward_pre_hook(self._begins))
                self.handles.append(module.register_forward_hook(self._ends))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()
        for module in self.scores:  # softmaxes outside of any forward, in another method of the module
            self.unreadable[self.names[module]] = "its softmax is not in its forward"

    def _heads(self, module: nn.Module) -> int | None:
        """The number of heads as stated for this module, or by an attribute of it or of its configuration."""
        stated = self.stated.get(self.names[id(module)])
        if stated is not None:
            return stated
        owners = (module, getattr(module, "config", None))
        return next((n for owner in owners for name in HEADS if isinstance(n := getattr(owner, name, None), int)), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            module = self._module()
            query = kwargs["query"] if "query" in kwargs else args[0]
            if module is not None and query.ndim == 3 and self._heads(module) is None:
                self.unreadable[self.names[id(module)]] = (  # heads may be folded into the batch
                    f"its queries have shape {tuple(query.shape)}, and {self._unstated(module)}"
                )
            elif module is not None:
                call, shape = of_sdpa(self._heads(module), *args, **kwargs)
                if self.beside:
                    out = func(*args, **kwargs)
                    mine = out.reshape(*call.q.shape[:3], call.v.shape[3])
                    made = self.on_call(self.names[id(module)], "sdpa", call, mine)
                    return out if made.out is mine else made.out.reshape(out.shape)
                result = self.on_call(self.names[id(module)], "sdpa", call)
                self.check(self.names[id(module)], lambda: func(*args, **kwargs).reshape(result.out.shape), result)
                return result.out.reshape(shape)
        elif func is MULTI_HEAD:
            module = self._module()
            if module is not None:
                multi_head = of_multi_head(*args, **kwargs)
                if multi_head is None:
                    self.unreadable[self.names[id(module)]] = "its keys or values are projected outside of it"
                else:
                    nothing = multi_head.v[:, :, :0] if self.beside else None
                    self.on_call(self.names[id(module)], "sdpa", multi_head, nothing, editable=False)
        elif func in SOFTMAX:
            self._softmax(*args, **kwargs)
        return func(*args, **kwargs)

    def _softmax(self, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        """Keep the scores until the module's forward ends: only then is it known that there is one softmax."""
        if not isinstance(input, Tensor) or input.ndim < 3:
            return
        if input.shape[-1] == 1 != input.shape[-2]:  # a softmax over a single number, as in some convolutions
            return
        module = self._module()
        if module is not None and _is_attention(module):
            over_keys = dim in (-1, input.ndim - 1)
            heads = self._heads(module)
            scores = as_scores(input, heads) if over_keys else None
            if not over_keys:
                reason = f"its softmax is over dimension {dim} of {input.ndim}, expected the last"
            elif heads is None:
                reason = f"its scores have shape {tuple(input.shape)}, and {self._unstated(module)}"
            else:
                reason = (
                    f"its scores have shape {tuple(input.shape)}, expected (batch, {heads}, queries, keys) or "
                    f"(batch · {heads}, queries, keys) for its {heads} heads"
                )
            self.scores.setdefault(id(module), []).append(reason if scores is None else scores)

    def _unstated(self, module: nn.Module) -> str:
        name = self.names[id(module)]
        return f"it has no attribute num_heads; set one, or pass heads={{{name!r}: number of heads}}"

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self.scores.pop(id(module), None)

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        kept = self.scores.pop(id(module), [])
        if not kept:
            return
        scores = kept[0]
        if len(kept) > 1:
            self.unreadable[self.names[id(module)]] = f"it computes {len(kept)} softmaxes in one forward"
        elif isinstance(scores, str):
            self.unreadable[self.names[id(module)]] = scores
        else:
            call = of_scores(scores)
            self.on_call(self.names[id(module)], "softmax", call, call.v[:, :, :0] if self.beside else None)

    def _module(self) -> nn.Module | None:
        """The innermost running module of the model; None inside qkv's kernels and in modules that are `expected`."""
        frame = sys._getframe(2)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("qkv.kernels"):
            module = frame.f_locals.get("self")
            known = isinstance(module, nn.Module) and id(module) in self.names
            if known and not _SOFTMAX.search(type(module).__name__):  # a softmax module counts as its owner
                return None if self.names[id(module)] in self.expected else module
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _is_attention(module: nn.Module) -> bool:
    return _ATTENTION.search(type(module).__name__) is not None
