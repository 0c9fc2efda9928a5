/* Attention of few queries (decoding) and its statistics: K and V are read in place, once.
 *
 * Rows are the queries of all heads that share a key head. A thread takes whole key heads, or a part of the keys of
 * each. Scores, weights with an offset for each tile and row, sums and output come first; then the sums of all threads
 * are added in their order; then the weights in memory become final, which gives all that needs the log-sum-exp.
 */
enum { ROWS = 4, MOST_THREADS = 64 }; /* rows that share a reading of K and V */

typedef struct {            /* a key head */
    const float *k, *v;
    int64_t rows, first, from, to; /* the first key that some row sees; the same, a multiple of VL; the end */
    int64_t apart;          /* of two rows of p: a tile if nobody else needs its weights, now or later; else all keys */
    int64_t *lo, *hi;       /* visible keys [rows] */
    int32_t *kept;          /* -1 at keys that are no padding [nkp], or NULL */
    const int32_t **cells;  /* of each row, or NULL [rows] */
    float *q;               /* [rows][dp], with scale * log2 e */
    float *p;               /* scores, then weights [rows][apart] */
    float *offset;          /* [rows][tiles] */
    float *weight, *center; /* [rows] of the final log-sum-exp */
    Row *row;               /* [rows] sums of all threads */
} Keys;

INLINE vf unaligned(const float *x) { return *(const vu *)x; }
static vf part_of(const float *x, int64_t n) { vf y = {0}; memcpy(&y, x, (size_t)n * sizeof(float)); return y; }
INLINE float *weights_of(const Keys *u, int64_t r, int64_t key) {
    return u->p + r * u->apart + (u->apart == TILE ? key % TILE : key);
}

/* Scores of n rows and the keys [0, end) from k on, `left` of which exist; `step` keys share a reading of q. Without
 * prefetch the memory is read at half of its speed. */
INLINE void scores_of(int n, int step, const Call *c, const float *q, const float *k, int64_t end, int64_t left,
                      float *p, int64_t apart) {
    const int64_t dp = up(c->d, VL), whole = c->d / VL * VL, stride = c->ks[2];
    for (int64_t j = 0; j < end; j += 4) {
        v4 parts[ROWS][4];
        UNROLL for (int i0 = 0; i0 < 4; i0 += step) {
            vf acc[ROWS][4] = {0};
            const float *at[4];
            UNROLL for (int i = 0; i < step; i++) {
                at[i] = k + min64(j + i0 + i, left - 1) * stride; /* the last key again is masked later */
                const float *next = k + min64(j + i0 + i + CELL, left - 1) * stride;
                for (int64_t x = 0; x < c->d; x += 16) __builtin_prefetch(next + x, 0, 2);
            }
            for (int64_t x = 0; x < whole; x += VL) UNROLL for (int i = 0; i < step; i++) {
                const vf key = unaligned(at[i] + x);
                UNROLL for (int r = 0; r < n; r++) acc[r][i] += key * load(q + r * dp + x);
            }
            if (whole < c->d) UNROLL for (int i = 0; i < step; i++) {
                const vf key = part_of(at[i] + whole, c->d - whole);
                UNROLL for (int r = 0; r < n; r++) acc[r][i] += key * load(q + r * dp + whole);
            }
            UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < step; i++)
                parts[r][i0 + i] = quarter(acc[r][i]);
        }
        UNROLL for (int r = 0; r < n; r++) {
            const v4 w = parts[r][0], x = parts[r][1], y = parts[r][2], z = parts[r][3];
            const v4 wx = (v4){w[0], x[0], w[1], x[1]} + (v4){w[2], x[2], w[3], x[3]};
            const v4 yz = (v4){y[0], z[0], y[1], z[1]} + (v4){y[2], z[2], y[3], z[3]};
            *(v4 *)(p + r * apart + j) = (v4){wx[0], wx[1], yz[0], yz[1]} + (v4){wx[2], wx[3], yz[2], yz[3]};
        }
    }
}
#define SCORES(n, step) static void scores_##n(const Call *c, const float *q, const float *k, int64_t end, \
        int64_t left, float *p, int64_t apart) { scores_of(n, step, c, q, k, end, left, p, apart); }
SCORES(1, 4) SCORES(2, 4) SCORES(4, KEYS_4)

