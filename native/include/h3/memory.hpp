// The machine's read bandwidth: the limit that decode is measured against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h3 {

// Reads each thread's share, a multiple of 4 KiB, once in one of several orders; returns a checksum, so that no read can
// be left out. `threads` is at least 1.
std::uint64_t read_all(const void* data, std::size_t size_bytes, int variant, int threads);
constexpr int kReadVariants = 4;

}  // namespace h3
