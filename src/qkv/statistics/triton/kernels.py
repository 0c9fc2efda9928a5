"""Triton kernels for attention and exact statistics of its weights.

`forward` computes the output and the log-sum-exp where torch's kernels do not. With the log-sum-exp known, a weight is
final at once, and `statistics` goes once through all pairs: a program has BN keys, and goes through the queries. Sums
of keys stay in registers. The sums of a query over the BN keys leave each tile as integers, and are added in memory to
64-bit integers by atomic additions: exact in any order, so that results are equal from run to run. `by_row` turns them
into the statistics of each query. Scores and logarithms are in base 2. (FlashAttention-2: Dao 2023, arXiv:2307.08691,
algorithm 1; online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867.)

The sums of a query, for the weights a of its keys alone (without a sink logit), which add up to 1. T is the number of a
block of BN keys, x the place of a key relative to the middle of its block, and each block adds rounded integers:

    ONE     Σ a                · 2^30
    FIRST   Σ a (BN T + x)     · 2^30 / BN
    SECOND  Σ a (BN T + x)²    · 2^30 / BN²
    BITS    Σ a log2 a         · 2^25
    SQUARES Σ a²               · 2^60
    TOP     max a, the bits of its float32: of numbers that are not negative, they have the same order; · 2^32, and
            with T in the lower half such that of equal weights the first block has the larger number
    LOW     if extremes are wanted, max −log2 a, the bits of its float32

The three moments use the same rounded Σ a of a block, so the spread of a head that attends far back keeps its digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qkv.statistics.triton.tiles import (
    LOG2_E,
    NONE,
    SCALE,
    SLICE,
    count_between,
    dot,
    exp2,
    final_scores,
    halves,
    integer,
    key_share,
    load_rows,
    moments,
    row_shift,
    slices,
    tile_weights,
    visible_pairs,
    visible_range,
)

HIDDEN = tl.constexpr(-1e30)  # running maximum of a row that has seen no key
LN2 = tl.constexpr(0.6931471805599453)

ONE, FIRST, SECOND, BITS, SQUARES, TOP = (tl.constexpr(n) for n in range(6))
SUMS = tl.constexpr(6)  # sums of each query in memory, before those that are not always wanted
BITS_SCALE = tl.constexpr(2.0**25)
SQUARES_SCALE = tl.constexpr(2.0**60)
NORMS_SCALE = tl.constexpr(2.0**50)
UNUSED = tl.constexpr(2**31 - 1)  # beyond all keys and blocks of keys
NAN_SUM = tl.constexpr(-(2**50))  # added in place of NaN; the sums of norms are not negative otherwise
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def _clipped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _or_nan(x, nan):
    return tl.where(nan, float("nan"), x).to(tl.float32)


@triton.jit
def forward(
    q, k, v, out, lse, total_lse, sink,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_sb, stride_sh, stride_sn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d, dv,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SINK: tl.constexpr, OUTPUT: tl.constexpr, EVEN_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDEN: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head: `lse` of the keys alone, `total_lse` with the sink."""
    head = tl.program_id(1)
    batch, h = head // heads, head % heads
    first_row = tl.program_id(0) * BM
    rows = first_row + tl.arange(0, BM)
    of_d, of_dv = tl.arange(0, D), tl.arange(0, DV)
    inside = rows < n_queries
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    at_v = v + batch.to(tl.int64) * stride_vb + (h // share).to(tl.int64) * stride_vh
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    queries = load_rows(at_q, rows, stride_qn, of_d, inside, d, EVEN_D)
    maximum = tl.full((BM,), HIDDEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV), tl.float32)

    begin, end = 0, n_keys
    if HAS_BAND:
        begin = tl.maximum(first_row + offset - high, 0) // BN * BN
        end = tl.minimum(tl.minimum(first_row + BM, n_queries) + offset - low, n_keys)
    for start in range(begin, end, BN):
        columns = start + tl.arange(0, BN)
        here = load_rows(at_k, columns, stride_kn, of_d, columns < n_keys, d, EVEN_D)
        scores = final_scores(
            dot(queries, tl.trans(here), WIDEN), rows[:, None], columns[None, :], h, n_queries, n_keys, bias,
            CAP, HAS_DISTANCE,
        )  # fmt: skip
        full = False
        if not (HAS_KEYS or HAS_IDS or HAS_DENSE):
            full = (first_row + BM <= n_queries) & (start + BN <= n_keys)
            if HAS_BAND:
                back = first_row + offset - start  # of the first pair; of the others from −(BN − 1) to BM − 1 more
                full = full & (back - (BN - 1) >= low) & (back + (BM - 1) <= high)
        if not full:
            seen = visible_pairs(
                rows[:, None], columns[None, :], batch, h, n_queries, n_keys, mask,
                HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        p = exp2(scores - new[:, None], CARD)
        shrink = exp2(maximum - new, CARD)
        total = total * shrink + tl.sum(p, 1)
        if OUTPUT:
            values = load_rows(at_v, columns, stride_vn, of_dv, columns < n_keys, dv, EVEN_D)
            if not full:  # values that no query of the tile sees can be NaN
                some = tl.max((scores != float("-inf")).to(tl.int32), 0)
                values = tl.where(some[:, None] != 0, values, 0.0)
            acc = acc * shrink[:, None] + dot(p.to(values.dtype), values, WIDEN)
        maximum = new

    empty = total == 0.0
    whole = tl.where(empty, 1.0, total)
    lse2 = tl.where(empty, float("-inf"), maximum + tl.log2(whole))
    write = head.to(tl.int64) * n_queries + rows
    tl.store(lse + write, lse2 * LN2, mask=inside)
    if HAS_SINK:
        logit = tl.load(sink + batch * stride_sb + h * stride_sh + rows * stride_sn, mask=inside, other=0.0)
        logit = logit.to(tl.float32) * LOG2_E
        top = tl.maximum(lse2, logit)
        top = tl.where(top == float("-inf"), 0.0, top)
        both = top + tl.log2(tl.exp2(lse2 - top) + tl.exp2(logit - top))
        tl.store(total_lse + write, both * LN2, mask=inside)
        whole += tl.exp2(tl.where(empty, -NONE, logit - maximum))
    if OUTPUT:
        acc = tl.where(empty[:, None], 0.0, acc / whole[:, None])
        tl.store(
            out + write[:, None] * dv + of_dv[None, :], acc.to(out.dtype.element_ty),
            mask=inside[:, None] & (of_dv[None, :] < dv),
        )  # fmt: skip


@triton.jit
def statistics(
    q, k, lse, sink, sums, received, totals, audience, pooled, counted, norms, largest_norm, query_counts,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_sb, stride_sh, stride_sn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    query_bin, pooled_rows, pooled_columns,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_COUNTED: tl.constexpr,
    HAS_NORMS: tl.constexpr, BOTH_SIDES: tl.constexpr, POOLED: tl.constexpr, POOL_M: tl.constexpr,
    POOL_N: tl.constexpr, PLANES: tl.constexpr, EVEN_D: tl.constexpr, STEP: tl.constexpr, FLUSH: tl.constexpr,
    STAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, CARD: tl.constexpr,
    HAS_LOWS: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all queries and of BN keys of one head.

    `sums` are 64-bit integers, 0 before: for each BM queries of each head, PLANES sums, in the order of `planes` of the
    host. `received` gets Σ a of each key, with `totals` (float64, 0 before) for its parts of STEP queries; `audience`
    how many queries see the key. `pooled` is (2, b·h, pooled_rows, pooled_columns), 0 before: maxima and sums over bins
    of `query_bin` queries and POOL_N keys, in tiles (POOLED 1) or of several tiles (POOLED 2). The `norms` of values
    (b·h, n_keys) are added up as parts of the largest of all.
    """
    head, block = tl.program_id(1), tl.program_id(0)
    batch, h = head // heads, head % heads
    first_column = block * BN
    columns, of_d = first_column + tl.arange(0, BN), tl.arange(0, D)
    exists = columns < n_keys
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    here = tl.trans(load_rows(at_k, columns, stride_kn, of_d, exists, d, EVEN_D))
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    write = head.to(tl.int64) * n_keys + columns
    at_sink = sink + batch * stride_sb + h * stride_sh
    at_counted = counted + batch.to(tl.int64) * n_queries
    at_sums = sums + head.to(tl.int64) * tl.cdiv(n_queries, BM) * (PLANES * BM)
    bins = pooled + head.to(tl.int64) * pooled_rows * pooled_columns
    second = tl.num_programs(1).to(tl.int64) * pooled_rows * pooled_columns
    NORMS: tl.constexpr = SUMS
    LATER: tl.constexpr = NORMS + HAS_NORMS
    SEEN: tl.constexpr = LATER + 2 * BOTH_SIDES
    FAR: tl.constexpr = POOL_N // 8 if POOL_N >= 8 else 1  # the columns of a bin: slices, threads, those of a thread
    LANES: tl.constexpr = 4 if POOL_N >= 8 else 1
    COUNT: tl.constexpr = HAS_IDS or HAS_DENSE  # else the numbers of visible pairs are differences of bounds
    LOW: tl.constexpr = SEEN + COUNT
    number = tl.zeros((BN,), tl.int32)
    per_norm = 1.0
    if HAS_NORMS:
        per_norm = 1.0 / tl.maximum(tl.load(largest_norm), SMALLEST)

    # Rows [begin, end) see any of the keys. Of them, rows [all_begin, all_end) see all, in whole tiles.
    begin, end, all_begin, all_end = 0, n_queries, 0, n_queries // BM * BM
    if HAS_BAND:
        begin = _clipped(first_column + low - offset, 0, n_queries) // BM * BM
        end = _clipped(tl.minimum(first_column + BN, n_keys) + high - offset, begin, n_queries)
        all_begin = tl.cdiv(_clipped(first_column + BN - 1 + low - offset, 0, n_queries), BM) * BM
        all_end = _clipped(first_column + high - offset + 1, 0, n_queries) // BM * BM
    real = tl.minimum(n_keys - first_column, BN)
    if HAS_KEYS:
        named = tl.load(keys + batch.to(tl.int64) * stride_kmb + columns, mask=exists, other=0) != 0
        real = tl.sum(named.to(tl.int32), 0)
        end = tl.where(real == 0, begin, end)
    if not COUNT:
        from_row, to_row = visible_range(columns, low - offset, high - offset, n_queries, HAS_BAND)
        queries_seeing = tl.maximum(to_row - from_row + 1, 0)
        if HAS_COUNTED:
            queries_seeing = count_between(query_counts + batch.to(tl.int64) * n_queries, from_row, to_row)
        if HAS_KEYS:
            queries_seeing = tl.where(named, queries_seeing, 0)
        tl.store(audience + write, queries_seeing.to(tl.float32), mask=exists)
    last = tl.cdiv(end, BM) * BM
    all_begin = _clipped(all_begin, begin, last)
    all_end = _clipped(tl.where(real == BN, tl.minimum(all_end, end // BM * BM), 0), all_begin, last)
    # Of these, rows [all_begin, before) are before all keys, and rows [after, all_end) after them.
    before, after = all_begin, all_begin
    if BOTH_SIDES:
        before = _clipped((first_column - offset + 1) // BM * BM, all_begin, all_end)
        after = _clipped(tl.cdiv(_clipped(first_column + BN - 1 - offset, 0, n_queries), BM) * BM, before, all_end)
    if COUNT:
        before, after, all_begin, all_end = begin, begin, begin, begin

    for MASKED in tl.static_range(2):  # tiles that no mask, edge or diagonal cuts, then the others
        for part in range(2 + MASKED):
            if MASKED:
                first_row = tl.where(part == 0, begin, tl.where(part == 1, before, all_end))
                last_row = tl.where(part == 0, all_begin, tl.where(part == 1, after, end))
            else:
                first_row, last_row = tl.where(part == 0, all_begin, after), tl.where(part == 0, before, all_end)
            partial = tl.zeros((BM // 16, 8, BN), tl.float32)
            for step in range(first_row // STEP, tl.cdiv(last_row, STEP)):
                if POOLED == 2:
                    top = tl.zeros((BM // 16, 8, BN // POOL_N, LANES), tl.float32)
                    pool = tl.zeros((BM // 16, 8, BN // POOL_N, LANES), tl.float32)
                for start in tl.range(
                    tl.maximum(step * STEP, first_row), tl.minimum(step * STEP + STEP, last_row), BM,
                    num_stages=1 if MASKED else STAGES,
                ):  # fmt: skip
                    rows = start + tl.arange(0, BM)
                    t, p, shift, seen = tile_weights(
                        at_q, here, lse + head.to(tl.int64) * n_queries, at_counted, rows, columns, stride_qn, batch, h,
                        n_queries, n_keys, d, bias, mask, HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE, CAP, HAS_DISTANCE,
                        HAS_COUNTED, MASKED, EVEN_D, D, WIDEN, CARD,
                    )  # fmt: skip
                    if HAS_LOWS:  # masked pairs do not count: p is 0 there, so nothing else changes
                        t = tl.where(t > -0.5 * NONE, t, 0.0)
                    w = p
                    if HAS_SINK:
                        w = p * key_share(shift, at_sink + rows * stride_sn, rows < n_queries)[:, None]
                    pairs = tl.sum(tl.reshape(w, (BM // 16, 2, 8, BN)), 1)  # two rows of a thread
                    partial += pairs
                    if POOLED == 1:
                        tiles = tl.reshape(w, (BM // POOL_M, POOL_M, BN // POOL_N, POOL_N))
                        bin_rows = start // POOL_M + tl.arange(0, BM // POOL_M)
                        bin_columns = first_column // POOL_N + tl.arange(0, BN // POOL_N)
                        at = bins + bin_rows[:, None] * pooled_columns + bin_columns[None, :]
                        fits = (bin_rows[:, None] < pooled_rows) & (bin_columns[None, :] < pooled_columns)
                        tl.store(at, tl.max(tl.max(tiles, 3), 1), mask=fits)
                        tl.store(at + second, tl.sum(tl.sum(tiles, 3), 1), mask=fits)
                    if POOLED == 2:
                        tiles = tl.reshape(w, (BM // 16, 2, 8, BN // POOL_N, FAR, LANES, POOL_N // FAR // LANES))
                        top = tl.maximum(top, tl.max(tl.max(tl.max(tiles, 6), 4), 1))
                        tiles = tl.reshape(pairs, (BM // 16, 8, BN // POOL_N, FAR, LANES, POOL_N // FAR // LANES))
                        pool += tl.sum(tl.sum(tiles, 5), 3)

                    norm = tl.zeros((1, BN), tl.float32)
                    if HAS_NORMS:
                        norm = tl.load(norms + write, mask=exists, other=0.0)[None, :]
                    z = tl.zeros((BM, SLICE), tl.float32)
                    left, right = halves(p, BM, BN)
                    t_left, t_right = halves(t, BM, BN)
                    norm_left, norm_right = halves(norm, 1, BN)
                    bits, squares, highest, lowest, zero, one, two, weighted = slices(
                        left, t_left, right, t_right, norm_left, norm_right, (z, z, z.to(tl.int32), z, z, z, z, z), BM,
                        BN // 2, BN / 4, HAS_NORMS, HAS_LOWS,
                    )  # fmt: skip
                    m0, m1, m2 = moments(zero, one, two, BN)
                    first, second_moment = m0 * block + m1, m0 * (block * block) + m1 * (2 * block) + m2
                    four = tl.join(
                        tl.join(m0, first),
                        tl.join(second_moment, integer(tl.sum(bits, 1) * BITS_SCALE).to(tl.int64)),
                    )  # fmt: skip
                    at = at_sums + start * PLANES + tl.arange(0, BM)
                    plane = BM * tl.arange(0, 2)
                    tl.atomic_add(
                        at[:, None, None] + plane[None, :, None] + 2 * plane[None, None, :], four, sem="relaxed"
                    )
                    tl.atomic_add(at + SQUARES * BM, (tl.sum(squares, 1) * SQUARES_SCALE).to(tl.int64), sem="relaxed")
                    packed = (tl.max(highest, 1).to(tl.int64) << 32) | (UNUSED - block)
                    tl.atomic_max(at + TOP * BM, packed, sem="relaxed")
                    if HAS_LOWS:
                        below = (-tl.min(lowest, 1)).to(tl.int32, bitcast=True)
                        tl.atomic_max(at + LOW * BM, below.to(tl.int64), sem="relaxed")
                    if HAS_NORMS:
                        m = tl.sum(weighted, 1) * per_norm * NORMS_SCALE
                        tl.atomic_add(at + NORMS * BM, tl.where(m >= 0.0, m.to(tl.int64), NAN_SUM), sem="relaxed")
                    if BOTH_SIDES and MASKED:
                        later = tl.where(columns[None, :] > (rows + offset)[:, None], p, 0.0)
                        place = (tl.arange(0, BN) - (BN - 1) / 2)[None, :]
                        m0 = integer(tl.sum(later, 1) * SCALE).to(tl.int64)
                        m1 = integer(tl.sum(later * place, 1) * (SCALE / BN)).to(tl.int64)
                        tl.atomic_add(at + LATER * BM, m0, sem="relaxed")
                        tl.atomic_add(at + (LATER + 1) * BM, m0 * block + m1, sem="relaxed")
                    if (BOTH_SIDES and not MASKED) and part == 0:
                        tl.atomic_add(at + LATER * BM, m0, sem="relaxed")
                        tl.atomic_add(at + (LATER + 1) * BM, first, sem="relaxed")
                    if COUNT and MASKED:
                        number += tl.sum(seen.to(tl.int32), 0)
                        tl.atomic_add(at + SEEN * BM, tl.sum(seen.to(tl.int32), 1).to(tl.int64), sem="relaxed")
                if POOLED == 2:
                    at = bins + step * STEP // query_bin * pooled_columns + first_column // POOL_N
                    at += tl.arange(0, BN // POOL_N)
                    fits = first_column // POOL_N + tl.arange(0, BN // POOL_N) < pooled_columns
                    top = tl.max(tl.max(tl.max(top, 3), 1), 0)
                    tl.store(at, tl.maximum(tl.load(at, mask=fits, other=0.0), top), mask=fits)
                    pool = tl.sum(tl.sum(tl.sum(pool, 3), 1), 0)
                    tl.store(at + second, tl.load(at + second, mask=fits, other=0.0) + pool, mask=fits)
                if ((step + 1) % FLUSH == 0) | (step * STEP + STEP >= last_row):
                    total = tl.load(totals + write, mask=exists, other=0.0)
                    tl.store(totals + write, total + tl.sum(tl.sum(partial, 0), 0).to(tl.float64), mask=exists)
                    partial = tl.zeros((BM // 16, 8, BN), tl.float32)

    tl.debug_barrier()
    tl.store(received + write, tl.load(totals + write, mask=exists, other=0.0).to(tl.float32), mask=exists)
    if COUNT:
        tl.store(audience + write, number.to(tl.float32), mask=exists)


@triton.jit
def masses(
    q, k, lse, sums, counted, bands, band_keys,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_COUNTED: tl.constexpr, MASSES: tl.constexpr,
    MASS_KEYS: tl.constexpr, PLANES: tl.constexpr, EVEN_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, WIDEN: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """Add up the weights of all queries on those of BN keys that are inside a mask: a band, and `band_keys`."""
    block, head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, h = head // heads, head % heads
    first_column = block * BN
    columns, of_d = first_column + tl.arange(0, BN), tl.arange(0, D)
    exists = columns < n_keys
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    at_sums = sums + head.to(tl.int64) * tl.cdiv(n_queries, BM) * (PLANES * BM) + (PLANES - MASSES + m) * BM
    least, most = tl.load(bands + 2 * m), tl.load(bands + 2 * m + 1)
    begin = _clipped(first_column + least - offset, 0, n_queries)
    end = _clipped(first_column + BN + most - offset, 0, n_queries)
    named = tl.zeros((BN,), tl.int8)
    if MASS_KEYS:
        of_mass = (m * (tl.num_programs(1) // heads) + batch).to(tl.int64) * n_keys
        named = tl.load(band_keys + of_mass + columns, mask=exists, other=0)
        some = tl.max(named.to(tl.int32), 0) != 0
        begin, end = tl.where(some, 0, begin), tl.where(some, n_queries, end)
    if HAS_BAND:
        begin = tl.maximum(begin, first_column + low - offset)
        end = tl.minimum(end, tl.minimum(first_column + BN, n_keys) + high - offset)
    if begin < end:
        here = tl.trans(load_rows(at_k, columns, stride_kn, of_d, exists, d, EVEN_D))
        for start in range(begin // BM * BM, end, BM):
            rows = start + tl.arange(0, BM)
            _, p, _, _ = tile_weights(
                at_q, here, lse + head.to(tl.int64) * n_queries, counted + batch.to(tl.int64) * n_queries, rows,
                columns, stride_qn, batch, h, n_queries, n_keys, d, bias, mask, HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE,
                CAP, HAS_DISTANCE, HAS_COUNTED, True, EVEN_D, D, WIDEN, CARD,
            )  # fmt: skip
            back = (rows + offset)[:, None] - columns[None, :]
            p = tl.where((back >= least) & (back <= most) | (named != 0)[None, :], p, 0.0)
            at = at_sums + start * PLANES + tl.arange(0, BM)
            tl.atomic_add(at, integer(tl.sum(p, 1) * SCALE).to(tl.int64), sem="relaxed")


@triton.jit
def extremes(
    q, k, lse, sums, counted, smallest, argmax,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_COUNTED: tl.constexpr, PLANES: tl.constexpr, LOW: tl.constexpr,
    EVEN_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    """The smallest score of BM queries, and the first key with the largest, for which the blocks of keys that have one
    are computed again."""
    head, first_row = tl.program_id(1), tl.program_id(0) * BM
    batch, h = head // heads, head % heads
    rows, of_d = first_row + tl.arange(0, BM), tl.arange(0, D)
    inside = rows < n_queries
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    at_lse, at_counted = lse + head.to(tl.int64) * n_queries, counted + batch.to(tl.int64) * n_queries
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    at = sums + (head.to(tl.int64) * tl.cdiv(n_queries, BM) * BM + first_row) * PLANES + tl.arange(0, BM)
    write = head.to(tl.int64) * n_queries + rows
    shift, _counts = row_shift(at_lse, at_counted, rows, inside, HAS_COUNTED)
    packed = tl.load(at + TOP * BM)
    sees = (packed >> 32) > 0
    below = tl.load(at + LOW * BM).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(smallest + write, tl.where(sees, (shift - below) * LN2, float("inf")), mask=inside)
    blocks = tl.where(sees, UNUSED - (packed & UNUSED).to(tl.int32), UNUSED)
    key = tl.full((BM,), -1, tl.int32)
    block = tl.min(blocks, 0)
    while block < UNUSED:
        columns = block * BN + tl.arange(0, BN)
        here = tl.trans(load_rows(at_k, columns, stride_kn, of_d, columns < n_keys, d, EVEN_D))
        t, _p, _again, seen = tile_weights(
            at_q, here, at_lse, at_counted, rows, columns, stride_qn, batch, h, n_queries, n_keys, d, bias, mask,
            HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE, CAP, HAS_DISTANCE, HAS_COUNTED, True, EVEN_D, D, WIDEN, CARD,
        )  # fmt: skip
        first = tl.min(tl.where(seen & (t == tl.max(t, 1)[:, None]), columns[None, :], UNUSED), 1)
        key = tl.where(blocks == block, first, key)
        blocks = tl.where(blocks == block, UNUSED, blocks)
        block = tl.min(blocks, 0)
    tl.store(argmax + write, key.to(tl.int64), mask=inside)


@triton.jit
def prefix_scores(
    q, k, lse, sink, counted, prefix, firsts,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_sb, stride_sh, stride_sn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk, prefix_keys,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_COUNTED: tl.constexpr,
    EVEN_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr,
    CARD: tl.constexpr,
):  # fmt: skip
    """The mean weight on BN of the first keys of a text, over its first `prefix_keys` queries, if they see the key."""
    head = tl.program_id(1)
    batch, h = head // heads, head % heads
    first = tl.load(firsts + batch)
    of_text, of_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    columns = first + of_text
    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    here = tl.trans(load_rows(at_k, columns, stride_kn, of_d, columns < n_keys, d, EVEN_D))
    total, number = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.int32)
    begin = tl.maximum(first - offset, 0)
    for start in range(begin, tl.minimum(first - offset + prefix_keys, n_queries), BM):
        rows = start + tl.arange(0, BM)
        _, p, shift, seen = tile_weights(
            at_q, here, lse + head.to(tl.int64) * n_queries, counted + batch.to(tl.int64) * n_queries, rows,
            columns, stride_qn, batch, h, n_queries, n_keys, d, bias, mask, HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE, CAP,
            HAS_DISTANCE, HAS_COUNTED, True, EVEN_D, D, WIDEN, CARD,
        )  # fmt: skip
        if HAS_SINK:
            at = sink + batch * stride_sb + h * stride_sh + rows * stride_sn
            p = p * key_share(shift, at, rows < n_queries)[:, None]
        seen = seen & (rows + offset - first < prefix_keys)[:, None]
        total += tl.sum(tl.where(seen, p, 0.0), 0)
        number += tl.sum(seen.to(tl.int32), 0)
    score = total / tl.maximum(number, 1).to(tl.float32)
    tl.store(prefix + head.to(tl.int64) * prefix_keys + of_text, score, mask=of_text < prefix_keys)


@triton.jit
def by_row(
    q, k, lse, total_lse, sink, sums, found, mass, firsts, counted, norms, largest_norm, key_counts,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_sb, stride_sh, stride_sn,
    heads, share, n_queries, n_keys, offset, scale, unit, cap, distances, stride_distance, d,
    low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk,
    HAS_BAND: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_DENSE: tl.constexpr,
    CAP: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_COUNTED: tl.constexpr,
    HAS_NORMS: tl.constexpr, BOTH_SIDES: tl.constexpr, MASSES: tl.constexpr, PLANES: tl.constexpr,
    EVEN_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The statistics of BM queries of one head from their sums, and their weights on four keys.

    `found` gets the statistics in the order of `host.OF_QUERIES`, then the weight on the sink logit, the largest
    score, the log-sum-exp of the queries that count, and the first key's part of Σ A ‖v‖, the norms of the values:
    (14, b·h, nq); `mass` gets those of the masses.
    """
    head = tl.program_id(1)
    batch, h = head // heads, head % heads
    first_row = tl.program_id(0) * BM
    rows, of_d = first_row + tl.arange(0, BM), tl.arange(0, D)
    inside = rows < n_queries
    bias = scale, unit, cap, distances, stride_distance
    mask = offset, low, high, keys, ids, dense, stride_kmb, stride_ib, stride_db, stride_dh, stride_dq, stride_dk
    write, size = head.to(tl.int64) * n_queries + rows, tl.num_programs(1).to(tl.int64) * n_queries
    shift, counts = row_shift(
        lse + head.to(tl.int64) * n_queries, counted + batch.to(tl.int64) * n_queries, rows, inside, HAS_COUNTED
    )
    share_of_keys, at_sink = tl.full((BM,), 1.0, tl.float32), tl.zeros((BM,), tl.float32)
    if HAS_SINK:
        at = sink + batch * stride_sb + h * stride_sh + rows * stride_sn
        share_of_keys = key_share(shift, at, inside)
        logit = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) * LOG2_E
        at_sink = 1.0 / (1.0 + tl.exp2(tl.minimum(shift - logit, 126.0)))
        at_sink = tl.where(shift == NONE, tl.where(logit == float("-inf"), 0.0, 1.0), at_sink)
        at_sink = tl.where(counts, at_sink, 0.0)

    NORMS: tl.constexpr = SUMS
    LATER: tl.constexpr = NORMS + HAS_NORMS
    SEEN: tl.constexpr = LATER + 2 * BOTH_SIDES
    at = sums + (head.to(tl.int64) * tl.cdiv(n_queries, BM) * BM + first_row) * PLANES + tl.arange(0, BM)
    whole = tl.load(at).to(tl.float64)
    first = tl.load(at + FIRST * BM).to(tl.float64) * BN
    second = tl.load(at + SECOND * BM).to(tl.float64) * BN * BN
    bits = tl.load(at + BITS * BM).to(tl.float64) * (SCALE / BITS_SCALE)
    squares = tl.load(at + SQUARES * BM).to(tl.float64) * (SCALE * SCALE / SQUARES_SCALE)
    top = (tl.load(at + TOP * BM) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    empty = whole == 0.0
    nan = ~(shift <= NONE)  # or infinity; integers have no NaN
    safe = tl.where(empty, 1.0, whole)
    mean, mean2 = first / safe, second / safe
    # Among the keys a weight is p / w: −Σ p/w ln(p/w) = −Σ p ln p / w + ln w
    entropy = LN2 * (tl.log2((safe / SCALE).to(tl.float32)).to(tl.float64) - bits / safe)
    away = mean + ((BN - 1) / 2 - offset) - rows.to(tl.float64)  # of the mean position of the keys from the query's
    distance = tl.abs(away)
    if BOTH_SIDES:  # |x| = 2 max(x, 0) − x
        later = tl.load(at + LATER * BM).to(tl.float64)
        later_first = tl.load(at + (LATER + 1) * BM).to(tl.float64) * BN
        distance = 2.0 * (later_first + later * ((BN - 1) / 2 - offset - rows.to(tl.float64))) / safe - away
    spread = tl.sqrt(tl.maximum(mean2 - mean * mean, 0.0))
    keys_alike = tl.where(squares > 0.0, whole * whole / tl.where(squares > 0.0, squares, 1.0), 0.0)

    if HAS_IDS or HAS_DENSE:
        number = tl.load(at + SEEN * BM).to(tl.int32)
    else:
        from_key, to_key = visible_range(rows, offset - high, offset - low, n_keys, HAS_BAND)
        number = tl.maximum(to_key - from_key + 1, 0)
        if HAS_KEYS:
            number = count_between(key_counts + batch.to(tl.int64) * stride_kmb, from_key, to_key)
        number = tl.where(counts, number, 0)

    at_q = q + batch.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    at_k = k + batch.to(tl.int64) * stride_kb + (h // share).to(tl.int64) * stride_kh
    queries = load_rows(at_q, rows, stride_qn, of_d, counts, d, EVEN_D).to(tl.float32)
    for which in tl.static_range(4):  # the first key, the query's own, the previous and the next
        if which == 0:
            key = tl.load(firsts + batch) + rows * 0
        else:
            key = rows + offset + (0 if which == 1 else -1 if which == 2 else 1)
        seen = counts & visible_pairs(
            rows, key, batch, h, n_queries, n_keys, mask, HAS_BAND, HAS_KEYS, HAS_IDS, HAS_DENSE
        )
        there = load_rows(at_k, key, stride_kn, of_d, seen, d, EVEN_D).to(tl.float32)
        products = tl.sum(queries * there, 1)
        score = final_scores(products, rows, key, h, n_queries, n_keys, bias, CAP, HAS_DISTANCE)
        weight = tl.exp2(tl.where(seen, score - shift, -NONE)) * share_of_keys
        tl.store(found + (1 + which) * size + write, weight, mask=inside)
        if HAS_NORMS and which == 0:
            largest = tl.load(largest_norm)
            finite = largest * 0.0 + 1.0  # or NaN
            norm = tl.load(at + NORMS * BM).to(tl.float64) / NORMS_SCALE * tl.maximum(largest, SMALLEST)
            norm = norm * share_of_keys * finite
            part = weight * tl.load(norms + head.to(tl.int64) * n_keys + key) / tl.where(norm > 0.0, norm, 1.0)
            part = tl.where(norm == 0.0, 0.0, tl.minimum(part, 1.0))  # rounding
            part = _or_nan(part, nan | ~(norm >= 0.0))
            tl.store(found + 13 * size + write, part, mask=inside)

    tl.store(found + write, _or_nan(tl.where(empty, 0.0, tl.maximum(entropy, 0.0)), nan), mask=inside)
    tl.store(found + 5 * size + write, _or_nan(tl.where(empty, 0.0, distance), nan), mask=inside)
    tl.store(found + 6 * size + write, _or_nan(tl.where(empty, 0.0, spread), nan), mask=inside)
    tl.store(found + 7 * size + write, _or_nan(keys_alike, nan), mask=inside)
    tl.store(found + 8 * size + write, number.to(tl.float32), mask=inside)
    tl.store(found + 9 * size + write, tl.where(number > 0, 1.0 - at_sink, 0.0), mask=inside)
    tl.store(found + 10 * size + write, at_sink, mask=inside)
    score = tl.where(top > 0.0, (shift + tl.log2(tl.where(top > 0.0, top, 1.0))) * LN2, float("-inf"))
    tl.store(found + 11 * size + write, _or_nan(score, nan), mask=inside)
    if HAS_COUNTED:
        whole_lse = tl.load(total_lse + write, mask=counts, other=float("-inf"))
        tl.store(found + 12 * size + write, whole_lse, mask=inside)
    for m in tl.static_range(MASSES):
        of_mass = tl.load(at + (PLANES - MASSES + m) * BM).to(tl.float64) / SCALE * share_of_keys
        tl.store(mass + m * size + write, _or_nan(of_mass, nan), mask=inside)
