"""Masks defined by data: `Padding`, `Document`, `Dense` tensors, and `Predicate` functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError, kind_of, one_of
from qkv.masks.base import Mask, check_pairs, tile_status
from qkv.masks.grid import Grid, Region, Tiles


class _TensorMask(Mask):
    """Base of masks that hold data: compared by identity, moved to the grid's device when used."""

    __hash__ = object.__hash__

    @property
    def by_value(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class Padding(_TensorMask):
    """Masks padding keys for every query.

    `lengths` is the number of real keys of each batch item; they are at the start (``side="right"``: padding on the
    right) or at the end (``side="left"``). Padding queries are not masked: use `Document` with id −1 for that.

    >>> Padding([1, 2]).dense(1, 3, batch=2)[:, 0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """

    lengths: Sequence[int] | Int[Tensor, " b"]
    side: str = "right"

    def __post_init__(self) -> None:
        lengths = torch.as_tensor(self.lengths)
        if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            raise InputError(f"Padding: lengths is {kind_of(lengths)}, expected one integer per batch item")
        one_of("Padding: side", self.side, ("left", "right"))
        object.__setattr__(self, "lengths", lengths)

    def _range(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """First visible key and first key after them, shaped (b, 1, 1, 1)."""
        lengths = torch.as_tensor(self.lengths)[:, None, None, None]
        return (0 * lengths, lengths) if self.side == "right" else (grid.n_keys - lengths, 0 * lengths + grid.n_keys)

    def check(self, grid: Grid) -> None:
        lengths = torch.as_tensor(self.lengths)
        if len(lengths) not in (1, grid.batch):
            raise InputError(f"Padding: lengths has {len(lengths)} numbers for a batch of {grid.batch}")
        if int(lengths.min()) < 0 or int(lengths.max()) > grid.n_keys:
            raise InputError(
                f"Padding: lengths lie in {int(lengths.min())}..{int(lengths.max())}, "
                f"expected 0..{grid.n_keys} (the number of keys)"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        lengths = torch.as_tensor(self.lengths).to(k.device)
        length = lengths[b] if len(lengths) > 1 else lengths[0]
        return (k < length) if self.side == "right" else (k >= grid.n_keys - length)

    def key_mask(self, grid: Grid) -> Tensor:
        start, stop = (x[:, 0, 0].to(grid.device) for x in self._range(grid))
        keys = grid.columns(0, grid.n_keys)
        return (keys >= start) & (keys < stop)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        start, stop = (x.cpu() for x in self._range(grid))
        shape = (-1, -1, len(tiles.q_first), -1)
        full = (tiles.k_first >= start) & (tiles.k_last < stop)
        empty = (tiles.k_last < start) | (tiles.k_first >= stop)
        return tile_status(full.expand(shape), empty.expand(shape))


@dataclass(frozen=True, eq=False)
class Document(_TensorMask):
    """A query attends only to keys of its own document; positions with a negative id are fully masked.

    `ids` is (n_keys,) or (batch, n_keys); query i has the id of position i + offset. Use it for packed sequences,
    chunked attention, and padding of both queries and keys.

    >>> from qkv.masks import Causal
    >>> (Document([0, 0, 1]) & Causal()).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """

    ids: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]

    def __post_init__(self) -> None:
        ids = torch.as_tensor(self.ids)
        if ids.ndim not in (1, 2) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InputError(f"Document: ids is {kind_of(ids)}, expected integers (n_keys,) or (batch, n_keys)")
        object.__setattr__(self, "ids", ids if ids.ndim == 2 else ids[None])

    def check(self, grid: Grid) -> None:
        shape = tuple(torch.as_tensor(self.ids).shape)
        if shape[0] not in (1, grid.batch) or shape[1] != grid.n_keys:
            raise InputError(
                f"Document: ids has shape {shape}, expected (1 or {grid.batch}, {grid.n_keys}) for this batch"
            )
        if grid.offset < 0 or grid.n_queries + grid.offset > grid.n_keys:
            raise InputError(
                f"Document: ids are those of {grid.n_keys} keys, but the queries are positions {grid.offset} to "
                f"{grid.n_queries + grid.offset - 1}; expected positions of these keys"
            )

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).to(k.device)
        b = b if len(ids) > 1 else torch.zeros_like(q)
        of_query, of_key = ids[b, q], ids[b, k]
        return (of_query == of_key) & (of_query >= 0)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        ids = torch.as_tensor(self.ids).cpu()
        q_min, q_max = _extremes(ids, tiles.q_first, tiles.q_last)
        k_min, k_max = _extremes(ids, tiles.k_first, tiles.k_last)
        q_min, q_max = q_min[:, None, :, None], q_max[:, None, :, None]
        k_min, k_max = k_min[:, None, None, :], k_max[:, None, None, :]
        full = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
        empty = (q_max < k_min) | (k_max < q_min) | (q_max < 0) | (k_max < 0)
        return tile_status(full, empty)


def _extremes(ids: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest id in each span of positions."""
    spans = _spans(first, last)
    return torch.stack([ids[:, s].amin(1) for s in spans], 1), torch.stack([ids[:, s].amax(1) for s in spans], 1)


def _spans(first: Tensor, last: Tensor) -> list[slice]:
    return [slice(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Dense(_TensorMask):
    """A boolean tensor, True where a query may attend, of a shape that broadcasts to (batch, heads, nq, nk).

    Integer and float masks are rejected, because libraries disagree on the meaning of 1, 0 and −inf.

    >>> Dense(torch.tensor([[True, False]])).dense(1, 2)[0, 0].tolist()
    [[True, False]]
    """

    tensor: Bool[Tensor, "..."]
    ndim: int = field(init=False, repr=False)  # number of dimensions of the tensor as passed

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or self.tensor.dtype != torch.bool:
            raise InputError(
                f"mask is {kind_of(self.tensor)}, expected a boolean tensor that is True where a query may attend; "
                "compare an integer mask with == (for example `ids == 1`), "
                "and pass an additive 0 / −inf mask as bias=qkv.biases.Dense(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"mask has {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk)"
            )
        object.__setattr__(self, "ndim", self.tensor.ndim)
        object.__setattr__(self, "tensor", self.tensor[(None,) * (4 - self.tensor.ndim)])

    def check(self, grid: Grid) -> None:
        check_pairs("mask", self.ndim, self.tensor, grid)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        where = (b, h, q - grid.offset, k)
        visible = self.tensor.to(k.device)
        return visible[
            tuple(x if size > 1 else torch.zeros_like(x) for x, size in zip(where, visible.shape, strict=True))
        ]

    def key_mask(self, grid: Grid) -> Tensor | None:
        b, h, n_queries, _ = self.tensor.shape
        if h > 1 or n_queries > 1:
            return None
        return self.tensor[:, 0, 0].to(grid.device).expand(b, grid.n_keys)

    def visible(self, region: Region, grid: Grid) -> Tensor:
        visible = region.of(self.tensor.to(grid.device))  # a slice: much faster than looking up every pair
        size = (region.rows.stop - region.rows.start, region.columns.stop - region.columns.start)
        return visible.expand(*visible.shape[:2], *size)

    def classify(self, tiles: Tiles, grid: Grid) -> Tensor:
        some = every = self.tensor
        q_spans = _spans(tiles.q_first - grid.offset, tiles.q_last - grid.offset)
        for dim, spans in ((2, q_spans), (3, _spans(tiles.k_first, tiles.k_last))):
            one = self.tensor.shape[dim] == 1  # one row (column) stands for all of them
            cut = [(slice(None),) * dim + (slice(0, 1) if one else span,) for span in spans]
            some = torch.cat([some[c].any(dim, keepdim=True) for c in cut], dim)
            every = torch.cat([every[c].all(dim, keepdim=True) for c in cut], dim)
        return tile_status(every.cpu(), ~some.cpu())


@dataclass(frozen=True, eq=False)
class Predicate(_TensorMask):
    """A mask defined by ``function(batch, head, q, k) -> bool tensor`` of broadcasting index tensors.

    Both `q` and `k` are key positions, as everywhere in this module. The block status of tiles is unknown, so every
    tile is evaluated; memory is still linear.

    >>> even = Predicate(lambda b, h, q, k: (q - k) % 2 == 0)
    >>> even.dense(2, 3)[0, 0].int().tolist()
    [[0, 1, 0], [1, 0, 1]]
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return self.function(b, h, q, k)
