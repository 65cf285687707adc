// What one access to memory costs: the latency that attention over HOST sees when the prefetcher cannot help.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace h3 {

constexpr std::uint32_t kProbeBatchAccesses = 64;

// Nanoseconds of one access, as means over `batches` batches of kProbeBatchAccesses dependent accesses each: every one
// reads a cache line drawn at random, whose address depends on what the one before gave. Only reads, whatever lies there
// and whoever writes it. Misses of the address translation are part of it; one reading of the clock for each batch, some
// 0.4 ns an access, too. `memory` is at a multiple of 8, and holds at least one line.
std::vector<double> probe_access(const void* memory, std::size_t size_bytes, std::uint32_t batches, std::uint64_t seed);

}  // namespace h3
