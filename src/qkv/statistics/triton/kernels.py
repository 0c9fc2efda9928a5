"""Two Triton kernels: attention with the statistics of each query in one pass, then the statistics of each key.

Scores are in base 2. Sums over keys are taken tile by tile in float32, about the middle of the tile, and added up in
float64, so that neither the entropy nor the spread loses digits at long contexts. (FlashAttention-2: Dao 2023,
arXiv:2307.08691, algorithm 1; online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867.)
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # running maximum of a row that has seen no key
LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(at, rows, stride, n, of_d, d):
    """The rows of a matrix (n, d) at a pointer, with zeros beyond it."""
    inside = (rows[:, None] < n) & (of_d[None, :] < d)
    return tl.load(at + rows[:, None].to(tl.int64) * stride + of_d[None, :], mask=inside, other=0.0)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """Matrix product with float32 sums. Products of bfloat16 are exact in float32, to which WIDEN converts first,
    because Triton's interpreter has no bfloat16 products."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _capped(scores, cap):
    """cap · tanh(score / cap). Below 0.1 the odd powers: 1 − 2 / (e^2x + 1) would lose digits there."""
    x = scores / cap
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    large = 1.0 - 2.0 / (tl.exp2(tl.minimum(2.0 * LOG2_E * x, 100.0)) + 1.0)
    return cap * tl.where(tl.abs(x) < 0.1, small, large)


@triton.jit
def _final(
    products, rows, columns, h, n_queries, n_keys, scale, unit, cap, distances, stride_distance,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr,
):  # fmt: skip
    """Final scores in base 2 of q·k: with a soft cap before (CAP 1) or after (CAP 2) a bias by distance.

    `unit` is log2(e) divided by the temperature.
    """
    if CAP == 0 and not HAS_DISTANCE:
        return products * (scale * unit)
    scores = products * scale
    if CAP == 1:
        scores = _capped(scores, cap)
    if HAS_DISTANCE:
        back = rows[:, None] - columns[None, :] + (n_keys - 1)
        exists = (rows[:, None] < n_queries) & (columns[None, :] < n_keys)
        scores += tl.load(distances + h.to(tl.int64) * stride_distance + back, mask=exists, other=0.0)
    if CAP == 2:
        scores = _capped(scores, cap)
    return scores * unit


