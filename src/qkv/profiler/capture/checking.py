"""Outputs of modules are compared with those of the recorded attention calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.engine import Call, Result, at_least_float32, detached, under_vmap
from qkv.errors import InputError
from qkv.huggingface.attention import EAGER_NAMES, call_of, causality, eager_of, is_known, name_of
from qkv.huggingface.masks import LazyMask, own_mask
from qkv.kernels import serving
from qkv.masks import Causal, Dense, Grid, Mask, Region, Window
from qkv.profiler.capture.calls import are_distributions, call_of_weights
from qkv.profiler.capture.intercept import unwatched
from qkv.profiler.capture.modules import group_of_module
from qkv.profiler.capture.record import served

ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference, as a fraction of the largest output: many times the rounding of that dtype, and far below the
effect of another mask, scale or bias."""
ROWS, SCORES = 16, 2**20
"""The model's own function is run for at most this many queries, and as many as have this many scores."""


@dataclass(frozen=True)
class Checked:
    """The largest difference between a module's output by its own function and by qkv, relative to the largest one."""

    module: str
    function: str
    difference: float


def compared(
    name: str,
    where: str,
    own: Float[Tensor, "b h nq dv"],
    computed: Float[Tensor, "b h nq dv"],
    counted: Bool[Tensor, "b h nq"] | None,
) -> Checked:
    """The difference of two outputs over the queries that count, the first of them by the function called `where`."""
    if own.shape != computed.shape:
        raise InputError(
            f"model computes an output of shape {tuple(own.shape)} (batch, heads, queries, values) in {name} by "
            f"{where}, but qkv computes {tuple(computed.shape)} from its arguments; expected standard attention"
        )
    wide = at_least_float32(computed.dtype)
    off, size = (own.to(wide) - computed.to(wide)).abs(), computed.to(wide).abs()
    if counted is not None:
        off, size = (x.masked_fill(~counted[..., None], 0) for x in (off, size))
    largest = float(size.amax().clamp(min=torch.finfo(wide).tiny))
    difference = float(off.amax()) / largest
    if not difference <= ALLOWED.get(own.dtype, ALLOWED[torch.float32]):
        raise InputError(
            f"model attends in {name} by {where}, whose output differs from standard attention with the same arguments "
            f"by {difference:.2g} of the largest output; expected a function that qkv can recompute, or one that "
            "returns its weights besides the output"
        )
    return Checked(name, where, difference)


