#include "h3/access_probe.hpp"

#include <time.h>

#include <random>

namespace h3 {
namespace {

constexpr std::size_t kLineBytes = 64;

double now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_RAW, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

}  // namespace

std::vector<double> probe_access(const void* memory, std::size_t size_bytes, std::uint32_t batches,
                                 std::uint64_t seed) {
  const char* const base = static_cast<const char*>(memory);
  std::mt19937_64 generator(seed);
  std::uniform_int_distribution<std::size_t> line(0, size_bytes / kLineBytes - 1);
  // 0, but the compiler does not know: what was read, masked by it, is added to the next address.
  volatile std::uint64_t none = 0;
  const std::uint64_t mask = none;
  std::uint64_t read = 0;
  std::size_t offsets[kProbeBatchAccesses];
  std::vector<double> means;
  means.reserve(batches);
  for (std::uint32_t batch = 0; batch < batches; ++batch) {
    for (std::size_t& offset : offsets) offset = line(generator) * kLineBytes;
    const double start = now_ns();
    for (const std::size_t offset : offsets)
      read = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(base + offset + (read & mask)), __ATOMIC_RELAXED);
    none = read & mask;  // the last read counts as well
    means.push_back((now_ns() - start) / kProbeBatchAccesses);
  }
  return means;
}

}  // namespace h3
