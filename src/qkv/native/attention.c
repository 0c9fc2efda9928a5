/* Exact softmax attention and statistics of its weights in one pass over the scores (CPU): one loop for all instruction sets,
 * whose headers in isa/ give the products and their packing. Products take float32 or bfloat16; all else is float32.
 *
 * Plain C11 with vector extensions of gcc and clang, and OpenMP for threads; qkv/native/binding.py calls it. For each
 * block of BLOCK queries and each tile of TILE keys, strips of RS queries go through three steps while they are in the
 * L1 cache: scores (packed q * packed K), weights (exp2 and all sums that need no normalizer), output (weights * packed
 * V). The weights of a block stay in memory, BLOCK * keys floats for each thread, until the log-sum-exp of its rows is
 * known. Then one more reading of them gives what does need it: the attention each key receives, the spread, the pooled
 * map, and the weights on single keys. Scores and their maxima are in base 2. Each tile of each row has its own offset
 * (a lazily raised running maximum: Milakov & Gimelshein 2018), so no weight in memory is ever rescaled.
 */
enum { BLOCK = 64, CELL = 64, TILE = 512 }; /* queries of a block; keys of a cell of the mask; keys of the longest run */
enum { STRIPS = BLOCK / RS, GROUP = 8 }; /* rows of which columns are summed together */
_Static_assert(BLOCK % RS == 0 && RS % GROUP == 0 && TILE % CELL == 0 && CELL % PW == 0, "sizes");
#include "weights.h"

/* A step from the product of a query and a key to their score, in base 2. */
enum { BY_DISTANCE, DENSE, DIFFERENCE, SOFT_CAP, LOG_SIGMOID, LOG_ELU_PLUS_ONE };
typedef struct {
    int64_t kind;
    const float *values; /* by distance: (b, h, nq + nk - 1 + PADDING), entry j - i + nq - 1; dense: (b, h, nq, nk);
                          * difference: (b, h, 2, nk), the numbers of keys in two parts, the second what rounding leaves */
    int64_t strides[4];  /* of batch, head, query and key; the last is 0 or 1; difference: of batch, head and part, 1 */
    const float *rows;   /* difference: (b, h, nq, 2), the numbers of queries, from which those of keys are subtracted */
    int64_t row_strides[2]; /* of batch and head */
    float factor;        /* of the values: log2 e, or less with a temperature; or the cap, in base 2; or of scores before ln w */
} Bias;

enum { ENTROPY, EFFECTIVE_KEYS, DISTANCE, SPREAD, SINK, SELF, PREVIOUS, NEXT, ROW_SUM, CONTRIBUTION, MAX_LOGIT, STATISTICS };

typedef struct {
    const Number *q, *k, *v; /* (b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv); the last dimension is contiguous */
    int64_t b, h, hkv, nq, nk, d, dv;
    int64_t qs[3], ks[3], vs[3]; /* strides of batch, head and token, in numbers */
    float scale;
    int32_t threads;
    int64_t low, high;           /* keys j with low <= position of the query - j <= high are visible */
    const uint8_t *keep;         /* (b, nk), 0 at keys of padding, or NULL */
    const int32_t *cells;        /* other masks: (query blocks, cells of keys): 0 if no pair is visible, 1 if all are,
                                  * i + 2 for those of bits[i]; strides cs of batch and head; or NULL */
    int64_t cs[2], widest;       /* widest: how many cells with visible pairs a block of queries has at most */
    const uint64_t *bits;        /* (cells, BLOCK): bit j of a query is 1 if key j of the cell is visible */
    float *visible, *visible_queries; /* (b, visible_heads, nq or nk): numbers of visible keys of each query that
                                       * counts, and the converse; or NULL */
    int64_t visible_heads;
    const Bias *biases;
    int64_t n_biases;
    const uint8_t *counted;      /* (b, nq), 0 at queries that statistics leave out, or NULL */
    const int64_t *firsts;       /* (b), the first key of each text; NULL: key 0 */
    const float *sinks;          /* sink logits, with strides ss of batch, head and query; or NULL */
    int64_t ss[3];
    int64_t normalizer;          /* SOFTMAX or another of weights.h */
    float power;                 /* of entmax: 1 / (alpha - 1) */
    int32_t by_sum;              /* whether weights that are no softmax are divided by the sum of their row */
    const float *shift;          /* added to the scores of a query, with strides hs of batch, head and query; or NULL */
    int64_t hs[3];
    const float *divisor;        /* of the weights of a query, with strides ds of batch, head and query; or NULL */
    int64_t ds[3];
    const float *norms;          /* norm of the value of each key, with strides ns of batch and head; or NULL */
    int64_t ns[2];
    const int32_t *ranges;       /* (number of ranges, 2, 1 or b, nq): first key and end; their masses are wanted */
    int64_t n_ranges, range_batch; /* range_batch: how far the ranges of two batch items are apart, 0 or nq */
    Number *out;                 /* (b, h, nq, dv) or NULL */
    float *lse;                  /* (b, h, nq): log-sum-exp, level of entmax, or the sum that weights are divided by */
    float *rows;                 /* (STATISTICS + n_ranges, b, h, nq), or NULL: no statistics */
    float *min_logit;            /* (b, h, nq): the smallest score, or infinity; or NULL */
    int64_t *argmax;             /* (b, h, nq): the first key with the largest score, or -1; NULL if min_logit is */
    float *received;             /* (b, h, nk) */
    float *prefix;               /* (2, b, h, n_prefix): for each of the first keys of the text, the weights that as many
                                  * first queries put on it, and how many of these see it */
    float *map;                  /* (2, b, h, query bins, key bins): largest and mean weights, or NULL */
    int64_t n_prefix, bin_q, bin_k; /* bins are powers of two */
} Call;

/* Sums over a row's weights w, before any division: w, w log2 w, w^2, w (key - query), w |key - query|, and
 * w (key - center)^2; what the rounding of a softpick's level leaves; the largest and the smallest score, and the first key
 * with the largest; and whether the row has seen a key. */
typedef struct { double total, bits, squares, place, distance, spread, left; float offset, top, low; int32_t key, seen; } Row;
#define NO_ROW .top = LOWEST, .low = -LOWEST, .key = -1

/* Keys [start, end), whole cells, that are a tile of a block of queries; and where in p its weights are. */
typedef struct { int64_t start, end, at; } Run;

typedef struct {           /* what one thread works with */
    Packed *k, *v;         /* packed panels of K and V; its own, or shared by all */
    int32_t *kept, *padded; /* -1 at keys that are no padding [nk], and number of others by cell; or NULL */
    Packed *q;             /* packed strips of q, with scale * log2 e unless SCALED_LATER */
    Packed *factors;       /* BUFFERS of the weights of a strip in a run, packed; unless products take those in p */
    Late late;             /* the output of the strip before, which reads the other buffer */
    int buffer;
    Run *runs;             /* the tiles of a block of queries */
    int64_t n_runs;
    int32_t *run_of;       /* the run that each cell of keys is in, or -1 */
    const int32_t *cells;  /* of the block of queries, or NULL */
    float *p;              /* weights [run][strip][panel][RS][PW] */
    float *scores;         /* of a strip in a run, where SEPARATE_SCORES: memory that tiles write to at once */
    float *o;              /* output [strip][RS][width] */
    float *candidates;     /* scores that may get weight from entmax, of one row */
    float *slopes;         /* derivatives of the functions of the score, each like p and `cap_size` floats long; or NULL */
    int64_t cap_size;
    float *offset;         /* [run][BLOCK] offsets of the weights in p */
    int16_t *spans;        /* [run][strip][2] panels in p */
    double *keys;          /* received [nkp], prefix [2 * n_prefix], map of sums and of maxima [2 * bins]: of one head */
    Row row[BLOCK];
    int64_t lo[BLOCK], hi[BLOCK]; /* visible keys */
    float weight[BLOCK], center[BLOCK];
    vf low[BLOCK];         /* the smallest score of each row by lane, before all are multiplied by `rest` */
    float rest;
    int infinite;          /* whether a score, an output or a contribution was infinite or NaN */
} Space;

