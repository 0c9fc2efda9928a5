/* Vectors of VL floats, by extensions of gcc and clang: what every instruction set has in common. Its header gives VL, NV and
 * RS before this one. */
enum { PW = NV * VL }; /* keys of a panel: NV vectors of each row of a strip */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16), may_alias));
typedef float v4 __attribute__((vector_size(16), may_alias));
typedef float vu __attribute__((vector_size(VL * 4), aligned(4), may_alias)); /* at any address */
typedef double vd __attribute__((vector_size(VL * 8), aligned(8), may_alias));

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t up(int64_t n, int64_t of) { return (n + of - 1) / of * of; }
INLINE vf choose(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }
INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf load(const float *x) { return *(const vf *)x; }

INLINE v4 quarter(vf x) {
    v4 part[VL / 4], s;
    memcpy(part, &x, sizeof x);
    s = part[0];
    UNROLL for (int i = 1; i < VL / 4; i++) s += part[i];
    return s;
}
INLINE float sum(vf x) { v4 s = quarter(x); return (s[0] + s[2]) + (s[1] + s[3]); }
INLINE float highest(vf x) {
    v4 part[VL / 4], m;
    memcpy(part, &x, sizeof x);
    m = part[0];
    UNROLL for (int i = 1; i < VL / 4; i++) {
        i4 more = m > part[i];
        m = (v4)(((i4)m & more) | ((i4)part[i] & ~more));
    }
    float a = m[0] > m[2] ? m[0] : m[2], b = m[1] > m[3] ? m[1] : m[3];
    return a > b ? a : b;
}
INLINE float lowest_of(vf x) { return -highest(-x); }
INLINE vf iota(void) { vf x; UNROLL for (int i = 0; i < VL; i++) x[i] = (float)i; return x; }