/* Add weights * values of some keys to nv vectors of the output of n rows; `used` floats of a single one are real. */
INLINE void values_of(int n, int nv, const float *p, int64_t apart, int64_t keys, const float *v, int64_t stride,
                      int64_t used, const int32_t *kept, float *o, int64_t dvp) {
    vf acc[ROWS][4];
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < nv; i++) acc[r][i] = load(o + r * dvp + i * VL);
    for (int64_t j = 0; j < keys; j++, v += stride) {
        if (kept && !kept[j]) continue; /* NaN in padding is harmless */
        vf x[4];
        UNROLL for (int i = 0; i < nv; i++) x[i] = nv == 1 && used < VL ? part_of(v, used) : unaligned(v + i * VL);
        UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < nv; i++) acc[r][i] += p[r * apart + j] * x[i];
    }
    UNROLL for (int r = 0; r < n; r++) UNROLL for (int i = 0; i < nv; i++) *(vf *)(o + r * dvp + i * VL) = acc[r][i];
}
typedef void Values(const float *, int64_t, int64_t, const float *, int64_t, int64_t, const int32_t *, float *,
                    int64_t);
#define VALUES(n, name, nv) static void values_##n##_##name(const float *p, int64_t apart, int64_t keys, \
        const float *v, int64_t stride, int64_t used, const int32_t *kept, float *o, int64_t dvp) { \
    values_of(n, nv, p, apart, keys, v, stride, used, kept, o, dvp); }
VALUES(1, 1, 1) VALUES(2, 1, 1) VALUES(4, 1, 1) VALUES(1, wide, 4) VALUES(2, wide, 4) VALUES(4, wide, VALUES_4)

static int rows_at_once(int64_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* Whether some row sees a key of the cell of key j. */
static int is_seen(const Keys *u, int64_t j) {
    int seen = 0;
    for (int64_t r = 0; r < u->rows; r++) seen |= !u->cells[r] || u->cells[r][j / CELL];
    return seen;
}
static int64_t end_of_cell(int64_t j, int64_t to) { return min64((j / CELL + 1) * CELL, to); }

/* The scores of all rows and the keys [from, to) of a tile. */
static void score_tile(const Call *c, const Keys *u, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; j = end_of_cell(j, to))
        for (int64_t r = 0, n; r < u->rows && is_seen(u, j); r += n) {
            n = rows_at_once(u->rows - r);
            (n == 4 ? scores_4 : n == 2 ? scores_2 : scores_1)(
                c, u->q + r * up(c->d, VL), u->k + j * c->ks[2], up(end_of_cell(j, to) - j, VL), c->nk - j,
                weights_of(u, r, j), u->apart);
        }
}

/* Add the weights of all rows * the values of the keys [from, to) of a tile to the output. */
static void add_values(const Call *c, const Keys *u, int64_t from, int64_t to, float *o) {
    const int64_t dvp = up(c->dv, VL);
    for (int64_t j = from; j < to; j = end_of_cell(j, to)) {
        if (!is_seen(u, j)) continue;
        const int64_t keys = end_of_cell(j, to) - j;
        const float *v = u->v + j * c->vs[2];
        for (int64_t i = 0; i < keys; i++)
            for (int64_t x = 0; x < c->dv; x += 16)
                __builtin_prefetch(u->v + min64(j + i + CELL, c->nk - 1) * c->vs[2] + x, 0, 2);
        for (int64_t r = 0, n; r < u->rows; r += n) {
            n = rows_at_once(u->rows - r);
            for (int64_t x = 0, size; x < c->dv; x += size) {
                size = (n == 4 ? VALUES_4 : 4) * VL;
                const int wide = x + size <= c->dv;
                Values *add = n == 4 ? wide ? values_4_wide : values_4_1 : n == 2 ? wide ? values_2_wide : values_2_1
                                     : wide ? values_1_wide : values_1_1;
                if (!wide) size = VL;
                add(weights_of(u, r, j), u->apart, keys, v + x, c->vs[2], c->dv - x, u->kept ? u->kept + j : NULL,
                    o + r * dvp + x, dvp);
            }
        }
    }
}

