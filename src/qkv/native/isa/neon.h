/* NEON: 32 registers of 4 floats.
 * Scores: 4 rows * 4 vectors of keys are sums in 16 registers, 4 more hold the keys, and 1 the factors of 4 queries.
 * Output: 4 rows * 3 vectors of values are sums in 12 registers, 3 more hold the values, and 4 the weights. */
enum { VL = 4, NV = 4, MR = 4, RS = 8, WIDEST = 3, KEYS_4 = 4, VALUES_4 = 4 }; /* as in avx512.h */
#include "vectors.h"
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); } /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return choose(a < b, a, b); }
INLINE int any(vi x) { return (x[0] | x[1] | x[2] | x[3]) != 0; } /* whether a lane of a comparison is true */
