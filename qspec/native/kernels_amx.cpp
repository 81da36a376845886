// The AVX-512 kernels, with INT8 matmuls of many rows in AMX tiles.
#define QSPEC_TABLE amx_kernels
#if (defined(__AVX512VNNI__) && defined(__AMX_INT8__)) || defined(QSPEC_EMULATED)
#define QSPEC_AVX512
#define QSPEC_AMX
#define QSPEC_NAME "amx"
#include "kernels_body.h"
#else
#include "kernels_absent.h"
#endif
