"""Run models of transformers with qkv's attention (`use`, `register`), or with a function around their own.

`call_of` translates the arguments of transformers' attention interface into a `Call` of qkv: every argument that
affects the weights is either supported or raises an error; only arguments known to be without effect are ignored.
(Written for transformers 5.24.)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import and_, or_
from types import FunctionType
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import biases
from qkv._packages import check_tested, require
from qkv.compat import autocast_dtype
from qkv.engine import Call
from qkv.errors import InputError
from qkv.kernels import opaque, serve
from qkv.masks import Causal, Dense, Document, Grid, Mask, Predicate, Region, Shifted, Window
from qkv.masks.convert import is_causal
from qkv.normalizers import Softmax
from qkv.scores import Dot

MASKED = -9984.0
"""Numbers added to scores that are at most this, −10⁴ in bfloat16, mask a pair like −inf: models use −10⁴, −10⁹ and the
lowest float."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments without effect on the weights: bookkeeping, or already in the mask.
INERT = {
    "cache_position",
    "deterministic",
    "is_causal",  # read where the model's own attention function reads it
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


def call_of(
    module: nn.Module,
    name: str,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkv nk d"],
    value: Float[Tensor, "b hkv nk dv"],
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " h"] | None = None,
    position_bias: Float[Tensor, "#b #h nq more"] | None = None,
    indices: Int[Tensor, "b nq few"] | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Call, Bool[Tensor, "b n_keys"] | None]:
    """The call that transformers makes, and its padding mask (True at real keys) if the attention mask has one.

    The unused slots of a static cache are left out of the call. The arguments are those that the model passes:
    `attention_mask` is a `LazyMask`, a 4-D tensor or None, `s_aux` the logit of a sink for each head, and `indices` are
    keys to which each query is restricted, in addition to the mask (DeepSeek-V3.2). Where transformers passes no mask
    to the model's own function, and this function reads `is_causal` of the module, as torch's SDPA does, so does qkv.
    """
    for argument, passed in others.items():
        if argument not in INERT and passed is not None and passed is not False:
            raise InputError(
                f"{argument} is {_brief(passed)}, which {name} passes to its attention; expected only arguments that "
                "qkv supports"
            )
    if (dtype := autocast_dtype(query)) is not None:  # as for torch's attention: rotary leaves q and k in float32
        query, key, value = (x.to(dtype) for x in (query, key, value))
    mask, bias, keys = read_mask(attention_mask, query.shape[2], key.shape[2])
    causal = causality(module, others) if query.shape[2] > 1 else None
    if attention_mask is None and query.shape[2] > 1:
        if causal is None and own_implementation(module) is None and getattr(module, "is_causal", False):
            raise InputError(f"attention_mask is None in {name}, whose is_causal is True; expected a mask")
        if causal:  # the unused slots of a static cache follow
            mask, key, value = Causal(), key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if isinstance(attention_mask, LazyMask):
        n_keys = attention_mask.grid.n_keys
        if causal not in (None, is_causal(mask)) and "flash" in str(own_implementation(module)):
            raise InputError(
                f"is_causal is {causal} in {name}, where the model has a mask that is {'not ' * bool(causal)}causal; "
                "expected the same in both, or the implementation sdpa"
            )
        key, value = key[:, :, :n_keys], value[:, :, :n_keys]
    if indices is not None:
        chosen = _chosen(name, indices, query, key)
        mask = chosen if mask is None else mask & chosen
    if position_bias is not None:
        bias = (biases.TensorBias(position_bias[..., : key.shape[2]]), *bias)
    if softcap is not None:
        bias = (biases.SoftCap(softcap), *bias)
    return Call.of(query, key, value, mask, bias, Dot(scaling), Softmax(sink=s_aux), dropout), keys


def own_implementation(module: nn.Module) -> str | None:
    """The implementation that the configuration of a module selected before qkv's; None if it does not say."""
    return own_name(getattr(module, "config", None))


