"""Flash attention of torch's own CPU kernel, folded over the parts of a mask that are not empty.

The stock kernel does dense, causal and tensor-masked attention and returns the log-sum-exp. A mask is cut into few
rectangular calls of it: full rectangles need no mask tensor, repeated patterns (a sliding window) become one call over
strided views, and the results merge exactly. The backward is the same fold: a part's gradient is exact when the stock
backward gets the *global* output and log-sum-exp. (Dao 2023, arXiv:2307.08691; the identities are in docs/design.md.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from qkv.biases import ByDistance
from qkv.call import Call, Result, at_least_float32
from qkv.masks import FULL, PARTIAL, Grid, Mask, Region, Tiles
from qkv.normalizers import Softmax
from qkv.partial import Partial, merge, sink_gradient
from qkv.tiles import classes, without_unseen

TILE = 256  # rows and columns of a tile: small enough to skip much, large for the stock kernel's own blocks
CALL_ROWS = 2**15  # rows of all heads in one call of many tiles: its output is copied while still in cache
ALIGN = 16  # the stock kernel is slower when the number of keys is not a multiple of this
SHORT = 64  # with fewer keys than this the stock kernel may answer 0 for a query that is NaN
MASK_ELEMENTS = 2**22  # the largest mask tensor made at once when one tile of rows does not need more


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if call.q.device.type != "cpu":
        return f"tensors are on {call.q.device.type}; the stock kernel it folds is torch's CPU one"
    if not _stock_kernel_works():
        return f"torch {torch.__version__} lacks the flash kernel for CPU that it folds"
    if call.dropout_p:
        return "dropout acts on weights, which it never forms"
    if not isinstance(call.normalizer, Softmax):
        return f"its weights are a softmax, not {type(call.normalizer).__name__}"
    if call.vector is not None:
        return "additive scores are no product of query and key"
    if call.capped:
        return "a soft cap does more to a score than add to it"
    if call.values is not None:
        return "it has no room for values that depend on the distance"
    if torch.is_grad_enabled() and any(b.tensor is not None and b.tensor.requires_grad for b in call.biases):
        return "the stock kernel has no gradient for a bias"
    return None


def run(call: Call) -> Result:
    """Attention in memory linear in the sequence, differentiable in q, k, v, the sink, and through the lse."""
    d, dv = call.q.shape[3], call.v.shape[3]
    q, k, v = (_pad(x, max(d, dv)) for x in (call.q, call.k, call.v))  # the stock kernel wants one head size
    if call.factor <= 0:  # its causal form masks before it scales: −inf · 0 is NaN, −inf · −1 is +inf
        q, call = q * call.factor, replace(call, factor=1.0)
    sink = call.sink
    if call.needs_grad:
        part = Partial(*_Flash.apply(q, k, v, sink, call))
    else:
        part, _ = _forward(q, k, v, sink, call, training=False)
    return Result(part.out[..., :dv], part.lse)


def _pad(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


# --- the stock kernel: the only place that touches torch's private operators -----------------------------------------


@functools.cache
def _stock_kernel_works() -> bool:
    """Whether this build of torch has the operators and they do what this file relies on."""
    try:
        q, k = torch.ones(1, 1, 2, 8), torch.arange(32.0).view(1, 1, 4, 8) / 32
        out, lse = _stock(q, k, k, causal=False, scale=1.0, added=None)
        grads = _stock_backward(out, q, k, k, out, lse, causal=False, scale=1.0, added=None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(torch.allclose(lse, k.sum(-1).logsumexp(-1, keepdim=True).expand(1, 1, 2))) and len(grads) == 3


def _stock(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    return out, lse


def _stock_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, causal: bool, scale: float, added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)


# --- cutting a mask into calls of the stock kernel -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """One call, queries `rows` against `keys`; or `count` calls at once, each `step` further along the diagonal."""

    rows: slice
    keys: slice
    batch: slice = field(default_factory=lambda: slice(None))
    causal: bool = False
    allowed: Bool[Tensor, "b h q k"] | None = None
    pattern: Float[Tensor, "1 h q k"] | None = None  # additive, and every row sees a key
    flipped: bool = False  # the pattern is for the rows in reverse
    count: int = 1
    step: int = 0

    def _span(self, x: Tensor, where: slice) -> Tensor:
        return x[self.batch][:, :, where.start : where.stop + (self.count - 1) * self.step]

    def cut(self, x: Tensor, where: slice) -> Tensor:
        """What the calls see of x (b, h, n, …): (b, h, size, …), or as a batch of calls (count, b·h, size, …)."""
        span = self._span(x, where)
        if self.count == 1:
            return span.flip(2) if self.flipped and where is self.rows else span
        tiles = span.flatten(0, 1).unfold(1, where.stop - where.start, self.step)
        return tiles.movedim(-1, 2).transpose(0, 1)

    def put(self, x: Tensor, value: Tensor) -> None:
        """Assign `value`, shaped as `cut` gives it, to the rows of x; tiles of rows never overlap."""
        span = self._span(x, self.rows)
        value = value.flip(2) if self.flipped else value
        span.copy_(value if self.count == 1 else value.transpose(0, 1).flatten(1, 2).view_as(span))

    def add(self, x: Tensor, where: slice, value: Tensor) -> None:
        """Add `value`, shaped as `cut` gives it, to x; where tiles overlap they add up."""
        if self.count == 1:
            self._span(x, where).add_(value.flip(2) if self.flipped and where is self.rows else value)
            return
        span = self._span(x, where)
        value = value.transpose(0, 1).unflatten(0, span.shape[:2])  # (b, h, count, size, d)
        for start in range(0, value.shape[3], self.step):  # the same piece of every tile: no two overlap
            piece = value[:, :, :, start : start + self.step]
            size = piece.shape[3]
            stop = start + (self.count - 1) * self.step + size
            span[:, :, start:stop].unfold(2, size, self.step).add_(piece.transpose(-1, -2))


Block = list[Part]  # parts that share their rows; their results merge


def blocks(call: Call, *, training: bool) -> Iterator[Block]:
    """The calls of the stock kernel that cover what the mask of a call shows."""
    mask, grid = call.mask, call.grid
    band = (-math.inf, math.inf) if mask is None else mask.band
    if band is not None and call.biases:
        by_distance = _by_distance(call)
        if by_distance is not None:
            yield from _biased_band_blocks(by_distance, band, mask, call, training=training)
            return
    if band == (-math.inf, math.inf):
        yield [Part(slice(0, grid.n_queries), slice(0, grid.n_keys))]
    elif band is not None and not call.biases and band[0] == 0 and band[1] >= grid.n_keys - 1:
        yield _causal_block(grid.n_queries, grid.offset)
    elif band is not None and not call.biases and math.isfinite(band[0]) and math.isfinite(band[1]):
        assert mask is not None
        yield from _band_blocks(mask, call, training=training)
    else:
        assert mask is not None
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)


def _by_distance(call: Call) -> Float[Tensor, "h distances"] | None:
    """All biases as one number a head and distance, over the temperature, if that is what they are and it is finite."""
    if not all(isinstance(bias, ByDistance) for bias in call.biases):
        return None
    tensors = [bias.tensor for bias in call.biases if bias.tensor is not None]
    total = sum(tensors[1:], tensors[0]).detach().to(at_least_float32(call.q.dtype)) / call.normalizer.temperature
    return total if total.isfinite().all() else None


def _causal_block(n_queries: int, offset: int) -> Block:
    """Causal over the first `n_queries`: keys before query 0 are a full rectangle, the rest the kernel's own square."""
    rows = slice(max(0, -offset), n_queries)
    if rows.stop - rows.start == 1:  # decoding: the last query sees everything
        return [Part(rows, slice(0, n_queries + offset))]
    lead = max(0, offset)
    square = Part(rows, slice(lead, n_queries + offset), causal=True)
    return [Part(rows, slice(0, lead)), square] if lead else [square]


