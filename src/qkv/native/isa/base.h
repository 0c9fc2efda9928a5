/* SSE, or any other processor: 16 registers of 4 floats.
 * Scores: 4 rows * 2 vectors of keys are sums in 8 registers, 2 more hold the keys, and 1 the factor of a query.
 * Output: 4 rows * 2 vectors of values are sums in 8 registers, 2 more hold the values, and 1 a weight. */
enum { VL = 4, NV = 2, MR = 4, RS = 8, WIDEST = 2, KEYS_4 = 2, VALUES_4 = 2 }; /* as in avx512.h */
#include "vectors.h"
#if defined(__SSE__) /* one instruction, which gcc does not find by itself */
#include <xmmintrin.h>
INLINE vf maximum(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); } /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
INLINE int any(vi x) { return _mm_movemask_ps((__m128)x) != 0; }              /* whether a lane of a comparison is true */
#else
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }                 /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return choose(a < b, a, b); }
INLINE int any(vi x) { return (x[0] | x[1] | x[2] | x[3]) != 0; }             /* whether a lane of a comparison is true */
#endif
