// The work on an index, written once over the vectors of simd_*.hpp. Each index_*.cpp includes this with its own H3_ISA,
// after `log2_lanes` and `transpose`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "h3/index.hpp"

namespace h3::H3_ISA {

constexpr int kBatch = 16;   // clusters whose 16 scores are turned over at once: one vector of log-sum-exps
constexpr int kRowsMax = 4;  // query rows of a tile: their sums stay in registers
constexpr float kNothing = -__builtin_inff();

// Numbers of 16 tokens' codes: number = scale * code + offset.
struct Factors {
  Vec scale, offset;
};

// Where a cluster's nibbles and its numbers in the arrays of scales begin.
struct ClusterPlane {
  const char* nibbles;
  const char* scales;

  ClusterPlane(const ScanBlock& b, std::int32_t cluster) {
    const std::int64_t page_nibbles = kPageTokens / 2 * std::int64_t{b.query.head_dim};
    const int page = cluster % kSegmentClusters / kPageClusters;
    const int place = cluster % kPageClusters;
    const char* plane = reinterpret_cast<const char*>(b.segments[cluster / kSegmentClusters].planes) + b.head_offset +
                        page * plane_bytes(b.query.head_dim);
    nibbles = plane + place * page_nibbles / kPageClusters;
    scales = plane + page_nibbles + place * kClusterTokens * 2;
  }

  // Of nibbles that are high halves the missing low ones count as their middle.
  Factors factors(bool split_keys) const {
    const Vec scale = load_fp16(scales + kKeyScale * kPageTokens * 2);
    const Vec offset = load_fp16(scales + kKeyOffset * kPageTokens * 2);
    if (!split_keys) return {scale, offset};
    return {mul(scale, fill(16.0f)), fma(scale, fill(7.5f), offset)};
  }

  void fetch_scales() const {
    prefetch(scales + kKeyScale * kPageTokens * 2);
    prefetch(scales + kKeyOffset * kPageTokens * 2);
  }
};

// What is fetched while two clusters are scored: three lines for each 8 dimensions.
struct Ahead {
  static constexpr int kBytes = 2048;  // in a straight line
  static constexpr int kClusters = 16;  // of a list
  const char* lines[3];
  int step;                            // bytes to the next three

  // Planes follow each other, with numbers between the nibbles; lines are fetched in their order, so that the processor's
  // own prefetch runs on. Three lines are more than what eight dimensions of two clusters take.
  static Ahead straight(const ClusterPlane& plane, int place, int head_dim) {
    const char* line = plane.nibbles + place * (plane_bytes(head_dim) / kPageClusters - head_dim * 8) + kBytes;
    return {{line, line + 64, line + 128}, 192};
  }

  static Ahead of(const ClusterPlane& first, const ClusterPlane& second) {
    first.fetch_scales();
    second.fetch_scales();
    return {{first.nibbles, second.nibbles, second.nibbles}, 64};
  }

  void fetch(int i) const {
    for (const char* line : lines) prefetch(line + i * step);
  }
};

// Scores of two clusters for R rows: a query's bytes are spread once for both.
template <int R, int Parts>
inline void score_nibbles(const CodeRows& q, int row, const ClusterPlane* planes, const Ahead& ahead, bool split_keys,
                          float* scores) {
  Ints acc[2][R][Parts];
  for (int c = 0; c < 2; ++c)
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) acc[c][r][p] = ints_zero();
  const std::int8_t* rows = q.parts + row * Parts * q.head_dim;
  for (int d = 0; d < q.head_dim; d += 8) {
    Bytes low[2], high[2];
    ahead.fetch(d / 8);
    for (int c = 0; c < 2; ++c) {
      const Bytes both = load_bytes(planes[c].nibbles + d * 8);
      low[c] = low_nibbles(both);
      high[c] = high_nibbles(both);
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) {
        const std::int8_t* part = rows + (r * Parts + p) * q.head_dim + d;
        for (int c = 0; c < 2; ++c)
          acc[c][r][p] = dot_nibbles(dot_nibbles(acc[c][r][p], low[c], part), high[c], part + 4);
      }
  }
  for (int c = 0; c < 2; ++c) {
    const Factors f = planes[c].factors(split_keys);
    for (int r = 0; r < R; ++r) {
      Ints sum = acc[c][r][0];
      if constexpr (Parts == 2) sum = ints_add(shift_left<7>(sum), acc[c][r][1]);
      const Vec score = fma(to_floats(sum), f.scale, mul(f.offset, fill(q.sum[row + r])));
      store(scores + (r * kBatch + c) * kLanes, mul(score, fill(q.scale[row + r])));
    }
  }
}

