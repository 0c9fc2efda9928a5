"""Intercept attention that does not go through qkv: torch's functions, and softmaxes over scores.

Two kinds of calls are intercepted: torch's attention functions, whose arguments are a complete call that qkv's kernel
computes in linear memory; and, in modules with "attention" in their class name, one softmax over scores. There the
model forms its scores, so the memory is quadratic. Modules that cannot be read (several softmaxes in one forward,
scores in blocks or bands) are listed as unreadable; nothing is guessed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv import masks
from qkv.biases import TensorBias
from qkv.engine import Call, at_least_float32
from qkv.errors import InputError
from qkv.huggingface.attention import read_mask
from qkv.masks import Causal, Mask, Shifted
from qkv.normalizers import Normalizer, Pointwise
from qkv.scores import Dot

if TYPE_CHECKING:
    from qkv.profiler.capture.observer import Observer

SDPA, MULTI_HEAD = nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward
SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nhead", "heads")
_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
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


NO_HEADS = "it has no attribute num_heads; set one"


class Intercept(TorchFunctionMode):
    """Inside, an observer receives every recognised attention call; other attention modules are its `unreadable` ones.

    If it observes beside the model, torch's functions compute, and calls are only reported. It compares torch's own
    output with the result of a call.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer, self.names, self.unreadable = observer, observer.names, observer.unreadable
        self.on_call, self.beside, self.expected = observer.intercepted, observer.beside, frozenset(observer.expected)
        self.scores: dict[int, list[Tensor | str]] = {}  # of modules whose forward is running, or why not readable

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for module in self.scores:  # softmaxes outside of any forward, in another method of the module
            self.unreadable[self.names[module]] = "its softmax is not in its forward"

    def _heads(self, module: nn.Module) -> int | None:
        """The number of heads, by an attribute of the module or of its configuration."""
        owners = (module, getattr(module, "config", None))
        return next((n for owner in owners for name in HEADS if isinstance(n := getattr(owner, name, None), int)), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            module = self._module()
            query = kwargs["query"] if "query" in kwargs else args[0]
            if module is not None and query.ndim == 3 and self._heads(module) is None:
                self.unreadable[self.names[id(module)]] = (  # heads may be folded into the batch
                    f"its queries have shape {tuple(query.shape)}, and {NO_HEADS}"
                )
            elif module is not None:
                call, shape = of_sdpa(self._heads(module), *args, **kwargs)
                if self.beside:
                    out = func(*args, **kwargs)
                    mine = out.reshape(*call.q.shape[:3], call.v.shape[3])
                    made = self.on_call(self.names[id(module)], "sdpa", call, mine)
                    return out if made.out is mine else made.out.reshape(out.shape)
                result = self.on_call(self.names[id(module)], "sdpa", call)
                self.observer.checks.of_torch(
                    self.names[id(module)], lambda: func(*args, **kwargs).reshape(result.out.shape), result
                )
                return result.out.reshape(shape)
        elif func is MULTI_HEAD:
            if (module := self._module()) is not None:
                multi_head = of_multi_head(*args, **kwargs)
                if multi_head is None:
                    self.unreadable[self.names[id(module)]] = "its keys or values are projected outside of it"
                else:
                    self.on_call(self.names[id(module)], "sdpa", multi_head, editable=False)
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
        if module is not None and is_attention(module):
            over_keys = dim in (-1, input.ndim - 1)
            heads = self._heads(module)
            scores = as_scores(input, heads) if over_keys else None
            if not over_keys:
                reason = f"its softmax is over dimension {dim} of {input.ndim}, expected the last"
            elif heads is None:
                reason = f"its scores have shape {tuple(input.shape)}, and {NO_HEADS}"
            else:
                reason = (
                    f"its scores have shape {tuple(input.shape)}, expected (batch, {heads}, queries, keys) or "
                    f"(batch · {heads}, queries, keys) for its {heads} heads"
                )
            self.scores.setdefault(id(module), []).append(reason if scores is None else scores)

    def begins(self, module: nn.Module) -> None:
        """The forward of a module begins."""
        self.scores.pop(id(module), None)

    def ends(self, module: nn.Module) -> None:
        """The forward of a module has ended."""
        kept = self.scores.pop(id(module), [])
        if not kept:
            return
        scores = kept[0]
        if len(kept) > 1:
            self.unreadable[self.names[id(module)]] = f"it computes {len(kept)} softmaxes in one forward"
        elif isinstance(scores, str):
            self.unreadable[self.names[id(module)]] = scores
        else:
            self.on_call(self.names[id(module)], "softmax", of_scores(scores))

    def _module(self) -> nn.Module | None:
        """The innermost running module of the model; None inside qkv's kernels and in modules that are `expected`."""
        frame = sys._getframe(2)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(
            ("qkv.attention", "qkv.kernels")
        ):
            module = frame.f_locals.get("self")
            known = isinstance(module, nn.Module) and id(module) in self.names
            if known and not _SOFTMAX.search(type(module).__name__):  # a softmax module counts as its owner
                return None if self.names[id(module)] in self.expected else module
            frame = frame.f_back  # type: ignore[assignment]
        return None


def calls_of_module(module: nn.Module) -> int:
    """How many calls of a module run, one inside of the other."""
    frame, calls = sys._getframe(1), 0
    while frame is not None:
        calls += frame.f_code is _CALL and frame.f_locals["self"] is module
        frame = frame.f_back  # type: ignore[assignment]
    return calls


def all_routed(model: nn.Module, names: dict[int, str], around: Collection[str]) -> bool:
    """True if all attention of a model passes transformers' interface, so that no function of torch need be read.

    Modules of transformers and torch that attend in another way have "attention" in the names of their classes. Those
    `around` are the modules that attend through the interface, and the modules that contain them.
    """
    known = ("transformers.", "torch.nn.")
    return bool(around) and all(
        type(module).__module__.startswith(known)
        and "forward" not in vars(module)
        and (not is_attention(module) or names[id(module)] in around)
        for module in model.modules()
    )


def is_attention(module: nn.Module) -> bool:
    """Whether a module attends, by the name of its class."""
    return _ATTENTION.search(type(module).__name__) is not None


F = nn.functional
FAR = 5000.0  # a score so far below the query's largest has weight 0; some masks add only −10⁴
MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def of_sdpa(
    heads: int | None,
    query: Float[Tensor, "*b nq d"],
    key: Float[Tensor, "*b nk d"],
    value: Float[Tensor, "*b nk dv"],
    attn_mask: Float[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, torch.Size]:
    """The call that ``F.scaled_dot_product_attention`` makes with these arguments, and the shape of its output.

    All dimensions but the last three are batch; a folded dimension (batch · heads) is unfolded by the number of heads
    of the calling module, if it is known. Torch aligns `is_causal` at the top left, `Causal` at the bottom right.
    """
    if torch.is_autocast_enabled(query.device.type):  # as autocast does for the function itself
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    if not enable_gqa:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    lead = query.shape[:-2]
    query, key, value = (_four(x, heads) for x in (query, key, value))
    mask: Mask | None = None
    if is_causal:
        mask = Causal() if n_queries == n_keys else Shifted(Causal(), 0)
    bias: tuple[Any, ...] = ()
    if attn_mask is not None:
        if len(lead) == 2 or attn_mask.ndim == 2:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        else:
            attn_mask = _four(attn_mask.expand(*lead, n_queries, n_keys), heads)
        mask, bias, _ = read_mask(attn_mask.expand(*attn_mask.shape[:2], n_queries, n_keys), n_queries, n_keys)
    call = Call.of(query, key, value, mask, bias, Dot(scale), dropout_p=dropout_p)
    return call, torch.Size((*lead, n_queries, value.shape[-1]))


def of_multi_head(*args: Any, **kwargs: Any) -> Call | None:
    """The call that ``F.multi_head_attention_forward`` makes, or None if keys or values were projected before.

    (That function works in (length, batch, width), and its boolean masks are True where a query may *not* attend.)
    """
    bound = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    if a["static_k"] is not None or a["static_v"] is not None:
        return None
    heads = a["num_heads"]
    weights = [a[f"{x}_proj_weight"] for x in "qkv"] if a["use_separate_proj_weight"] else a["in_proj_weight"].chunk(3)
    shifts = (None,) * 3 if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    inputs = [x if x.ndim == 3 else x[:, None] for x in (a["query"], a["key"], a["value"])]
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, shifts, strict=True))
    batch = q.shape[1]
    if a["bias_k"] is not None:
        k, v = (torch.cat([x, one.expand(1, batch, -1)]) for x, one in ((k, a["bias_k"]), (v, a["bias_v"])))
    if a["add_zero_attn"]:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    mask: Mask | None = None
    bias: tuple[Any, ...] = ()
    attn_mask = a["attn_mask"]
    if attn_mask is not None:
        attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
    padding = a["key_padding_mask"]
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
    for masked in (attn_mask, padding):
        if masked is not None:
            wide = F.pad(masked, (0, n_keys - masked.shape[-1]))  # keys that the function appends are visible
            read, added, _ = read_mask(~wide if wide.dtype == torch.bool else wide, n_queries, n_keys)
            mask = read if mask is None else mask if read is None else mask & read
            bias += added
    dropout = a["dropout_p"] if a["training"] else 0.0
    return Call.of(q, k, v, mask, bias, dropout_p=dropout)