static const float LARGEST = 1e28f; /* score of a pair that is visible */
static const float RAISE = 8;       /* the offset is raised if a score exceeds it by more */

INLINE int64_t first_of(const Call *c, int64_t batch) { return c->firsts ? c->firsts[batch] : 0; }

/* The first key's part of all contributions, weights times norms of values; 0 in rows without any. */
INLINE float share_of_first(float weight, float norm, double all) {
    const double share = all == 0 ? 0 : weight * norm / all;
    return share > 1 ? 1 : (float)share; /* rounding */
}

/* ---- Weights ---------------------------------------------------------------------------------------------------- */

/* Scores s of one row, times scale, to weights p, and their sums: total, weight * log2 weight, squares, weight * place. The
 * weights become factors as well, unless these are NULL or the weights in p themselves. */
INLINE void weigh(int kind, int statistics, const float *s, float *p, int64_t panels, float power, float scale, float offset,
                  float place, int64_t row, Packed *factors, vf sums[4]) {
    vf total = {0}, bits = {0}, squares = {0}, first = {0}, x = iota() + place, derivative;
    for (int64_t panel = 0; panel < panels; panel++, s += RS * PW, p += RS * PW) {
        vf w[NV];
        UNROLL for (int v = 0; v < NV; v++) {
            vf t = load((SEPARATE_SCORES ? s : p) + v * VL);
            if (SCALED_LATER) t *= scale;
            if (kind == SOFTPICK) w[v] = choose(t <= 0, (vf){0}, picked(t, (vf){0} + offset));
            else t -= offset, w[v] = weight_of(kind, t, power, &derivative);
            if (statistics || !WEIGHT_SIZE) *(vf *)(p + v * VL) = w[v];
            total += w[v];
            if (statistics) bits += w[v] * log_of_weight(kind, t, w[v]), squares += w[v] * w[v];
            if (statistics) first += w[v] * x, x += (float)VL;
        }
        if (WEIGHT_SIZE && factors) put_weights(w, row, factors + panel * WEIGHT_SIZE);
    }
    sums[0] = total, sums[1] = bits, sums[2] = squares, sums[3] = first;
}
typedef void Weigh(const float *, float *, int64_t, float, float, float, float, int64_t, Packed *, vf[4]);
#define WEIGH(kind, statistics) static void weigh_##kind##_##statistics(const float *s, float *p, int64_t n, float power, \
        float scale, float offset, float place, int64_t row, Packed *factors, vf sums[4]) { \
    weigh(kind, statistics, s, p, n, power, scale, offset, place, row, factors, sums); }
#define EACH_NORMALIZER(of) of(SOFTMAX) of(SIGMOID) of(RELU) of(ELU_PLUS_ONE) of(IDENTITY) of(SPARSEMAX) of(ENTMAX_15) of(ENTMAX) \
    of(SOFTPICK)
#define BOTH(kind) WEIGH(kind, 0) WEIGH(kind, 1)
EACH_NORMALIZER(BOTH)
#define ENTRY(kind) [kind] = {weigh_##kind##_0, weigh_##kind##_1},
static Weigh *const WEIGHS[NORMALIZERS][2] = {EACH_NORMALIZER(ENTRY)}; /* without and with statistics */

/* What a bias has for the keys of query i; a function of the score has nothing. `row` is for `biased`. */
INLINE const float *values_of_row(const Call *c, const Bias *bias, int64_t batch, int64_t head, int64_t i,
                                  const float **row) {
    if (bias->kind >= SOFT_CAP) return NULL;
    const float *values = bias->values + batch * bias->strides[0] + head * bias->strides[1];
    if (bias->kind == DIFFERENCE) {
        *row = bias->rows + batch * bias->row_strides[0] + head * bias->row_strides[1] + 2 * i;
        return values;
    }
    values += i * bias->strides[2];
    return bias->kind == BY_DISTANCE ? values + c->nq - 1 - i : values;
}

/* Values of the keys from j on; 0 after the last. */
INLINE vf values_at(const Call *c, const float *values, int64_t j) {
    vf x = {0};
    if (j + VL <= c->nk) x = *(const vu *)(values + j);
    else if (j < c->nk) memcpy(&x, values + j, (size_t)(c->nk - j) * sizeof(float));
    return x;
}

/* Scores x of the keys from j on with a bias; the derivative is that of a function of the score. */
INLINE vf biased(const Call *c, const Bias *bias, const float *values, const float *row, int64_t j, vf x, vf *derivative) {
    vf added = {0}, y;
    if (bias->kind == SOFT_CAP) {
        y = capped(x, bias->factor);
        const vf share = y / bias->factor;
        *derivative = maximum((vf){0}, 1 - share * share);
        return y;
    }
    if (bias->kind > SOFT_CAP) { /* a masked pair stays so */
        y = (bias->kind == LOG_SIGMOID ? log_sigmoid : log_elu_plus_one)(x * bias->factor, derivative);
        *derivative *= bias->factor;
        return choose(x > LOWEST / 2, y, x);
    }
    if (bias->kind == DENSE && !bias->strides[3]) added += values[0];
    else if (bias->kind == BY_DISTANCE) added = *(const vu *)(values + j);
    else if (bias->kind == DENSE) added = values_at(c, values, j);
    else added = (row[0] - values_at(c, values, j)) + (row[1] - values_at(c, values + bias->strides[2], j));
    return maximum((vf){0} + LOWEST, x + added * bias->factor); /* -infinity masks a pair; NaN stays */
}

/* Apply the biases to the scores of a strip; `first` is the key of the first panel, `query` the first of `rows` queries. */
static void add_biases(const Call *c, const Space *s, float *p, int64_t panels, int64_t first, int64_t batch, int64_t head,
                       int64_t query, int64_t rows) {
    float *slopes = s->slopes ? s->slopes + (p - s->p) : NULL;
    for (const Bias *bias = c->biases; bias < c->biases + c->n_biases; bias++) {
        const int derivatives = slopes && bias->kind >= SOFT_CAP;
        for (int64_t r = 0; r < rows; r++) {
            const float *row = NULL, *values = values_of_row(c, bias, batch, head, query + r, &row);
            for (int64_t panel = 0; panel < panels; panel++)
                for (int v = 0; v < NV; v++) {
                    const int64_t at = panel * RS * PW + r * PW + v * VL;
                    vf derivative;
                    *(vf *)(p + at) = biased(c, bias, values, row, first + panel * PW + v * VL, load(p + at), &derivative);
                    if (derivatives) *(vf *)(slopes + at) = derivative;
                }
        }
        if (derivatives) slopes += s->cap_size;
    }
}

/* Bits of the keys of a cell that row r of a block sees; the band and padding are not in them. */
INLINE uint64_t bits_of(const Call *c, const Space *s, int64_t cell, int64_t r) {
    const int32_t status = s->cells ? s->cells[cell] : 1;
    return status > 1 ? c->bits[(status - 2) * (int64_t)BLOCK + r] : status ? UINT64_MAX : 0;
}
static int is_visible(const Call *c, const Space *s, int64_t r, int64_t key) {
    return s->lo[r] <= key && key < s->hi[r] && (!s->kept || s->kept[key]) && bits_of(c, s, key / CELL, r) >> key % CELL & 1;
}

