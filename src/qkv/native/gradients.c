/* Gradients of attention and of statistics of its weights, in one pass over the recomputed scores (CPU). Products are those of
 * the headers in isa/, as in the forward call; all else is float32.
 *
 * Let w_ij be the weights before any division, of a softmax the shares of the row, and A_ij = mass_i w_ij the final ones (the
 * mass of a softmax is 1 unless there is a sink). With the derivative w'_ij of a weight in its score, every gradient is of one
 * form, in which all but the first term are of statistics:
 *
 *     dscore_ij = w'_ij (mass_i (grad_out_i . v_j + received_j + masses_ij) + constant_i + bits_i log2 w_ij + weight_i w_ij
 *                        + far_i |j - i|)
 *
 * and masses_ij is the sum of the gradients of all masses that contain key j. So statistics cost a few more instructions for
 * each score, and no more products. For each block of BLOCK queries and each run of keys, strips of RS queries form their
 * scores and the products grad_out * V, then A and dscore in their place, then dq += dscore * K. After all strips of the
 * run, dv += A^T grad_out and dk += dscore^T q over all queries of the block. A gradient of what keys received needs
 * sum_j A_ij received_j of a whole row first, if its weights are divided by their sum; then the scores of a block are kept from
 * a first pass. The level of an entmax moves with each score: the bracket, for which the first pass then leaves room, loses its
 * mean over the row with the shares of w'. That of a softpick moves with each score s by e^(s - level), downwards where s < 0: w'
 * times the bracket then loses this times the sum of w times the bracket.
 *
 * A bias has the gradient dscore times the derivatives of the functions of the score after it. It is summed over the rows of a
 * strip by distance or by key, added to the table of a thread and head in double precision, and at the end of a key head the
 * tables of all threads are added in their order. A bias of each pair is summed in the gradient itself.
 */

/* How the gradient of a bias is summed. */
enum { BY_ROW, BY_KEY, ALONG_DIAGONALS, BY_PAIR, BY_ROW_AND_KEY };
typedef struct {
    int64_t kind;
    void *sums;         /* zeros, or NULL if it is not wanted; by row, by key and along diagonals double (b, h, nq), (b, h, nk)
                         * and (b, h, nq + nk - 1), entry j - i + nq - 1; by pair float */
    int64_t strides[3]; /* by pair: of batch, head and query; the keys are contiguous */
    double *rows;       /* by row and key: those by row, beside those by key in `sums` */
} BiasGradient;

typedef struct {
    Call call;             /* as in the forward call; `out` and `lse` are read, and queries that do not count have no gradient */
    const Number *grad_out; /* (b, h, nq, dv), the last dimension is contiguous; or NULL */
    int64_t gs[3];         /* its strides of batch, head and query */
    const float *grad_lse, *grad_entropy, *grad_effective, *grad_distance; /* (b, h, nq), or NULL */
    const float *grad_received;                                            /* (b, h, nk), or NULL */
    const float *grad_masses;  /* (call.n_ranges, b, h, nq), or NULL */
    const float *entropy, *effective, *distance, *masses; /* the statistics whose gradients are given */
    const float *mass;         /* (b, h, nq), the sum of the final weights of each row; NULL if it is 1 or not needed */
    const BiasGradient *biases; /* one for each bias of the call; or NULL */
    int64_t in_order;          /* whether all threads share each key head, and each takes the same queries of all heads, since
                                * batch items or heads add to the same sums by pair */
    float *dq, *dk, *dv;       /* contiguous; dv is NULL without grad_out */
    float *dsinks;             /* (b, h, nq): gradient of the sink by query, or NULL */
    float *dshift;             /* (b, h, nq): gradient of what is added to the scores of a query, or NULL */
    const float *grad_sinks;   /* (b, h, nq): gradient of the weight of the sink of an entmax, or NULL */
    const float *grad_max_logit; /* (b, h, nq): gradient of the largest score, or NULL */
    const int64_t *argmax;       /* (b, h, nq): its key, or -1 */
} Gradients;

