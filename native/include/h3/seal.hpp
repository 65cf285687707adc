// Sealing: the tokens of a full segment in a clustered encoding are put in clusters, in place, and get their summary.
#pragma once

#include "h3/slab.hpp"

namespace h3 {

struct SealArgs {
  const std::uint64_t* slabs;  // addresses of slabs with room for kSegmentBlocks, tokens in natural order; writable
  int slab_count;
  SlabShape shape;
  int blocks;                  // whole blocks in use: every one of their tokens is
  int threads;                 // at most; results do not depend on it
};

// Writes pages, nibbles and scales in the clusters' order, then places and summaries.
void seal(const SealArgs& args);

}  // namespace h3
