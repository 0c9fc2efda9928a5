/* One function for all processors: calls the build of library.c for the instructions that this one has. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether tiles of AMX can be used: 1, or -1 if the processor has them and the operating system does not allow them. The
 * permission is that of the process, of all its threads and of its forks. */
static int find_tiles(void) {
#if !defined(NO_TILES)
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 0;     /* AVX512_BF16 */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 5) != 5) return 0; /* AMX-BF16 and AMX-TILE */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const int request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
    return (low >> 17 & 3) == 3 && !syscall(SYS_arch_prctl, request, tile_data) ? 1 : -1;
#else
    return 0;
#endif
}

/* On an Intel Xeon with AVX512_BF16 the conversion to float32 took 0.7 times as long as products of bfloat16 by vectors at
 * 2,048 tokens; on Zen 4 these products with all statistics take 0.45 times as long as torch's attention at 8,192 tokens
 * (benchmarks/results/native.json). */
static int find_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
        const int tiles = find_tiles();
        if (tiles) return tiles > 0 ? 6 : 7;
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd") ? 5 : 4;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") ? 3 : 2;
}

/* The level of x86-64, or 5, 6 or 7 as in INSTRUCTIONS of __init__.py. */
int qkv_level(void) {
    static int level;
    int found = __atomic_load_n(&level, __ATOMIC_RELAXED);
    if (!found) __atomic_store_n(&level, found = find_level(), __ATOMIC_RELAXED);
    return found;
}
#define CHOOSE(name, at_tiles) \
    int name##_v2(const void *call); \
    int name##_v3(const void *call); \
    int name##_v4(const void *call); \
    int at_tiles(const void *call); \
    int name(const void *call) { \
        const int level = qkv_level(); \
        return (level == 6 ? at_tiles : level >= 4 ? name##_v4 : level == 3 ? name##_v3 : name##_v2)(call); \
    }
int qkv_attend_products(const void *call);
#if !defined(NO_TILES)
int qkv_attend_tiles1(const void *call);
int qkv_attend_tiles2(const void *call);
int qkv_gradients_tiles1(const void *call);
int qkv_gradients_tiles2(const void *call);
int qkv_attend_float16(const void *call) { return qkv_attend_tiles2(call); } /* at level 6, as the next two */
int qkv_gradients_float16(const void *call) { return qkv_gradients_tiles2(call); }
int qkv_gradients_bfloat16(const void *call) { return qkv_gradients_tiles1(call); }
int qkv_attend_bfloat16(const void *call) {                                 /* at levels 5 and 6 */
    return (qkv_level() == 6 ? qkv_attend_tiles1 : qkv_attend_products)(call);
}
CHOOSE(qkv_attend, qkv_attend_tiles3)
CHOOSE(qkv_gradients, qkv_gradients_tiles3)
#else
int qkv_attend_bfloat16(const void *call) { return qkv_attend_products(call); } /* at level 5 */
CHOOSE(qkv_attend, qkv_attend_v4)
CHOOSE(qkv_gradients, qkv_gradients_v4)
#endif
CHOOSE(qkv_decode, qkv_decode_v4)
CHOOSE(qkv_pool, qkv_pool_v4)
CHOOSE(qkv_eigenvalues, qkv_eigenvalues_v4)
CHOOSE(qkv_nodes, qkv_nodes_v4)
#else
int qkv_level(void) { return 0; }
#define CHOOSE(name) \
    int name##_base(const void *call); \
    int name(const void *call) { return name##_base(call); }
CHOOSE(qkv_attend)
CHOOSE(qkv_decode)
CHOOSE(qkv_gradients)
CHOOSE(qkv_pool)
CHOOSE(qkv_eigenvalues)
CHOOSE(qkv_nodes)
#endif