/* Bits of the keys of a cell that a row sees; the band and padding are not in them. */
INLINE uint64_t bits_of_row(const Call *c, const Keys *u, int64_t r, int64_t cell) {
    const int32_t status = u->cells[r] ? u->cells[r][cell] : 1;
    return status > 1 ? c->bits[(status - 2) * (int64_t)BLOCK + r % c->nq % BLOCK] : status ? UINT64_MAX : 0;
}
static int row_sees(const Call *c, const Keys *u, int64_t r, int64_t key) {
    if (key < u->lo[r] || key >= u->hi[r] || (u->kept && !u->kept[key])) return 0;
    return bits_of_row(c, u, r, key / CELL) >> key % CELL & 1;
}

/* Mask the scores of a row in a tile. */
static void mask_row(const Call *c, const Keys *u, int64_t r, float *p, int64_t from, int64_t to) {
    vi place, one;
    for (int i = 0; i < VL; i++) place[i] = i, one[i] = 1 << i;
    for (int64_t j = from; j < to; j += VL, p += VL) {
        const uint32_t bits = (uint32_t)(bits_of_row(c, u, r, j / CELL) >> j % CELL);
        const vi key = place + (int32_t)j;
        vi visible = (key >= (int32_t)u->lo[r]) & (key < (int32_t)u->hi[r]) & ((((vi){0} + (int32_t)bits) & one) != 0);
        if (u->kept) visible &= *(const vi *)(u->kept + j);
        *(vf *)p = choose(visible, load(p), (vf){0} + LOWEST);
    }
}

/* Scores of a row in a tile to weights in place, and their sums; `place` is the distance of the first key after the query. */
INLINE void weigh_row(int kind, float *p, int64_t keys, Row *row, float place) {
    vf total = {0}, bits = {0}, squares = {0}, first = {0}, distance = {0}, x = iota() + place, derivative;
    for (int64_t j = 0; j < keys; j += VL, p += VL, x += (float)VL) {
        const vf t = load(p) - row->offset, w = weight_of(kind, t, 1, &derivative);
        *(vf *)p = w;
        total += w, bits += w * log_of_weight(kind, t, w), squares += w * w, first += w * x, distance += w * magnitude(x);
    }
    row->total += sum(total), row->bits += sum(bits), row->squares += sum(squares), row->place += sum(first);
    row->distance += sum(distance), row->seen |= row->total != row->total;
}
#define WEIGH_ROW(kind) static void weigh_row_##kind(float *p, int64_t keys, Row *row, float place) { \
    weigh_row(kind, p, keys, row, place); }
WEIGH_ROW(SOFTMAX) WEIGH_ROW(SIGMOID) WEIGH_ROW(RELU) WEIGH_ROW(ELU_PLUS_ONE) WEIGH_ROW(IDENTITY)
static void (*const WEIGH_ROWS[])(float *, int64_t, Row *, float) = { /* few queries have no levels */
    weigh_row_SOFTMAX, weigh_row_SIGMOID, weigh_row_RELU, weigh_row_ELU_PLUS_ONE, weigh_row_IDENTITY};

/* A row in a tile: biases, mask, offset, weights and sums. Returns by how much its output so far must be multiplied. */
static float weigh_tile(const Call *c, const Keys *u, int64_t r, int64_t batch, int64_t head, int64_t from, int64_t to,
                        float *offset, Row *row) {
    const int64_t i = r % c->nq, position = i + c->nk - c->nq;
    float *p = weights_of(u, r, from);
    for (const Bias *bias = c->biases; bias < c->biases + c->n_biases; bias++) {
        const float *at = NULL, *values = values_of_row(c, bias, batch, head + r / c->nq, i, &at);
        vf derivative;
        for (int64_t j = from; j < to; j += VL)
            *(vf *)(p + j - from) = biased(c, bias, values, at, j, load(p + j - from), &derivative);
    }
    if (u->kept || u->cells[r] || c->n_biases || u->lo[r] > from || u->hi[r] < up(to, VL))
        mask_row(c, u, r, p, from, to);
    vf top = (vf){0} + LOWEST, low = -top;
    for (int64_t j = from; j < to; j += VL) {
        const vf x = load(p + j - from);
        top = maximum(x, top), low = minimum((vf)((vi)x | (x < LOWEST / 2)), low);
    }
    const float m = highest(top);
    float factor = 1;
    if (c->normalizer != SOFTMAX) row->seen |= m > LOWEST / 2;
    else if (row->seen ? m > row->offset + RAISE : m > LOWEST / 2) {
        const double below = row->offset - (double)m, by = row->seen ? exp2(below) : 0;
        row->bits = by * (row->bits + (row->seen ? below * row->total : 0));
        row->total *= by, row->squares *= by * by, row->place *= by, row->distance *= by;
        row->offset = m, row->seen = 1, factor = (float)by;
    }
    if (m > row->top) {
        row->top = m;
        if (c->min_logit) for (row->key = (int32_t)from; p[row->key - from] != m; row->key++);
    }
    row->low = fminf(row->low, lowest_of(low));
    *offset = row->offset;
    WEIGH_ROWS[c->normalizer](p, to - from, row, (float)(from - position));
    return factor;
}

