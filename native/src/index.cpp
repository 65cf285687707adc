#include "h3/index.hpp"

#include "h3/dispatch.hpp"

namespace h3 {

const IndexKernels& index_kernels() {
#ifdef H3_X86
  switch (isa_current()) {
    case Isa::kAvx512: return kAvx512Index;
    case Isa::kAvx2: return kAvx2Index;
    case Isa::kPortable: break;
  }
#endif
  return kPortableIndex;
}

}  // namespace h3
