// Prints each instruction set that gives the bits of plain C++, and each that does not.
#include <cstdio>

#include "kernels.h"

int main() {
  const qspec::Kernels* sets[] = {qspec::avx2_kernels, qspec::avx512_kernels, qspec::amx_kernels};
  for (const qspec::Kernels* set : sets)
    if (set) std::printf("%s %s\n", set->name, qspec::agrees_with_portable(*set) ? "agrees" : "differs");
}