typedef struct {
    Space s;                  /* of it: q, k, p (scores, then weights), o (dq), runs, spans, lo, hi, kept, padded */
    Packed *k_rows, *v;       /* K packed as values are, and V as keys are */
    Packed *q_rows, *out_rows; /* q and grad_out, packed by strip as factors of weights^T */
    Packed *grad;             /* strips of grad_out, packed as q is */
    float *ds;                /* dscore of a run, or of all if there are levels, like p */
    vf falls[BLOCK], moves[BLOCK]; /* of a row with a level, by lane: sums of w', and of w' times the bracket */
    double shift[BLOCK];      /* sums of dscore of a row */
    float *dk, *dv;           /* dk / scale, and dv: sums of this thread of whole cells of keys, in the order of the instruction set */
    float *received;          /* gradient of what the keys received [nkp], 0 if none */
    double *tables;           /* sums of this thread for biases [bias][head of the group][nq + nk - 1] */
    float lse[BLOCK], mass[BLOCK], constant[BLOCK], bits[BLOCK], weight[BLOCK], far[BLOCK];
} GradientSpace;

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* Scores p of row k on some panels become final weights, and products ds of grad_out and values, to which the gradients of the
 * masses were added, its gradients. Of a row with a level, scores stay scores, and ds becomes the bracket. */
INLINE void gradients_of(int kind, int statistics, GradientSpace *g, int64_t k, int64_t panels, float power, float *p, float *ds,
                         const float *received, float away) {
    const float lse = g->lse[k], mass = g->mass[k], constant = g->constant[k];
    vf falls = {0}, moves = {0}, place = iota() + away;
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, ds += RS * PW, received += PW)
        UNROLL for (int v = 0; v < NV; v++) {
            const vf t = load(p + v * VL) - lse;
            vf derivative = {0}, x = load(ds + v * VL), w;
            if (kind == SOFTPICK) w = choose(t <= -lse, (vf){0}, picked(load(p + v * VL), (vf){0} + lse));
            else w = weight_of(kind, t, power, &derivative);
            if (statistics) x += load(received + v * VL);
            x = x * mass + constant;
            if (statistics) {
                x += g->bits[k] * log_of_weight(kind, t, w) + g->weight[k] * w;
                x += g->far[k] * magnitude(place), place += (float)VL;
            }
            if (kind == SOFTPICK) moves += w * x, *(vf *)(ds + v * VL) = x;
            else if (kind >= SPARSEMAX) falls += derivative, moves += derivative * x, *(vf *)(ds + v * VL) = x;
            else *(vf *)(p + v * VL) = w * mass, *(vf *)(ds + v * VL) = derivative * x;
        }
    if (kind >= SPARSEMAX) g->falls[k] += falls, g->moves[k] += moves;
}
typedef void GradientsOf(GradientSpace *, int64_t, int64_t, float, float *, float *, const float *, float);
#define GRADIENTS(kind, statistics) static void gradients_##kind##_##statistics(GradientSpace *g, int64_t k, int64_t panels, \
        float power, float *p, float *ds, const float *received, float away) { \
    gradients_of(kind, statistics, g, k, panels, power, p, ds, received, away); }
#define BOTH_GRADIENTS(kind) GRADIENTS(kind, 0) GRADIENTS(kind, 1)
EACH_NORMALIZER(BOTH_GRADIENTS)
#define GRADIENTS_ENTRY(kind) [kind] = {gradients_##kind##_0, gradients_##kind##_1},
static GradientsOf *const GRADIENTS_OF[NORMALIZERS][2] = {EACH_NORMALIZER(GRADIENTS_ENTRY)}; /* without and with statistics */

/* The same for a row whose level moves: scores to weights, and the bracket less its mean to gradients. */
INLINE void level_gradients(int kind, float *p, float *ds, int64_t panels, float power, float level, float mass, float mean) {
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, ds += RS * PW)
        UNROLL for (int v = 0; v < NV; v++) {
            vf derivative;
            const vf zero = {0}, score = load(p + v * VL), x = load(ds + v * VL);
            if (kind == SOFTPICK) {
                const vf term = exp2_of(maximum(zero - 127, score - level));
                *(vf *)(p + v * VL) = choose(score <= 0, zero, picked(score, zero + level));
                *(vf *)(ds + v * VL) = term * choose(score > 0, x - mean, choose(score < 0, zero + mean, zero));
                continue;
            }
            *(vf *)(p + v * VL) = mass * weight_of(kind, score - level, power, &derivative);
            *(vf *)(ds + v * VL) = derivative * (x - mean);
        }
}
static void gradients_at_level(int64_t kind, float *p, float *ds, int64_t panels, float power, float level, float mass,
                               float mean) {
    if (kind == SPARSEMAX) level_gradients(SPARSEMAX, p, ds, panels, power, level, mass, mean);
    else if (kind == ENTMAX_15) level_gradients(ENTMAX_15, p, ds, panels, power, level, mass, mean);
    else if (kind == SOFTPICK) level_gradients(SOFTPICK, p, ds, panels, power, level, mass, mean);
    else level_gradients(ENTMAX, p, ds, panels, power, level, mass, mean);
}

