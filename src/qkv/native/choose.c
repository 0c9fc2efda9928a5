/* One function for all processors: calls the build of library.c for the instructions that this one has. */
#if defined(__x86_64__)
/* The level of x86-64; 5 if qkv_attend_bfloat16 is to be called, too. On an Intel Xeon with AVX512_BF16 the conversion to
   float32 took 0.7 times as long at 2,048 tokens; on Zen 4 the products with all statistics take 0.45 times as long as
   torch's attention at 8,192 tokens (benchmarks/results/native.json). */
int qkv_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd") ? 5 : 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") ? 3 : 2;
}
#define CHOOSE(name) \
    int name##_v2(const void *call); \
    int name##_v3(const void *call); \
    int name##_v4(const void *call); \
    int name(const void *call) { \
        const int level = qkv_level(); \
        return (level >= 4 ? name##_v4 : level == 3 ? name##_v3 : name##_v2)(call); \
    }
#else
int qkv_level(void) { return 0; }
#define CHOOSE(name) \
    int name##_base(const void *call); \
    int name(const void *call) { return name##_base(call); }
#endif
CHOOSE(qkv_attend)
CHOOSE(qkv_decode)
CHOOSE(qkv_gradients)
