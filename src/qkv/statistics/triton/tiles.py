"""A tile of the score matrix in a Triton kernel: its scores, visible pairs and weights, and sums over its keys."""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(1e30)  # the log-sum-exp of a row without weights: 2^(score − 1e30) is 0, and so is that times score
LOG2_E = tl.constexpr(1.4426950408889634)
SLICE = tl.constexpr(8)  # columns of a tile that are added first: those of one instruction of a tensor core
SCALE = tl.constexpr(2.0**30)


@triton.jit
def load_rows(at, rows, stride, of_d, inside, d, EVEN: tl.constexpr):
    """Rows of a matrix at a pointer, with zeros where they are not `inside`, and beyond d, unless EVEN."""
    inside = inside[:, None] if EVEN else inside[:, None] & (of_d[None, :] < d)
    return tl.load(at + rows[:, None].to(tl.int64) * stride + of_d[None, :], mask=inside, other=0.0)


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    """Matrix product with float32 sums. Products of bfloat16 are exact in float32, to which WIDEN converts first,
    because Triton's interpreter has no bfloat16 products."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def exp2(x, CARD: tl.constexpr):
    """2^x by one instruction, which takes numbers below 2^−126 for 0; Triton's own adds three for these."""
    if CARD:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _capped(scores, cap):
    """cap · tanh(score / cap). Below 0.1 the odd powers: 1 − 2 / (e^2x + 1) would lose digits there."""
    x = scores / cap
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    large = 1.0 - 2.0 / (tl.exp2(tl.minimum(2.0 * LOG2_E * x, 100.0)) + 1.0)
    return cap * tl.where(tl.abs(x) < 0.1, small, large)


@triton.jit
def final_scores(products, rows, columns, h, n_queries, n_keys, bias, CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr):
    """Final scores in base 2 of q·k: with a soft cap before (CAP 1) or after (CAP 2) a bias by distance.

    `unit` is log2(e) divided by the temperature; `rows` and `columns` are the indices of each product.
    """
    scale, unit, cap, distances, stride_distance = bias
    if CAP == 0 and not HAS_DISTANCE:
        return products * (scale * unit)
    scores = products * scale
    if CAP == 1:
        scores = _capped(scores, cap)
    if HAS_DISTANCE:
        back = rows - columns + (n_keys - 1)
        exists = (rows < n_queries) & (columns >= 0) & (columns < n_keys)
        scores += tl.load(distances + h.to(tl.int64) * stride_distance + back, mask=exists, other=0.0)
    if CAP == 2:
        scores = _capped(scores, cap)
    return scores * unit