/* Add ds * rows of K, some panels of a strip, to dq. */
static void add_queries(Space *s, const float *ds, int64_t panels, const Packed *k_rows, int64_t width, float *o) {
    for (int64_t panel = 0; WEIGHT_SIZE && panel < panels; panel++)
        for (int64_t r = 0; r < RS; r++) {
            vf x[NV];
            UNROLL for (int v = 0; v < NV; v++) x[v] = load(ds + (panel * RS + r) * PW + v * VL);
            put_weights(x, r, s->factors + panel * WEIGHT_SIZE);
        }
    start_output(WEIGHT_SIZE ? s->factors : (const Packed *)ds, panels, k_rows, width, o, &s->late);
    finish_output(&s->late);
}

/* ---- A block of queries ----------------------------------------------------------------------------------------- */

/* sum_j w_ij received_j of one row, in one run. */
INLINE double weighed(int kind, const float *p, int64_t panels, float offset, const float *received) {
    vf total = {0}, derivative;
    for (int64_t panel = 0; panel < panels; panel++, p += RS * PW, received += PW)
        UNROLL for (int v = 0; v < NV; v++)
            total += weight_of(kind, load(p + v * VL) - offset, 1, &derivative) * load(received + v * VL);
    return sum(total);
}
static double received_of(int64_t kind, const float *p, int64_t panels, float offset, const float *received) {
    return kind == SOFTMAX ? weighed(SOFTMAX, p, panels, offset, received) : kind == SIGMOID
        ? weighed(SIGMOID, p, panels, offset, received) : kind == RELU ? weighed(RELU, p, panels, offset, received)
        : kind == IDENTITY ? weighed(IDENTITY, p, panels, offset, received)
        : weighed(ELU_PLUS_ONE, p, panels, offset, received);
}

/* What is known of each row before its scores are; the gradient of the sink of a softmax, as far as known. */
static void row_terms(const Gradients *b, GradientSpace *g, int64_t r, int64_t batch, int64_t head, int64_t query,
                      const Number *grad_out) {
    const Call *c = &b->call;
    const int64_t all = c->b * c->h * c->nq, at = (batch * c->h + head) * c->nq + query;
    const double row_sum = b->mass ? b->mass[at] : 1;
    const int softmax = c->normalizer == SOFTMAX, divided = softmax || c->by_sum;
    const int vanishes = row_sum < 1e-37; /* no key has weight: no statistic of the row has a gradient */
    double mass = 1, total = 1, offset = 0, constant = 0; /* total: the sum of w */
    if (softmax) {
        mass = vanishes ? 1 : row_sum;
        offset = c->lse[at] == -INFINITY ? -LOWEST : (c->lse[at] + log(mass)) * M_LOG2E;
    } else {
        if (divided) mass = 1 / c->lse[at];
        else if (c->divisor) mass = 1 / of_query(c->divisor, c->ds, batch, head, query);
        if (has_level(c)) offset = c->lse[at] * M_LOG2E;
        else if (c->shift) offset = -of_query(c->shift, c->hs, batch, head, query) * M_LOG2E;
        total = row_sum / mass;
    }
    g->lse[r] = (float)offset, g->mass[r] = (float)mass;
    for (int64_t i = 0; divided && grad_out && i < c->dv; i++)
        constant -= (double)widened(grad_out[i]) * widened(c->out[at * c->dv + i]);
    if (b->grad_lse && c->lse[at] > -INFINITY) constant += b->grad_lse[at];
    for (int64_t i = 0; divided && b->grad_masses && i < c->n_ranges; i++)
        constant -= (double)b->grad_masses[i * all + at] * b->masses[i * all + at];
    if (b->dsinks) b->dsinks[at] = (float)constant;
    constant *= mass;
    if (b->grad_entropy && !vanishes) {
        constant -= b->grad_entropy[at] * (b->entropy[at] - log(total)) / total;
        g->bits[r] = (float)(-b->grad_entropy[at] * M_LN2 / total);
    }
    if (b->grad_effective && !vanishes) {
        const double by = 2 * (double)b->grad_effective[at] * b->effective[at] / total;
        constant += by;
        g->weight[r] = (float)(-by * b->effective[at] / total);
    }
    if (b->grad_distance && !vanishes) {
        constant -= (double)b->grad_distance[at] * b->distance[at] / total;
        g->far[r] = (float)(b->grad_distance[at] / total);
    }
    g->constant[r] = (float)constant;
}