def own_name(config: Any) -> str | None:
    """The implementation that a configuration selected before qkv's, which is in the place of torch's SDPA."""
    name: str | None = getattr(config, "_attn_implementation_internal", None)
    name = _ROUTED.get(name, name)
    return "sdpa" if name == NAME else "eager" if name == MASKS else name


def causality(module: nn.Module, arguments: Mapping[str, Any]) -> bool | None:
    """What the model's own function applies where it gets no mask: causal or not; None if it needs a mask for that.

    SDPA and FlashAttention take `is_causal` from the arguments or from the module; eager attention takes it from none.
    """
    name, given = own_implementation(module), arguments.get("is_causal")
    if name is None:
        return given
    if "sdpa" not in name and "flash" not in name:
        return None
    return bool(getattr(module, "is_causal", True) if given is None else given)


def routes(module: nn.Module) -> bool:
    """True if the module's code gets its attention function from transformers' attention interface."""
    return bool(globals_of(module))


def globals_of(module: nn.Module) -> dict[str, Any]:
    """The globals of the code of a module that calls transformers' attention interface; empty if it does not."""
    kind: type = type(module)
    return _class_globals(kind)


@functools.cache
def _class_globals(kind: type) -> dict[str, Any]:
    for cls in kind.__mro__:
        if cls is nn.Module or cls.__module__ == "transformers.modeling_utils":
            break
        for method in vars(cls).values():
            plain = inspect.unwrap(method) if callable(method) else None
            if isinstance(plain, FunctionType) and INTERFACE in plain.__code__.co_names:
                return plain.__globals__
    return {}


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration that selects the attention implementation of some module of the model, each once."""
    found = dict[int, Any]()
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        if any(map(routes, module.modules())):
            found[id(config)] = config
    return list(found.values())


def read_mask(mask: Any, n_queries: int, n_keys: int) -> tuple[Mask | None, tuple[biases.Bias, ...], Tensor | None]:
    """Split the attention mask that a model passes into a mask, a bias and a padding mask (True at real keys)."""
    if mask is None:
        return None, (), None
    if isinstance(mask, LazyMask):
        if mask.shape[2:] != (n_queries, n_keys):
            raise InputError(
                f"attention_mask is for {mask.shape[2]} queries × {mask.shape[3]} keys, "
                f"but the model attends with {n_queries} × {n_keys}"
            )
        return mask.mask, (), mask.keys
    known = isinstance(mask, Tensor) and mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    if not known:
        raise InputError(f"attention_mask is {_brief(mask)}, expected a tensor of 4 dimensions, bool or float")
    mask = mask[..., :n_keys]
    if mask.dtype == torch.bool:
        return Dense(mask), (), None
    masked = mask <= MASKED
    bias = mask.masked_fill(masked, 0)
    learned = mask.requires_grad  # a learned bias may start at 0
    additive = (biases.TensorBias(bias),) if learned or bool(bias.any()) else ()
    return Dense(~masked) if bool(masked.any()) else None, additive, None


def _chosen(name: str, indices: Tensor, query: Tensor, key: Tensor) -> Mask:
    """The mask of the keys in `indices`; it is quadratic, but smaller than the scores by which the model chose them."""
    batch, _, n_queries, _ = query.shape
    n_keys = key.shape[2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, n_queries):
        raise InputError(
            f"indices is {_brief(indices)} in {name}, expected (batch, queries, chosen keys) with "
            f"(batch, queries) = {(batch, n_queries)}"
        )
    kept = indices.clamp(max=n_keys).long()  # indices may point to unused slots of a static cache
    chosen = torch.zeros(batch, n_queries, n_keys + 1, dtype=torch.bool, device=query.device)
    return Dense(chosen.scatter_(2, kept, True)[:, None, :, :n_keys])


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


# --- masks ------------------------------------------------------------------------------------------------------------
#
# Transformers describes a mask by a function of (batch, head, query, key) that is built from a dozen factories, and
# calls a registered mask function to turn it into a tensor. The mask function of qkv returns a `LazyMask` instead: no
# n × n tensor is formed, and the description is decoded to the mask algebra.

FAR = 2**62  # a window that ends beyond any sequence


class LazyMask:
    """A mask that models pass from mask creation to attention in place of a 4-D mask tensor.

    It has the interface of a float tensor as far as models inspect masks. Code that computes with it gets an additive
    tensor of 0 and the lowest float, which any attention implementation accepts.
    """

    def __init__(
        self, mask: Mask | None, grid: Grid, dtype: torch.dtype, keys: Tensor | None, length: int,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.mask = mask
        self.arguments = dict(arguments or {})  # those of transformers' mask functions
        self.grid = grid  # over the keys up to the last that is visible to a query; later keys are masked
        self.keys = keys  # (batch, grid.n_keys), True at real tokens, or None if all are real
        self.dtype = dtype
        self.device = grid.device
        self.shape = torch.Size((grid.batch, 1, grid.n_queries, length))
        self.ndim = 4

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> LazyMask:
        return self

    def contiguous(self, *args: Any, **kwargs: Any) -> LazyMask:
        return self

    def tensor(self) -> Tensor:
        """The additive mask as a tensor."""
        grid = self.grid
        added = torch.full(self.shape, torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        if self.mask is None:
            added[..., : grid.n_keys] = 0
        else:
            visible = self.mask.visible(Region(slice(0, grid.n_queries), slice(0, grid.n_keys)), grid)
            added[..., : grid.n_keys].masked_fill_(visible, 0)
        return added

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def formed(x: Any) -> Any:
            if isinstance(x, LazyMask):
                return x.tensor()
            return type(x)(map(formed, x)) if isinstance(x, list | tuple) else x

        return func(*map(formed, args), **{k: formed(v) for k, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]


class _FormedError(Exception):
    """Raised when transformers begins to form a mask."""


def _formed(*_: Any) -> Tensor:
    raise _FormedError


def _skipped(arguments: Mapping[str, Any]) -> bool:
    """Whether transformers passes no mask to torch's SDPA."""
    try:
        return own_mask("sdpa", **{**arguments, "mask_function": _formed}) is None
    except _FormedError:
        return False


