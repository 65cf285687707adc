// The work on an index, written once over the vectors of simd_*.hpp. Each index_*.cpp includes this with its own H3_ISA,
// after what index_scalar.hpp or index_avx512.cpp define for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "h3/index.hpp"

namespace h3::H3_ISA {

constexpr int kBatch = 16;   // clusters whose 16 scores are summed at once: one vector of log-sum-exps
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

  ClusterPlane() = default;
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

// What is fetched while kTogether clusters are scored: some lines for each 8 dimensions.
struct Ahead {
  static constexpr int kPages = 2;      // in a straight line
  static constexpr int kClusters = 12;  // of a list
  static constexpr int kLines = 3 * kTogether / 2;  // more than what eight dimensions of kTogether clusters take
  const char* lines[kLines];

  // Planes follow each other, with numbers between the nibbles; lines are fetched in their order.
  static Ahead straight(const ClusterPlane& plane, int place, int head_dim) {
    Ahead ahead;
    const std::int64_t size = plane_bytes(head_dim);
    const char* line = plane.nibbles + place * (size / kPageClusters - head_dim * 8) + kPages * size;
    for (int i = 0; i < kLines; ++i) ahead.lines[i] = line + 64 * i;
    return ahead;
  }

  static Ahead of(const ClusterPlane* planes) {
    Ahead ahead;
    for (int c = 0; c < kTogether; ++c) {
      ahead.lines[c] = planes[c].nibbles;
      planes[c].fetch_scales();
    }
    return ahead;
  }

  // Into the second cache: far more lines may be on their way there than into the first.
  template <bool Listed>
  void fetch(int i) const {
    for (int n = 0; n < (Listed ? kTogether : kLines); ++n)
      __builtin_prefetch(lines[n] + i * 64 * (Listed ? 1 : kLines), 0, 2);
  }
};

// Scores of kTogether clusters for R rows, before the rows' scales: a query's bytes are spread once for all of them. Gives
// `best` the largest of each lane.
template <int R, int Parts, bool Listed>
inline void score_nibbles(const CodeRows& q, int row, const ClusterPlane* planes, const Ahead& ahead, bool split_keys,
                          float* scores, Vec* best) {
  Ints acc[kTogether][R][Parts];
  for (int c = 0; c < kTogether; ++c)
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) acc[c][r][p] = ints_zero();
  const std::int8_t* rows = q.parts + row * Parts * q.head_dim;
  for (int d = 0; d < q.head_dim; d += 8) {
    Bytes low[kTogether], high[kTogether];
    ahead.fetch<Listed>(d / 8);
    for (int c = 0; c < kTogether; ++c) {
      const Bytes both = load_bytes(planes[c].nibbles + d * 8);
      low[c] = low_nibbles(both);
      high[c] = high_nibbles(both);
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) {
        const std::int8_t* part = rows + (r * Parts + p) * q.head_dim + d;
        const Quad first = load_quad(part);
        for (int c = 0; c < kTogether; ++c) acc[c][r][p] = dot_quad(acc[c][r][p], low[c], first);
        const Quad second = load_quad(part + 4);
        for (int c = 0; c < kTogether; ++c) acc[c][r][p] = dot_quad(acc[c][r][p], high[c], second);
      }
  }
  for (int c = 0; c < kTogether; ++c) {
    const Factors f = planes[c].factors(split_keys);
    for (int r = 0; r < R; ++r) {
      Ints sum = acc[c][r][0];
      if constexpr (Parts == 2) sum = ints_add(shift_left<7>(sum), acc[c][r][1]);
      const Vec score = fma(to_floats(sum), f.scale, mul(f.offset, fill(q.sum[row + r])));
      best[r] = max(best[r], score);
      store(scores + (r * kBatch + c) * kLanes, score);
    }
  }
}

