// Which of the kernels' instruction sets this CPU has.
#pragma once

namespace clearhead {

// 0: the baseline, 1: AVX2, 2: AVX-512, 3: AVX-512 with BF16. A CPU with one of them has all before it.
inline int level_of_cpu() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return avx512 ? (__builtin_cpu_supports("avx512bf16") ? 3 : 2) : avx2;
#else
    return 0;
#endif
}

}  // namespace clearhead