def of_scores(scores: Float[Tensor, "b h nq nk"]) -> Call:
    """A call whose weights are the softmax of `scores`.

    A pair counts as masked if its score is −∞, the lowest float, or so far below the query's largest score that its
    weight is 0. The values are not known, so they are NaN.
    """
    scores = scores.to(at_least_float32(scores.dtype))
    lowest = torch.finfo(scores.dtype).min / 2
    masked = scores <= (scores.amax(-1, keepdim=True) - FAR).clamp(min=lowest)
    return of_pairs(scores.masked_fill(masked, 0), masks.Dense(~masked) if bool(masked.any()) else None)


def of_pairs(scores: Float[Tensor, "b h nq nk"], mask: Mask | None, normalizer: Normalizer | None = None) -> Call:
    """A call with these scores, whose queries and keys are 0 and whose values are not known, so NaN."""
    zeros = scores.new_zeros(*scores.shape[:2], 1, 1)
    q, k = (zeros.expand(-1, -1, n, -1) for n in scores.shape[2:])
    return Call.of(q, k, k + torch.nan, mask, (TensorBias(scores),), normalizer=normalizer)


class AsGiven(Pointwise):
    """The score is the weight."""

    def weight(self, scores: Tensor) -> Tensor:
        return scores


def of_weights(weights: Float[Tensor, "b h nq nk"]) -> Call:
    """A call with these weights, whose queries and keys are 0 and whose values are not known, so NaN.

    A pair counts as masked if its weight is 0. If the weights of every query add up to 1, or to 0, the call is a
    softmax; otherwise it has the same weights without one.
    """
    weights = weights.to(at_least_float32(weights.dtype))
    if bool((weights < 0).any()):
        raise InputError(f"weights has negative entries down to {float(weights.min()):.3g}, expected weights ≥ 0")
    if are_distributions(weights):
        return of_scores(weights.log())
    return of_pairs(weights, masks.Dense(weights > 0), AsGiven())