/* The mean bracket of a row, by the shares of w': by how much of a gradient its level moves. */
static float mean_of(const Gradients *b, const GradientSpace *g, int64_t r, int64_t batch, int64_t head, int64_t query) {
    const Call *c = &b->call;
    const int64_t at = (batch * c->h + head) * c->nq + query;
    double fall = sum(g->falls[r]), move = sum(g->moves[r]);
    if (c->normalizer == SOFTPICK) return (float)move;
    const double grad = b->grad_sinks ? b->grad_sinks[at] : 0;
    float of_sink;
    weight_of_sink(c, batch, head, query, g->lse[r], &of_sink);
    fall += of_sink, move += of_sink * grad;
    const double mean = fall > 0 ? move / fall : 0;
    if (b->dsinks) b->dsinks[at] = (float)(of_sink * (grad - mean));
    return (float)mean;
}

/* Add the gradients of masses with respect to the weights of a strip in a run. */
static void add_masses(const Gradients *b, float *ds, int64_t panels, int64_t first, int64_t batch, int64_t head,
                       int64_t query, int64_t rows) {
    const Call *c = &b->call;
    const int64_t batches = c->range_batch ? c->b : 1, last = min64(first + panels * PW, c->nk);
    for (int64_t i = 0; b->grad_masses && i < c->n_ranges; i++)
        for (int64_t r = 0; r < rows; r++) {
            const int32_t *range = c->ranges + i * 2 * batches * c->nq + batch * c->range_batch + query + r;
            const float grad = b->grad_masses[((i * c->b + batch) * c->h + head) * c->nq + query + r];
            const int64_t from = max64(range[0], first), to = min64(range[batches * c->nq], last);
            for (int64_t j = from - first; j < to - first && grad != 0; j++)
                ds[j / PW * RS * PW + r * PW + j % PW] += grad;
        }
}

/* Add the gradients of the largest scores of a strip in a run; `at` is the first query of the strip. */
static void add_largest(const Gradients *b, float *ds, int64_t panels, int64_t first, int64_t at, int64_t rows) {
    for (int64_t r = 0; b->grad_max_logit && r < rows; r++) {
        const int64_t j = b->argmax[at + r] - first;
        if (j >= 0 && j < panels * PW) ds[j / PW * RS * PW + r * PW + j % PW] += b->grad_max_logit[at + r];
    }
}

/* The sum of a row of a strip. */
static float sum_row(const float *ds, int64_t panels) {
    vf total = {0};
    for (int64_t panel = 0; panel < panels; panel++, ds += RS * PW)
        UNROLL for (int v = 0; v < NV; v++) total += load(ds + v * VL);
    return sum(total);
}

/* Sum over `rows` rows of a strip, the next of which is `shift` places to the left; `sums` starts with the last. */
static void sum_rows(const float *ds, int64_t panels, int64_t rows, int64_t shift, float *sums) {
    memset(sums, 0, (size_t)(panels * PW + RS) * sizeof(float));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t panel = 0; panel < panels; panel++)
            UNROLL for (int v = 0; v < NV; v++) {
                vu *to = (vu *)(sums + (rows - 1 - r) * shift + panel * PW + v * VL);
                *to += load(ds + panel * RS * PW + r * PW + v * VL);
            }
}

