/* Products of float32 by multiply-add of vectors; a header of registers comes before. Queries are packed with the scale. */
typedef float Number, Packed; /* of q, k, v and the output; the factors of one step of a product */
enum { EACH = 1, SCALED_LATER = 0, SEPARATE_SCORES = 0, BUFFERS = 1, WEIGHT_SIZE = 0 };
typedef Packed vp __attribute__((vector_size(VL * 4), may_alias));

INLINE vf product(vf sum, Packed a, vp b) { return sum + a * b; }
INLINE float widened(Number x) { return x; }
INLINE Number rounded(float x) { return x; }
INLINE Packed placed(Packed others, Number x, int64_t place) { (void)others, (void)place; return x; }
INLINE Packed scaled_query(Packed q, float scale) { return q * scale; }
INLINE void put_weights(const vf w[NV], int64_t row, Packed *to) { (void)w, (void)row, (void)to; } /* they are factors */
#include "products.h"

/* ---- Gradients of keys ------------------------------------------------------------------------------------------ */

/* Packed are rows of queries as they are [RS][width]; sums are [key][width]. */
INLINE int64_t row_size(int64_t d) { return RS * output_width(d); } /* of a strip */
INLINE int64_t place_of_sum(int64_t key, int64_t i, int64_t width) { return key * width + i; }
static void pack_rows(const Number *x, int64_t stride, int64_t rows, int64_t d, Packed *to) {
    for (int64_t r = 0; r < RS; r++)
        for (int64_t i = 0; i < output_width(d); i++) *to++ = r < rows && i < d ? x[r * stride + i] : 0;
}

/* Add weights^T * rows of some strips, which are `apart` floats apart, to nv vectors of MR keys. */
INLINE void keys_of(int nv, const float *p, int64_t apart, int64_t strips, const float *rows, int64_t width, float *to) {
    vf acc[MR][4] = {0}; /* a sum of its own for each block: a third of the rounding errors of one chain over all queries */
    for (int64_t strip = 0; strip < strips; strip++, p += apart)
        for (int r = 0; r < RS; r++, rows += width) step(acc, nv, p + r * PW, 1, rows);
    UNROLL for (int r = 0; r < MR; r++) UNROLL for (int i = 0; i < nv; i++) *(vf *)(to + r * width + i * VL) += acc[r][i];
}
typedef void AddKeys(const float *, int64_t, int64_t, const float *, int64_t, float *);
static void keys_1(const float *p, int64_t apart, int64_t n, const float *rows, int64_t width, float *to) {
    keys_of(1, p, apart, n, rows, width, to);
}
static void keys_2(const float *p, int64_t apart, int64_t n, const float *rows, int64_t width, float *to) {
    keys_of(2, p, apart, n, rows, width, to);
}
static void keys_widest(const float *p, int64_t apart, int64_t n, const float *rows, int64_t width, float *to) {
    keys_of(WIDEST, p, apart, n, rows, width, to);
}

/* Add weights^T * rows of a block to the keys of a run; a strip has the panels of its span only. */
static void add_keys(const float *p, int64_t panels, int64_t strips, const int16_t *spans, const Packed *rows, int64_t width,
                     Packed *factors, float *to) {
    (void)factors;
    const int64_t apart = RS * (panels + 1) * PW;
    for (int64_t left = width / VL, c = 0; left; ) {
        const int n = next_vectors(left);
        AddKeys *add = n == 1 ? keys_1 : n == 2 ? keys_2 : keys_widest;
        for (int panel = 0; panel < panels; panel++)
            for (int64_t strip = 0, end; strip < strips; strip = end) {
                for (end = strip; end < strips && spans[2 * end] <= panel && panel < spans[2 * end + 1]; end++);
                if (end == strip) { end++; continue; }
                for (int j = 0; j < PW; j += MR)
                    add(p + strip * apart + panel * RS * PW + j, apart, end - strip, rows + strip * RS * width + c, width,
                        to + (panel * PW + j) * width + c);
            }
        left -= n, c += n * VL;
    }
}
