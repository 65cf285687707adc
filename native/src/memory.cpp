#include "h3/memory.hpp"

#include <omp.h>

#include "h3/dispatch.hpp"

namespace h3 {

std::uint64_t read_all(const void* data, std::size_t size_bytes, int variant, int threads) {
  std::uint64_t sum = 0;
#pragma omp parallel num_threads(thread_count(threads)) reduction(^ : sum)
  {
    const auto team = static_cast<std::size_t>(omp_get_num_threads());
    const auto index = static_cast<std::size_t>(omp_get_thread_num());
    const std::size_t share = size_bytes / team / 4096 * 4096;
    sum ^= kernels().read_bytes(static_cast<const char*>(data) + index * share, share, variant);
  }
  return sum;
}

}  // namespace h3