/* Scores, weights, sums and output of some tiles. */
static void attend_tiles(const Call *c, const Keys *u, int64_t batch, int64_t head, Row *rows, float *o, int64_t tile0,
                         int64_t tile1) {
    const int64_t dvp = up(c->dv, VL), tiles = up(c->nk, TILE) / TILE;
    for (int64_t r = 0; r < u->rows; r++) {
        rows[r] = (Row){NO_ROW};
        if (c->shift) rows[r].offset = -of_query(c->shift, c->hs, batch, head + r / c->nq, r % c->nq) * (float)M_LOG2E;
    }
    if (c->out) memset(o, 0, (size_t)(u->rows * dvp) * sizeof(float));
    for (int64_t tile = tile0; tile < tile1; tile++) {
        const int64_t from = max64(tile * TILE, u->from), to = min64((tile + 1) * TILE, u->to);
        if (from >= to) continue;
        score_tile(c, u, from, to);
        for (int64_t r = 0; r < u->rows; r++) {
            float *offset = u->offset + r * tiles + tile;
            const float by = weigh_tile(c, u, r, batch, head, from, to, offset, rows + r);
            if (c->out && by != 1) for (int64_t x = 0; x < dvp; x++) o[r * dvp + x] *= by;
        }
        if (c->out) add_values(c, u, max64(from, u->first), to, o);
    }
}

/* Add the sums of all threads, and write the log-sum-exp and the output. Returns whether all of these are finite. */
static int combine(const Call *c, const Keys *u, int64_t batch, int64_t head, Row *const *rows, float *const *o,
                   int64_t team) {
    const int64_t dvp = up(c->dv, VL), base = (batch * c->h + head) * c->nq;
    int finite = 1;
    for (int64_t r = 0; r < u->rows; r++) {
        Row all = {NO_ROW, .offset = LOWEST};
        double factor[MOST_THREADS];
        for (int64_t t = 0; t < team; t++)
            if (rows[t][r].seen) all.seen = 1, all.offset = fmaxf(all.offset, rows[t][r].offset);
        for (int64_t t = 0; t < team; t++) {
            const Row *one = rows[t] + r;
            const double below = (double)one->offset - all.offset, by = factor[t] = one->seen ? exp2(below) : 0;
            if (!one->seen) continue;
            all.total += by * one->total, all.bits += by * (one->bits + below * one->total);
            all.squares += by * by * one->squares, all.place += by * one->place, all.distance += by * one->distance;
            if (one->top > all.top) all.top = one->top, all.key = one->key; /* the parts of the threads are in order */
            all.low = fminf(all.low, one->low);
        }
        int64_t first = u->lo[r];
        while (!all.seen && first < u->hi[r] && !row_sees(c, u, r, first)) first++;
        finite &= is_finite(&all, first < u->hi[r]);
        double lse;
        const float weight = (float)final_factor(c, &all, batch, head + r / c->nq, r % c->nq, &lse);
        if (c->lse) c->lse[base + r] = (float)lse;
        finite &= !c->rows || all.bits == all.bits; /* a negative weight has no entropy */
        u->center[r] = all.seen && all.total != 0 ? (float)(all.place / all.total + (double)(r % c->nq + c->nk - c->nq)) : 0;
        if (c->out) for (int64_t i = 0; i < c->dv; i++) {
            double x = 0;
            for (int64_t t = 0; t < team; t++) x += factor[t] * o[t][r * dvp + i];
            const float out = all.seen ? (float)(x * weight) : 0;
            c->out[(base + r) * c->dv + i] = out;
            finite &= fabsf(out) <= FLT_MAX;
        }
        if (c->counted && !c->counted[batch * c->nq + r % c->nq]) all.seen = 0;
        u->weight[r] = all.seen ? weight : 0;
        u->row[r] = all;
    }
    return finite;
}

