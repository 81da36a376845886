// Plain C++ for any CPU.
#define QSPEC_TABLE portable_kernels
#define QSPEC_NAME "portable"
#include "kernels_body.h"
