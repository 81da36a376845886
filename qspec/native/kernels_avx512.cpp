// Compiled with AVX-512 and its VNNI, and run where the CPU has them. QSPEC_EMULATED: in a test, without them.
#define QSPEC_TABLE avx512_kernels
#if defined(__AVX512VNNI__) || defined(QSPEC_EMULATED)
#define QSPEC_AVX512
#define QSPEC_NAME "avx512"
#include "kernels_body.h"
#else
#include "kernels_absent.h"
#endif