def are_distributions(weights: Float[Tensor, "b h nq nk"]) -> bool:
    """True if the weights of every query add up to 1, or to 0 (at padding)."""
    total = weights.sum(-1)
    return bool((((total - 1).abs() < 1e-3) | (total == 0)).all()) and not bool((weights < 0).any())


def as_scores(x: Tensor, heads: int | None) -> Tensor | None:
    """The input of a softmax as scores (batch, heads, nq, nk), or None if the meaning of its dimensions is ambiguous.

    The softmax is over the last dimension; `heads` is the number of heads of the module, if known.
    """
    if x.ndim == 4 and heads == x.shape[1]:
        return x
    if x.ndim == 3 and heads is not None and x.shape[0] % heads == 0:
        return x.unflatten(0, (-1, heads))
    if (
        x.ndim == 5 and heads == x.shape[1] != x.shape[2]
    ):  # (batch, heads, windows, …): each window becomes a batch item
        return x.transpose(1, 2).flatten(0, 1)
    return None


def _four(x: Tensor, heads: int | None) -> Tensor:
    """Reshape a tensor with any batch dimensions to (batch, heads, length, width)."""
    if x.ndim < 2:
        raise InputError(
            f"scaled_dot_product_attention got a tensor of shape {tuple(x.shape)}, expected 2 or more dimensions"
        )
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        return x.unflatten(0, (-1, heads)) if heads and x.shape[0] % heads == 0 else x[:, None]
    return x.flatten(0, -4)
