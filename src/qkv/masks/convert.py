"""Conversion of masks to and from SDPA, `nn.MultiheadAttention` and FlexAttention.

True means "may attend" in SDPA and FlexAttention as in qkv, but "may not attend" in `nn.MultiheadAttention`. These
libraries count queries from row 0; qkv counts positions among the keys. The table is in docs/conventions.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError, kind_of
from qkv.masks.base import And, Mask, Predicate, Shifted, partial_rows, whole_status
from qkv.masks.built_in import Causal, Dense, Prefix
from qkv.masks.geometry import FULL, PARTIAL, Grid

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def is_causal(mask: Mask | None) -> bool:
    """True if no query can attend to a later key."""
    match mask:
        case None:
            return False
        case And(left, right):
            return is_causal(left) or is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            offset = n_keys - n_queries
            to_self = n_queries > 1 and bool(tensor.diagonal(offset, 2, 3).any())  # queries and keys are one text
            return to_self and not bool(tensor.triu(offset + 1).any())
    return mask.band is not None and mask.band[0] >= 0


# --- torch.nn.functional.scaled_dot_product_attention ----------------------------------------------------------------


def to_sdpa(
    mask: Mask, n_queries: int, n_keys: int, *, batch: int = 1, heads: int = 1
) -> Bool[Tensor, "b h {n_queries} {n_keys}"]:
    """Return torch's `attn_mask` of attention: **True = may attend**; b and h are 1 if all are the same.

    Raises `InputError` if the mask does not fit these sizes.

    >>> from qkv.masks import Causal
    >>> to_sdpa(Causal(), 2, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    return mask.dense(n_queries, n_keys, batch=batch, heads=heads)


def from_sdpa(
    attn_mask: Tensor | None = None, *, is_causal: bool = False, n_queries: int | None = None, n_keys: int | None = None
) -> Mask:
    """Return the mask for these arguments of scaled_dot_product_attention.

    Args:
        attn_mask: bool, **True = may attend**, (nq, nk) to (batch, heads, nq, nk); None: all pairs are visible.
        is_causal: top-left aligned causal mask: the *first* query is aligned with the first key, for any number of
            keys. It equals `Causal` when nq = nk; pass both numbers to get `Causal()` then, the fastest form.
        n_queries: number of queries of the call, to check `attn_mask`.
        n_keys: number of keys of the call; pass both or neither.

    Raises:
        InputError: for a float `attn_mask`, which is a bias; for both a mask and `is_causal`; for a wrong shape.

    >>> from_sdpa(is_causal=True).dense(2, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    if (n_queries is None) != (n_keys is None):
        raise InputError(f"from_sdpa: n_queries is {n_queries} and n_keys is {n_keys}, expected both or neither")
    if attn_mask is None:
        square = n_queries is not None and n_queries == n_keys
        return (Causal() if square else Shifted(Causal(), 0)) if is_causal else ~Prefix(0)
    if is_causal:
        raise InputError(
            "from_sdpa: attn_mask was passed with is_causal=True, expected at most one of them, as in torch"
        )
    mask = Dense(_boolean("from_sdpa: attn_mask", attn_mask, "may attend"))
    if n_queries is not None and n_keys is not None:
        mask.check(Grid.of(n_queries, n_keys, *mask.tensor.shape[:2]))
    return mask


def _boolean(name: str, x: object, meaning: str) -> Tensor:
    if isinstance(x, Tensor) and x.dtype.is_floating_point:
        raise InputError(
            f"{name} is {x.dtype}, which torch adds to the scores, expected a boolean tensor (True = {meaning}); "
            "pass it as bias=qkv.biases.TensorBias(tensor)"
        )
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        raise InputError(f"{name} is {kind_of(x)}, expected a boolean tensor (True = {meaning})")
    return x


# --- torch.nn.MultiheadAttention --------------------------------------------------------------------------------------


def to_multihead(mask: Mask, n_queries: int, n_keys: int, *, batch: int, heads: int) -> Bool[Tensor, "*n nq nk"]:
    """Return `attn_mask` of nn.MultiheadAttention: **True = may NOT attend**.

    (nq, nk) if the mask is the same for all items and heads, else (batch · heads, nq, nk), heads running fastest.
    Fully masked queries give NaN in torch. Raises `InputError` if the mask does not fit these sizes.

    >>> from qkv.masks import Causal
    >>> to_multihead(Causal(), 2, 3, batch=4, heads=8).int().tolist()
    [[0, 0, 1], [0, 0, 0]]
    """
    masked = ~mask.dense(n_queries, n_keys, batch=batch, heads=heads)
    if masked.shape[:2] == (1, 1):
        return masked[0, 0]
    return masked.expand(batch, heads, -1, -1).flatten(0, 1)


def from_multihead(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int | None = None
) -> Mask:
    """Return the mask for these arguments of nn.MultiheadAttention; without arguments, all pairs are visible.

    Args:
        attn_mask: bool, **True = may NOT attend**, (nq, nk) or (batch · heads, nq, nk).
        key_padding_mask: bool, **True = the key is padding**, (batch, nk), or (nk,) for one item.
        heads: number of heads; required for a 3-dimensional `attn_mask`.

    Raises:
        InputError: for a float mask, which is a bias; for a wrong shape; for `heads` missing.

    >>> from_multihead(key_padding_mask=torch.tensor([[False, False, True]])).dense(1, 3)[0, 0].int().tolist()
    [[1, 1, 0]]
    """
    parts: list[Mask] = []
    if attn_mask is not None:
        masked = _boolean("from_multihead: attn_mask", attn_mask, "may not attend")
        shape = tuple(masked.shape)
        if masked.ndim not in (2, 3):
            raise InputError(f"from_multihead: attn_mask is {shape}, expected (nq, nk) or (batch · heads, nq, nk)")
        if masked.ndim == 3:
            if heads is None or heads < 1 or shape[0] % heads:
                raise InputError(
                    f"from_multihead: attn_mask is {shape} and heads is {heads}, "
                    "expected (batch · heads, nq, nk) and the number of heads"
                )
            masked = masked.unflatten(0, (-1, heads))
        parts.append(Dense(~masked))
    if key_padding_mask is not None:
        padding = _boolean("from_multihead: key_padding_mask", key_padding_mask, "padding")
        if padding.ndim not in (1, 2):
            raise InputError(f"from_multihead: key_padding_mask is {tuple(padding.shape)}, expected (batch, nk)")
        parts.append(Dense(~padding.view(-1, 1, 1, padding.shape[-1])))
    if not parts:
        return ~Prefix(0)
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


# --- torch FlexAttention ----------------------------------------------------------------------------------------------


def mask_mod(
    mask: Mask, n_queries: int, n_keys: int, *, batch: int = 1, heads: int = 1, device: str | torch.device = "cpu"
) -> Visible:
    """Return FlexAttention's ``(b, h, q, k) -> bool``, **True = may attend**, with q the *row* of a query.

    The function is valid for these sizes only: with nq ≠ nk query 0 has position nk − nq. Tensors of the mask are moved
    to `device` and random masks are drawn now, so that the function can be traced and compiled. Raises `InputError` if
    the mask does not fit the sizes.

    >>> from qkv.masks import Causal
    >>> zero = torch.tensor(0)
    >>> mask_mod(Causal(), 2, 3)(zero, zero, zero, torch.tensor(1)).item()
    True
    """
    grid = Grid.of(n_queries, n_keys, batch, heads, device)
    mask.check(grid)
    return grid_mod(mask, grid)


def grid_mod(mask: Mask, grid: Grid) -> Visible:
    """Return `mask_mod` for a mask that has been checked against the grid."""
    specialized, offset = mask.specialize(grid), grid.offset
    return lambda b, h, q, k: specialized.sees(b, h, q + offset, k, grid)


def parts(mask: Mask | None, grid: Grid) -> tuple[tuple[float, float], Bool[Tensor, "#b nk"] | None, tuple[Mask, ...]]:
    """Return the band, the visible keys (None for all) and the other masks, of which a mask is the intersection.

    Compiled kernels compute the band and the keys by themselves.
    """
    low, high, keys, others = -math.inf, math.inf, None, []
    for factor in () if mask is None else mask.factors():
        of_keys = factor.key_mask(grid)
        if factor.band is not None:
            low, high = max(low, factor.band[0]), min(high, factor.band[1])
        elif of_keys is not None:
            keys = of_keys if keys is None else keys & of_keys
        else:
            others.append(factor)
    return (low, high), keys, tuple(others)


def block_visibility(
    mask: Mask, grid: Grid, size: int
) -> tuple[Int[Tensor, "b h rows cols"], Bool[Tensor, "b h nq"], Bool[Tensor, "b nk"]]:
    """Evaluate a mask one row of `size` × `size` blocks at a time; unlike `classify`, PARTIAL is exact here.

    Returns the block status (b and h may be 1), which queries have a visible key, and which keys are visible to any.
    """
    status = whole_status(mask, grid, size)
    full = status == FULL
    queries = full.any(-1, keepdim=True).repeat(1, 1, 1, size)
    keys = full.any(2).any(1)[..., None].repeat(1, 1, size)
    for row, columns, visible in partial_rows(mask, grid, size, status):
        queries[:, :, row] |= visible.any(4).any(2)
        keys[:, columns] |= visible.any(3).any(1)
    return status, queries.flatten(2)[..., : grid.n_queries], keys.flatten(1)[..., : grid.n_keys]


@dataclass(frozen=True, eq=False)
class MaskBits:
    """A mask on a grid as cells of 64 × 64 pairs, with the bits of those that are neither empty nor full."""

    CELL: ClassVar = 64
    status: Int[Tensor, "b h rows cols"]
    """int32: 0 for an empty cell, 1 for a full one, i + 2 for that of ``bits[i]``; b and h may be 1."""
    bits: Int[Tensor, "cells 64"]
    """int64 of each query of a cell: bit j is 1 if it may attend to key j."""

    @property
    def nbytes(self) -> int:
        return self.status.nbytes + self.bits.nbytes


def mask_bits(mask: Mask, grid: Grid, limit: int) -> MaskBits | None:
    """Return the bits of a mask, evaluated in `classify`'s partial tiles alone; None if they exceed `limit` bytes."""
    if isinstance(mask, Dense):
        return _bits_of_tensor(mask.tensor, grid, limit)
    size = MaskBits.CELL
    status = whole_status(mask, grid, size)
    if int((status == PARTIAL).sum()) * size * 8 > limit:
        return None
    bits = [torch.empty(0, size, dtype=torch.int64)]
    for row, columns, visible in partial_rows(mask, grid, size, status):
        packed = torch.from_numpy(np.packbits(visible.numpy(), axis=-1, bitorder="little")).view(torch.int64)[..., 0]
        bits.append(packed[status[:, :, row, columns] == PARTIAL])
    cells = torch.cat(bits)
    by_row = status.movedim(2, 0)  # in the order of the cells
    numbers = (by_row == FULL).int()
    numbers[by_row == PARTIAL] = torch.arange(2, 2 + len(cells), dtype=torch.int32)
    return MaskBits(numbers.movedim(0, 2).contiguous(), cells)


def _bits_of_tensor(tensor: Bool[Tensor, "b h _ _"], grid: Grid, limit: int) -> MaskBits | None:
    """Return `mask_bits` of the tensor of a mask, in one pass over it."""
    size, columns = MaskBits.CELL, -(-grid.n_keys // MaskBits.CELL)
    pairs = tensor.cpu().expand(-1, -1, grid.n_queries, grid.n_keys).numpy()
    beyond = ~np.packbits(np.arange(columns * size) < grid.n_keys, bitorder="little").view(np.uint64)  # the last key
    status, bits, n_cells = [], [np.empty((0, size), np.uint64)], 0
    for row in range(0, grid.n_queries, size):
        packed = np.packbits(pairs[:, :, row : row + size], axis=-1, bitorder="little")
        words = np.zeros((*packed.shape[:2], size, columns), np.uint64)
        words.view(np.uint8)[:, :, : packed.shape[2], : packed.shape[3]] = packed
        full = np.bitwise_and.reduce(words[:, :, : packed.shape[2]] | beyond, axis=2) == ~np.uint64(0)
        partial = (np.bitwise_or.reduce(words, axis=2) != 0) & ~full
        numbers = full.astype(np.int32)
        n_partial = int(np.count_nonzero(partial))
        numbers[partial] = 2 + n_cells + np.arange(n_partial)
        n_cells += n_partial
        if n_cells * size * 8 > limit:
            return None
        status.append(numbers)
        bits.append(words.swapaxes(2, 3)[partial])
    return MaskBits(torch.from_numpy(np.stack(status, 2)), torch.from_numpy(np.concatenate(bits).view(np.int64)))


def block_mask(mask: Mask, grid: Grid, status: Int[Tensor, "b h rows cols"], size: int) -> BlockMask:
    """Return the BlockMask of FlexAttention for a mask whose blocks have this `status`."""
    from torch.nn.attention.flex_attention import BlockMask

    status = status.clone()
    # A short block at the edge is never FULL in FlexAttention, which pads it with masked pairs.
    if grid.n_queries % size:
        status[:, :, -1] = status[:, :, -1].clamp(max=PARTIAL)
    if grid.n_keys % size:
        status[..., -1] = status[..., -1].clamp(max=PARTIAL)
    return BlockMask.from_kv_blocks(
        *_listing(status == PARTIAL),
        *_listing(status == FULL),
        BLOCK_SIZE=size,
        mask_mod=grid_mod(mask, grid),
        seq_lengths=(grid.n_queries, grid.n_keys),
    )


def _listing(chosen: Bool[Tensor, "b h rows cols"]) -> tuple[Int[Tensor, "b h rows"], Int[Tensor, "b h rows cols"]]:
    """Return the number of chosen blocks per row, and their columns first, followed by the remaining columns."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()


def to_flex(
    mask: Mask,
    n_queries: int,
    n_keys: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: str | torch.device = "cpu",
    block_size: int = 128,
) -> BlockMask:
    """Return the BlockMask of FlexAttention, **True = may attend**; None for `batch` or `heads` if all are the same.

    The same as ``create_block_mask(mask_mod(mask, …))``, in memory linear in the sequence: blocks that `classify`
    reports as EMPTY or FULL are not evaluated. Raises `InputError` if the mask does not fit the sizes.

    >>> from qkv.masks import Causal
    >>> to_flex(Causal(), 256, 256).sparsity()
    25.0
    """
    if block_size < 1:
        raise InputError(f"to_flex: block_size is {block_size}, expected at least 1 token")
    grid = Grid.of(n_queries, n_keys, batch or 1, heads or 1, device)
    mask.check(grid)
    status = block_visibility(mask, grid, block_size)[0].expand(grid.batch, grid.heads, -1, -1)
    return block_mask(mask, grid, status, block_size)


def from_flex(mask: BlockMask | Visible, n_queries: int | None = None, n_keys: int | None = None) -> Mask:
    """Return the mask of a BlockMask, or of a ``mask_mod(b, h, q, k)`` with q from row 0; True = may attend.

    A mask_mod is called on broadcasting index tensors. Blocks that a BlockMask does not list are masked, and blocks
    listed as full are visible, as in its compiled kernels. Pairs beyond the lengths of the BlockMask, or beyond
    `n_queries` and `n_keys` if passed, are masked.

    Raises `InputError` for other objects, for a sliced BlockMask (torch removes its mask_mod), and for lengths that
    differ from those of the BlockMask.

    >>> from_flex(lambda b, h, q, k: k <= q).dense(2, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    sizes: tuple[int | None, int | None] = (n_queries, n_keys)
    if isinstance(mask, BlockMask):
        made_for: tuple[int, int] = tuple(mask.seq_lengths)  # type: ignore[assignment]
        if any(given not in (None, size) for given, size in zip(sizes, made_for, strict=True)):
            raise InputError(
                f"from_flex: n_queries and n_keys are {sizes}, expected those of the BlockMask, {made_for}"
            )
        visible, sizes = _block_visible(mask), made_for
    elif isinstance(mask, Mask) or not callable(mask):
        raise InputError(
            f"from_flex: mask is {type(mask).__name__}, expected a BlockMask or a function mask_mod(b, h, q, k)"
        )
    else:
        visible = mask
    # With offset 0, the position of a query equals its row, for any lengths of the call.
    return Shifted(Predicate(visible if sizes == (None, None) else _within(visible, *sizes)), 0)


def _within(visible: Visible, n_queries: int | None, n_keys: int | None) -> Visible:
    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        sizes = ((q, n_queries), (k, n_keys))
        pairs = visible(b, h, *(x if size is None else x.clamp(0, size - 1) for x, size in sizes))
        for x, size in sizes:
            pairs = pairs if size is None else pairs & (x >= 0) & (x < size)
        return pairs

    return inside


def _block_visible(mask: Any) -> Visible:
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise InputError("from_flex: mask is a sliced BlockMask, expected an unsliced one or one with its mask_mod set")
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    full = None if mask.full_kv_num_blocks is None else _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    (rows, columns), first = mask.BLOCK_SIZE, Grid.of(1, 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = (b, h, q // rows, k // columns, first)
        pairs = partial.sees(*block) & mask.mask_mod(b, h, q, k)
        return pairs if full is None else pairs | full.sees(*block)

    return visible


def _listed(count: Tensor, indices: Tensor) -> Dense:
    """Return the mask of the blocks among the first `count` entries of the lists `indices` (…, rows, cols)."""
    count, indices = (x[(None,) * (4 - indices.ndim)] for x in (count, indices))
    used = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    return Dense(torch.zeros_like(used).scatter(-1, indices.long(), used))
