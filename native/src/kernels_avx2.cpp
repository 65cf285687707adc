#define H3_ISA avx2
#include "simd_avx2.hpp"
#include "kernels_impl.hpp"

namespace h3 {
const Kernels kAvx2Kernels = avx2::kKernels;
}
