/* One function for all processors: calls the build of attention.c for the instructions that this one has. */
#if defined(__x86_64__)
int qkv_attend_v2(const void *call);
int qkv_attend_v3(const void *call);
int qkv_attend_v4(const void *call);

int qkv_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") ? 3 : 2;
}
int qkv_attend(const void *call) {
    const int level = qkv_level();
    return (level == 4 ? qkv_attend_v4 : level == 3 ? qkv_attend_v3 : qkv_attend_v2)(call);
}
#else
int qkv_attend_base(const void *call);
int qkv_level(void) { return 0; }
int qkv_attend(const void *call) { return qkv_attend_base(call); }
#endif