def own_mask(implementation: str, **arguments: Any) -> Any:
    """The mask that transformers makes for an implementation."""
    from transformers.masking_utils import AttentionMaskInterface

    function: Any = AttentionMaskInterface._global_mapping[implementation]
    return getattr(function, "replaced", function)(**arguments)


def _through_tensor(name: str) -> Callable[..., Any]:
    def operator(self: LazyMask, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*(a.tensor() if isinstance(a, LazyMask) else a for a in args))

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LazyMask, f"__{_name}__", _through_tensor(f"__{_name}__"))


@opaque
def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | LazyMask | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LazyMask | None:
    """The mask function to register with transformers. It never returns a tensor.

    A static cache passes its live counter as `q_offset` and advances it before attention runs, so the counter is read
    here. The unused slots of such a cache are left out: decoding is then the same as with a cache that grows. Where the
    model's own implementation has no mask, since torch's SDPA takes `is_causal` in its place, it is None.
    """
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    name = own_name(kwargs.get("config"))
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    arguments = sizes | {"kv_offset": kv_offset, "attention_mask": attention_mask, "device": device, "dtype": dtype}
    arguments |= kwargs if mask_function is None else kwargs | {"mask_function": mask_function}
    if name is not None and "sdpa" in name and _skipped(arguments):
        return None
    start, offset = int(kv_offset), int(q_offset) - int(kv_offset)

    def decoded(n_keys: int) -> Mask | None:
        return Causal() if mask_function is None else decode(mask_function, batch_size, n_keys, start)

    n_keys, mask = kv_length, decoded(kv_length)
    if 0 < offset + q_length < kv_length and is_causal(mask):
        n_keys = offset + q_length
        mask = decoded(n_keys)
    grid = Grid(batch_size, 1, q_length, n_keys, n_keys - q_length, torch.device(device))
    if mask is not None and offset != grid.offset:
        mask = Shifted(mask, offset)
    keys = _real_keys(attention_mask, start, n_keys)
    if keys is not None:
        padding = Dense(keys[:, None, None, :])
        band = None if mask is None or q_length > 1 else mask.band
        shows_all = band is not None and band[0] <= 0 and band[1] >= n_keys - 1  # a step of decoding
        mask = padding if mask is None or shows_all else mask & padding
    floating = dtype if dtype.is_floating_point else torch.float32
    return LazyMask(mask, grid, floating, keys, kv_length, arguments)