// Log-sum-exp of each of the 16 rows of 16 scores times `scale`, of which `best` is the largest. One origin does for all
// rows: what is 2^100 below another cluster weighs nothing. NaN in any score makes its sum NaN.
template <int Parts>
inline Vec lse_of_rows(const float* scores, float best, float scale) {
  constexpr float kLeast = 1.17549435e-38f;
  const float top = best * scale;
  const Vec origin = fill(-top), factor = fill(scale);
  const Vec sums = sums_of_rows([&](int i) { return power_of_two<Parts>(fma(load(scores + i * kLanes), factor, origin)); });
  return add(fill(top), log2_lanes(max(fill(kLeast), sums)));
}

template <int R, int Parts, bool Listed>
inline void scan_rows(const ScanBlock& b, int row, int first, int count) {
  alignas(64) float scores[R][kBatch * kLanes];
  Vec best[R];
  for (int r = 0; r < R; ++r) {
    best[r] = fill(kNothing);
    std::fill(&scores[r][count / kTogether * kTogether * kLanes], &scores[r][0] + kBatch * kLanes, 0.0f);
  }
  const auto plane = [&](int i, int last) { return ClusterPlane(b, b.cluster(std::min(i, last))); };
  for (int i = 0; i < count; i += kTogether) {
    ClusterPlane planes[kTogether], later[kTogether];
    // A last cluster that has no neighbours is scored several times.
    for (int c = 0; c < kTogether; ++c) planes[c] = plane(first + i + c, first + count - 1);
    Ahead ahead;
    if constexpr (Listed) {
      for (int c = 0; c < kTogether; ++c) later[c] = plane(first + i + c + Ahead::kClusters, b.count - 1);
      ahead = Ahead::of(later);
    } else {
      ahead = Ahead::straight(planes[0], (b.first + first + i) % kPageClusters, b.query.head_dim);
    }
    score_nibbles<R, Parts, Listed>(b.query, row, planes, ahead, b.split_keys, &scores[0][i * kLanes], best);
  }
  for (int r = 0; r < R; ++r) {
    const Vec lse = lse_of_rows<Parts>(scores[r], max_lanes(best[r]), b.query.scale[row + r]);
    float* target = b.lse + (row + r) * b.lse_stride;
    if (!Listed && count == kBatch) {
      store(target + b.first + first, lse);
    } else {
      alignas(64) float found[kLanes];
      store(found, lse);
      for (int i = 0; i < count; ++i) target[b.cluster(first + i)] = found[i];
    }
  }
}

template <int Parts, bool Listed>
inline void scan_parts(const ScanBlock& b) {
  for (int first = 0; first < b.count; first += kBatch) {
    const int count = std::min(kBatch, b.count - first);
    for (int row = 0; row < b.query.rows; row += kRowsMax) switch (b.query.rows - row) {
        case 1: scan_rows<1, Parts, Listed>(b, row, first, count); break;
        case 2: scan_rows<2, Parts, Listed>(b, row, first, count); break;
        case 3: scan_rows<3, Parts, Listed>(b, row, first, count); break;
        default: scan_rows<4, Parts, Listed>(b, row, first, count); break;
      }
  }
}

template <int Parts>
inline void scan_of(const ScanBlock& b) {
  if (b.clusters == nullptr) scan_parts<Parts, false>(b);
  else scan_parts<Parts, true>(b);
}

inline void scan(const ScanBlock& b) {
  if (b.query.part_count == 1) scan_of<1>(b);
  else scan_of<2>(b);
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
    const Vec w = power_of_two<2>(sub(load(row.lse + i), origin));
    store(row.weights + i, w);
    total = add(total, w);
  }
  const float other = row.other == kNothing ? 0.0f : exp2f(row.other - maximum);
  return {maximum, sum_lanes(total) + other};
}

}  // namespace h3::H3_ISA

#include "means_impl.hpp"
#include "cluster_impl.hpp"

namespace h3::H3_ISA {

constexpr IndexKernels kIndex = {scan, weigh, sum_means, cluster};

}  // namespace h3::H3_ISA