/* Make the weights of some tiles final, and sum them by key; and the second moments of the rows. */
static void receive(const Call *c, const Keys *u, int64_t bh, Row *rows, int64_t tile0, int64_t tile1) {
    const int64_t tiles = up(c->nk, TILE) / TILE;
    for (int64_t tile = tile0; tile < tile1; tile++)
        for (int64_t g = 0; g * c->nq < u->rows; g++) {
            float *received = c->received + (bh + g) * c->nk;
            const int64_t end = min64((tile + 1) * TILE, c->nk);
            const int64_t from = min64(max64(tile * TILE, u->from), end), to = min64(max64(u->to, from), end);
            memset(received + tile * TILE, 0, (size_t)(end - tile * TILE) * sizeof(float));
            for (int64_t r = g * c->nq; r < (g + 1) * c->nq && from < to; r++) {
                const Row *row = u->row + r;
                const float factor = row->seen ? exp2f(u->offset[r * tiles + tile] - row->offset) : 0;
                const float weight = factor * u->weight[r];
                float *p = weights_of(u, r, from);
                vf second = {0}, x = iota() + ((float)from - u->center[r]);
                for (int64_t j = from; j < to; j += VL, p += VL, x += (float)VL) {
                    const vf w = load(p), final = w * weight;
                    second += w * x * x;
                    *(vf *)p = final;
                    if (j + VL <= to) *(vu *)(received + j) += final;
                    else for (int64_t i = 0; i < to - j; i++) received[j + i] += final[i];
                }
                rows[r].spread += (double)sum(second) * factor;
            }
        }
}

/* The sum of n weights, times the norms of the values if there are any. */
static double total_of(const float *p, const float *norms, int64_t n) {
    vf total = {0};
    double rest = 0;
    int64_t j = 0;
    for (; j + VL <= n; j += VL) {
        vf w = unaligned(p + j);
        if (norms) w *= unaligned(norms + j);
        total += w;
    }
    for (; j < n; j++) rest += norms ? p[j] * norms[j] : p[j];
    return sum(total) + rest;
}

/* The final weight of a row on one key. */
static float weight_of_key(const Keys *u, int64_t r, int64_t key) {
    return key < u->lo[r] || key >= u->hi[r] ? 0 : *weights_of(u, r, key);
}