def _real_keys(attention_mask: Tensor | None, offset: int, length: int) -> Tensor | None:
    """True at real keys, (batch, length), or None if all are real. `attention_mask` may be shorter than the cache."""
    if attention_mask is None:
        return None
    real = attention_mask.to(torch.bool)
    short = offset + length - real.shape[-1]
    if short > 0:
        real = torch.nn.functional.pad(real, (0, short))
    real = real[:, offset : offset + length]
    return None if bool(real.all()) else real


def decode(function: Callable[..., Any], batch: int, n_keys: int, kv_offset: int) -> Mask | None:
    """The mask that transformers' `function` describes, over keys `kv_offset` to `kv_offset + n_keys`; None is no mask.

    An unknown function becomes a `Predicate`, which is exact and evaluated tile by tile.
    """
    try:
        return _decode(function, n_keys, kv_offset)
    except _UnknownError:
        mapped: Any = function  # of numbers; vectorised, it takes indices that broadcast
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)
        return Predicate(
            lambda b, h, q, k: mapped(b.flatten(), h.flatten(), q.flatten() + kv_offset, k.flatten() + kv_offset)
        )


class _UnknownError(Exception):
    """Raised for a mask function that is not one of transformers' factories."""


def _decode(function: Callable[..., Any], n_keys: int, start: int) -> Mask | None:
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        raise _UnknownError
    name = function.__qualname__.split(".")[0]
    inner = inspect.getclosurevars(function).nonlocals
    keys = slice(start, start + n_keys)
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function":
            return None
        case "sliding_window_overlay" if int(inner["sliding_window"]) < 1:
            raise _UnknownError  # Qwen2-MoE makes a mask of 0 keys, which no layer uses, when its windows are off
        case "sliding_window_overlay":  # all keys after q − w; transformers combines it with the causal mask by "and"
            return Window(int(inner["sliding_window"]), ahead=FAR)
        case "sliding_window_bidirectional_overlay":  # |q − k| ≤ w
            return Window(int(inner["sliding_window"]) + 1, ahead=int(inner["sliding_window"]))
        case "chunked_overlay":
            place = torch.arange(start, start + n_keys, device=inner["left_padding"].device)
            chunk = (place - inner["left_padding"][:, None]) // inner["chunk_size"]
            return Document(chunk - chunk.min())
        case "blockwise_overlay":
            return Document(inner["block_sequence_ids"][:, keys])
        case "packed_sequence_mask_function":
            return Document(inner["packed_sequence_mask"][:, keys])
        case "padding_mask_function":
            return Dense(inner["padding_mask"][:, None, None, keys].to(torch.bool))
        case "remap_positions_for_packed_sequence":
            mask = _decode(inner["mask_function"], n_keys, start)
            if mask is not None and mask.band is None:
                raise _UnknownError
            return mask  # within a packed sequence, differences of positions equal differences of indices
        case "and_masks" | "or_masks":
            parts = [_decode(f, n_keys, start) for f in inner["mask_functions"]]
            known = [m for m in parts if m is not None]
            if not known or (name == "or_masks" and len(known) < len(parts)):
                return None
            return functools.reduce(and_ if name == "and_masks" else or_, known)
    raise _UnknownError


# --- models of transformers -------------------------------------------------------------------------------------------


NAME = "qkv"  # transformers treats names that contain "sdpa", "flash" or "/" in a special way
MASKS = "qkv_by_masks"  # the same for models of other implementations than torch's SDPA, which always have masks
_GUESTS = (f"qkv_guest_{n}" for n in itertools.count())
_ROUTED: dict[str | None, str | None] = {}  # the implementations in whose place guests are
Model = TypeVar("Model", bound=nn.Module)


