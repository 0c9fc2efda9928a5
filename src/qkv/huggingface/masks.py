"""Masks of transformers: those that a model passes are read, and described without an n × n tensor.

Transformers describes a mask by a function of (batch, head, query, key) that is built from a dozen factories, and calls
a registered mask function to turn it into a tensor. The mask function of qkv, `lazy_mask`, returns a `LazyMask`: no
n × n tensor is formed, and the description is decoded to the mask algebra. (Written for transformers 5.24.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from qkv import biases
from qkv.errors import InputError
from qkv.kernels import opaque
from qkv.masks import Causal, Dense, Document, Grid, Mask, Predicate, Region, Shifted, Window
from qkv.masks.convert import is_causal

MASKED = -9984.0
"""Numbers added to scores that are at most this, −10⁴ in bfloat16, mask a pair like −inf: models use −10⁴, −10⁹ and the
lowest float."""
NAME = "qkv"  # transformers treats names that contain "sdpa", "flash" or "/" in a special way
MASKS = "qkv_by_masks"  # the same for models of other implementations than torch's SDPA, which always have masks
ROUTED: dict[str | None, str | None] = {}  # the implementations in whose place guests are


def own_name(config: Any) -> str | None:
    """The implementation that a configuration selected before qkv's, which is in the place of torch's SDPA."""
    name: str | None = getattr(config, "_attn_implementation_internal", None)
    name = ROUTED.get(name, name)
    return "sdpa" if name == NAME else "eager" if name == MASKS else name


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
        raise InputError(f"attention_mask is {brief(mask)}, expected a tensor of 4 dimensions, bool or float")
    mask = mask[..., :n_keys]
    if mask.dtype == torch.bool:
        return Dense(mask), (), None
    masked = mask <= MASKED
    bias = mask.masked_fill(masked, 0)
    learned = mask.requires_grad  # a learned bias may start at 0
    additive = (biases.TensorBias(bias),) if learned or bool(bias.any()) else ()
    return Dense(~masked) if bool(masked.any()) else None, additive, None


def brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


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
