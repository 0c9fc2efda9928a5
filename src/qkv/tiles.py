"""One attention call, and its score matrix tile by tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Bias
from qkv.errors import InputError
from qkv.masks import FULL, PARTIAL, Dense, Grid, Mask, Region, Tiles
from qkv.normalizers import Softmax
from qkv.scores import Dot

LOG2_E = math.log2(math.e)
HIDDEN = -1e30  # a masked score: exp of it is 0, and 0 times it is 0 (0 times −inf would be NaN)


@dataclass(frozen=True, eq=False)
class Call:
    """Checked arguments of one attention call; every kernel takes exactly this."""

    q: Float[Tensor, "b h nq d"]
    k: Float[Tensor, "b hkv nk d"]
    v: Float[Tensor, "b hkv nk dv"]
    mask: Mask | None = None
    biases: tuple[Bias, ...] = ()
    score: Dot = field(default_factory=Dot)
    normalizer: Softmax = field(default_factory=Softmax)
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        _check_tensors(self.q, self.k, self.v)
        if self.mask is not None:
            self.mask.check(self.grid)
        for bias in self.biases:
            bias.check(self.grid)
        if not isinstance(self.score, Dot):
            raise InputError(f"score is {self.score!r}, expected an instance of qkv.scores.Dot")
        if not isinstance(self.normalizer, Softmax):
            raise InputError(f"normalizer is {self.normalizer!r}, expected an instance of qkv.normalizers.Softmax")
        if not 0 <= self.dropout_p < 1:
            raise InputError(f"dropout_p is {self.dropout_p}, expected a probability in [0, 1)")
        self.normalizer.sink_of(self.q.shape[1], self.q)  # raises if its length does not fit

    @property
    def grid(self) -> Grid:
        batch, heads, n_queries, _ = self.q.shape
        n_keys = self.k.shape[2]
        return Grid(batch, heads, n_queries, n_keys, n_keys - n_queries, self.q.device)

    @property
    def scale(self) -> float:
        """What q·k is multiplied by before any bias; the temperature is in it when no bias comes between."""
        factor = self.score.factor(self.q.shape[3])
        return factor if self.biases else factor / self.normalizer.temperature

    @property
    def sink(self) -> Float[Tensor, " h"] | None:
        like = self.q.new_empty((), dtype=at_least_float32(self.q.dtype))
        return self.normalizer.sink_of(self.q.shape[1], like)

    @property
    def needs_grad(self) -> bool:
        sink = self.normalizer.sink
        tensors = [self.q, self.k, self.v, *(p for b in self.biases for p in b.parameters())]
        if isinstance(sink, Tensor):
            tensors.append(sink)
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, weights and statistics of `dtype` inputs are kept."""
    return torch.promote_types(dtype, torch.float32)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} is {kind}, expected a float tensor (batch, heads, length, head_dim)")
        if x.ndim != 4:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected (batch, heads, length, head_dim)")
        if 0 in x.shape:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected at least 1 in every dimension")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise InputError(f"q, k and v differ in batch size: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q and k differ in head_dim: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise InputError(f"k and v differ in heads or length: {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly: {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"q, k and v differ in dtype or device: {kinds}")


def as_biases(bias: Bias | Sequence[Bias] | None) -> tuple[Bias, ...]:
    """A tuple of biases of what users pass for `bias`."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, Bias) else bias
    if not isinstance(biases, Sequence) or not all(isinstance(b, Bias) for b in biases):
        raise InputError(
            f"bias is {type(bias).__name__}, expected one of qkv.biases or several in a tuple; "
            "wrap a float tensor in qkv.biases.Dense"
        )
    return tuple(biases)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A mask object of what users pass for `mask`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise InputError(f"mask is the class {mask.__name__}, expected an instance such as {mask.__name__}(...)")
    return Dense(mask)


class ScoreTiles:
    """The score matrix of some heads of a call, tile by tile, in float32 or better; never the whole.

    Heads that share keys are folded into the rows of one product, so a tile costs one batched product whatever the
    grouping, and keys are not repeated.
    """

    def __init__(self, call: Call, batch: slice = slice(None), key_heads: slice = slice(None)) -> None:
        self.call = call
        self.dtype = at_least_float32(call.q.dtype)
        self.group = call.q.shape[1] // call.k.shape[1]
        start, stop, _ = key_heads.indices(call.k.shape[1])
        self.batch, self.heads = batch, slice(start * self.group, stop * self.group)
        q, k = call.q[batch, self.heads], call.k[batch, start:stop]
        self.shape = q.shape[:2]  # (batch, query heads)
        self.q = (q.to(self.dtype) * call.scale).reshape(-1, self.group, *q.shape[2:])
        self.k = k.to(self.dtype).flatten(0, 1)
        self._patterns: dict[tuple[int, int, int], Tensor] = {}

    def region(self, rows: slice, columns: slice) -> Region:
        return Region(rows, columns, self.batch, self.heads)

    def product(self, rows: slice, columns: slice) -> Float[Tensor, "b h q k"]:
        """scale · q·k of the tile, before any bias."""
        q = self.q[:, :, rows].flatten(1, 2)
        return torch.bmm(q, self.k[:, columns].transpose(1, 2)).view(*self.shape, rows.stop - rows.start, -1)

    def biased(self, product: Float[Tensor, "b h q k"], rows: slice, columns: slice) -> Float[Tensor, "b h q k"]:
        """Final scores of a product: biased, divided by the temperature; not masked."""
        for bias in self.call.biases:
            product = bias.apply(product, self.region(rows, columns))
        return product / self.call.normalizer.temperature if self.call.biases else product

    def scores(self, rows: slice, columns: slice) -> Float[Tensor, "b h q k"]:
        """Final scores of the tile; not masked."""
        return self.biased(self.product(rows, columns), rows, columns)

    def log2_weights(
        self, rows: slice, columns: slice, lse: Float[Tensor, "b h q"], out: Float[Tensor, "b h q k"]
    ) -> Float[Tensor, "b h q k"]:
        """(Final score − `lse`) / ln 2, whose exp2 is the weight; not masked. Without a bias it is made in `out`.

        Base 2 because torch's exp is MKL's, which on some processors takes several times as long as its exp2.
        """
        if self.call.biases:
            return self.scores(rows, columns).sub_(lse[..., None]).mul_(LOG2_E)
        q = self.q[:, :, rows].flatten(1, 2)
        folded = out.view(len(self.k), -1, out.shape[3])
        lse = lse.reshape(*folded.shape[:2], 1)
        keys = self.k[:, columns].transpose(1, 2)
        torch.baddbmm(lse, q, keys, beta=-LOG2_E, alpha=LOG2_E, out=folded)
        return out

    def classes(self, mask: Mask | None, size: int) -> list[list[int]]:
        """EMPTY, PARTIAL or FULL for each tile of `size`, over all heads and batch items of these score tiles."""
        kinds = classes(mask, Tiles.of(self.call.grid, size, size), self.call.grid)
        everything = slice(None)
        kinds = Region(everything, everything, self.batch, self.heads).of(kinds)
        low, high = kinds.amin((0, 1)), kinds.amax((0, 1))
        return torch.where(low == high, low, PARTIAL).tolist()

    def hidden(self, rows: slice, columns: slice) -> Bool[Tensor, "b h q k"]:
        """Which pairs of a tile are not visible; the pattern of a band depends on the offset only and is kept."""
        mask = self.call.mask
        assert mask is not None
        key = (rows.start - columns.start, rows.stop - rows.start, columns.stop - columns.start)
        if key in self._patterns:
            return self._patterns[key]
        hidden = ~mask.allowed(self.region(rows, columns), self.call.grid)
        if mask.band is not None:
            self._patterns[key] = hidden
        return hidden

    def weigh(self, weights: Float[Tensor, "b h q k"], v: Float[Tensor, "n k d"]) -> Float[Tensor, "b h q d"]:
        """weights @ v, where v has its batch and key heads folded: (b · key heads, k, d)."""
        folded = weights.reshape(len(v), -1, weights.shape[3])
        return torch.bmm(folded, v).view(*weights.shape[:3], -1)

    def weigh_back(self, weights: Float[Tensor, "b h q k"], x: Float[Tensor, "b h q d"]) -> Float[Tensor, "n k d"]:
        """weightsᵀ @ x summed over the query heads that share a key head: (b · key heads, k, d)."""
        n = len(self.k)
        return torch.bmm(weights.reshape(n, -1, weights.shape[3]).transpose(1, 2), x.reshape(n, -1, x.shape[3]))


def without_unseen(x: Float[Tensor, "b h k d"], allowed: Bool[Tensor, "b2 h2 q k"] | None) -> Float[Tensor, "b h k d"]:
    """Keys or values with zeros where no query may look, so that NaN in padding stays there."""
    if allowed is None:
        return x
    unseen = ~allowed.any(2).any(1)
    return x.masked_fill(unseen[:, None, :, None], 0) if unseen.any() else x


def classes(mask: Mask | None, tiles: Tiles, grid: Grid) -> Int[Tensor, "b h r c"]:
    """EMPTY, PARTIAL or FULL for each tile; without a mask everything is full."""
    if mask is None:
        return torch.full((1, 1, len(tiles.q_first), len(tiles.k_first)), FULL, dtype=torch.int8)
    return mask.classify(tiles, grid)


def spans(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` that cover `length`; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def detached(call: Call) -> Call:
    """The same call with nothing that wants a gradient."""
    sink = call.normalizer.sink
    normalizer = replace(call.normalizer, sink=sink.detach()) if isinstance(sink, Tensor) else call.normalizer
    return replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach(), normalizer=normalizer)
