#define H3_ISA avx512
#include "simd_avx512.hpp"
#include "kernels_impl.hpp"

namespace h3 {
const Kernels kAvx512Kernels = avx512::kKernels;
}