/* Write the statistics of the queries of one head, from final weights. Returns whether all are finite. */
static int finish_head(const Call *c, const Keys *u, int64_t batch, int64_t head, int64_t g, Row *const *rows,
                       int64_t team) {
    const int64_t bh = batch * c->h + head, all = c->b * c->h * c->nq, first = first_of(c, batch);
    const int64_t ends = (c->range_batch ? c->b : 1) * c->nq;
    const float *norms = c->norms ? c->norms + batch * c->ns[0] + head * c->ns[1] : NULL;
    float *prefix = c->prefix + bh * c->n_prefix, *seen = prefix + c->b * c->h * c->n_prefix;
    int finite = 1;
    for (int64_t j = 0; j < c->n_prefix; j++) prefix[j] = seen[j] = 0;
    for (int64_t i = 0; i < c->nq; i++) {
        const int64_t r = g * c->nq + i, position = i + c->nk - c->nq, lo = u->lo[r], hi = u->hi[r];
        const Row *row = u->row + r;
        float *to_row = c->rows + bh * c->nq + i, weight = u->weight[r];
        const int none = !row->seen || row->total * weight == 0, counts = !c->counted || c->counted[batch * c->nq + i];
        put_extremes(c, row, bh * c->nq + i);
        if (counts && position >= first && position < first + c->n_prefix)
            for (int64_t j = max64(first, lo); j < min64(first + c->n_prefix, hi); j++) {
                if (!none) prefix[j - first] += *weights_of(u, r, j);
                seen[j - first] += (float)row_sees(c, u, r, j);
            }
        if (none) { /* nothing is visible, the query is left out, or a sink takes all weight */
            for (int64_t x = 0; x < STATISTICS + c->n_ranges; x++) if (x != MAX_LOGIT) to_row[x * all] = 0;
            continue;
        }
        finite &= row->squares >= 1e-30; /* else the squares of its weights underflow */
        double spread = 0;
        for (int64_t t = 0; t < team; t++) spread += rows[t][r].spread;
        to_row[ENTROPY * all] = (float)fmax(log(row->total) - M_LN2 * row->bits / row->total, 0);
        to_row[EFFECTIVE_KEYS * all] = (float)(row->total * row->total / row->squares);
        to_row[DISTANCE * all] = (float)fmax(row->distance / row->total, 0);
        to_row[SPREAD * all] = (float)sqrt(spread / row->total);
        to_row[SINK * all] = weight_of_key(u, r, first);
        to_row[SELF * all] = weight_of_key(u, r, position);
        to_row[PREVIOUS * all] = weight_of_key(u, r, position - 1);
        to_row[NEXT * all] = weight_of_key(u, r, position + 1);
        to_row[ROW_SUM * all] = (float)(row->total * weight);
        const double contribution = norms ? total_of(weights_of(u, r, lo), norms + lo, hi - lo) : 0;
        to_row[CONTRIBUTION * all] = !norms ? 0 : share_of_first(to_row[SINK * all], norms[first], contribution);
        finite &= contribution == contribution;
        for (int64_t x = 0; x < c->n_ranges; x++) {
            const int32_t *range = c->ranges + x * 2 * ends + batch * c->range_batch + i;
            const int64_t from = max64(range[0], lo), to = min64(range[ends], hi);
            to_row[(STATISTICS + x) * all] = from < to ? (float)total_of(weights_of(u, r, from), NULL, to - from) : 0;
        }
    }
    if (!c->map) return finite;
    const int64_t bins_q = (c->nq + c->bin_q - 1) / c->bin_q, bins_k = (c->nk + c->bin_k - 1) / c->bin_k;
    float *most = c->map + bh * bins_q * bins_k, *mean = of_pairs(c) ? most : most + c->b * c->h * bins_q * bins_k;
    for (int64_t i = 0; i < bins_q; i++) for (int64_t j = 0; j < bins_k; j++, most++, mean++) {
        const int64_t q1 = min64((i + 1) * c->bin_q, c->nq), k0 = j * c->bin_k, k1 = min64(k0 + c->bin_k, c->nk);
        double total = 0;
        *most = 0;
        for (int64_t r = g * c->nq + i * c->bin_q; r < g * c->nq + q1; r++) {
            const int64_t from = max64(k0, u->lo[r]), to = min64(k1, u->hi[r]);
            for (int64_t key = from; key < to; key++) *most = fmaxf(*most, *weights_of(u, r, key));
            if (from < to) total += total_of(weights_of(u, r, from), NULL, to - from);
        }
        *mean = (float)(total / (double)((q1 - i * c->bin_q) * (k1 - k0)));
    }
    return finite;
}

static void prepare(const Call *c, Keys *u, int64_t batch, int64_t key_head) {
    const int64_t dp = up(c->d, VL), head = key_head * (c->h / c->hkv), cells = (c->nk + CELL - 1) / CELL;
    u->k = c->k + batch * c->ks[0] + key_head * c->ks[1], u->v = c->v + batch * c->vs[0] + key_head * c->vs[1];
    u->first = INT64_MAX, u->to = 0;
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t i = r % c->nq, position = i + c->nk - c->nq;
        int64_t lo = max64(position - c->high, 0), hi = min64(position - c->low + 1, c->nk);
        if (lo >= hi) lo = hi = 0;
        else u->first = min64(u->first, lo), u->to = max64(u->to, hi);
        u->lo[r] = lo, u->hi[r] = hi, u->cells[r] = NULL;
        if (c->cells) u->cells[r] = c->cells + batch * c->cs[0] + (head + r / c->nq) * c->cs[1] + i / BLOCK * cells;
        const float *q = c->q + batch * c->qs[0] + (head + r / c->nq) * c->qs[1] + i * c->qs[2];
        for (int64_t x = 0; x < dp; x++) u->q[r * dp + x] = x < c->d ? q[x] * (c->scale * (float)M_LOG2E) : 0;
    }
    if (u->first > u->to) u->first = u->to = 0;
    u->from = u->first / VL * VL;
    if (u->kept)
        for (int64_t j = 0; j < up(c->nk, TILE); j++) u->kept[j] = j < c->nk ? -(c->keep[batch * c->nk + j] != 0) : 0;
}

