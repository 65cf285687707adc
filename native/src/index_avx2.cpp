#define H3_ISA index_avx2
#include "simd_avx2.hpp"
#include "index_scalar.hpp"
#include "index_impl.hpp"

namespace h3 {
const IndexKernels kAvx2Index = index_avx2::kIndex;
}
