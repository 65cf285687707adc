#include "retrieve_scan.hpp"

#include <algorithm>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

namespace h3 {
namespace {

constexpr float kLogTokens = 4.0f;  // log2(kClusterTokens)
constexpr int kListRun = 64;        // listed clusters of one unit

Page summary_page(const RetrieveArgs& a, const Indexed& segment, int kv_head) {
  const std::uint64_t keys = segment.summary + static_cast<std::uint64_t>(kv_head * a.shape.summary_bytes());
  const auto means = static_cast<std::uint64_t>(a.shape.means_bytes());
  return {keys, keys + means / 2, 0, 0, keys + means, 0, used_clusters(segment)};
}

void clear_unused(const RetrieveArgs& a, const RetrieveShape& s, int segment, int kv_head) {
  const int used = used_clusters(a.segments[segment]);
  const std::int64_t first = std::int64_t{segment} * kSegmentClusters + used;
  for (int t = 0; t < a.tokens && used < kSegmentClusters; ++t)
    for (int g = 0; g < s.group; ++g)
      std::fill_n(lse_of(a, s, t, kv_head) + g * s.clusters + first, kSegmentClusters - used, kNothing);
}

ScanBlock scan_block(const RetrieveArgs& a, const RetrieveShape& s, int head) {
  ScanBlock block{};
  block.segments = a.segments;
  block.head_offset = head * kSegmentBlocks * a.shape.plane_bytes();
  block.split_keys = a.shape.split_keys;
  block.lse_stride = s.clusters;
  return block;
}

// Where the planes lie that are read after those of a segment and head.
const char* planes_after(const RetrieveArgs& a, int segment, int head) {
  const bool is_last = head + 1 == a.shape.kv_heads;
  if (is_last && segment + 1 == a.segment_count) return nullptr;
  const Indexed& next = a.segments[is_last ? segment + 1 : segment];
  const std::int64_t head_offset = is_last ? 0 : (head + 1) * kSegmentBlocks * a.shape.plane_bytes();
  return reinterpret_cast<const char*>(next.planes) + head_offset;
}

}  // namespace

void scan_means(const RetrieveArgs& a, const RetrieveShape& s, const Queries& queries) {
  parallel(a.segment_count * a.shape.kv_heads, a.threads, Share::kGuided, [&](int begin, int end) {
    thread_local std::vector<float> room;
    float* const scores = grown(room, std::int64_t{s.rows} * kPageTokens);
    for (int unit = begin; unit < end; ++unit) {
      const int segment = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
      const Page page = summary_page(a, a.segments[segment], head);
      if (segment + 1 < a.segment_count) {
        const Page next = summary_page(a, a.segments[segment + 1], head);
        fetch(next.keys, a.shape.means_bytes() / 2);
        fetch(next.scales, a.shape.scales_bytes() / 2);
      }
      kernels().codes.score_page[static_cast<int>(Encoding::kInt8)](queries.rows(head), page, scores);
      for (int r = 0; r < s.rows; ++r) {
        float* lse = lse_of(a, s, r / s.group, head) + r % s.group * s.clusters + segment * kSegmentClusters;
        for (int i = 0; i < page.count; ++i) lse[i] = scores[r * kPageTokens + i] + kLogTokens;
      }
      clear_unused(a, s, segment, head);
    }
  });
}

void scan_units(const RetrieveArgs& a, const RetrieveShape& s, const Queries& queries, int first, int last) {
  for (int unit = first; unit < last; ++unit) {
    // Heads of a segment follow each other as their planes do: memory is read in a straight line.
    const int segment = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
    ScanBlock block = scan_block(a, s, head);
    block.first = segment * kSegmentClusters;
    block.count = used_clusters(a.segments[segment]);
    block.next = planes_after(a, segment, head);
    // A segment's planes of one head stay in cache from token to token.
    for (int t = 0; t < a.tokens; ++t) {
      block.query = queries.rows(head, t * s.group, s.group);
      block.lse = lse_of(a, s, t, head);
      index_kernels().scan(block);
    }
    clear_unused(a, s, segment, head);
  }
}

void scan_all(const RetrieveArgs& a, const RetrieveShape& s, const Queries& queries) {
  parallel(a.segment_count * a.shape.kv_heads, a.threads, Share::kGuided,
           [&](int begin, int end) { scan_units(a, s, queries, begin, end); });
}

void scan_listed(const RetrieveArgs& a, const RetrieveShape& s, const Queries& queries, const std::int32_t* lists,
                 int count) {
  const int runs = (count + kListRun - 1) / kListRun;
  parallel(a.tokens * a.shape.kv_heads * runs, a.threads, Share::kGuided, [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      const int row = unit / runs, head = row % a.shape.kv_heads, token = row / a.shape.kv_heads;
      const int first = unit % runs * kListRun;
      ScanBlock block = scan_block(a, s, head);
      block.clusters = lists + std::int64_t{row} * count + first;
      const int room = std::min(kListRun, count - first);
      while (block.count < room && block.clusters[block.count] >= 0) ++block.count;
      block.query = queries.rows(head, token * s.group, s.group);
      block.lse = lse_of(a, s, token, head);
      index_kernels().scan(block);
    }
  });
}

}  // namespace h3