def check_rows(
    module: nn.Module,
    name: str,
    function: Callable[..., Any],
    call: Call,
    out: Float[Tensor, "b h nq dv"],
    attention_mask: Any,
    arguments: dict[str, Any],
) -> Checked | None:
    """Run the model's own function for a few queries and compare with the same rows of `out`.

    Its arguments are those of the model, and its mask is the one that transformers makes for it: the mask of the last
    queries, or none and the first queries, since a function without a mask counts positions from the first key. None if
    the function does not accept these arguments, so that nothing can be compared.
    """
    b, h, n_queries, _ = call.q.shape
    n_keys = call.k.shape[2]
    count = min(n_queries, max(2, min(ROWS, SCORES // max(1, b * h * n_keys))))
    rows, added = slice(n_queries - count, n_queries), attention_mask
    if isinstance(attention_mask, LazyMask):
        torchs = name_of(function).endswith("sdpa_attention_forward")
        own = dict(attention_mask.arguments) | {"q_length": count, "allow_is_causal_skip": False}
        own["q_offset"] += rows.start
        added = own_mask("sdpa" if torchs else "eager", **own)
    elif attention_mask is not None and attention_mask.shape[2] > 1:
        added = attention_mask[..., rows, :]
    rows = slice(0, count) if added is None else rows
    added = None if added is None else added[..., :n_keys]
    visible = None
    if call.mask is not None:
        visible = call.mask.visible(Region(rows, slice(0, n_keys)), call.grid)
        visible = visible.expand(b, -1, count, n_keys)
    if added is None and visible is not None and "eager" in name_of(function):  # in place of one that needs a card
        added = torch.where(visible, 0.0, torch.finfo(call.q.dtype).min)
    few = dict(arguments)
    if isinstance(bias := few.get("position_bias"), Tensor):
        few["position_bias"] = bias[..., rows, :n_keys] if bias.shape[2] > 1 else bias[..., :n_keys]
    if isinstance(indices := few.get("indices"), Tensor):
        few["indices"] = indices[:, rows]
        if visible is not None:  # the model adds them to the mask of its own function
            added = torch.where(visible, 0.0, torch.finfo(call.q.dtype).min)
    given = call.user
    try:
        own = function(module, given.q[:, :, rows], given.k, given.v, added, **few)[0]
    except (TypeError, ValueError, RuntimeError):
        return None
    counted = None if visible is None else visible.any(-1).expand(b, h, count)
    return compared(name, name_of(function), own.transpose(1, 2), out[:, :, rows], counted)


def masks_of(
    module: nn.Module, function: Callable[..., Any], query: Tensor, key: Tensor, attention_mask: Any,
    arguments: Mapping[str, Any],
) -> Iterator[Any]:  # fmt: skip
    """The mask of an attention function, in each way in which its arguments can be meant.

    Transformers passes no mask to a function that has no mask function of its own, and some functions apply the
    causality of the module, or its window, by themselves: FlashAttention the window, torch's SDPA not, which aligns
    the first query with the first key. A tensor of 2 dimensions marks the real keys.
    """
    described = getattr(attention_mask, "qkv_mask", None)
    if described is not None and described.shape[2:] == (query.shape[2], key.shape[2]):
        yield described
        return
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        yield attention_mask
        return
    n_queries, n_keys = query.shape[2], key.shape[2]
    real = None if attention_mask is None else attention_mask[:, None, None, -n_keys:].bool()
    causal = causality(module, arguments) if is_known(function) else arguments.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None and not is_known(function) else causal
    window = arguments.get("sliding_window")
    masks: list[Mask | None] = [Causal() if causal and n_queries > 1 else None]
    flash = "flash" in name_of(function)
    if causal and isinstance(window, int) and (flash or not is_known(function)):
        masks = [Window(window), *masks]
    masks = masks[:1] if is_known(function) else [*masks, None] if masks[-1] is not None else masks
    used = n_queries if masks[0] is not None and is_known(function) and not flash else n_keys  # of a static cache
    grid = Grid(len(query), 1, n_queries, used, used - n_queries, query.device)
    for mask in masks:
        whole = mask if real is None else Dense(real) if mask is None else mask & Dense(real)
        yield LazyMask(whole, grid, query.dtype, None if real is None else real[:, 0, 0], n_keys)


_CHECKED: WeakKeyDictionary[nn.Module, dict[Hashable, Checked]] = WeakKeyDictionary()
"""The comparisons that were made for a model, by function and, for functions of users, by module."""
SDPA = "torch.nn.functional.scaled_dot_product_attention"


class Checks(list[Checked]):
    """Comparisons of a model's own attention functions with what is recorded: once for every model.

    Args:
        model: the model.
        functions: the attention functions of its modules, by id.
    """

    def __init__(self, model: nn.Module, functions: Mapping[int, Callable[..., Any] | None]) -> None:
        super().__init__()
        self.functions, self.known = functions, _CHECKED.setdefault(model, {})

    def of_rows(
        self, module: nn.Module, name: str, call: Call, out: Tensor, attention_mask: Any, arguments: dict[str, Any]
    ) -> None:
        """Compare some rows of the model's first call with the function that the model would have called."""
        if self:
            return
        for function in (self.functions.get(id(module)), eager_of(module)):
            if (
                function is None or name_of(function).rpartition(".")[2] not in EAGER_NAMES
            ):  # needs a card, or another mask
                continue
            if name_of(function) not in self.known:
                with unwatched(), serving(None):
                    checked = check_rows(module, name, function, call, out, attention_mask, arguments)
                if checked is None:
                    continue
                self.known[name_of(function)] = checked
            self.append(self.known[name_of(function)])
            return

    def of_torch(self, name: str, own: Callable[[], Tensor], result: Result) -> None:
        """Compare the result of the first call of torch's function with what it computes itself."""
        if self or result.lse is None:
            return
        if SDPA not in self.known:
            made = own()  # under the autocast of the user
            with unwatched():
                self.known[SDPA] = compared(name, SDPA, made, result.out, result.lse > -torch.inf)
        self.append(self.known[SDPA])

    def of_flex(self, name: str, own: Tensor, call: Call) -> None:
        """Compare the output of a call of FlexAttention with what qkv computes of its functions: of every call."""
        with torch.no_grad(), unwatched():
            result = served(detached(call))
            counted = None if result.lse is None else result.lse > -torch.inf
            self.append(compared(name, "torch.nn.attention.flex_attention", own.detach(), result.out, counted))

    def of_function(
        self, module: nn.Module, name: str, function: Callable[..., Any], returned: tuple[Any, ...],
        args: tuple[Any, ...], named: dict[str, Any], *, once: bool,
    ) -> tuple[Call, Tensor | None, str]:  # fmt: skip
        """The call of a model's own function, its padding mask, and its source.

        That is the reading of its arguments that gives its output. If none does, it is the weights that the function
        returns, if their product with the values is its output. With `once`, only the first call is compared, and
        none in which weights are dropped.
        """
        where, known, out = name_of(function), is_known(function), returned[0].detach().transpose(1, 2)
        place, reason = (where, None if known else name), None
        query, key, value, attention_mask = (*args, named.get("attention_mask"))[:4]
        others = {argument: x for argument, x in named.items() if argument != "attention_mask"}
        readings = masks_of(module, function, query, key, attention_mask, others)
        if dropped := once and bool(others.get("dropout")):
            others["dropout"] = 0.0
            if not known:
                reason, readings = (
                    InputError(
                        f"model applies dropout in {name} by {where}, whose output cannot be compared with standard "
                        "attention then; expected evaluation mode or a dropout of 0"
                    ),
                    iter(()),
                )
        for mask in readings:
            try:
                call, keys = call_of(module, name, query, key, value, mask, **others)
                if not (dropped or under_vmap(call) or (once and place in self.known)):
                    with torch.no_grad(), unwatched():
                        result = served(detached(call))
                        counted = None if result.lse is None else result.lse > -torch.inf
                        self.append(compared(name, where, out, result.out, counted))
                    if known or mask is not None:
                        self.known[place] = self[-1]
            except InputError as error:
                reason = reason or error
                continue
            return call, keys, "interface"
        assert reason is not None
        weights = returned[1] if len(returned) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4:
            raise reason
        if weights.shape[1] % value.shape[1] or weights.shape[3] != value.shape[2]:
            raise InputError(
                f"model attends in {name} by {where}, which returns weights of shape {tuple(weights.shape)} for values "
                f"of shape {tuple(value.shape)}; expected (batch, heads, queries, keys)"
            ) from reason
        values = value.detach().repeat_interleave(weights.shape[1] // value.shape[1], 1)
        self.append(compared(name, where, out, weights.detach().to(values.dtype) @ values, None))
        return call_of_weights(weights.detach()), None, "returned"


RETURNED = {  # fields of transformers' outputs, and the groups that they hold
    "attentions": ("self", "text", "vision", "audio"),
    "encoder_attentions": ("encoder",),
    "decoder_attentions": ("decoder",),
    "cross_attentions": ("cross",),
}


Inputs = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""Arguments of the calls of a model; of two calls at most, which tell that it ran more than once (generation, say)."""


@torch.no_grad()
def returned(model: nn.Module, recorded: Inputs, modules: list[str], observed: set[str]) -> dict[str, Tensor]:
    """Weights (batch, heads, nq, nk) that the model returns for `modules`, by their names, if they are unambiguous.

    The model runs again and forms all of its weights. The weights of a kind of attention are used only if as many
    layers are returned as there are modules of this kind, all of them in `modules`, and every row is a distribution
    over as many keys as there are queries (over any number of keys in cross-attention).

    Args:
        model: a transformers model; for any other the result is empty.
        recorded: the arguments of its only call.
        modules: names of attention modules whose calls could not be observed, in the model's order.
        observed: kinds of attention (`qkv.profiler.capture.inputs`) of which some modules were observed.
    """
    banded = hasattr(getattr(model, "config", None), "attention_window")  # Longformer and LED return weights in bands
    if not modules or len(recorded) != 1 or banded or not type(model).__module__.startswith("transformers."):
        return {}
    args, kwargs = recorded[0]
    try:
        outputs = model(*args, **kwargs | {"output_attentions": True})
    except (TypeError, ValueError):  # the model cannot return weights; its modules are reported as unobserved
        return {}
    by_name: dict[str, Tensor] = {}
    kinds = {name: group_of_module(name, model) for name in modules}
    for key, group in RETURNED.items():
        names = [name for name in modules if kinds[name] in group]
        weights = outputs.get(key) if isinstance(outputs, Mapping) else None
        if names and not observed & set(group) and weights is not None and len(weights) == len(names):
            shapes = [w.shape for w in weights if isinstance(w, Tensor) and w.ndim == 4 and are_distributions(w)]
            square = key != "cross_attentions"
            if len(shapes) == len(names) and not (square and any(shape[2] != shape[3] for shape in shapes)):
                by_name |= dict(zip(names, weights, strict=True))
    return by_name
