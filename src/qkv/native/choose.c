/* The functions of the library: most call its build for the instructions that this processor has. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(ONE_BUILD)
int qkv_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") ? 3 : 2;
}
#define BUILDS(name) \
    int name##_v2(const void *), name##_v3(const void *), name##_v4(const void *); \
    int name(const void *call) { \
        const int level = qkv_level(); \
        return (level == 4 ? name##_v4 : level == 3 ? name##_v3 : name##_v2)(call); \
    }
#else
int qkv_level(void) { return 0; }
#define BUILDS(name) \
    int name##_base(const void *); \
    int name(const void *call) { return name##_base(call); }
#endif

BUILDS(qkv_attend)
BUILDS(qkv_gradients)

/* Whether none of n numbers is NaN or infinite. */
int qkv_is_finite(const float *x, int64_t n) {
    int32_t lost = 0, bits[256];
    for (int64_t at = 0; at < n && !lost; at += 256) {
        const int64_t m = n - at < 256 ? n - at : 256;
        memcpy(bits, x + at, (size_t)m * sizeof *x);
        for (int64_t i = 0; i < m; i++) lost |= (bits[i] & 0x7f800000) == 0x7f800000;
    }
    return !lost;
}