def cache_name(model: nn.Module) -> str:
    """What a model calls its key-value cache, as an argument and as a field of its output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def routed(model: nn.Module, attend: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Inside, transformers' interface calls `attend` for all attention of the model, with masks for `call_of`.

    The model and transformers' registries are restored on exit, also after an error.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    configs = configurations(model)
    before = [config._attn_implementation_internal for config in configs]
    guests = {implementation: next(_GUESTS) for implementation in before}
    _ROUTED.update({guest: _ROUTED.get(own, own) for own, guest in guests.items()})
    try:
        for guest in guests.values():
            _register(guest, attend)
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = guests[implementation]
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        for guest in guests.values():
            AttentionInterface._global_mapping.pop(guest, None)
            AttentionMaskInterface._global_mapping.pop(guest, None)
            _ROUTED.pop(guest)


def register() -> None:
    """Register the attention implementation "qkv" with transformers; it may be called repeatedly.

    Afterwards ``model.set_attn_implementation("qkv")`` or ``from_pretrained(..., attn_implementation="qkv")`` runs any
    model that uses transformers' `AttentionInterface` on qkv's kernels: forward and backward, `generate` with any
    cache, padding, windows, sinks, soft caps, position biases, cross-attention, dropout. The output of a query without
    a visible key (such as padding) is 0, where other implementations differ from one another. A module's `is_causal` is
    read where the implementation "sdpa" reads it. If a model does not use the interface, transformers only warns; `use`
    raises.
    """
    require("qkv.huggingface", "transformers")
    _register(NAME, attend)
    _register(MASKS, attend)


def _register(name: str, attend: Callable[..., tuple[Tensor, Any]]) -> None:
    check_tested("transformers")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lazy_mask)  # otherwise masks, such as windows, would be dropped silently


def use(model: Model) -> Model:
    """Switch the attention of a model to qkv's kernels; ``model.set_attn_implementation("sdpa")`` switches back.

    The code of the model's modules is inspected before anything runs. If none of them uses transformers' attention
    interface, an error is raised. Some models have single parts that do not use it, such as the pooling head of
    SigLIP; these parts do not change.

    Args:
        model: a Hugging Face model, or a module that contains some.

    Returns:
        the same object.

    Raises:
        InputError: if no attention of the model uses transformers' attention interface; the model is not changed.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = use(LlamaModel(LlamaConfig(vocab_size=50, **sizes)))
    >>> model.config._attn_implementation
    'qkv'
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a Hugging Face model")
    if not any(map(routes, model.modules())):
        raise InputError(
            f"model {type(model).__name__} does not use transformers' attention interface (AttentionInterface), so qkv "
            "cannot compute its attention; expected a model that does, such as GPT-2, Llama or BERT"
        )
    register()
    own = [own_name(config) or "" for config in configurations(model)]
    setter: Any = getattr(model, "set_attn_implementation", None)  # None in a module that contains models
    if setter is not None:
        setter(NAME)
    for config, name in zip(
        configurations(model), own, strict=True
    ):  # the setter misses copies, as of ViT-MAE's decoder
        config._attn_implementation_internal = NAME if "sdpa" in name or "flash" in name else MASKS
    return model


@opaque  # torch.compile would retrace the choice of kernels for every length of a cache
def attend(
    module: nn.Module,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkv nk d"],
    value: Float[Tensor, "b hkv nk dv"],
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Float[Tensor, "b nq h dv"], Float[Tensor, "b h nq nk"] | None]:
    """The attention function for transformers. It also returns the weights if `output_attentions` is set."""
    call, _ = call_of(module, type(module).__name__, query, key, value, attention_mask, **arguments)
    with torch.autocast(query.device.type, enabled=False):  # the kernels use float32 where they need it
        result = serve(call, weights=asks_weights(arguments))
    return result.out.transpose(1, 2).contiguous(), result.weights


def asks_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether a model wants the weights of a call, which some models say to transformers' hooks only."""
    from transformers.utils import output_capturing

    asked = output_capturing._active_collector.get() or {}
    return bool(arguments.get("output_attentions")) or any("attentions" in name for name in asked)