@triton.jit
def _visible(
    rows, columns, batch, h, n_queries, n_keys, offset, low, high, keys, ids, dense,
    stride_kb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile are visible: both exist, and they pass the band, the mask of the keys, the ids of the
    documents and the dense mask, as far as there are any."""
    positions = rows + offset
    seen = (rows[:, None] < n_queries) & (columns[None, :] < n_keys)
    if HAS_BAND:
        back = positions[:, None] - columns[None, :]
        seen = seen & (back >= low) & (back <= high)
    if HAS_KEYS:
        real = tl.load(keys + batch.to(tl.int64) * stride_kb + columns, mask=columns < n_keys, other=0)
        seen = seen & (real[None, :] != 0)
    if HAS_IDS:
        of_batch = ids + batch.to(tl.int64) * stride_ib
        of_query = tl.load(of_batch + positions, mask=(rows < n_queries) & (positions >= 0), other=-1)
        of_key = tl.load(of_batch + columns, mask=columns < n_keys, other=-1)
        seen = seen & (of_query[:, None] == of_key[None, :]) & (of_key[None, :] >= 0)
    if HAS_DENSE:
        of_head = dense + batch.to(tl.int64) * stride_db + h.to(tl.int64) * stride_dh
        pairs = rows[:, None].to(tl.int64) * stride_dq + columns[None, :].to(tl.int64) * stride_dk
        seen = seen & (tl.load(of_head + pairs, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _sees_all(
    first_row, first_column, n_queries, n_keys, offset, low, high, BM: tl.constexpr, BN: tl.constexpr,
    HAS_BAND: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Whether every pair of a tile exists and passes the band, so that no pair needs to be masked."""
    if OTHERS:
        return False
    full = (first_row + BM <= n_queries) & (first_column + BN <= n_keys)
    if HAS_BAND:
        back = first_row + offset - first_column  # of the first pair; of the others from −(BN − 1) to BM − 1 more
        full = full & (back - (BN - 1) >= low) & (back + (BM - 1) <= high)
    return full


@triton.jit
def by_query(
    q, k, v, out, lse, state, found, mass, sink, firsts, bands, band_keys, counted, norms,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_sb, stride_sh, stride_sn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d, dv,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_COUNTED: tl.constexpr, HAS_NORMS: tl.constexpr,
    OUTPUT: tl.constexpr, MASSES: tl.constexpr, MASS_COLUMNS: tl.constexpr, MASS_KEYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Output, log-sum-exp and the statistics of BM queries of one head.

    `state` gets the running maximum and the factor of the weights, in base 2, which `by_key` needs: (2, b·h, nq).
    `found` gets the statistics in the order of `host.OF_QUERIES`, then the weight on the sink logit, and Σ p ‖v‖ with
    the norms of the values, (b·h, nk): (11, b·h, nq); `mass` gets those of the masses.
    """
    head = tl.program_id(1)
    batch, h = head // heads, head % heads
    first_row = tl.program_id(0) * BM
    rows = first_row + tl.arange(0, BM)
    positions = rows + offset
    of_d, of_dv = tl.arange(0, D), tl.arange(0, DV)
    inside = rows < n_queries
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    at_v = v + batch.to(tl.int64) * stride_vb + (h // share).to(tl.int64) * stride_vh
    queries = _load(at_q, rows, stride_qn, n_queries, of_d, d)
    first = tl.load(firsts + batch)

    maximum = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float64)
    bits = tl.zeros((BM,), tl.float64)  # Σ p (s − maximum)
    squares = tl.zeros((BM,), tl.float64)
    offset1 = tl.zeros((BM,), tl.float64)  # Σ p (j − position)
    offset2 = tl.zeros((BM,), tl.float64)
    distance = tl.zeros((BM,), tl.float64)
    contributions = tl.zeros((BM,), tl.float64)
    masses = tl.zeros((BM, MASS_COLUMNS), tl.float64)
    of_mass = tl.arange(0, MASS_COLUMNS)
    number = tl.zeros((BM,), tl.int32)
    at_self = tl.full((BM,), float("-inf"), tl.float32)  # scores, until the log-sum-exp is known
    at_previous = tl.full((BM,), float("-inf"), tl.float32)
    at_next = tl.full((BM,), float("-inf"), tl.float32)
    at_first = tl.full((BM,), float("-inf"), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)

    begin, end = 0, n_keys
    if HAS_BAND:
        begin = tl.maximum(first_row + offset - high, 0) // BN * BN
        end = tl.minimum(tl.minimum(first_row + BM, n_queries) + offset - low, n_keys)
    for start in range(begin, end, BN):
        columns = start + tl.arange(0, BN)
        here = _load(at_k, columns, stride_kn, n_keys, of_d, d)
        scores = _final(
            _dot(queries, tl.trans(here), WIDEN), rows, columns, h, n_queries, n_keys, scale, unit, cap, distances,
            stride_distance, CAP, HAS_DISTANCE,
        )  # fmt: skip
        full = _sees_all(
            first_row, start, n_queries, n_keys, offset, low, high, BM, BN, HAS_BAND, HAS_KEYS or HAS_IDS or HAS_DENSE
        )  # fmt: skip
        if full:
            number += BN
        else:
            seen = _visible(
                rows, columns, batch, h, n_queries, n_keys, offset, low, high, keys, ids, dense,
                stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
                HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
            number += tl.sum(seen.to(tl.int32), 1)
        new = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        above = tl.where(p > 0.0, scores - new[:, None], 0.0)  # a bias may be −∞
        shrink = tl.exp2(maximum - new)
        shrink64, drop = shrink.to(tl.float64), tl.where(total > 0, (maximum - new).to(tl.float64), 0.0)
        of_tile = tl.sum(p, 1).to(tl.float64)
        bits = shrink64 * (bits + drop * total) + tl.sum(p * above, 1).to(tl.float64)
        total = shrink64 * total + of_tile
        squares = shrink64 * shrink64 * squares + tl.sum(p * p, 1).to(tl.float64)
        # Offsets from the middle of the tile are small; those from the query follow in float64.
        middle = start + BN // 2
        place = (columns - middle).to(tl.float32)
        one, two = tl.sum(p * place[None, :], 1).to(tl.float64), tl.sum(p * (place * place)[None, :], 1).to(tl.float64)
        away = (middle - positions).to(tl.float64)
        offset1 = shrink64 * offset1 + one + away * of_tile
        offset2 = shrink64 * offset2 + two + away * (2 * one + away * of_tile)
        back = positions[:, None] - columns[None, :]
        if (start + BN - 1 <= first_row + offset) | (start >= first_row + BM - 1 + offset):  # all on one side
            distance = shrink64 * distance + tl.abs(one + away * of_tile)
        else:
            distance = shrink64 * distance + tl.sum(p * tl.abs(back).to(tl.float32), 1).to(tl.float64)
        if (start <= first_row + BM + offset) & (start + BN >= first_row + offset):
            at_self = tl.maximum(at_self, tl.max(tl.where(back == 0, scores, float("-inf")), 1))
            at_previous = tl.maximum(at_previous, tl.max(tl.where(back == 1, scores, float("-inf")), 1))
            at_next = tl.maximum(at_next, tl.max(tl.where(back == -1, scores, float("-inf")), 1))
        if (start <= first) & (first < start + BN):
            at_first = tl.max(tl.where((columns == first)[None, :], scores, float("-inf")), 1)
        if HAS_NORMS:
            norm = tl.load(norms + head.to(tl.int64) * n_keys + columns, mask=columns < n_keys, other=0.0)
            added = tl.where(p > 0.0, p * norm[None, :], 0.0)  # the value of a masked key can be NaN
            contributions = shrink64 * contributions + tl.sum(added, 1).to(tl.float64)
        if MASSES > 0:
            masses *= shrink64[:, None]
        nearest = first_row + offset - (start + BN - 1)  # the least distance of a pair of the tile
        for m in tl.static_range(MASSES):
            least, most = tl.load(bands + 2 * m), tl.load(bands + 2 * m + 1)
            meets = (nearest <= most) & (nearest + BM + BN - 2 >= least)
            named = tl.zeros((BN,), tl.int8)
            if MASS_KEYS:
                named = tl.load(
                    band_keys + (m * (tl.num_programs(1) // heads) + batch).to(tl.int64) * n_keys + columns,
                    mask=columns < n_keys, other=0,
                )  # fmt: skip
                meets = meets | (tl.max(named, 0) > 0)
            if meets:  # most tiles are far from a band near the diagonal, and from the first keys
                of_band = (back >= least) & (back <= most) | (named != 0)[None, :]
                part = tl.sum(tl.where(of_band, p, 0.0), 1).to(tl.float64)
                masses += tl.where((of_mass == m)[None, :], part[:, None], 0.0)
        if OUTPUT:
            values = _load(at_v, columns, stride_vn, n_keys, of_dv, dv)
            if not full:  # values that no query of the tile sees can be NaN
                some = tl.max((scores != float("-inf")).to(tl.int32), 0)
                values = tl.where(some[:, None] != 0, values, 0.0)
            acc = acc * shrink[:, None] + _dot(p.to(values.dtype), values, WIDEN)
        maximum = new

    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    log2_total = tl.log2(safe.to(tl.float32))
    whole = safe
    lse2 = tl.where(empty, float("-inf"), maximum + log2_total)
    at_sink = tl.zeros((BM,), tl.float32)
    if HAS_SINK:
        above_sink = tl.load(
            sink + batch * stride_sb + h * stride_sh + rows * stride_sn, mask=inside, other=0.0
        ).to(tl.float32) * LOG2_E  # fmt: skip
        top = tl.maximum(lse2, above_sink)
        none = top == float("-inf")
        top = tl.where(none, 0.0, top)
        both = top + tl.log2(tl.exp2(lse2 - top) + tl.exp2(above_sink - top))
        at_sink = tl.where(none, 0.0, tl.exp2(above_sink - tl.where(none, 0.0, both)))
        whole = safe + tl.exp2(tl.where(empty, float("-inf"), above_sink - maximum)).to(tl.float64)
        lse2 = tl.where(none, float("-inf"), both)
    factor = tl.where(empty, 0.0, 1.0 / whole)
    write = head.to(tl.int64) * n_queries + rows
    if OUTPUT:
        acc = tl.where(empty[:, None], 0.0, acc * factor.to(tl.float32)[:, None])
        tl.store(
            out + write[:, None] * dv + of_dv[None, :], acc.to(out.dtype.element_ty),
            mask=inside[:, None] & (of_dv[None, :] < dv),
        )  # fmt: skip
    tl.store(lse + write, lse2 * LN2, mask=inside)
    if HAS_COUNTED:
        counts = tl.load(counted + batch.to(tl.int64) * n_queries + rows, mask=inside, other=0) != 0
        factor = tl.where(counts, factor, 0.0)
        empty = empty | (counts == 0)
        at_sink = tl.where(counts, at_sink, 0.0)
        number = tl.where(counts, number, 0)
    size = tl.num_programs(1).to(tl.int64) * n_queries
    tl.store(state + write, tl.where(empty, 0.0, maximum), mask=inside)
    tl.store(state + size + write, factor.to(tl.float32), mask=inside)

    mean, mean2 = offset1 / safe, offset2 / safe
    entropy = LN2 * (tl.log2(safe.to(tl.float32)).to(tl.float64) - bits / safe)
    spread = tl.sqrt(tl.maximum(mean2 - mean * mean, 0.0))
    small = factor.to(tl.float32)
    tl.store(found + write, tl.where(empty, 0.0, tl.maximum(entropy, 0.0)).to(tl.float32), mask=inside)
    tl.store(found + size + write, tl.where(empty, 0.0, tl.exp2(at_first - maximum) * small), mask=inside)
    tl.store(found + 2 * size + write, tl.where(empty, 0.0, tl.exp2(at_self - maximum) * small), mask=inside)
    tl.store(found + 3 * size + write, tl.where(empty, 0.0, tl.exp2(at_previous - maximum) * small), mask=inside)
    tl.store(found + 4 * size + write, tl.where(empty, 0.0, tl.exp2(at_next - maximum) * small), mask=inside)
    tl.store(found + 5 * size + write, tl.where(empty, 0.0, distance / safe).to(tl.float32), mask=inside)
    tl.store(found + 6 * size + write, tl.where(empty, 0.0, spread).to(tl.float32), mask=inside)
    shape = tl.where(empty, 0.0, total * total / tl.where(empty, 1.0, squares))
    tl.store(found + 7 * size + write, shape.to(tl.float32), mask=inside)
    tl.store(found + 8 * size + write, number.to(tl.float32), mask=inside)
    tl.store(found + 9 * size + write, at_sink, mask=inside)
    if HAS_NORMS:
        tl.store(found + 10 * size + write, (contributions * factor).to(tl.float32), mask=inside)
    for m in tl.static_range(MASSES):
        of_m = tl.sum(tl.where((of_mass == m)[None, :], masses, 0.0), 1)
        tl.store(mass + m * size + write, (of_m * factor).to(tl.float32), mask=inside)


@triton.jit
def by_key(
    q, k, state, received, audience, prefix, pooled, firsts, counted,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    prefix_keys, query_bin, pooled_rows, pooled_columns,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    HAS_COUNTED: tl.constexpr, HAS_PREFIX: tl.constexpr,
    POOLED: tl.constexpr, POOL_M: tl.constexpr, POOL_N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Received attention, visible queries, prefix sink scores and the pooled map of BN keys of one head.

    `pooled` is (2, b·h, pooled_rows, pooled_columns): maxima and sums over bins of `query_bin` queries × POOL_N keys;
    a program goes through the queries in order and stores a bin each time it grows.
    """
    head = tl.program_id(1)
    batch, h = head // heads, head % heads
    first_column = tl.program_id(0) * BN
    columns = first_column + tl.arange(0, BN)
    of_d = tl.arange(0, D)
    inside = columns < n_keys
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    here = _load(at_k, columns, stride_kn, n_keys, of_d, d)
    first = tl.load(firsts + batch)
    of_head, size = head.to(tl.int64) * n_queries, tl.num_programs(1).to(tl.int64) * n_queries

    total = tl.zeros((BN,), tl.float64)
    partial = tl.zeros((BM, BN), tl.float32)  # sums over at most 32 tiles, before they are added up in float64
    number = tl.zeros((BN,), tl.int32)
    early = tl.zeros((BN,), tl.float32)
    early_number = tl.zeros((BN,), tl.int32)
    top = tl.zeros((BM // POOL_M, BN // POOL_N), tl.float32)
    pool = tl.zeros((BM // POOL_M, BN // POOL_N), tl.float32)
    pool_rows, pool_columns = tl.arange(0, BM // POOL_M), tl.arange(0, BN // POOL_N)

    begin, end = 0, n_queries
    if HAS_BAND:
        begin = tl.maximum(first_column + low - offset, 0) // BM * BM
        end = tl.minimum(tl.minimum(first_column + BN, n_keys) + high - offset, n_queries)
    for start in range(begin, end, BM):
        rows = start + tl.arange(0, BM)
        queries = _load(at_q, rows, stride_qn, n_queries, of_d, d)
        maximum = tl.load(state + of_head + rows, mask=rows < n_queries, other=0.0)
        factor = tl.load(state + size + of_head + rows, mask=rows < n_queries, other=0.0)
        scores = _final(
            _dot(queries, tl.trans(here), WIDEN), rows, columns, h, n_queries, n_keys, scale, unit, cap, distances,
            stride_distance, CAP, HAS_DISTANCE,
        )  # fmt: skip
        scores -= maximum[:, None]
        row_of_text = rows + offset - first
        among = ((row_of_text >= 0) & (row_of_text < prefix_keys))[:, None]
        is_early = HAS_PREFIX and (start + BM + offset > first) & (start + offset - first < prefix_keys)
        if _sees_all(
            start, first_column, n_queries, n_keys, offset, low, high, BM, BN,
            HAS_BAND, HAS_KEYS or HAS_IDS or HAS_DENSE or HAS_COUNTED,
        ):  # fmt: skip
            number += BM
            if is_early:
                early_number += tl.sum(tl.where(among, 1, 0), 0)
        else:
            seen = _visible(
                rows, columns, batch, h, n_queries, n_keys, offset, low, high, keys, ids, dense,
                stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
                HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE,
            )  # fmt: skip
            if HAS_COUNTED:
                counts = tl.load(counted + batch.to(tl.int64) * n_queries + rows, mask=rows < n_queries, other=0)
                seen = seen & (counts[:, None] != 0)
            scores = tl.where(seen, scores, float("-inf"))
            number += tl.sum(seen.to(tl.int32), 0)
            if is_early:
                early_number += tl.sum((seen & among).to(tl.int32), 0)
        p = tl.exp2(scores) * factor[:, None]
        partial += p
        if (start + BM) % (32 * BM) == 0:
            total += tl.sum(partial, 0).to(tl.float64)
            partial = tl.zeros((BM, BN), tl.float32)
        if is_early:
            early += tl.sum(tl.where(among, p, 0.0), 0)
        if POOLED:
            tiles = tl.reshape(p, (BM // POOL_M, POOL_M, BN // POOL_N, POOL_N))
            maxima, sums = tl.max(tl.max(tiles, 3), 1), tl.sum(tl.sum(tiles, 3), 1)
            same = start % query_bin != 0
            top = tl.maximum(tl.where(same, top, 0.0), maxima)
            pool = tl.where(same, pool, 0.0) + sums
            bin_row = start // query_bin + pool_rows
            bin_column = first_column // POOL_N + pool_columns
            at = head.to(tl.int64) * pooled_rows * pooled_columns + bin_row[:, None] * pooled_columns + bin_column
            fits = (bin_row[:, None] < pooled_rows) & (bin_column[None, :] < pooled_columns)
            tl.store(pooled + at, top, mask=fits)
            both = tl.num_programs(1).to(tl.int64) * pooled_rows * pooled_columns
            tl.store(pooled + both + at, pool, mask=fits)

    total += tl.sum(partial, 0).to(tl.float64)
    write = head.to(tl.int64) * n_keys + columns
    tl.store(received + write, total.to(tl.float32), mask=inside)
    tl.store(audience + write, number.to(tl.float32), mask=inside)
    if HAS_PREFIX:
        of_text = columns - first
        put = head.to(tl.int64) * prefix_keys + of_text
        score = early / tl.maximum(early_number, 1).to(tl.float32)
        tl.store(prefix + put, score, mask=inside & (of_text >= 0) & (of_text < prefix_keys))