/* Set masked scores of a strip to `lowest`; `first` is the key of the first panel. */
static void mask(const Call *c, const Space *s, float *p, int64_t panels, int64_t first, int64_t strip, float lowest) {
    vi place, one;
    for (int i = 0; i < VL; i++) place[i] = i, one[i] = 1 << i;
    for (int r = 0; r < RS; r++) {
        const int64_t row = strip * RS + r;
        const vi lo = (vi){0} + (int32_t)max64(s->lo[row] - first, 0);
        const vi hi = (vi){0} + (int32_t)max64(s->hi[row] - first, 0);
        const vf low = (vf){0} + lowest;
        for (int64_t panel = 0; panel < panels; panel++) {
            const int64_t key = first + panel * PW;
            const uint64_t bits = bits_of(c, s, key / CELL, row) >> key % CELL;
            for (int v = 0; v < NV; v++) {
                float *at = p + panel * RS * PW + r * PW + v * VL;
                const int64_t j = panel * PW + v * VL;
                vi here = place + (int32_t)j, visible = (here >= lo) & (here < hi);
                visible &= (((vi){0} + (int32_t)(bits >> v * VL & UINT32_MAX)) & one) != 0;
                if (s->kept) visible &= *(const vi *)(s->kept + first + j);
                *(vf *)at = choose(visible, load(at), low);
            }
        }
    }
}

/* The largest score of each row of a strip by lane, not below `lowest`; the smallest that is above it is added to `low`. */
static void find_extremes_of(const float *p, int64_t panels, float lowest, vf top[RS], vf *low) {
    for (int m = 0; m < RS; m += GROUP) {
        vf t[GROUP], u[GROUP];
        UNROLL for (int r = 0; r < GROUP; r++) t[r] = (vf){0} + lowest, u[r] = low ? low[m + r] : t[r];
        for (int64_t panel = 0; panel < panels; panel++)
            UNROLL for (int r = 0; r < GROUP; r++) UNROLL for (int v = 0; v < NV; v++) {
                const vf x = load(p + (panel * RS + m + r) * PW + v * VL);
                t[r] = maximum(x, t[r]);
                if (low) u[r] = minimum((vf)((vi)x | (x < lowest / 2)), u[r]); /* a masked score becomes NaN */
            }
        UNROLL for (int r = 0; r < GROUP; r++) top[m + r] = t[r];
        UNROLL for (int r = 0; r < GROUP && low; r++) low[m + r] = u[r];
    }
}

/* The place of the first score of a row that equals its largest, in some panels. */
static int32_t place_of(const float *p, int64_t panels, float top) {
    for (int64_t panel = 0; panel < panels; panel++)
        for (int v = 0; v < NV; v++) {
            const vi here = load(p + panel * RS * PW + v * VL) == top;
            if (!any(here)) continue;
            for (int i = 0; i < VL; i++) if (here[i]) return (int32_t)(panel * PW + v * VL + i);
        }
    return -1;
}

/* ---- A block of queries ----------------------------------------------------------------------------------------- */

/* Whether a strip sees a key of a cell. */
static int strip_sees(const Call *c, const Space *s, int64_t strip, int64_t cell) {
    uint64_t bits = 0;
    for (int r = 0; r < RS; r++) bits |= bits_of(c, s, cell, strip * RS + r);
    return bits != 0;
}

/* Scores of a strip in a run, with biases and mask, and the largest of each row; the smallest are added to `low` unless it is
 * NULL; `span` gets the panels that they are in. Returns by what all of these are still to be multiplied. */
static float strip_scores(const Call *c, Space *s, float *p, const Run *run, int16_t span[2], int64_t strip,
                         int64_t batch, int64_t head, int64_t query, vf top[RS], vf *low) {
    const int64_t *lo = s->lo + strip * RS, *hi = s->hi + strip * RS;
    int64_t from = INT64_MAX, to = 0, every_from = 0, every_to = INT64_MAX;
    for (int r = 0; r < RS; r++) {
        every_from = max64(every_from, lo[r]), every_to = min64(every_to, hi[r]);
        if (lo[r] < hi[r]) from = min64(from, lo[r]), to = max64(to, hi[r]);
    }
    from = max64(from, run->start), to = min64(to, run->end);
    if (s->cells) {
        while (from < to && !strip_sees(c, s, strip, from / CELL)) from = (from / CELL + 1) * CELL;
        while (from < to && !strip_sees(c, s, strip, (to - 1) / CELL)) to = (to - 1) / CELL * CELL;
    }
    span[0] = span[1] = 0;
    if (from >= to) return 1;
    span[0] = (int16_t)((from - run->start) / PW), span[1] = (int16_t)(up(to - run->start, PW) / PW);
    const int64_t panels = span[1] - span[0], first = run->start + span[0] * PW, last = first + panels * PW;
    const float scale = SCALED_LATER ? c->scale * (float)M_LOG2E : 1;
    const int later = SCALED_LATER && !c->n_biases && scale > 1e-6f && scale < 1e6f;
    const float rest = later ? scale : 1, lowest = LOWEST / rest;
    int cut = 0;
    for (int64_t cell = first / CELL; cell * CELL < last; cell++)
        cut |= (s->kept && s->padded[cell]) || (s->cells && s->cells[cell] != 1);
    for (int r = 0; r < RS; r++) top[r] = (vf){0} + lowest;
    p += span[0] * RS * PW;
    /* panels [0, a) and [b, panels) are cut by an edge of the band */
    int64_t a = min64(panels, (max64(every_from - first, 0) + PW - 1) / PW), b = max64(a, min64(panels, (every_to - first) / PW));
    if (cut || c->n_biases) a = b = panels;
    const int again = a > 0 || b < panels || (SCALED_LATER && !later);
    scores(s->q + strip * query_size(c->d), s->k + first / PW * key_size(c->d), panels, c->d, p, top, again ? NULL : low);
    if (SCALED_LATER && !later)
        for (int64_t i = 0; i < panels * RS * PW; i += VL) *(vf *)(p + i) *= scale;
    if (c->n_biases) {
        const int64_t i = query + strip * RS;
        add_biases(c, s, p, panels, first, batch, head, i, min64(RS, c->nq - i));
    }
    if (a > 0) mask(c, s, p, a, first, strip, lowest);
    if (b < panels) mask(c, s, p + b * RS * PW, panels - b, first + b * PW, strip, lowest);
    if (again) find_extremes_of(p, panels, lowest, top, low);
    s->rest = rest;
    return rest;
}

/* Whether weights depend on a level that all scores of the row determine, which is to be found before them. */
INLINE int has_level(const Call *c) { return c->normalizer >= SPARSEMAX; }

/* One strip of queries and one run of keys: scores, and the largest of each row. */
static void strip_tops(const Call *c, Space *s, float *p, int64_t slot, int64_t strip, int64_t batch, int64_t head,
                       int64_t query) {
    int16_t *span = s->spans + (slot * STRIPS + strip) * 2;
    vf top[RS];
    const float scale = strip_scores(c, s, p, s->runs + slot, span, strip, batch, head, query, top,
                                     c->min_logit ? s->low + strip * RS : NULL);
    const int64_t panels = span[1] - span[0], first = s->runs[slot].start + span[0] * PW;
    for (int64_t i = span[0] * RS * PW; SCALED_LATER && i < span[1] * RS * PW; i += VL) *(vf *)(p + i) *= scale;
    for (int r = 0; r < RS && span[0] < span[1]; r++) {
        Row *row = s->row + strip * RS + r;
        const float m = highest(top[r]) * scale;
        if (m > row->top) {
            row->top = m;
            if (c->min_logit) row->key = (int32_t)first + place_of(p + (span[0] * RS + r) * PW, panels, m);
        }
    }
}