// Log-sum-exp of each of the 16 rows of 16 scores. Scores are used up.
inline Vec lse_of_rows(float* scores) {
  transpose(scores);
  Vec best = load(scores);
  for (int t = 1; t < kClusterTokens; ++t) best = max(best, load(scores + t * kLanes));
  Vec even = zero(), odd = zero();
  for (int t = 0; t < kClusterTokens; t += 2) {
    even = add(even, power_of_two(sub(load(scores + t * kLanes), best)));
    odd = add(odd, power_of_two(sub(load(scores + (t + 1) * kLanes), best)));
  }
  return add(best, log2_lanes(add(even, odd)));  // NaN in any score makes its sum NaN
}

template <int R, int Parts>
inline void scan_rows(const ScanBlock& b, int row, int first, int count) {
  alignas(64) float scores[R][kBatch * kLanes];
  // An odd last cluster is scored twice.
  const auto plane = [&](int i, int last) { return ClusterPlane(b, b.cluster(std::min(i, last))); };
  for (int i = 0; i < count; i += 2) {
    const int at = first + i;
    const ClusterPlane planes[2] = {plane(at, at), plane(at + 1, first + count - 1)};
    const Ahead ahead = b.clusters == nullptr
                            ? Ahead::straight(planes[0], b.cluster(at) % kPageClusters, b.query.head_dim)
                            : Ahead::of(plane(at + Ahead::kClusters, b.count - 1), plane(at + Ahead::kClusters + 1, b.count - 1));
    score_nibbles<R, Parts>(b.query, row, planes, ahead, b.split_keys, &scores[0][i * kLanes]);
  }
  for (int r = 0; r < R; ++r) {
    std::fill(&scores[r][count * kLanes], &scores[r][0] + kBatch * kLanes, 0.0f);
    alignas(64) float found[kLanes];
    store(found, lse_of_rows(scores[r]));
    float* target = b.lse + (row + r) * b.lse_stride;
    for (int i = 0; i < count; ++i) target[b.cluster(first + i)] = found[i];
  }
}

template <int Parts>
inline void scan_parts(const ScanBlock& b) {
  for (int first = 0; first < b.count; first += kBatch) {
    const int count = std::min(kBatch, b.count - first);
    for (int row = 0; row < b.query.rows; row += kRowsMax) switch (b.query.rows - row) {
        case 1: scan_rows<1, Parts>(b, row, first, count); break;
        case 2: scan_rows<2, Parts>(b, row, first, count); break;
        case 3: scan_rows<3, Parts>(b, row, first, count); break;
        default: scan_rows<4, Parts>(b, row, first, count); break;
      }
  }
}

inline void scan(const ScanBlock& b) {
  if (b.query.part_count == 1) scan_parts<1>(b);
  else scan_parts<2>(b);
}

inline Weighed weigh(const WeighRow& row) {
  Vec best = fill(row.other);
  for (std::int64_t i = 0; i < row.count; i += kLanes) best = max(best, load(row.lse + i));
  const float maximum = max_lanes(best);
  if (maximum == kNothing) {
    bool is_nan = false;
    for (std::int64_t i = 0; i < row.count; ++i) is_nan |= row.lse[i] != row.lse[i];
    std::fill_n(row.weights, row.count, is_nan ? __builtin_nanf("") : 0.0f);
    return {maximum, is_nan ? __builtin_nanf("") : 0.0f};
  }
  Vec total = zero();
  const Vec origin = fill(maximum);
  for (std::int64_t i = 0; i < row.count; i += kLanes) {
    const Vec w = power_of_two(sub(load(row.lse + i), origin));
    store(row.weights + i, w);
    total = add(total, w);
  }
  const float other = row.other == kNothing ? 0.0f : exp2f(row.other - maximum);
  return {maximum, sum_lanes(total) + other};
}

}  // namespace h3::H3_ISA

#include "cluster_impl.hpp"

namespace h3::H3_ISA {

constexpr IndexKernels kIndex = {scan, weigh, cluster};

}  // namespace h3::H3_ISA
