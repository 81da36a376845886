// An instruction set that the compiler, or the architecture, does not have.
#include "kernels.h"

namespace qspec {
extern const Kernels* const QSPEC_TABLE;
const Kernels* const QSPEC_TABLE = nullptr;
}  // namespace qspec
