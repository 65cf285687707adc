// Reads of pieces of slabs as ops of the I/O engine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "h3/io.hpp"
#include "h3/page_cache.hpp"

namespace h3 {

// Slabs in a file; each piece of `check_bytes` has a checksum.
struct UnitSlabs {
  const std::uint64_t* offsets;  // in the file
  const std::uint64_t* crcs;     // addresses of the checksums
  const std::uint64_t* sizes;    // bytes that were written
  std::uint32_t count;
  std::uint32_t check_bytes;
};

struct UnitOps {
  std::size_t sound;  // reads up to the first that is not
  std::size_t ahead;  // among these: read ahead
};

// Fills in one op for each read, tags from `first_tag` on. It stops at a read that names no slab, is not of whole pieces
// inside of it, or does not begin at a multiple of `alignment` in memory.
inline UnitOps unit_ops(const PageRead* reads, std::size_t count, const UnitSlabs& slabs, std::uint64_t first_tag,
                        std::uint32_t alignment, io::Op* ops) {
  std::size_t ahead = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const PageRead& read = reads[i];
    if (read.slab >= slabs.count || read.size == 0 || read.target % alignment != 0 ||
        read.offset % slabs.check_bytes != 0 || read.size % slabs.check_bytes != 0 ||
        std::uint64_t{read.offset} + read.size > slabs.sizes[read.slab])
      return {i, ahead};
    ops[i] = {first_tag + i, slabs.offsets[read.slab] + read.offset, read.target, read.size,
              slabs.crcs[read.slab] + read.offset / slabs.check_bytes * sizeof(std::uint32_t), slabs.check_bytes,
              io::Kind::kRead, 0, 0};
    ahead += read.is_ahead != 0;
  }
  return {count, ahead};
}

// Says which of the slabs each read is of; `segments` are theirs, ascending. Returns whether all are among them.
inline bool find_slabs(PageRead* reads, const std::uint64_t* read_segments, std::size_t count,
                       const std::uint64_t* segments, std::size_t segment_count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t* const at = std::lower_bound(segments, segments + segment_count, read_segments[i]);
    if (at == segments + segment_count || *at != read_segments[i]) return false;
    reads[i].slab = static_cast<std::uint32_t>(at - segments);
  }
  return true;
}

}  // namespace h3