/* One strip of queries and one run of keys: scores unless the levels are known, weights, sums and output. */
static void strip_tile(const Call *c, Space *s, float *p, int64_t slot, int64_t strip, int64_t batch, int64_t head,
                       int64_t query) {
    const int known = has_level(c);
    const int64_t width = output_width(c->dv);
    Row *rows = s->row + strip * RS;
    const int64_t *hi = s->hi + strip * RS, start = s->runs[slot].start;
    int16_t *span = s->spans + (slot * STRIPS + strip) * 2;
    vf top[RS], sums[4];
    float *x = SEPARATE_SCORES && c->rows && !known ? s->scores : p;
    const float scale = known ? 1 : strip_scores(c, s, x, s->runs + slot, span, strip, batch, head, query, top,
                                                    c->min_logit ? s->low + strip * RS : NULL);
    if (span[0] >= span[1]) return;
    const int64_t panels = span[1] - span[0], first = start + span[0] * PW, last = first + panels * PW;
    p += span[0] * RS * PW, x += span[0] * RS * PW;
    float *o = s->o + strip * RS * width;
    Packed *factors = c->out ? s->factors + (s->buffer = (s->buffer + 1) % BUFFERS) * (TILE / PW * WEIGHT_SIZE) : NULL;
    Weigh *const weigh = WEIGHS[c->normalizer][c->rows != NULL];
    if (s->late.o == o) finish_output(&s->late); /* rows of this output may be multiplied */
    for (int r = 0; r < RS; r++) {
        advance_output(&s->late);
        Row *row = rows + r;
        const float m = known ? row->top : highest(top[r]) * scale;
        if (c->normalizer != SOFTMAX) row->seen |= m > LOWEST / 2;
        else if (row->seen ? m > row->offset + RAISE : m > LOWEST / 2) {
            const double below = row->offset - (double)m, factor = row->seen ? exp2(below) : 0;
            row->bits = factor * (row->bits + (row->seen ? below * row->total : 0));
            row->total *= factor, row->squares *= factor * factor, row->place *= factor, row->distance *= factor;
            if (c->out) for (int64_t i = 0; i < width; i++) o[r * width + i] *= (float)factor;
            row->offset = m, row->seen = 1;
        }
        if (m > row->top) {
            row->top = m;
            if (c->min_logit) row->key = (int32_t)first + place_of(x + r * PW, panels, highest(top[r]));
        }
        s->offset[slot * BLOCK + strip * RS + r] = row->offset;
        if (!c->rows) {
            weigh(x + r * PW, p + r * PW, panels, c->power, scale, row->offset, 0, r, factors, sums);
            row->total += sum(sums[0]);
            row->seen |= row->total != row->total;
            continue;
        }
        const int64_t away = first - (query + strip * RS + r + c->nk - c->nq); /* of the first key from the query */
        weigh(x + r * PW, p + r * PW, panels, c->power, scale, row->offset, (float)away, r, factors, sums);
        v4 a = quarter(sums[0]), b = quarter(sums[1]), e = quarter(sums[2]), f = quarter(sums[3]);
        v4 ab = (v4){a[0], b[0], a[1], b[1]} + (v4){a[2], b[2], a[3], b[3]};
        v4 ef = (v4){e[0], f[0], e[1], f[1]} + (v4){e[2], f[2], e[3], f[3]};
        const double total = ab[0] + ab[2], place = ef[1] + ef[3];
        row->seen |= total != total; /* NaN scores have no maximum */
        row->total += total, row->bits += ab[1] + ab[3], row->squares += ef[0] + ef[2], row->place += place;
        if (min64(last, hi[r]) - first + away <= 1) row->distance -= place; /* no key after the query */
        else {
            vf d = {0}, x = iota() + (float)away;
            for (int64_t i = 0; i < panels; i++) for (int v = 0; v < NV; v++, x += (float)VL)
                d += load(p + i * RS * PW + r * PW + v * VL) * magnitude(x);
            row->distance += sum(d);
        }
    }
    finish_output(&s->late);
    if (!c->out) return;
    start_output(WEIGHT_SIZE ? factors : (const Packed *)p, panels, s->v + first / PW * value_size(c->dv), width, o, &s->late);
}

/* Weights, as shares of the row, of `rows` rows from r on in one tile: columns, and second moments of the rows. */
INLINE void columns_of(int count, const Space *s, const float *p, int64_t panels, int64_t at, const float *weight,
                       float place, float *columns, vf second[GROUP]) {
    vf acc[GROUP] = {0}, x = iota() + place;
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, columns += PW)
        UNROLL for (int v = 0; v < NV; v++, x += (float)VL) {
            vf sum = load(columns + v * VL);
            UNROLL for (int r = 0; r < count; r++) {
                vf w = load(p + r * PW + v * VL), away = x - s->center[at + r];
                sum += w * weight[r];
                acc[r] += w * away * away;
            }
            *(vf *)(columns + v * VL) = sum;
        }
    UNROLL for (int r = 0; r < count; r++) second[r] = acc[r];
}
static void columns_8(const Space *s, const float *p, int64_t n, int64_t at, const float *w, float place, float *sums,
                      vf second[GROUP]) {
    columns_of(GROUP, s, p, n, at, w, place, sums, second);
}
static void columns_1(const Space *s, const float *p, int64_t n, int64_t at, const float *w, float place, float *sums,
                      vf second[GROUP]) {
    columns_of(1, s, p, n, at, w, place, sums, second);
}

/* The largest weights of some rows in each column, as shares of the row. */
static void highest_columns(const float *p, int64_t panels, int64_t count, const float *weight, float *columns) {
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, columns += PW)
        for (int v = 0; v < NV; v++) {
            vf most = load(columns + v * VL);
            for (int64_t r = 0; r < count; r++) most = maximum(load(p + r * PW + v * VL) * weight[r], most);
            *(vf *)(columns + v * VL) = most;
        }
}

/* Whether the map is that of single pairs: the weights themselves, which are written row by row. */
INLINE int of_pairs(const Call *c) { return c->map && c->bin_q == 1 && c->bin_k == 1; }

/* Write the weights of one row in a tile, as shares of the row, on at most n keys. */
static void write_row(const float *p, int64_t panels, float weight, float *to, int64_t n) {
    for (int64_t j = 0; j < min64(n, panels * PW); j += VL) {
        const vf w = load(p + j / PW * RS * PW + j % PW) * weight;
        memcpy(to + j, &w, (size_t)min64(VL, n - j) * sizeof(float));
    }
}

/* Add columns summed over the queries [r0, r1) of a block to what the keys received, and to the map. */
static void add_columns(const Call *c, Space *s, const float *columns, const float *most, int64_t start, int64_t n,
                        int64_t query) {
    double *received = s->keys + start;
    for (int64_t j = 0; j < n; j += VL) *(vd *)(received + j) += __builtin_convertvector(load(columns + j), vd);
    if (!c->map || of_pairs(c)) return;
    const int64_t bins = (c->nk + c->bin_k - 1) / c->bin_k, whole = min64(n, c->nk - start);
    const int64_t cells = (c->nq + c->bin_q - 1) / c->bin_q * bins;
    const int shift = __builtin_ctzll((uint64_t)c->bin_k);
    double *map = s->keys + up(c->nk, TILE) + 2 * c->n_prefix + query / c->bin_q * bins;
    if (c->bin_k >= VL)
        for (int64_t j = 0; j < whole; j += VL) {
            double *at = map + ((start + j) >> shift);
            at[0] += sum(load(columns + j));
            at[cells] = fmax(at[cells], highest(load(most + j)));
        }
    else
        for (int64_t j = 0; j < whole; j++) {
            double *at = map + ((start + j) >> shift);
            at[0] += columns[j];
            at[cells] = fmax(at[cells], most[j]);
        }
}

/* By how much the weights of a row in a tile are too small, or large, for its final offset. */
INLINE float factor_of(const Space *s, int64_t slot, int64_t r) {
    const float below = s->offset[slot * BLOCK + r] - s->row[r].offset;
    return below == 0 ? 1 : exp2f(below);
}

/* The final weight of row r of a block on one key. */
static float weight_on(const Space *s, int64_t r, int64_t key) {
    if (key < s->lo[r] || key >= s->hi[r] || s->run_of[key / CELL] < 0) return 0; /* masked pairs have a weight of 0 */
    const int64_t slot = s->run_of[key / CELL], strip = r / RS;
    const Run *run = s->runs + slot;
    const int64_t panel = (key - run->start) / PW, panels = (run->end - run->start) / PW;
    const int16_t *span = s->spans + (slot * STRIPS + strip) * 2;
    if (panel < span[0] || panel >= span[1]) return 0;
    return s->p[run->at + (strip * panels + panel) * RS * PW + r % RS * PW + key % PW] * factor_of(s, slot, r) * s->weight[r];
}