/* From the gradients ds of the final scores of a strip, those of its biases, and in place those of the products. */
static void bias_gradients(const Gradients *b, const GradientSpace *g, float *ds, int64_t panels, const float *slopes,
                           int64_t first, int64_t batch, int64_t head, int64_t query, int64_t rows) {
    const Call *c = &b->call;
    const int64_t distances = c->nq + c->nk - 1, group = c->h / c->hkv, last = min64(first + panels * PW, c->nk);
    for (const Bias *bias = c->biases; slopes && bias < c->biases + c->n_biases; bias++)
        if (bias->kind >= SOFT_CAP) slopes += g->s.cap_size;
    for (int64_t i = c->n_biases - 1; i >= 0; i--) {
        if (c->biases[i].kind >= SOFT_CAP) {
            slopes -= g->s.cap_size;
            for (int64_t panel = 0; panel < panels; panel++)
                for (int64_t at = panel * RS * PW; at < panel * RS * PW + rows * PW; at += VL)
                    *(vf *)(ds + at) = load(ds + at) * load(slopes + at);
            continue;
        }
        const BiasGradient *to = b->biases ? b->biases + i : NULL;
        if (!to || !to->sums) continue;
        if (to->kind != BY_ROW && to->kind != BY_PAIR) {
            const int64_t shift = to->kind == ALONG_DIAGONALS, at = first + shift * (c->nq - query - rows);
            double *table = g->tables + (i * group + head % group) * distances + at;
            float sums[TILE + RS];
            sum_rows(ds, panels, rows, shift, sums);
            for (int64_t j = 0; j < last - first + shift * (rows - 1); j++) table[j] += sums[j];
        }
        double *of_rows = to->kind == BY_ROW ? to->sums : to->kind == BY_ROW_AND_KEY ? to->rows : NULL;
        for (int64_t r = 0; r < rows && of_rows; r++)
            of_rows[(batch * c->h + head) * c->nq + query + r] += sum_row(ds + r * PW, panels);
        for (int64_t r = 0; r < rows && to->kind == BY_PAIR; r++) {
            float *row = (float *)to->sums + batch * to->strides[0] + head * to->strides[1] + (query + r) * to->strides[2];
            for (int64_t j = first; j < last; j += VL) {
                const int64_t panel = (j - first) / PW;
                const float *from = ds + panel * RS * PW + r * PW + (j - first) % PW;
                if (j + VL <= last) *(vu *)(row + j) += load(from);
                else for (int64_t k = j; k < last; k++) row[k] += from[k - j];
            }
        }
    }
}

