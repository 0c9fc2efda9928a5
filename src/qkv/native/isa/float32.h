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
