/* Products of pairs of bfloat16, summed in float32: by AVX512_BF16, or elsewhere by the same sums of vectors, to test them.
 * A header of registers comes before; a factor is 2 numbers, so that sums and factors have its register plan.
 * Queries are packed without the scale, with which they would be rounded, and weights are rounded to factors. */
typedef uint16_t Number; /* of q, k, v and the output */
typedef uint32_t Packed; /* the factors of one step of a product: 2 numbers, the first in the lower half */
enum { EACH = 2, SCALED_LATER = 1, SEPARATE_SCORES = 0, BUFFERS = 1, WEIGHT_SIZE = RS * PW / EACH };
typedef Packed vp __attribute__((vector_size(VL * 4), may_alias));

INLINE float widened(Number x) { const uint32_t bits = (uint32_t)x << 16; float y; memcpy(&y, &bits, 4); return y; }
INLINE Number rounded(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (Number)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#if defined(__AVX512BF16__)
INLINE vf product(vf sum, Packed a, vp b) { /* sum + the upper factors + the lower factors */
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
INLINE void pairs_of(const vf w[NV], Packed *to) {
    *(__m512i *)to = (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
}
#else
INLINE vf product(vf sum, Packed a, vp b) {
    const vp x = (vp){0} + a, upper = (vp){0} + 0xffff0000;
    return sum + (vf)(x & upper) * (vf)(b & upper) + (vf)(x << 16) * (vf)(b << 16);
}
INLINE void pairs_of(const vf w[NV], Packed *to) {
    for (int j = 0; j < PW; j += 2)
        to[j / 2] = rounded(w[j / VL][j % VL]) | (Packed)rounded(w[j / VL][j % VL + 1]) << 16;
}
#endif
/* A number as the first of two factors, or beside the first one. */
INLINE Packed placed(Packed others, Number x, int64_t place) { return place ? others | (Packed)x << 16 : x; }
INLINE Packed scaled_query(Packed q, float scale) { (void)scale; return q; }
/* The weights of one row on a panel as factors. */
INLINE void put_weights(const vf w[NV], int64_t row, Packed *to) { pairs_of(w, to + row * (PW / EACH)); }
#include "products.h"