static void block_gradients(const Gradients *b, GradientSpace *g, int64_t batch, int64_t head, int64_t query) {
    const Call *c = &b->call;
    Space *s = &g->s;
    const int64_t n = min64(BLOCK, c->nq - query), strips = (n + RS - 1) / RS, shift = c->nk - c->nq;
    const int64_t d = c->d, dv = b->grad_out ? c->dv : 0, dp = output_width(d), dvp = output_width(dv);
    const int64_t base = (batch * c->h + head) * c->nq + query;
    const int statistics = b->grad_received || b->mass || b->grad_entropy || b->grad_effective || b->grad_distance
                           || b->grad_masses;
    const int level = has_level(c), twice = level || (b->grad_received && (c->normalizer == SOFTMAX || c->by_sum));
    GradientsOf *const gradients = GRADIENTS_OF[c->normalizer][statistics];
    const Number *q = c->q + batch * c->qs[0] + head * c->qs[1] + query * c->qs[2];
    const Number *grad = b->grad_out ? b->grad_out + batch * b->gs[0] + head * b->gs[1] + query * b->gs[2] : NULL;
    int64_t from = INT64_MAX, to = 0;
    for (int64_t r = 0; r < strips * RS; r++) {
        const int64_t position = query + r + shift;
        const int counts = r < n && (!c->counted || c->counted[batch * c->nq + query + r]);
        int64_t lo = max64(position - c->high, 0), hi = counts ? min64(position - c->low + 1, c->nk) : 0;
        if (lo >= hi) lo = hi = 0;
        else from = min64(from, lo), to = max64(to, hi);
        s->lo[r] = lo, s->hi[r] = hi;
        g->constant[r] = g->bits[r] = g->weight[r] = g->far[r] = 0, g->mass[r] = 1, g->lse[r] = -LOWEST;
        g->falls[r] = g->moves[r] = (vf){0}, g->shift[r] = 0;
        if (r < n) row_terms(b, g, r, batch, head, query + r, grad ? grad + r * b->gs[2] : NULL);
    }
    for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t rows = min64(RS, n - strip * RS), row = strip * RS;
        pack_queries(q + row * c->qs[2], c->qs[2], rows, d, c->scale * (float)M_LOG2E, s->q + strip * query_size(d));
        pack_rows(q + row * c->qs[2], c->qs[2], rows, d, g->q_rows + strip * row_size(d));
        if (!grad) continue;
        pack_queries(grad + row * b->gs[2], b->gs[2], rows, dv, 1, g->grad + strip * query_size(dv));
        pack_rows(grad + row * b->gs[2], b->gs[2], rows, dv, g->out_rows + strip * row_size(dv));
    }
    s->cells = c->cells ? c->cells + batch * c->cs[0] + head * c->cs[1] + query / BLOCK * ((c->nk + CELL - 1) / CELL) : NULL;
    find_runs(c, s, from, to);
    memset(s->o, 0, (size_t)(strips * RS * dp) * sizeof(float));
    memset(s->spans, 0, (size_t)(s->n_runs * STRIPS * 2) * sizeof *s->spans);
    double seen[BLOCK] = {0};
    float mean[BLOCK] = {0};
    for (int pass = twice ? 0 : 1; pass < 2; pass++) {
        for (int64_t slot = 0; slot < s->n_runs; slot++) {
            const Run *run = s->runs + slot;
            const int64_t start = run->start, panels = (run->end - start) / PW, apart = RS * (panels + 1) * PW;
            float *p = s->p + (twice ? run->at + slot * BLOCK * PW : 0);
            float *ds = g->ds + (level ? run->at + slot * BLOCK * PW : 0);
            int16_t *spans = s->spans + slot * STRIPS * 2;
            for (int64_t strip = 0; strip < strips; strip++) {
                float scale = 1;
                vf top[RS];
                if (!pass || !twice)
                    scale = strip_scores(c, s, p + strip * apart, run, spans + 2 * strip, strip, batch, head, query, top, NULL);
                const int64_t row = strip * RS, used = spans[2 * strip + 1] - spans[2 * strip], rows = min64(RS, n - row);
                const int64_t first = start + spans[2 * strip] * PW, at = strip * apart + spans[2 * strip] * RS * PW;
                if (!used) continue;
                for (int64_t i = 0; SCALED_LATER && scale != 1 && i < used * RS * PW; i += VL) *(vf *)(p + at + i) *= scale;
                for (int64_t r = 0; r < RS && !pass && !level; r++)
                    seen[row + r] += received_of(c->normalizer, p + at + r * PW, used, g->lse[row + r], g->received + first);
                if (level ? !pass : pass) {
                    for (int r = 0; r < RS; r++) top[r] = (vf){0};
                    scores(g->grad + strip * query_size(dv), g->v + first / PW * key_size(dv), used, dv, ds + at, top, NULL);
                    if (statistics) add_masses(b, ds + at, used, first, batch, head, query + row, rows);
                    for (int64_t r = 0; r < RS; r++)
                        gradients(g, row + r, used, c->power, p + at + r * PW, ds + at + r * PW, g->received + first,
                                  (float)(first - (query + row + r + shift)));
                }
                if (!pass) continue;
                for (int64_t r = 0; r < RS && level; r++)
                    gradients_at_level(c->normalizer, p + at + r * PW, ds + at + r * PW, used, c->power, g->lse[row + r],
                                       g->mass[row + r], mean[row + r]);
                for (int64_t r = 0; r < rows && b->dshift; r++) g->shift[row + r] += sum_row(ds + at + r * PW, used);
                add_largest(b, ds + at, used, first, base + row, rows);
                if (c->n_biases)
                    bias_gradients(b, g, ds + at, used, s->slopes ? s->slopes + (p + at - s->p) : NULL, first, batch, head,
                                   query + row, rows);
                add_queries(s, ds + at, used, g->k_rows + first / PW * value_size(d), dp, s->o + row * dp);
            }
            if (!pass) continue;
            if (dv) add_keys(p, panels, strips, spans, g->out_rows, dvp, s->factors, g->dv + start * dvp);
            add_keys(ds, panels, strips, spans, g->q_rows, dp, s->factors, g->dk + start * dp);
        }
        for (int64_t r = 0; !pass && r < n; r++) {
            if (level) {
                mean[r] = mean_of(b, g, r, batch, head, query + r);
                continue;
            }
            const float received = g->mass[r] * (float)seen[r];
            g->constant[r] -= g->mass[r] * received;
            if (b->dsinks) b->dsinks[base + r] -= received;
        }
    }
    for (int64_t r = 0; r < n; r++) {
        for (int64_t i = 0; i < d; i++) b->dq[(base + r) * d + i] = s->o[r * dp + i] * c->scale;
        if (b->dshift) b->dshift[base + r] = (float)g->shift[r];
        if (b->dsinks && !level) { /* times the weight of the sink */
            const float sink = c->sinks[batch * c->ss[0] + head * c->ss[1] + (query + r) * c->ss[2]];
            const double weight = sink == -INFINITY ? 0 : exp((double)sink - c->lse[base + r]);
            b->dsinks[base + r] = weight == 0 ? 0 : b->dsinks[base + r] * (float)weight;
        }
    }
}

/* ---- A call ----------------------------------------------------------------------------------------------------- */