/* The sum of the final weights of row r of a block on the keys [from, to). */
static float mass_of(const Space *s, int64_t r, int64_t from, int64_t to) {
    vi place;
    double mass = 0;
    for (int i = 0; i < VL; i++) place[i] = i;
    from = max64(from, s->lo[r]), to = min64(to, s->hi[r]);
    for (int64_t slot = 0; slot < s->n_runs && from < to; slot++) {
        const Run *run = s->runs + slot;
        const int16_t *span = s->spans + (slot * STRIPS + r / RS) * 2;
        const int64_t start = run->start, panels = (run->end - start) / PW;
        const int64_t first = max64(max64(from - start, 0) / PW, span[0]);
        const int64_t end = min64(up(max64(to - start, 0), PW) / PW, span[1]);
        const float *p = s->p + run->at + (r / RS * panels + first) * RS * PW + r % RS * PW;
        const vi lo = (vi){0} + (int32_t)max64(from - start, 0), hi = (vi){0} + (int32_t)min64(to - start, TILE);
        vf total = {0};
        for (int64_t panel = first; panel < end; panel++, p += RS * PW)
            for (int v = 0; v < NV; v++) {
                const vi here = place + (int32_t)(panel * PW + v * VL);
                total += choose((here >= lo) & (here < hi), load(p + v * VL), (vf){0});
            }
        if (first < end) mass += sum(total) * (double)factor_of(s, slot, r);
    }
    return (float)(mass * s->weight[r]);
}

/* Add the weights of row r on the first keys of its text, and how many of them it sees. */
static void add_prefix(const Call *c, Space *s, int64_t r, int64_t batch, int64_t position) {
    const int64_t first = first_of(c, batch);
    double *sums = s->keys + up(c->nk, TILE);
    if (position < first || position >= first + c->n_prefix) return;
    for (int64_t j = max64(first, s->lo[r]); j < min64(first + c->n_prefix, s->hi[r]); j++) {
        sums[j - first] += weight_on(s, r, j);
        sums[c->n_prefix + j - first] += is_visible(c, s, r, j);
    }
}

/* Weights of one row times the norms of the values; at the end of the keys there may be fewer norms than weights. */
static double dot(const float *p, int64_t panels, const float *norms, int64_t left) {
    vf total = {0};
    float rest = 0;
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, norms += PW, left -= PW) {
        if (left >= PW)
            for (int v = 0; v < NV; v++) total += load(p + v * VL) * *(const vu *)(norms + v * VL);
        else
            for (int64_t j = 0; j < left; j++) rest += p[j] * norms[j];
    }
    return sum(total) + rest;
}

/* Cut the visible keys [from, to) of a block into runs of cells that follow one another. */
static void find_runs(const Call *c, Space *s, int64_t from, int64_t to) {
    const int64_t cells = up(c->nk, TILE) / CELL;
    int64_t at = 0;
    s->n_runs = 0;
    memset(s->run_of, -1, (size_t)cells * sizeof *s->run_of);
    for (int64_t cell = from < to ? from / CELL : cells; cell * CELL < to; cell++) {
        if (s->cells && !s->cells[cell]) continue;
        Run *run = s->runs + s->n_runs - 1;
        if (s->n_runs && run->end == cell * CELL && run->end - run->start < TILE) run->end += CELL;
        else s->runs[s->n_runs++] = (Run){cell * CELL, (cell + 1) * CELL, at};
        s->run_of[cell] = (int32_t)s->n_runs - 1;
        at += BLOCK * CELL;
    }
}

/* The logarithm to base 2 of a row's sum, with its sink logit. */
static double log_sum_exp(const Call *c, const Row *row, int64_t batch, int64_t head, int64_t query) {
    const double lse = row->seen ? row->offset + log2(row->total) : -INFINITY;
    if (!c->sinks) return lse;
    const double sink = c->sinks[batch * c->ss[0] + head * c->ss[1] + query * c->ss[2]] * M_LOG2E;
    const double most = fmax(lse, sink), least = fmin(lse, sink);
    return most > -INFINITY ? most + log2(1 + exp2(least - most)) : lse;
}

/* The number of a query in a table with strides of batch, head and query. */
INLINE float of_query(const float *x, const int64_t strides[3], int64_t batch, int64_t head, int64_t query) {
    return x[batch * strides[0] + head * strides[1] + query * strides[2]];
}

/* The weight of the sink of a query at the level of its row, and its derivative; 0 without sinks. */
static float weight_of_sink(const Call *c, int64_t batch, int64_t head, int64_t query, float level, float *derivative) {
    const float sink = c->sinks ? of_query(c->sinks, c->ss, batch, head, query) * (float)M_LOG2E : LOWEST;
    const vf t = (vf){0} + (sink - level);
    vf w, falls;
    if (c->normalizer == SPARSEMAX) w = weight_of(SPARSEMAX, t, c->power, &falls);
    else if (c->normalizer == ENTMAX_15) w = weight_of(ENTMAX_15, t, c->power, &falls);
    else w = weight_of(ENTMAX, t, c->power, &falls);
    *derivative = falls[0];
    return w[0];
}

/* By what the weights of a row of a known sum are multiplied to become final; what `lse` of the call holds. */
static double final_factor(const Call *c, const Row *row, int64_t batch, int64_t head, int64_t query, double *lse) {
    if (c->normalizer == SOFTMAX) {
        const double bits = c->lse || c->sinks ? log_sum_exp(c, row, batch, head, query) : 0;
        *lse = bits * M_LN2;
        return !row->seen ? 0 : c->sinks ? exp2(row->offset - bits) : 1 / row->total;
    }
    *lse = c->by_sum ? fabs(row->total) < FLT_MIN ? 1 : row->total : row->offset * M_LN2;
    if (c->by_sum) return 1 / *lse;
    if (c->normalizer == SOFTPICK) return row->left;
    if (has_level(c)) { /* the offset is rounded, and with it the sum */
        float derivative;
        const double sum_of = row->total + weight_of_sink(c, batch, head, query, row->offset, &derivative);
        return sum_of == 0 ? 1 : 1 / sum_of;
    }
    return c->divisor ? 1 / of_query(c->divisor, c->ds, batch, head, query) : 1;
}

/* Whether a row has a largest score that no masked pair has, and a sum; a row without any visible pair needs none. */
static int is_finite(const Row *row, int sees) {
    return row->seen ? row->top < LARGEST && fabs(row->total) <= DBL_MAX : !sees;
}

/* Write the largest score of a row, and its key and the smallest score if they are wanted. */
static void put_extremes(const Call *c, const Row *row, int64_t at) {
    const int sees = row->seen && row->top > LOWEST / 2;
    c->rows[MAX_LOGIT * c->b * c->h * c->nq + at] = sees ? (float)(row->top * M_LN2) : -INFINITY;
    if (!c->min_logit) return;
    c->min_logit[at] = sees ? (float)(row->low * M_LN2) : INFINITY;
    c->argmax[at] = sees ? row->key : -1;
}

/* The scores of row r of a block in a run, from its first panel on. */
INLINE float *scores_of_row(const Space *s, int64_t slot, int64_t r) {
    const Run *run = s->runs + slot;
    const int64_t panel = r / RS * ((run->end - run->start) / PW) + s->spans[(slot * STRIPS + r / RS) * 2];
    return s->p + run->at + panel * RS * PW + r % RS * PW;
}

/* The level of entmax at which the weights of the candidates, relative to the largest score, and of a sink add up to 1: Newton's
 * method on the norm (sum w)^(1 / power), which is convex and falls as the level rises, from where the largest score alone
 * has the weight 1; so no step passes the level. Those that drop out of the candidates on the way have no weight. */
