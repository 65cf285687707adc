// Decodes a block of LZ4 (its block format, without a frame), straight into the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h3 {

// True when the source is a whole block that stands for exactly `target_size` bytes. Neither side is ever left, whatever
// the source holds; after false the target holds anything. The two must not overlap.
bool lz4_decode(const void* source, std::size_t source_size, void* target, std::size_t target_size);

}  // namespace h3
