/* AVX-512: 32 registers of 16 floats.
 * Scores: 8 rows * 2 vectors of keys are sums in 16 registers, 2 more hold the keys, and factors of the queries stay in memory.
 * Output: 8 rows * 3 vectors of values are sums in 24 registers, and 3 more hold the values. */
#include <immintrin.h>
enum { VL = 16, NV = 2, MR = 8, RS = 8, WIDEST = 3 }; /* floats of a vector; vectors of a panel; rows of the micro-kernel, and
                                                       * of a strip; most vectors of values at once */
enum { KEYS_4 = 4, VALUES_4 = 4 }; /* few queries: keys of a step, and vectors of values, for 4 rows */
#include "vectors.h"
INLINE vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); } /* b if one is NaN */
INLINE vf minimum(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE int any(vi x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; } /* whether a lane of a comparison is true */
