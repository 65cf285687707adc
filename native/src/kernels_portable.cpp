#define H3_ISA portable
#include "simd_portable.hpp"
#include "kernels_impl.hpp"

namespace h3 {
const Kernels kPortableKernels = portable::kKernels;
}
