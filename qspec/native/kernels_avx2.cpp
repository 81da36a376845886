// Compiled with AVX2, FMA and F16C on x86-64, and run where the CPU has them; elsewhere an empty file.
#if defined(__x86_64__)
#define QSPEC_AVX2
#define QSPEC_TABLE avx2_kernels
#define QSPEC_NAME "avx2"
#include "kernels_body.h"
#endif