INLINE float level_of(int kind, float *x, int64_t n, float power, float sink) {
    float level = -power * (float)M_LOG2E;
    for (int i = 0; i < 100; i++) {
        vf total = {0}, fall = {0}, w, derivative;
        int64_t left = 0;
        for (int64_t j = 0; j < n; j += VL) {
            const vf score = load(x + j);
            w = weight_of(kind, score - level, power, &derivative);
            total += w, fall += derivative;
            if (any(score > level)) *(vf *)(x + left) = score, left += VL;
        }
        n = left, w = weight_of(kind, (vf){0} + (sink - level), power, &derivative);
        const double sum_of = (double)sum(total) + w[0], slope = (double)sum(fall) + derivative[0];
        const double move = (1 - pow(sum_of, -1 / (double)power)) * sum_of / slope * M_LOG2E * power;
        if (!(move > 2 * FLT_EPSILON * (power * (float)M_LOG2E + fabsf(level)))) break; /* NaN ends it, too */
        level += (float)move;
    }
    return level;
}

/* The level of a softpick of row r, log2 of the sum of |e^s - 1|; 0 if that is 0. */
static void find_level_of_softpick(Space *s, int64_t r) {
    Row *row = s->row + r;
    const float top = fmaxf(row->top, 0);
    double total = 0;
    for (int64_t slot = 0; slot < s->n_runs; slot++) {
        const int16_t *span = s->spans + (slot * STRIPS + r / RS) * 2;
        const float *p = scores_of_row(s, slot, r);
        vf of_run = {0};
        for (int64_t panel = span[0]; panel < span[1]; panel++, p += RS * PW)
            UNROLL for (int v = 0; v < NV; v++) of_run += picked(load(p + v * VL), (vf){0} + top);
        total += span[0] < span[1] ? sum(of_run) : 0;
    }
    const double level = total == 0 ? 0 : top + log2(total);
    row->offset = (float)level, row->left = exp2(row->offset - level);
}

/* Find the offsets of the rows of a block of which all scores are in memory: the levels of their normalizers. */
static void find_levels(const Call *c, Space *s, int64_t n, int64_t batch, int64_t head, int64_t query) {
    for (int64_t r = 0; r < n; r++) {
        Row *row = s->row + r;
        const float sink = c->sinks ? of_query(c->sinks, c->ss, batch, head, query + r) * (float)M_LOG2E : LOWEST;
        const float top = fmaxf(row->top, sink), least = top - c->power * (float)M_LOG2E;
        int64_t count = 0;
        if (top <= LOWEST / 2) continue; /* it sees nothing */
        if (c->normalizer == SOFTPICK) {
            find_level_of_softpick(s, r);
            continue;
        }
        for (int64_t slot = 0; slot < s->n_runs; slot++) {
            const int16_t *span = s->spans + (slot * STRIPS + r / RS) * 2;
            const float *p = scores_of_row(s, slot, r);
            for (int64_t panel = span[0]; panel < span[1]; panel++, p += RS * PW)
                UNROLL for (int v = 0; v < NV; v++) {
                    const vf x = load(p + v * VL);
                    if (any(x > least)) *(vf *)(s->candidates + count) = x - top, count += VL;
                }
        }
        const int kind = (int)c->normalizer;
        row->offset = top + (kind == SPARSEMAX ? level_of(SPARSEMAX, s->candidates, count, c->power, sink - top)
                             : kind == ENTMAX_15 ? level_of(ENTMAX_15, s->candidates, count, c->power, sink - top)
                             : level_of(ENTMAX, s->candidates, count, c->power, sink - top));
    }
}

static void block(const Call *c, Space *s, int64_t batch, int64_t head, int64_t query) {
    const int64_t n = min64(BLOCK, c->nq - query), strips = (n + RS - 1) / RS, shift = c->nk - c->nq;
    const int64_t width = output_width(c->dv);
    int64_t from = INT64_MAX, to = 0;
    for (int64_t r = 0; r < strips * RS; r++) {
        const int64_t position = query + r + shift;
        int64_t lo = max64(position - c->high, 0), hi = r < n ? min64(position - c->low + 1, c->nk) : 0;
        if (lo >= hi) lo = hi = 0;
        else from = min64(from, lo), to = max64(to, hi);
        s->lo[r] = lo, s->hi[r] = hi;
        s->row[r] = (Row){NO_ROW}, s->low[r] = (vf){0} - LOWEST;
        if (c->shift && r < n) s->row[r].offset = -of_query(c->shift, c->hs, batch, head, query + r) * (float)M_LOG2E;
    }
    s->cells = c->cells ? c->cells + batch * c->cs[0] + head * c->cs[1] + query / BLOCK * ((c->nk + CELL - 1) / CELL) : NULL;
    find_runs(c, s, from, to);
    const Number *q = c->q + batch * c->qs[0] + head * c->qs[1] + query * c->qs[2];
    for (int64_t strip = 0; strip < strips; strip++)
        pack_queries(q + strip * RS * c->qs[2], c->qs[2], min64(RS, n - strip * RS), c->d, c->scale * (float)M_LOG2E,
                     s->q + strip * query_size(c->d));
    if (c->out) memset(s->o, 0, (size_t)(strips * RS * width) * sizeof(float));
    for (int pass = has_level(c) ? 0 : 1; pass < 2; pass++) {
        for (int64_t slot = 0; slot < s->n_runs; slot++)
            for (int64_t strip = 0; strip < strips; strip++) {
                const Run *run = s->runs + slot;
                const int64_t at = c->rows || has_level(c) ? run->at + strip * RS * (run->end - run->start) : 0;
                (pass ? strip_tile : strip_tops)(c, s, s->p + at, slot, strip, batch, head, query);
            }
        if (!pass) find_levels(c, s, n, batch, head, query);
    }
    finish_output(&s->late), s->late.o = NULL;
    for (int64_t r = 0; r < n && c->min_logit; r++) s->row[r].low = lowest_of(s->low[r]) * s->rest;
    const int64_t base = (batch * c->h + head) * c->nq + query, all = c->b * c->h * c->nq;
    for (int64_t r = 0; r < n; r++) {
        Row *row = s->row + r;
        const int empty = !row->seen;
        double lse;
        const float w = (float)final_factor(c, row, batch, head, query + r, &lse);
        int64_t first = s->lo[r];
        while (empty && first < s->hi[r] && !is_visible(c, s, r, first)) first++;
        s->infinite |= !is_finite(row, first < s->hi[r]);
        if (c->lse) c->lse[base + r] = (float)lse;
        if (c->counted && !c->counted[batch * c->nq + query + r]) row->seen = 0;
        s->weight[r] = row->seen ? w : 0;
        s->infinite |= row->bits != row->bits; /* a weight is negative: there is no entropy */
        s->infinite |= c->rows && row->total != 0 && row->squares < 1e-30; /* the squares of its weights underflow */
        s->center[r] = empty || row->total == 0 ? 0 : (float)(row->place / row->total + (double)(query + r + shift));
        if (c->out) {
            Number *out = c->out + (base + r) * c->dv;
            const float *o = s->o + r * width;
            for (int64_t i = 0; i < c->dv; i++) out[i] = empty ? 0 : rounded(o[i] * w);
            int infinite = 0; /* a local variable, so that the loop becomes vector instructions */
            for (int64_t i = 0; i < c->dv; i++) infinite |= !(fabsf(widened(out[i])) <= FLT_MAX);
            s->infinite |= infinite;
        }
    }
    if (!c->rows) return;
    float columns[TILE] __attribute__((aligned(64))), most[TILE] __attribute__((aligned(64)));
    float weight[BLOCK], factor[BLOCK], center[BLOCK];
    double contribution[BLOCK] = {0};
    const float *norms = c->norms ? c->norms + batch * c->ns[0] + head * c->ns[1] : NULL;
    memcpy(center, s->center, (size_t)n * sizeof(float));
    const int pooled = c->map && !of_pairs(c);
    const int64_t step = pooled ? min64(BLOCK, c->bin_q) : BLOCK;
    if (c->map && !pooled) memset(c->map + base * c->nk, 0, (size_t)(n * c->nk) * sizeof(float));
    for (int64_t r0 = 0; r0 < n; r0 += step) {
        const int64_t r1 = min64(r0 + step, strips * RS);
        for (int64_t slot = 0; slot < s->n_runs; slot++) {
            const int64_t start = s->runs[slot].start, length = s->runs[slot].end - start;
            int64_t used = TILE / PW, end = 0;
            for (int64_t strip = r0 / RS; strip * RS < r1; strip++) {
                const int16_t *span = s->spans + (slot * STRIPS + strip) * 2;
                if (span[0] < span[1]) used = min64(used, span[0]), end = max64(end, span[1]);
            }
            if (used >= end) continue;
            memset(columns + used * PW, 0, (size_t)(end - used) * PW * sizeof(float));
            if (pooled) memset(most + used * PW, 0, (size_t)(end - used) * PW * sizeof(float));
            for (int64_t r = r0; r < r1; r++) {
                factor[r] = factor_of(s, slot, r);
                weight[r] = r >= n ? 0 : s->weight[r] * factor[r];
                s->center[r] = r >= n ? 0 : center[r] - (float)start;
            }
            for (int64_t r = r0; r < r1; ) {
                const int64_t strip = r / RS, count = r % GROUP == 0 && r1 - r >= GROUP ? GROUP : 1;
                const int16_t *span = s->spans + (slot * STRIPS + strip) * 2;
                const int64_t first = start + span[0] * PW;
                const float *p = s->p + s->runs[slot].at + strip * RS * length + span[0] * RS * PW + r % RS * PW;
                vf second[GROUP];
                (count == GROUP ? columns_8 : columns_1)(s, p, span[1] - span[0], r, weight + r, (float)(span[0] * PW),
                                                      columns + span[0] * PW, second);
                if (span[0] < span[1])
                    for (int64_t i = 0; i < count; i++) {
                        s->row[r + i].spread += (double)sum(second[i]) * factor[r + i];
                        if (norms)
                            contribution[r + i] += weight[r + i] * dot(p + i * PW, span[1] - span[0], norms + first,
                                                                       c->nk - first);
                    }
                if (pooled) highest_columns(p, span[1] - span[0], count, weight + r, most + span[0] * PW);
                else if (c->map)
                    for (int64_t i = 0; i < min64(count, n - r); i++)
                        write_row(p + i * PW, span[1] - span[0], weight[r + i], c->map + (base + r + i) * c->nk + first,
                                  c->nk - first);
                r += count;
            }
            add_columns(c, s, columns + used * PW, most + used * PW, start + used * PW, (end - used) * PW, query + r0);
        }
    }
    for (int64_t r = 0; r < n; r++) {
        Row *row = s->row + r;
        float *to_row = c->rows + base + r, weight = s->weight[r];
        const int64_t position = query + r + shift;
        put_extremes(c, row, base + r);
        if (c->n_prefix && (!c->counted || c->counted[batch * c->nq + query + r])) add_prefix(c, s, r, batch, position);
        if (!row->seen || row->total * weight == 0) { /* nothing has weight, the query is left out, or a sink takes all */
            for (int64_t i = 0; i < STATISTICS + c->n_ranges; i++) if (i != MAX_LOGIT) to_row[i * all] = 0;
            continue;
        }
        to_row[ENTROPY * all] = (float)fmax(log(row->total) - M_LN2 * row->bits / row->total, 0);
        to_row[EFFECTIVE_KEYS * all] = (float)(row->total * row->total / row->squares);
        to_row[DISTANCE * all] = (float)fmax(row->distance / row->total, 0);
        to_row[SPREAD * all] = (float)sqrt(row->spread / row->total);
        to_row[SINK * all] = weight_on(s, r, first_of(c, batch));
        to_row[SELF * all] = weight_on(s, r, position);
        to_row[PREVIOUS * all] = weight_on(s, r, position - 1);
        to_row[NEXT * all] = weight_on(s, r, position + 1);
        to_row[ROW_SUM * all] = (float)(row->total * weight);
        to_row[CONTRIBUTION * all] = !norms ? 0 : share_of_first(to_row[SINK * all], norms[first_of(c, batch)], contribution[r]);
        s->infinite |= contribution[r] != contribution[r];
        for (int64_t i = 0; i < c->n_ranges; i++) {
            const int32_t *range = c->ranges + i * 2 * (c->range_batch ? c->b : 1) * c->nq + batch * c->range_batch;
            const int64_t ends = (c->range_batch ? c->b : 1) * c->nq;
            to_row[(STATISTICS + i) * all] = mass_of(s, r, range[query + r], range[ends + query + r]);
        }
    }
}