/* Pack the keys [from, to) of a key head; padding and keys beyond the end are 0. */
static void pack_gradient(const Call *c, const GradientSpace *g, int64_t dv, int64_t batch, int64_t head, int64_t from,
                          int64_t to) {
    const int64_t d = c->d;
    const Number *k = c->k + batch * c->ks[0] + head * c->ks[1], *v = c->v + batch * c->vs[0] + head * c->vs[1];
    for (int64_t first = from; first < to; first += PW) {
        const uint32_t exist = find_existing(c, &g->s, batch, first);
        pack_keys(k + first * c->ks[2], c->ks[2], exist, d, g->s.k + first / PW * key_size(d));
        pack_values(k + first * c->ks[2], c->ks[2], exist, d, g->k_rows + first / PW * value_size(d));
        pack_keys(v + first * c->vs[2], c->vs[2], exist, dv, g->v + first / PW * key_size(dv));
    }
}

/* Write the gradients of the keys [from, to) of a key head: sums over `count` threads, whose sums lie `apart` bytes. */
static void write_keys(const Gradients *b, const GradientSpace *g, int64_t unit, int64_t from, int64_t to, int64_t count,
                       int64_t apart) {
    const Call *c = &b->call;
    for (int value = 0; value < (b->grad_out ? 2 : 1); value++) {
        const int64_t width = value ? c->dv : c->d, padded = output_width(width);
        const char *sums = (const char *)(value ? g->dv : g->dk);
        float *to_keys = (value ? b->dv : b->dk) + unit * c->nk * width;
        for (int64_t j = from; j < min64(to, c->nk); j++)
            for (int64_t i = 0; i < width; i++) {
                float total = 0;
                const int64_t at = place_of_sum(j, i, padded);
                for (int64_t t = 0; t < count; t++) total += ((const float *)(sums + t * apart))[at];
                to_keys[j * width + i] = value ? total : total * c->scale;
            }
    }
}

/* Write the sums [from, to) of the tables of the biases for the heads of a key head, over threads as in `write_keys`. */
static void write_tables(const Gradients *b, const GradientSpace *g, int64_t unit, int64_t from, int64_t to, int64_t count,
                         int64_t apart) {
    const Call *c = &b->call;
    const int64_t distances = c->nq + c->nk - 1, group = c->h / c->hkv;
    for (int64_t i = 0; i < c->n_biases; i++) {
        const BiasGradient *bias = b->biases + i;
        if (!bias->sums || bias->kind == BY_ROW || bias->kind == BY_PAIR) continue;
        const int64_t size = bias->kind == ALONG_DIAGONALS ? distances : c->nk;
        for (int64_t head = 0; head < group; head++)
            for (int64_t j = from; j < min64(to, size); j++) {
                double total = 0;
                for (int64_t t = 0; t < count; t++) {
                    const double *tables = (const double *)((const char *)g->tables + t * apart);
                    total += tables[(i * group + head) * distances + j];
                }
                ((double *)bias->sums)[(unit * group + head) * size + j] = total;
            }
    }
}