def _band_blocks(
    mask: Mask, call: Call, bias: Float[Tensor, "h distances"] | None = None, *, training: bool
) -> Iterator[Block]:
    """Few calls for all the tiles of rows whose band lies inside the matrix, and few for the edges."""
    assert mask.band is not None
    grid, shares, dtype = call.grid, 4 if training else 8, at_least_float32(call.q.dtype)
    low, high = map(int, mask.band)
    # A short step wastes little on the band's corners; a long one reads each key less often, which the backward minds
    # more: an eighth of the band was fastest forward, a quarter both ways.
    step = min(TILE, max(TILE // shares, 2 ** round(math.log2(max(1, (high - low) / shares)))))
    spare = -(step + high - low) % ALIGN  # hidden keys at the end of each tile
    first = max(0, high - grid.offset)  # queries before it would see keys before key 0
    last = min(grid.n_queries, grid.n_keys - grid.offset + min(low, 0))
    count = (min(last, grid.n_keys - grid.offset + low - spare) - first) // step
    rest = last - first - count * step
    if count < 2:
        yield from _tile_blocks(mask, grid, 0, grid.n_queries)
        return
    if low == 0 and bias is None:
        if first > max(0, -grid.offset):
            yield _causal_block(first, grid.offset)
    else:
        yield from _tile_blocks(mask, grid, 0, first)
    together = max(1, CALL_ROWS // (grid.batch * grid.heads * step))
    calls = [(first + t * step, step, min(together, count - t), spare) for t in range(0, count, together)]
    for start, size, repeats, more in (*calls, (last - rest, rest, 1, 0)):
        if size:
            keys = slice(start + grid.offset - high, start + grid.offset + size - low + more)
            pattern = _band_pattern(low, high, size, keys.stop - keys.start, dtype)
            if bias is not None:
                added = ByDistance(bias, grid.n_keys).tile(Region(slice(start, start + size), keys))
                pattern = (pattern + added).repeat(1, grid.batch if repeats > 1 and len(bias) > 1 else 1, 1, 1)
            yield [Part(slice(start, start + size), keys, pattern=pattern, count=repeats, step=step)]
    yield from _tile_blocks(mask, grid, last, grid.n_queries)


@functools.lru_cache(maxsize=16)
def _band_pattern(low: int, high: int, queries: int, keys: int, dtype: torch.dtype) -> Float[Tensor, "1 1 q k"]:
    """0 where low ≤ q − k ≤ high and −inf elsewhere; the first query stands `high` keys after the first key."""
    back = high + torch.arange(queries)[:, None] - torch.arange(keys)
    return torch.zeros(back.shape, dtype=dtype).masked_fill_((back < low) | (back > high), -torch.inf)[None, None]


def _biased_band_blocks(
    bias: Float[Tensor, "h distances"], band: tuple[float, float], mask: Mask | None, call: Call, *, training: bool
) -> Iterator[Block]:
    """Rows of tiles whose bias is a view of one vector a head: what depends on i − j needs no matrix.

    With the rows in reverse the bias of row i and key j stands at i + j of the reversed vector, and a view with both
    strides 1 is that matrix. A band mask is −inf in the vector.
    """
    low, high = band
    if math.isfinite(low) and math.isfinite(high):
        assert mask is not None
        yield from _band_blocks(mask, call, bias, training=training)
        return
    grid = call.grid
    back = torch.arange(bias.shape[1]) - (grid.n_keys - 1) + grid.offset
    vector = bias.masked_fill((back < low) | (back > high), -torch.inf).flip(-1)
    first = 0 if math.isinf(low) else max(0, int(low) - grid.offset)  # rows before it see nothing, nor those after last
    last = grid.n_queries if math.isinf(high) else min(grid.n_queries, grid.n_keys + int(high) - grid.offset)
    size = min(4, max(1, grid.n_queries // (8 * TILE))) * TILE
    for start in range(first, last, size):
        stop = min(start + size, last)
        left = 0 if math.isinf(high) else max(0, start + grid.offset - int(high))
        right = grid.n_keys if math.isinf(low) else min(grid.n_keys, stop + grid.offset - int(low))
        shape, stride = (1, len(vector), stop - start, right - left), vector.stride(0)
        view = vector.as_strided(shape, (0, stride, 1, 1), vector.storage_offset() + grid.n_queries - stop + left)
        yield [Part(slice(start, stop), slice(left, right), pattern=view, flipped=True)]


def _tile_blocks(mask: Mask, grid: Grid, start: int, stop: int) -> Iterator[Block]:
    """Queries `start` to `stop` of any mask: runs of full and of partial tiles, equal rows of tiles together."""
    if start >= stop:
        return
    size = max(TILE, 2 ** math.ceil(math.log2(grid.n_keys / 1024)))  # keeps the table of classes small
    kinds = classes(mask, Tiles.of(grid, size, size, start, stop), grid)
    low, high = kinds.amin(1), kinds.amax(1)
    kinds = torch.where(low == high, low, PARTIAL)  # over heads: (b, rows, columns)
    for item, table in enumerate(kinds.tolist()):
        batch = slice(None) if len(kinds) == 1 else slice(item, item + 1)
        row = 0
        while row < len(table):
            most = max(1, MASK_ELEMENTS // max(1, table[row].count(PARTIAL) * size * size))
            end = row + 1
            while end < len(table) and table[end] == table[row] and end - row < most:
                end += 1
            rows = slice(start + row * size, min(start + end * size, stop))
            parts = list(_runs(mask, grid, table[row], rows, size, batch))
            if parts:
                yield parts
            row = end


def _runs(mask: Mask, grid: Grid, kinds: list[int], rows: slice, size: int, batch: slice) -> Iterator[Part]:
    """Consecutive tiles of one class are one part; a partial one carries its mask unless it proves full or empty."""
    column = 0
    for kind, group in itertools.groupby(kinds):
        first, column = column, column + len(list(group))
        keys = slice(first * size, min(column * size, grid.n_keys))
        if kind == FULL:
            yield Part(rows, keys, batch)
        elif kind == PARTIAL:
            seen = mask.allowed(Region(rows, keys, batch), grid)
            if seen.all():
                yield Part(rows, keys, batch)
            elif seen.any():
                yield Part(rows, keys, batch, allowed=seen)


# --- forward and backward ---------------------------------------------------------------------------------------------


class _Flash(torch.autograd.Function):
    """out and lse, the sink included, of q, k, v with equal head sizes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        part, cut = _forward(q, k, v, sink, call, training=True)
        ctx.save_for_backward(q, k, v, sink, part.out, part.lse)
        ctx.blocks, ctx.call = cut, call
        ctx.set_materialize_grads(False)
        return part.out, part.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        if grad is None and grad_lse is None:
            return None, None, None, None, None
        grad = torch.zeros_like(out) if grad is None else grad
        grad_sink = None
        if sink is not None:
            grad_sink = sink_gradient(sink, Partial(out, lse), grad, grad_lse)
        d = q.shape[3]
        if grad_lse is not None:
            # One more dimension turns the kernel's rowsum(grad·out) into rowsum(grad·out) − grad_lse, which is exactly
            # what a gradient of the log-sum-exp adds; q, k and v are 0 there.
            q, k, v = (_pad(x, d + 1) for x in (q, k, v))
            out = torch.cat([out, -torch.ones_like(out[..., :1])], -1)
            grad = torch.cat([grad, grad_lse[..., None].to(grad.dtype)], -1)
        grads = _fold_backward(grad, q, k, v, out, lse, ctx.blocks, ctx.call)
        return *(g[..., :d] for g in grads), grad_sink, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, *, training: bool
) -> tuple[Partial, list[Block]]:
    """Attention of all parts, the sink included, and the parts."""
    cut = list(blocks(call, training=training))
    part = _fold(q, k, v, cut, call)
    return (part if sink is None else part.with_sink(sink)), cut


def _fold(q: Tensor, k: Tensor, v: Tensor, cut: list[Block], call: Call) -> Partial:
    if len(cut) == 1 and _covers(cut[0], call.grid):
        return merge(*[_attend(part, q, k, v, call) for part in cut[0]])
    covered = sum(len(q[b[0].batch]) * b[0].count * (b[0].rows.stop - b[0].rows.start) for b in cut)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=at_least_float32(q.dtype))
    if covered < len(q) * q.shape[2]:
        out.zero_()
        lse.fill_(-torch.inf)
    for block in cut:
        whole = merge(*[_attend(part, q, k, v, call) for part in block])
        block[0].put(out, whole.out)
        block[0].put(lse, whole.lse)
    return Partial(out, lse)


def _covers(block: Block, grid: Grid) -> bool:
    part = block[0]
    return (
        part.count == 1
        and not part.flipped
        and part.batch == slice(None)
        and part.rows == slice(0, grid.n_queries)
    )


def _attend(part: Part, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
    added, hidden = _added(part, call)
    k, v = (without_unseen(part.cut(x, part.keys), part.allowed) for x in (k, v))
    rows = part.cut(q, part.rows)
    out, lse = _stock(rows, k, v, causal=part.causal, scale=_scale(call), added=added)
    if k.shape[2] < SHORT and (lost := rows.isnan().any(-1)).any():
        lse = lse.masked_fill(lost, torch.nan)
        out = out.masked_fill(lost[..., None], torch.nan)
    if hidden is not None:  # the stock kernel says lse = 0 where nothing is visible
        lse = lse.masked_fill(hidden, -torch.inf)
        out = out.masked_fill(hidden[..., None], 0)
    return Partial(out, lse)


def _fold_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cut: list[Block], call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    wide = at_least_float32(q.dtype)
    sums = tuple(torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0)  # such rows see nothing, so e^(−∞ − 0) = 0 is their weight
    for part in itertools.chain.from_iterable(cut):
        added, _ = _added(part, call)
        keys, values = (without_unseen(part.cut(x, part.keys), part.allowed) for x in (k, v))
        rows = [part.cut(x, part.rows) for x in (grad, q, out, lse)]
        grads = _stock_backward(
            rows[0],
            rows[1],
            keys,
            values,
            rows[2],
            rows[3],
            causal=part.causal,
            scale=_scale(call),
            added=added,
        )
        for total, where, value in zip(sums, (part.rows, part.keys, part.keys), grads, strict=True):
            part.add(total, where, value)
    dq, dk, dv = (total.to(q.dtype) for total in sums)
    return dq, dk, dv


def _scale(call: Call) -> float:
    return call.factor / call.normalizer.temperature


def _added(part: Part, call: Call) -> tuple[Tensor | None, Bool[Tensor, "b h q"] | None]:
    """The additive mask of a part (0 or a bias where visible, −inf where not), and the rows it hides entirely."""
    if part.pattern is not None:
        return part.pattern, None
    dtype = at_least_float32(call.q.dtype)
    added = None
    for bias in call.biases:
        tile = bias.tile(Region(part.rows, part.keys, part.batch))
        added = tile.to(dtype) if added is None else added + tile
    if added is not None and call.normalizer.temperature != 1:
        added = added / call.normalizer.temperature
    if part.allowed is not None:
        zero = torch.zeros((), dtype=dtype) if added is None else added
        added = torch.where(part.allowed, zero, -torch.inf)
    if added is None:
        return None, None
    hidden = (added == -torch.inf).all(-1)
    size = (*added.shape[:2], part.rows.stop - part.rows.start, part.keys.stop - part.keys.start)
    return added.expand(size), hidden if hidden.any() else None