/* Wait for the threads that share a key head. */
static void meet(int alone) {
    if (!alone) {
        #pragma omp barrier
    }
}

/* Like qkv_attend, for few queries. */
int qkv_decode(const Call *c) {
    const int64_t dp = up(c->d, VL), dvp = c->out ? up(c->dv, VL) : 0, nkp = up(c->nk, TILE), tiles = nkp / TILE;
    const int64_t group = c->h / c->hkv, units = c->b * c->hkv, rows = group * c->nq;
    const double work = (double)c->b * c->h * c->nq * c->nk * (c->d + c->dv);
    const int threads = (int)min64(work < 1e6 || c->threads < 2 ? 1 : c->threads, MOST_THREADS);
    const int alone = threads == 1 || units >= 4 * threads || units % threads == 0; /* a thread takes whole key heads */
    const int64_t apart = c->rows || !alone ? nkp : TILE;
    const int64_t own = up(rows * ((int64_t)sizeof(Row) + dvp * 4) + 128, 4096);
    const int64_t size = up((int64_t)sizeof(Keys) + rows * (32 + (int64_t)sizeof(Row) + (dp + apart + tiles) * 4)
                            + (c->keep ? nkp * 4 : 0) + 1024, 4096);
    char *memory = aligned_alloc(4096, (size_t)(threads * own + (alone ? threads : 1) * size));
    if (!memory) return 1;
    if (c->visible) count(c, c->visible_heads);
    Row *sums[MOST_THREADS];
    float *outputs[MOST_THREADS];
    for (int t = 0; t < threads; t++) {
        char *at = memory + t * own;
        sums[t] = take(&at, rows * (int64_t)sizeof(Row)), outputs[t] = take(&at, rows * dvp * 4);
    }
    int64_t next_unit = 0;
    int infinite = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(|:infinite)
    {
        const int64_t me = omp_get_thread_num(), team = alone ? 1 : omp_get_num_threads(), part = alone ? 0 : me;
        char *at = memory + threads * own + (alone ? me * size : 0);
        Keys *u = take(&at, sizeof(Keys));
        Row **of_all = sums + (alone ? me : 0);
        if (part == 0) {
            *u = (Keys){.rows = rows, .apart = apart};
            u->lo = take(&at, rows * 8), u->hi = take(&at, rows * 8), u->row = take(&at, rows * (int64_t)sizeof(Row));
            u->q = take(&at, rows * dp * 4), u->p = take(&at, rows * apart * 4);
            u->offset = take(&at, rows * tiles * 4), u->cells = take(&at, rows * 8);
            u->weight = take(&at, rows * 4), u->center = take(&at, rows * 4);
            u->kept = c->keep ? take(&at, nkp * 4) : NULL;
        }
        for (int64_t unit = 0; ; unit++) {
            if (alone) unit = __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
            if (unit >= units) break;
            const int64_t batch = unit / c->hkv, head = unit % c->hkv * group;
            if (part == 0) prepare(c, u, batch, unit % c->hkv);
            meet(alone);
            const int64_t tile = u->from / TILE, used = up(u->to, TILE) / TILE - tile;
            attend_tiles(c, u, batch, head, sums[me], outputs[me], tile + part * used / team,
                         tile + (part + 1) * used / team);
            meet(alone);
            if (part == 0) infinite |= !combine(c, u, batch, head, of_all, outputs + (alone ? me : 0), team);
            meet(alone);
            if (!c->rows) continue;
            receive(c, u, batch * c->h + head, sums[me], part * tiles / team, (part + 1) * tiles / team);
            meet(alone);
            for (int64_t g = part; g < group; g += team)
                infinite |= !finish_head(c, u, batch, head + g, g, of_all, team);
            meet(alone);
        }
    }
    free(memory);
    return infinite ? 2 : 0;
}
