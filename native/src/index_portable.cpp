#define H3_ISA index_portable
#include "simd_portable.hpp"
#include "index_scalar.hpp"
#include "index_impl.hpp"

namespace h3 {
const IndexKernels kPortableIndex = index_portable::kIndex;
}
