// Geometry of the slab of a full segment in a clustered encoding; src/h3kv/core/layout.py draws it.
#pragma once

#include "h3/types.hpp"

namespace h3 {

constexpr int kSegmentBlocks = 16;   // room of a clustered segment
constexpr int kClusterTokens = 16;   // consecutive tokens of a page: one vector of scores
constexpr int kPageClusters = kPageTokens / kClusterTokens;
constexpr int kSegmentClusters = kSegmentBlocks * kPageClusters;

// Bytes of the index for one page: nibbles, scales, places.
constexpr std::int64_t plane_bytes(int head_dim) {
  return kPageTokens / 2 * std::int64_t{head_dim} + 4 * 2 * kPageTokens + 2 * kPageTokens;
}

struct SlabShape {
  int kv_heads;
  int head_dim;      // a multiple of 16
  bool split_keys;   // k8v4: the plane holds the high nibbles of keys, the page the low ones; else int4: the plane is all
  std::int64_t page_bytes;  // from one page to the next

  Encoding encoding() const { return split_keys ? Encoding::kK8V4 : Encoding::kInt4; }

  std::int64_t nibbles_bytes() const { return kPageTokens / 2 * std::int64_t{head_dim}; }
  std::int64_t keys_bytes() const { return split_keys ? nibbles_bytes() : 0; }  // of a page
  std::int64_t scales_bytes() const { return 4 * 2 * kPageTokens; }
  std::int64_t plane_bytes() const { return h3::plane_bytes(head_dim); }
  std::int64_t means_bytes() const { return 2 * kPageTokens * std::int64_t{head_dim}; }  // of a summary, before its scales
  std::int64_t summary_bytes() const { return means_bytes() + scales_bytes(); }

  std::int64_t page_offset(int block, int head) const { return (head * kSegmentBlocks + block) * page_bytes; }
  std::int64_t planes_offset() const { return page_offset(0, kv_heads); }
  std::int64_t plane_offset(int block, int head) const {
    return planes_offset() + (head * kSegmentBlocks + block) * plane_bytes();
  }
  std::int64_t summary_offset(int head) const { return plane_offset(0, kv_heads) + head * summary_bytes(); }
  // Of the values' residues, which k8v4 has: [kv_head][block], from a checked unit on.
  std::int64_t residue_offset(int block, int head) const {
    const std::int64_t start = (summary_offset(kv_heads) + 4095) / 4096 * 4096;
    return start + (head * kSegmentBlocks + block) * nibbles_bytes();
  }
};

// Arrays of 64 fp16 numbers that follow each other.
enum ScaleArray : int { kKeyScale = 0, kKeyOffset = 1, kValueScale = 2, kValueOffset = 3 };

}  // namespace h3
