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

// 2^x for x <= 0 with a relative error of 1e-7; below 2^-126 the result is 0 or a denormal number. NaN stays NaN.
inline Vec power_of_two(Vec x) {
  x = max(fill(-200.0f), x);  // the second operand wins over NaN
  const Vec n = round_nearest(x);
  const Vec f = sub(x, n);
  Vec p = fill(1.326472753e-3f);
  p = fma(p, f, fill(9.671512709e-3f));
  p = fma(p, f, fill(5.550733742e-2f));
  p = fma(p, f, fill(2.402224208e-1f));
  p = fma(p, f, fill(6.931469776e-1f));
  p = fma(p, f, fill(1.0f));
  return scale_by_power(p, n);
}

// Numbers of 16 tokens' codes: number = scale * code + offset.
struct Factors {
  Vec scale, offset;
};

template <int R, int Parts>
inline void score_nibbles(const CodeRows& q, int row, const char* nibbles, const Factors& f, float* scores) {
  Ints acc[R][Parts];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < Parts; ++p) acc[r][p] = ints_zero();
  const std::int8_t* rows = q.parts + row * Parts * q.head_dim;
  for (int d = 0; d < q.head_dim; d += 8, nibbles += 64) {
    const Bytes both = load_bytes(nibbles);
    const Bytes low = low_nibbles(both);
    const Bytes high = high_nibbles(both);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) {
        const std::int8_t* part = rows + (r * Parts + p) * q.head_dim + d;
        acc[r][p] = dot_nibbles(dot_nibbles(acc[r][p], low, fill_quad(part)), high, fill_quad(part + 4));
      }
  }
  for (int r = 0; r < R; ++r) {
    Ints sum = acc[r][0];
    if constexpr (Parts == 2) sum = ints_add(shift_left<7>(sum), acc[r][1]);
    const Vec score = fma(to_floats(sum), f.scale, mul(f.offset, fill(q.sum[row + r])));
    store(scores + r * kBatch * kLanes, mul(score, fill(q.scale[row + r])));
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

  Vec numbers(ScaleArray array) const { return load_fp16(scales + array * kPageTokens * 2); }

  void fetch(int head_dim) const {
    for (int i = 0; i < kClusterTokens / 2 * head_dim; i += 64) prefetch(nibbles + i);
    prefetch(scales + kKeyScale * kPageTokens * 2);
    prefetch(scales + kKeyOffset * kPageTokens * 2);
  }
};

template <int R, int Parts>
inline void scan_rows(const ScanBlock& b, int row, int first, int count) {
  constexpr int kAhead = 4;  // listed clusters lie apart: the processor's own prefetch does not see the next one
  alignas(64) float scores[R][kBatch * kLanes];
  for (int i = 0; i < count; ++i) {
    const ClusterPlane plane(b, b.clusters == nullptr ? b.first + first + i : b.clusters[first + i]);
    if (b.clusters != nullptr && first + i + kAhead < b.count)
      ClusterPlane(b, b.clusters[first + i + kAhead]).fetch(b.query.head_dim);
    const Vec scale = plane.numbers(kKeyScale), offset = plane.numbers(kKeyOffset);
    Factors factors{scale, offset};
    if (b.split_keys) factors = {mul(scale, fill(16.0f)), fma(scale, fill(7.5f), offset)};
    score_nibbles<R, Parts>(b.query, row, plane.nibbles, factors, &scores[0][i * kLanes]);
  }
  for (int r = 0; r < R; ++r) {
    std::fill(&scores[r][count * kLanes], &scores[r][0] + kBatch * kLanes, 0.0f);
    alignas(64) float found[kLanes];
    store(found, lse_of_rows(scores[r]));
    float* target = b.lse + (row + r) * b.lse_stride;
    if (b.clusters == nullptr) std::copy_n(found, count, target + b.first + first);
    else
      for (int i = 0; i < count; ++i) target[b.clusters[first + i]] = found[i];
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
