#include "h3/memory.hpp"

#include <atomic>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

namespace h3 {

std::uint64_t read_all(const void* data, std::size_t size_bytes, int variant, int threads) {
  std::atomic<std::uint64_t> sum{0};
  const std::size_t share = size_bytes / static_cast<std::size_t>(threads) / 4096 * 4096;
  parallel(threads, threads, Share::kOne, [&](int begin, int end) {
    for (int i = begin; i < end; ++i)
      sum ^= kernels().read_bytes(static_cast<const char*>(data) + static_cast<std::size_t>(i) * share, share, variant);
  });
  return sum;
}

}  // namespace h3