/* ---- A call ----------------------------------------------------------------------------------------------------- */

/* Bits of the keys of a panel that exist and are no padding; the latter is also written to `kept` and `padded`. */
static uint32_t find_existing(const Call *c, const Space *s, int64_t batch, int64_t first) {
    uint32_t exist = 0;
    for (int64_t j = first; j < first + PW; j++) {
        const int real = j < c->nk && (!c->keep || c->keep[batch * c->nk + j]);
        exist |= (uint32_t)real << (j - first);
        if (!s->kept) continue;
        if (j % CELL == 0) s->padded[j / CELL] = 0;
        s->kept[j] = -real, s->padded[j / CELL] += !real;
    }
    return exist;
}

/* Pack the keys [from, to) of a key head; padding and keys beyond the end are 0. */
static void pack(const Call *c, const Space *s, int64_t batch, int64_t head, int64_t from, int64_t to) {
    const Number *k = c->k + batch * c->ks[0] + head * c->ks[1], *v = c->v + batch * c->vs[0] + head * c->vs[1];
    for (int64_t first = from; first < to; first += PW) {
        const uint32_t exist = find_existing(c, s, batch, first);
        pack_keys(k + first * c->ks[2], c->ks[2], exist, c->d, s->k + first / PW * key_size(c->d));
        if (c->out) pack_values(v + first * c->vs[2], c->vs[2], exist, c->dv, s->v + first / PW * value_size(c->dv));
    }
}

/* Write the sums over queries of one head, and set them to 0. */
static void finish(const Call *c, double *keys, int64_t size, int64_t bh) {
    const int64_t nkp = up(c->nk, TILE);
    for (int64_t j = 0; j < c->nk; j++) c->received[bh * c->nk + j] = (float)keys[j];
    for (int64_t i = 0; i < 2; i++)
        for (int64_t j = 0; j < c->n_prefix; j++)
            c->prefix[(i * c->b * c->h + bh) * c->n_prefix + j] = (float)keys[nkp + i * c->n_prefix + j];
    if (c->map && !of_pairs(c)) {
        const int64_t rows = (c->nq + c->bin_q - 1) / c->bin_q, cols = (c->nk + c->bin_k - 1) / c->bin_k;
        const double *of = keys + nkp + 2 * c->n_prefix;
        float *most = c->map + bh * rows * cols, *mean = most + c->b * c->h * rows * cols;
        for (int64_t i = 0; i < rows; i++) for (int64_t j = 0; j < cols; j++) {
            const int64_t pairs = min64(c->bin_q, c->nq - i * c->bin_q) * min64(c->bin_k, c->nk - j * c->bin_k);
            mean[i * cols + j] = (float)(of[i * cols + j] / (double)pairs);
            most[i * cols + j] = (float)of[(rows + i) * cols + j];
        }
    }
    memset(keys, 0, (size_t)size * sizeof(double));
}

static void *take(char **at, int64_t bytes) { char *x = *at; *at += up(bytes, 64); return x; }

