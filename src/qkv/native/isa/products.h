/* Products of strips and panels by vectors, and the packing for them: sums of MR rows * nv vectors stay in registers.
 *
 * Packed are strips of q [steps][RS], panels of K [steps][PW], and of V [PW / EACH][width]; a step is EACH numbers. */
INLINE int64_t output_width(int64_t dv) { return up(dv, VL); }
INLINE int64_t steps_of(int64_t d) { return up(d, EACH) / EACH; }
INLINE int64_t query_size(int64_t d) { return steps_of(d) * RS; } /* of a strip */
INLINE int64_t key_size(int64_t d) { return steps_of(d) * PW; }   /* of a panel */
INLINE int64_t value_size(int64_t dv) { return PW / EACH * output_width(dv); }

/* A thread is about to make products, or has made its last one. */
INLINE void begin_products(void) {}
INLINE void end_products(void) {}

/* The next numbers, as the factors of a step; `left` numbers exist, and the others are 0. */
INLINE Packed packed(const Number *x, int64_t left) {
    Packed y = 0;
    if (left < EACH) memcpy(&y, x, sizeof *x);
    else memcpy(&y, x, sizeof y);
    return y;
}

/* Pack a strip, `rows` queries of which exist. */
static void pack_queries(const Number *q, int64_t stride, int64_t rows, int64_t d, float scale, Packed *to) {
    for (int64_t r = 0; r < RS; r++)
        for (int64_t i = 0; i < steps_of(d); i++)
            to[i * RS + r] = scaled_query(r < rows ? packed(q + r * stride + i * EACH, d - i * EACH) : 0, scale);
}

/* Pack a panel of keys: 0 unless their bit of `exist` is 1, so that NaN in the others is harmless. */
static void pack_keys(const Number *k, int64_t stride, uint32_t exist, int64_t d, Packed *to) {
    for (int64_t j = 0; j < PW; j++)
        for (int64_t i = 0; i < steps_of(d); i++)
            to[i * PW + j] = exist >> j & 1 ? packed(k + j * stride + i * EACH, d - i * EACH) : 0;
}
static void pack_values(const Number *v, int64_t stride, uint32_t exist, int64_t dv, Packed *to) {
    for (int64_t j = 0; j < PW; j++) {
        Packed *row = to + j / EACH * output_width(dv);
        const int64_t used = exist >> j & 1 ? dv : 0;
        for (int64_t i = 0; i < used; i++) row[i] = placed(row[i], v[j * stride + i], j % EACH);
        for (int64_t i = used; i < output_width(dv); i++) row[i] = placed(row[i], 0, j % EACH);
    }
}

/* acc[r][v] += a[r * row] * b[v]: one step of a micro-kernel. */
INLINE void step(vf acc[MR][4], int nv, const Packed *a, int64_t row, const Packed *b) {
    vp x[4];
    UNROLL for (int v = 0; v < nv; v++) x[v] = *(const vp *)(b + v * VL);
    UNROLL for (int r = 0; r < MR; r++) UNROLL for (int v = 0; v < nv; v++)
        acc[r][v] = product(acc[r][v], a[r * row], x[v]);
}

/* Scores of a strip and some panels of keys, and the largest of each row by lane; and the smallest, unless `low` is NULL. */
static void scores(const Packed *q, const Packed *k, int64_t panels, int64_t d, float *s, vf top[RS], vf *low) {
    const int64_t steps = steps_of(d);
    for (int64_t panel = 0; panel < panels; panel++, k += steps * PW, s += RS * PW)
        UNROLL for (int m = 0; m < RS; m += MR) {
            vf acc[MR][4] = {0};
            for (int64_t i = 0; i < steps; i++) step(acc, NV, q + i * RS + m, 1, k + i * PW);
            UNROLL for (int r = 0; r < MR; r++) {
                vf t = top[m + r];
                UNROLL for (int v = 0; v < NV; v++) {
                    *(vf *)(s + (m + r) * PW + v * VL) = acc[r][v];
                    t = maximum(acc[r][v], t);
                }
                top[m + r] = t;
                if (!low) continue;
                t = low[m + r];
                UNROLL for (int v = 0; v < NV; v++) t = minimum(acc[r][v], t);
                low[m + r] = t;
            }
        }
}

/* Add weights * values to nv vectors of the output of a strip. */
INLINE void output_of(int nv, const Packed *p, int64_t panels, const Packed *v, int64_t width, float *o) {
    enum { STEPS = PW / EACH };
    UNROLL for (int m = 0; m < RS; m += MR) {
        vf acc[MR][4];
        UNROLL for (int r = 0; r < MR; r++) UNROLL for (int i = 0; i < nv; i++)
            acc[r][i] = load(o + (m + r) * width + i * VL);
        const Packed *a = p + m * STEPS, *b = v;
        for (int64_t panel = 0; panel < panels; panel++, a += (RS - 1) * STEPS)
            for (int j = 0; j < STEPS; j++, a++, b += width) step(acc, nv, a, STEPS, b);
        UNROLL for (int r = 0; r < MR; r++) UNROLL for (int i = 0; i < nv; i++)
            *(vf *)(o + (m + r) * width + i * VL) = acc[r][i];
    }
}
static void output_1(const Packed *p, int64_t n, const Packed *v, int64_t width, float *o) {
    output_of(1, p, n, v, width, o);
}
static void output_2(const Packed *p, int64_t n, const Packed *v, int64_t width, float *o) {
    output_of(2, p, n, v, width, o);
}
static void output_widest(const Packed *p, int64_t n, const Packed *v, int64_t width, float *o) {
    output_of(WIDEST, p, n, v, width, o);
}
/* How many of the vectors that are left come next: 4 are 2 + 2, not 3 + 1. */
INLINE int next_vectors(int64_t left) { return left >= WIDEST && left != WIDEST + 1 ? WIDEST : left >= 2 ? 2 : 1; }

/* Add weights * values to the output [RS][width] of a strip. */
static void output(const Packed *p, int64_t panels, const Packed *v, int64_t width, float *o) {
    for (int64_t left = width / VL, c = 0; left; ) {
        const int n = next_vectors(left);
        (n == 1 ? output_1 : n == 2 ? output_2 : output_widest)(p, panels, v + c, width, o + c);
        left -= n, c += n * VL;
    }
}

/* The output of a strip could wait until the weights of the next one are computed; here it does not. */
typedef struct { float *o; } Late;
INLINE void start_output(const Packed *p, int64_t panels, const Packed *v, int64_t width, float *o, Late *late) {
    (void)late, output(p, panels, v, width, o);
}
INLINE void advance_output(Late *late) { (void)late; }
INLINE void finish_output(Late *late) { (void)late; }
