// What the parts of a retrieval share: how many rows and clusters there are, and where a row's numbers lie.
//
// All loops are cut by shapes alone and every sum has one order, so that results never depend on threads.
#pragma once

#include <limits>
#include <vector>

#include "h3/retrieve.hpp"

namespace h3 {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.44269504088896341f;

struct RetrieveShape {
  int group;              // query heads of a KV head
  int rows;               // query rows of a KV head: (token, head of the group)
  int lists;              // (token, KV head): each chooses for itself
  std::int64_t clusters;  // numbers of clusters, used or not
  std::int64_t used;

  explicit RetrieveShape(const RetrieveArgs& a)
      : group(a.heads / a.shape.kv_heads),
        rows(a.tokens * group),
        lists(a.tokens * a.shape.kv_heads),
        clusters(std::int64_t{kSegmentClusters} * a.segment_count),
        used(h3::used_clusters(a.segments, a.segment_count)) {}
};

// Log-sum-exps of the clusters for the first head of a group; the next heads' follow, `clusters` apart.
inline float* lse_of(const RetrieveArgs& a, const RetrieveShape& s, int token, int kv_head) {
  return a.lse + (std::int64_t{token} * a.heads + kv_head * s.group) * s.clusters;
}

// Scratch that is kept from call to call.
template <class T>
T* grown(std::vector<T>& room, std::int64_t count) {
  if (room.size() < static_cast<std::size_t>(count)) room.resize(static_cast<std::size_t>(count));
  return room.data();
}

// Into the second cache.
inline void fetch(std::uint64_t address, std::int64_t size) {
  for (std::int64_t at = 0; at < size; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(address) + at, 0, 2);
}

}  // namespace h3