/* Count the visible pairs of each query that counts, and of each key. */
static void count(const Call *c, int64_t heads) {
    const int64_t cells = (c->nk + CELL - 1) / CELL, shift = c->nk - c->nq;
    memset(c->visible_queries, 0, (size_t)(c->b * heads * c->nk) * sizeof(float));
    for (int64_t bh = 0; bh < c->b * heads; bh++) {
        const int64_t batch = bh / heads;
        const uint8_t *keep = c->keep ? c->keep + batch * c->nk : NULL;
        float *of_keys = c->visible_queries + bh * c->nk;
        int64_t from = 0, to = 0, kept = 0; /* the last query's keys, and how many of them are no padding */
        for (int64_t i = 0; i < c->nq; i++) {
            const int64_t lo = min64(max64(i + shift - c->high, 0), c->nk);
            const int64_t hi = max64(min64(i + shift - c->low + 1, c->nk), lo);
            const int counts = !c->counted || c->counted[batch * c->nq + i];
            int64_t seen = 0;
            if (!c->cells) { /* the band moves by one key; `of_keys` has the differences of neighbours first */
                for (; keep && to < hi; to++) kept += keep[to];
                for (; keep && from < lo; from++) kept -= keep[from];
                seen = counts ? keep ? kept : hi - lo : 0;
                if (counts && lo < hi) of_keys[lo]++;
                if (counts && lo < hi && hi < c->nk) of_keys[hi]--;
            }
            const int32_t *row = !c->cells ? NULL : c->cells + batch * c->cs[0] + bh % heads * c->cs[1] + i / BLOCK * cells;
            for (int64_t cell = lo / CELL; row && counts && cell * CELL < hi; cell++) {
                if (!row[cell]) continue;
                const uint64_t bits = row[cell] == 1 ? UINT64_MAX : c->bits[(row[cell] - 2) * (int64_t)BLOCK + i % BLOCK];
                for (int64_t j = max64(lo, cell * CELL); j < min64(hi, (cell + 1) * CELL); j++) {
                    const int on = (bits >> j % CELL & 1) && (!keep || keep[j]);
                    seen += on, of_keys[j] += (float)on;
                }
            }
            c->visible[bh * c->nq + i] = (float)seen;
        }
        int64_t sum = 0;
        for (int64_t j = 0; j < c->nk && !c->cells; j++) {
            sum += (int64_t)of_keys[j];
            of_keys[j] = keep && !keep[j] ? 0 : (float)sum;
        }
    }
}

/* Returns 0; 1 if there is no memory; 2 if a score or an output is infinite or NaN, so that results are not to be used.
 * The build gives it one name for each set of instructions. */
int qkv_attend(const Call *c) {
    const int64_t width = c->out ? output_width(c->dv) : 0, nkp = up(c->nk, TILE), group = c->h / c->hkv;
    const int64_t units = c->b * c->hkv;
    const int64_t blocks = (c->nq + BLOCK - 1) / BLOCK, items = group * blocks;
    const int64_t bins = c->map ? ((c->nq + c->bin_q - 1) / c->bin_q) * ((c->nk + c->bin_k - 1) / c->bin_k) : 0;
    const int64_t map = of_pairs(c) ? 0 : bins;
    const int64_t size = c->rows ? nkp + 2 * (c->n_prefix + map) : 0, maxima = size - map; /* sums, then maxima */
    const int64_t held = up(c->nk, CELL); /* a short text has few: malloc returns more than 128 KiB to the system in each call */
    const int64_t k_size = held / PW * key_size(c->d) * 4, v_size = c->out ? held / PW * value_size(c->dv) * 4 : 0;
    const int64_t q_size = STRIPS * query_size(c->d) * 4, factors = c->out ? BUFFERS * (TILE / PW * WEIGHT_SIZE) * 4 : 0;
    const int64_t scores = SEPARATE_SCORES && c->rows ? RS * TILE * 4 : 0;
    const int64_t cells = nkp / CELL; /* of all keys; `most`: those that a block of queries sees at most */
    const int64_t most = min64(c->cells ? c->widest : held / CELL, up(c->high - c->low + BLOCK, CELL) / CELL + 1);
    const int64_t p_size = (c->rows || has_level(c) ? BLOCK * CELL * most : RS * TILE) * 4;
    const int64_t candidates = has_level(c) ? CELL * most * 4 : 0;
    const double work = (double)c->b * c->h * c->nq * c->nk * (c->d + c->dv);
    const int threads = work < 2e6 || c->threads < 2 ? 1 : c->threads;
    const int alone = threads == 1 || (units >= 4 * threads) || units % threads == 0; /* a thread takes whole units */
    const int64_t kept = c->keep ? nkp + cells : 0, packed = up(k_size + v_size + kept * 4, 64) + 192;
    const int64_t own = (alone ? packed : 0) + sizeof(Space) + q_size + factors + scores + BLOCK * (width + most) * 4 + 2048
                      + p_size + candidates
                      + most * (STRIPS * 4 + (int64_t)sizeof(Run)) + cells * 4;
    const int64_t sums = alone ? size : group * size, shared = (alone ? 0 : packed) + threads * sums * 8 + 256;
    char *memory = aligned_alloc(4096, (size_t)up(threads * up(own, 4096) + shared, 4096));
    if (!memory) return 1;
    char *at = memory + threads * up(own, 4096);
    Packed *shared_k = take(&at, alone ? 0 : k_size), *shared_v = take(&at, alone ? 0 : v_size);
    int32_t *shared_kept = take(&at, alone ? 0 : kept * 4);
    double *keys = take(&at, threads * sums * 8); /* sums over queries of each thread: of one head, or of a group */
    memset(keys, 0, (size_t)(threads * sums) * 8);
    if (c->visible) count(c, c->visible_heads);
    int64_t next_unit = 0;
    int infinite = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(|:infinite)
    {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        char *mine = memory + me * up(own, 4096);
        Space *s = take(&mine, sizeof(Space));
        s->q = take(&mine, q_size), s->factors = take(&mine, factors), s->scores = take(&mine, scores);
        s->o = take(&mine, BLOCK * width * 4), s->p = take(&mine, p_size), s->candidates = take(&mine, candidates);
        s->offset = take(&mine, most * BLOCK * 4), s->spans = take(&mine, most * STRIPS * 4);
        s->runs = take(&mine, most * (int64_t)sizeof(Run)), s->run_of = take(&mine, cells * 4);
        s->k = alone ? take(&mine, k_size) : shared_k;
        s->v = alone ? take(&mine, v_size) : shared_v;
        s->kept = !c->keep ? NULL : alone ? take(&mine, kept * 4) : shared_kept;
        s->padded = c->keep ? s->kept + nkp : NULL;
        s->infinite = 0, s->rest = 1, s->slopes = NULL, s->late = (Late){0}, s->buffer = 0;
        begin_products();
        for (int64_t unit = 0; ; unit++) {
            if (alone) unit = __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
            if (unit >= units) break;
            const int64_t batch = unit / c->hkv, key_head = unit % c->hkv, used = up(c->nk, PW);
            if (alone) pack(c, s, batch, key_head, 0, used);
            else {
                const int64_t tiles = nkp / TILE;
                pack(c, s, batch, key_head, me * tiles / team * TILE, min64(used, (me + 1) * tiles / team * TILE));
                #pragma omp barrier
            }
            for (int64_t item = alone ? 0 : me; item < items; item += alone ? 1 : team) { /* the longest block first */
                const int64_t g = item / blocks;
                s->keys = keys + me * sums + (alone ? 0 : g * size);
                block(c, s, batch, key_head * group + g, (blocks - 1 - item % blocks) * BLOCK);
                if (alone && c->rows && item % blocks == blocks - 1) finish(c, s->keys, size, batch * c->h + key_head * group + g);
            }
            if (alone) continue;
            #pragma omp barrier
            if (c->rows) { /* the sums of all threads, always in the same order */
                #pragma omp for
                for (int64_t g = 0; g < group; g++) {
                    double *total = keys + g * size;
                    for (int64_t t = 1; t < team; t++) {
                        double *more = total + t * sums;
                        for (int64_t j = 0; j < size; j++) total[j] = j < maxima ? total[j] + more[j] : fmax(total[j], more[j]);
                        memset(more, 0, (size_t)size * 8);
                    }
                    finish(c, total, size, batch * c->h + key_head * group + g);
                }
            }
        }
        end_products();
        infinite |= s->infinite;
    }
    free(memory);
    return infinite ? 2 : 0;
}