/* Returns 0, or 1 if there is no memory. With the same number of threads, the same bits in each call. */
int qkv_gradients(const Gradients *b) {
    const Call *c = &b->call;
    const int64_t d = c->d, dv = b->grad_out ? c->dv : 0, dp = output_width(d), dvp = output_width(dv);
    const int64_t nkp = up(c->nk, TILE), held = up(c->nk, CELL);
    const int64_t k_size = held / PW * key_size(d), v_size = held / PW * key_size(dv);
    const int64_t k_rows = held / PW * value_size(d), q_size = STRIPS * query_size(d), grad = STRIPS * query_size(dv);
    const int64_t q_rows = STRIPS * row_size(d), out_rows = STRIPS * row_size(dv), factors = TILE / PW * WEIGHT_SIZE;
    const int64_t group = c->h / c->hkv, units = c->b * c->hkv, blocks = (c->nq + BLOCK - 1) / BLOCK;
    const int64_t cells = nkp / CELL, tiles = nkp / TILE;
    const int64_t most = min64(c->cells ? c->widest : held / CELL, up(c->high - c->low + BLOCK, CELL) / CELL + 1);
    const int64_t scores = b->grad_received || has_level(c) ? most * BLOCK * (CELL + PW) : BLOCK * (TILE + PW);
    const double work = (double)c->b * c->h * c->nq * c->nk * (d + dv);
    const int threads = work < 1e6 || c->threads < 2 ? 1 : c->threads;
    const int whole = units >= 4 * threads || units % threads == 0;
    const int alone = threads == 1 || (whole && !b->in_order); /* a thread takes whole units */
    const int64_t distances = c->nq + c->nk - 1, tables = b->biases ? c->n_biases * group * distances : 0;
    int64_t caps = 0;
    for (int64_t i = 0; i < c->n_biases; i++) caps += c->biases[i].kind >= SOFT_CAP;
    const int64_t ds = has_level(c) ? scores : BLOCK * (TILE + PW);
    const int64_t kept = c->keep ? nkp + cells : 0, packed = (k_size + k_rows + v_size + kept) * 4 + 256;
    const int64_t own = up((int64_t)sizeof(GradientSpace)
        + (q_size + grad + q_rows + out_rows + factors + BLOCK * dp + held * (dp + dvp) + nkp) * 4
        + ((1 + caps) * scores + ds) * 4 + tables * 8 + most * (STRIPS * 4 + (int64_t)sizeof(Run)) + cells * 4
        + (alone ? packed : 0) + 2048, 4096);
    char *memory = aligned_alloc(4096, (size_t)up(threads * own + (alone ? 0 : packed), 4096));
    if (!memory) return 1;
    int64_t next_unit = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t each = b->in_order ? up(blocks, team) : blocks; /* a thread has the same blocks of all heads */
        char *mine = memory + me * own, *shared = memory + threads * own;
        GradientSpace *g = take(&mine, sizeof(GradientSpace));
        Space *s = &g->s;
        g->dk = take(&mine, held * dp * 4), g->dv = take(&mine, held * dvp * 4), g->received = take(&mine, nkp * 4);
        s->q = take(&mine, q_size * 4), g->grad = take(&mine, grad * 4), s->o = take(&mine, BLOCK * dp * 4);
        g->q_rows = take(&mine, q_rows * 4), g->out_rows = take(&mine, out_rows * 4);
        s->factors = take(&mine, factors * 4), s->late = (Late){0};
        s->p = take(&mine, scores * 4), g->ds = take(&mine, ds * 4);
        s->spans = take(&mine, most * STRIPS * 4), s->runs = take(&mine, most * (int64_t)sizeof(Run));
        s->run_of = take(&mine, cells * 4);
        s->slopes = caps ? take(&mine, caps * scores * 4) : NULL, s->cap_size = scores;
        g->tables = take(&mine, tables * 8);
        char **from = alone ? &mine : &shared;
        s->k = take(from, k_size * 4), g->k_rows = take(from, k_rows * 4), g->v = take(from, v_size * 4);
        s->kept = c->keep ? take(from, kept * 4) : NULL, s->padded = c->keep ? s->kept + nkp : NULL;
        memset(g->received, 0, (size_t)nkp * 4);
        begin_products();
        for (int64_t unit = 0; ; unit++) {
            if (alone) unit = __atomic_fetch_add(&next_unit, 1, __ATOMIC_RELAXED);
            if (unit >= units) break;
            const int64_t batch = unit / c->hkv, key_head = unit % c->hkv, used = up(c->nk, PW);
            const int64_t part0 = alone ? 0 : me * tiles / team * TILE, part1 = alone ? nkp : (me + 1) * tiles / team * TILE;
            memset(g->dk, 0, (size_t)(used * dp) * 4), memset(g->dv, 0, (size_t)(used * dvp) * 4);
            memset(g->tables, 0, (size_t)tables * 8);
            pack_gradient(c, g, dv, batch, key_head, part0, min64(used, part1));
            if (!alone) {
                #pragma omp barrier
            }
            int64_t head = -1; /* the longest block first */
            for (int64_t item = alone ? 0 : me; item < group * each; item += alone ? 1 : team) {
                if (item % each >= blocks) continue;
                const int64_t at = key_head * group + item / each;
                if (at != head && b->grad_received)
                    memcpy(g->received, b->grad_received + (batch * c->h + at) * c->nk, (size_t)c->nk * 4);
                head = at;
                block_gradients(b, g, batch, head, (blocks - 1 - item % each) * BLOCK);
            }
            if (alone) {
                write_keys(b, g, unit, 0, nkp, 1, 0);
                if (tables) write_tables(b, g, unit, 0, distances, 1, 0);
            } else {
                #pragma omp barrier
                write_keys(b, (const GradientSpace *)memory, unit, part0, part1, team, own);
                if (tables)
                    write_tables(b, (const GradientSpace *)memory, unit, me * distances / team, (me + 1) * distances / team,
                                 team, own);
                #pragma omp barrier
            }
        }
        end_products();
    }
    free(memory);
    return 0;
}
