/* AVX and AVX2: 16 registers of 8 floats.
 * Scores: 4 rows * 2 vectors of keys are sums in 8 registers, 2 more hold the keys, and 1 the factor of a query.
 * Output: 4 rows * 2 vectors of values are sums in 8 registers, 2 more hold the values, and 1 a weight. */
#include <immintrin.h>
enum { VL = 8, NV = 2, MR = 4, RS = 8, WIDEST = 2, KEYS_4 = 2, VALUES_4 = 2 }; /* as in avx512.h */
#include "vectors.h"
INLINE vf maximum(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); } /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE int any(vi x) { return _mm256_movemask_ps((__m256)x) != 0; } /* whether a lane of a comparison is true */