@triton.jit
def visible_pairs(
    rows, columns, batch, h, n_queries, n_keys, mask,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Which pairs of rows and columns are visible: both exist, and they pass the band, the mask of the keys, the ids of
    the documents and the dense mask, as far as there are any."""
    offset, low, high, keys, ids, dense, stride_kb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk = mask
    positions = rows + offset
    exists = (columns >= 0) & (columns < n_keys)
    seen = (rows < n_queries) & exists
    if HAS_BAND:
        back = positions - columns
        seen = seen & (back >= low) & (back <= high)
    if HAS_KEYS:
        seen = seen & (tl.load(keys + batch.to(tl.int64) * stride_kb + columns, mask=exists, other=0) != 0)
    if HAS_IDS:
        of_batch = ids + batch.to(tl.int64) * stride_ib
        of_query = tl.load(of_batch + positions, mask=(rows < n_queries) & (positions >= 0), other=-1)
        of_key = tl.load(of_batch + columns, mask=exists, other=-1)
        seen = seen & (of_query == of_key) & (of_key >= 0)
    if HAS_DENSE:
        of_head = dense + batch.to(tl.int64) * stride_db + h.to(tl.int64) * stride_dh
        pairs = rows.to(tl.int64) * stride_dq + columns.to(tl.int64) * stride_dk
        seen = seen & (tl.load(of_head + pairs, mask=seen, other=0) != 0)
    return seen


@triton.jit
def row_shift(lse, counted, rows, inside, HAS_COUNTED: tl.constexpr):
    """The log-sum-exp of rows in base 2, NONE where there is no weight or the query does not count; and which count."""
    shift = tl.load(lse + rows, mask=inside, other=float("-inf")) * LOG2_E
    if HAS_COUNTED:
        inside = inside & (tl.load(counted + rows, mask=inside, other=0) != 0)
    return tl.where(inside & (shift != float("-inf")), shift, NONE), inside


@triton.jit
def tile_weights(
    at_q, here, lse, counted, rows, columns, stride_qn, batch, h, n_queries, n_keys, d, bias, mask,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_COUNTED: tl.constexpr, MASKED: tl.constexpr,
    EVEN_D: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """The weights of a tile among the keys alone, their base-2 logarithms, the log-sum-exp of the rows in base 2, and
    which pairs are visible; `here` are the keys, transposed."""
    inside = rows < n_queries if MASKED else tl.full(rows.shape, True, tl.int1)
    shift, counts = row_shift(lse, counted, rows, inside, HAS_COUNTED)
    queries = load_rows(at_q, rows, stride_qn, tl.arange(0, D), counts, d, EVEN_D)
    t = final_scores(
        dot(queries, here, WIDEN), rows[:, None], columns[None, :], h, n_queries, n_keys, bias, CAP, HAS_DISTANCE
    ) - shift[:, None]  # fmt: skip
    seen = counts[:, None]
    if MASKED:
        seen = seen & visible_pairs(
            rows[:, None], columns[None, :], batch, h, n_queries, n_keys, mask, HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE
        )
        t = tl.where(seen, t, -NONE)
    if HAS_DISTANCE or at_q.dtype.element_ty == tl.float32:
        t = tl.maximum(t, -NONE)  # a score may be −∞
    return t, exp2(t, CARD), shift, seen


@triton.jit
def key_share(shift, sink, inside):
    """The weight of all keys of a row together beside a sink logit, given their log-sum-exp in base 2."""
    logit = tl.load(sink, mask=inside, other=float("-inf")).to(tl.float32) * LOG2_E
    return 1.0 / (1.0 + tl.exp2(tl.minimum(logit - shift, 126.0)))


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of a tile (M, N)."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def slices(
    p, t, p2, t2, norms, norms2, sums, M: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, HAS_NORMS: tl.constexpr,
    HAS_LOWS: tl.constexpr,
):  # fmt: skip
    """Add the slices of columns of the left half of a tile (p, t) and of its mirrored right half (p2, t2) to `sums`.

    A slice and its mirror image are as far from the middle (FAR), so that the even moments need their sum alone. The
    sums are multiplications with an addition, one instruction each.
    """
    if N == SLICE:
        bits, squares, top, low, zero, one, two, norm = sums
        both = p + p2
        bits = bits + p * t + p2 * t2
        squares = squares + p * p + p2 * p2
        top = tl.maximum(top, tl.maximum(p.to(tl.int32, bitcast=True), p2.to(tl.int32, bitcast=True)))
        if HAS_LOWS:
            low = tl.minimum(low, tl.minimum(t, t2))
        zero, one, two = zero + both, one - p * FAR + p2 * FAR, two + both * (FAR * FAR)
        if HAS_NORMS:
            norm = norm + p * norms + p2 * norms2
        return bits, squares, top, low, zero, one, two, norm
    else:
        a, b = halves(p, M, N)
        a2, b2 = halves(p2, M, N)
        ta, tb = halves(t, M, N)
        ta2, tb2 = halves(t2, M, N)
        na, nb, na2, nb2 = norms, norms, norms2, norms2
        if HAS_NORMS:
            na, nb = halves(norms, 1, N)
            na2, nb2 = halves(norms2, 1, N)
        sums = slices(a, ta, b2, tb2, na, nb2, sums, M, N // 2, FAR + N / 4, HAS_NORMS, HAS_LOWS)
        return slices(b, tb, a2, ta2, nb, na2, sums, M, N // 2, FAR - N / 4, HAS_NORMS, HAS_LOWS)


@triton.jit
def moments(zero, one, two, BN: tl.constexpr):
    """Σ a, Σ a x and Σ a x² over BN keys, as integers, from sums by slice and column of a slice."""
    place = (tl.arange(0, SLICE) - (SLICE - 1) / 2)[None, :]
    m0, m1 = tl.sum(zero, 1), tl.sum(one + place * zero, 1)
    m2 = tl.sum(two + (2.0 * place) * one + (place * place) * zero, 1)
    return (
        integer(m0 * SCALE).to(tl.int64), integer(m1 * (SCALE / BN)).to(tl.int64),
        integer(m2 * (SCALE / BN / BN)).to(tl.int64),
    )  # fmt: skip


@triton.jit
def integer(x):
    return tl.floor(x + 0.5).to(tl.int32)


@triton.jit
def count_between(counts, low, high):
    """How many there are from `low` to `high`, given how many there are up to each."""
    some = high >= low
    upto, before = tl.load(counts + high, mask=some, other=0), tl.load(counts + low - 1, mask=some & (low > 0), other=0)
    return upto - before


@triton.jit
def visible_range(at, low, high, n, HAS_BAND: tl.constexpr):
    """The first and the last of n positions that are from `low` to `high` after `at`; all of them without a band."""
    first, last = at * 0, at * 0 + (n - 1)
    if HAS_BAND:
        first, last = tl.maximum(at + low, 0), tl.minimum(at + high, n - 1)
    return first, last
