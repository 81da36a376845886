// Compiled with AVX2, FMA and F16C, and run where the CPU has them.
#define QSPEC_TABLE avx2_kernels
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QSPEC_NAME "avx2"
#include "kernels_body.h"
#else
#include "kernels_absent.h"
#endif