EAGER = "eager_attention_forward"
EAGER_NAMES = (EAGER, "sdpa_attention_forward")
"""Functions of transformers that run on every device and take masks as tensors."""

Own = Callable[[], tuple[Tensor, Any]]
"""Runs the model's attention function with the arguments of the call."""
OnCall = Callable[[nn.Module, Callable[..., Any], Own, tuple[Any, ...], dict[str, Any]], tuple[Tensor, Any]]
"""Module, its attention function, `Own`, and the arguments (query, key, value, mask) and (scaling, …) of the call."""


def function_of(module: nn.Module) -> Callable[..., Any] | None:
    """The attention function that a module of transformers calls by its configuration; None if it cannot be found."""
    found = globals_of(module)
    name = getattr(getattr(module, "config", None), "_attn_implementation_internal", None)
    registered = found.get(INTERFACE, {}).get(name)
    if hasattr(registered, "replaced"):  # the model is watched
        registered = registered.replaced
    function = found.get(EAGER) if registered is None else registered
    return function


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a module calls in transformers' eager implementation; None if it cannot be found."""
    function: Callable[..., Any] | None = globals_of(module).get(EAGER)
    return function


def is_known(function: Callable[..., Any] | None) -> bool:
    """Whether a function is one of transformers or of qkv, whose arguments `call_of` understands."""
    return function is None or name_of(function).partition(".")[0] in ("transformers", "qkv")


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


_LOCK = threading.Lock()  # several threads may watch models


@contextmanager
def wrapped(model: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Inside, `on_call` is called in place of the attention functions of the model, which it can run as they are.

    The configuration and the masks of the model do not change, so its own functions get what they always get. A mask
    that transformers makes for them also carries the `LazyMask` that describes it, as its attribute ``qkv_mask``.
    Other models are not affected. Transformers' registries are restored on exit, also after an error.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    wrapper = frozenset(id(module) for module in model.modules() if routes(module)), on_call
    names = {config._attn_implementation_internal for config in configurations(model)}
    entries: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = []
    local = (globals_of(module).get(INTERFACE) for module in model.modules())  # some models have functions of their own
    mappings = [x._local_mapping for x in local if x is not None and x._local_mapping]
    interfaces = [AttentionInterface._global_mapping, *{id(x): x for x in mappings}.values()]
    entries += [(interface, name, _calling) for interface in interfaces for name in names]
    masks = AttentionMaskInterface._global_mapping
    entries += [(masks, name, _describing) for name in names if name in masks]
    try:
        with _LOCK:
            for interface, name, made in entries:
                if not hasattr(interface.get(name), "wrappers"):
                    interface[name] = made(interface.get(name))
                interface[name].wrappers.append(wrapper)
        yield
    finally:
        with _LOCK:
            for interface, name, _ in entries:
                function: Any = interface.get(name)
                if wrapper in getattr(function, "wrappers", ()):
                    function.wrappers.remove(wrapper)
                    if not function.wrappers:
                        del interface[name]
                        if function.replaced is not None:
                            interface[name] = function.replaced


def _calling(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """An attention function that calls the newest of its `wrappers` that has the module.

    `before` is what it replaces, None for the eager function.
    """
    wrappers: list[tuple[frozenset[int], OnCall]] = []

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        function: Any = eager_of(module) if before is None else before
        on_call = next((call for modules, call in reversed(wrappers) if id(module) in modules), None)
        if on_call is None:
            result: tuple[Tensor, Any] = function(module, *args, **kwargs)
            return result
        return on_call(module, function, functools.partial(function, module, *args, **kwargs), args, kwargs)

    attend.replaced, attend.wrappers = before, wrappers  # type: ignore[attr-defined]
    return attend


def _describing(before: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function whose masks carry their description."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = before(*args, **kwargs)
        if made is not None:
            made.qkv_mask = lazy_mask(*args, **kwargs)
        return made

    mask.replaced, mask.wrappers = before, []  # type: ignore[attr-defined]
    return mask
