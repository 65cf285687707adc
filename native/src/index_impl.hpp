// The work on an index, written once over the vectors of simd_*.hpp. Each index_*.cpp includes this with its own
// H3_ISA, after what index_scalar.hpp or index_avx512.cpp define for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "h3/index.hpp"

namespace h3::H3_ISA {

constexpr int kBatch = 16;   // clusters whose 16 scores are summed at once: one vector of log-sum-exps
constexpr int kRowsMax = 4;  // query rows of a tile: their sums stay in registers
constexpr int kAhead = 16;   // clusters between the one that is scored and the one that is fetched
constexpr float kNothing = -__builtin_inff();

// Numbers of 16 tokens' codes: number = scale * code + offset.
struct Factors {
  Vec scale, offset;
};

// Where a cluster's nibbles and its numbers in the arrays of scales begin.
struct ClusterPlane {
  const char* nibbles;
  const char* scales;

  ClusterPlane(const char* planes, int cluster, int head_dim) {
    const std::int64_t page_nibbles = kPageTokens / 2 * std::int64_t{head_dim};
    const int place = cluster % kPageClusters;
    const char* plane = planes + cluster / kPageClusters * plane_bytes(head_dim);
    nibbles = plane + place * page_nibbles / kPageClusters;
    scales = plane + page_nibbles + place * kClusterTokens * 2;
  }

  static ClusterPlane of(const ScanBlock& b, std::int32_t cluster) {
    const char* planes = reinterpret_cast<const char*>(b.segments[cluster / kSegmentClusters].planes) + b.head_offset;
    return {planes, cluster % kSegmentClusters, b.query.head_dim};
  }

  // What is to be read kAhead clusters after number i of a block.
  template <bool Listed>
  static ClusterPlane ahead(const ScanBlock& b, int i) {
    const int later = i + kAhead;
    if (later < b.count) return of(b, b.cluster(later));
    if (Listed || b.next == nullptr) return of(b, b.cluster(b.count - 1));
    return {b.next, std::min(later - b.count, kSegmentClusters - 1), b.query.head_dim};
  }

  // Of nibbles that are high halves the missing low ones count as their middle.
  Factors factors(bool split_keys) const {
    const Vec scale = load_fp16(scales + kKeyScale * kPageTokens * 2);
    const Vec offset = load_fp16(scales + kKeyOffset * kPageTokens * 2);
    if (!split_keys) return {scale, offset};
    return {mul(scale, fill(16.0f)), fma(scale, fill(7.5f), offset)};
  }

  void fetch_scales() const {
    __builtin_prefetch(scales + kKeyScale * kPageTokens * 2, 0, 2);
    __builtin_prefetch(scales + kKeyOffset * kPageTokens * 2, 0, 2);
  }
};

// Scores of one cluster for R rows, before the rows' scales. Gives `best` the largest of each lane. Nibbles are read in
// a straight line, and only the lines that are needed are fetched, into the second cache: far more of them may be on
// their way there than into the first.
template <int R, int Parts>
inline void score_nibbles(const CodeRows& q, int row, const ClusterPlane& plane, const ClusterPlane& ahead,
                          bool split_keys, float* scores, Vec* best) {
  Ints low[R][Parts], high[R][Parts];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < Parts; ++p) low[r][p] = high[r][p] = ints_zero();
  const std::int8_t* rows = q.parts + row * Parts * q.head_dim;
  for (int d = 0; d < q.head_dim; d += 8) {
    __builtin_prefetch(ahead.nibbles + d * 8, 0, 2);
    const Bytes both = load_bytes(plane.nibbles + d * 8);
    const Bytes low_codes = low_nibbles(both), high_codes = high_nibbles(both);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < Parts; ++p) {
        const std::int8_t* part = rows + (r * Parts + p) * q.head_dim + d;
        low[r][p] = dot_nibbles(low[r][p], low_codes, part);
        high[r][p] = dot_nibbles(high[r][p], high_codes, part + 4);
      }
  }
  ahead.fetch_scales();
  const Factors f = plane.factors(split_keys);
  for (int r = 0; r < R; ++r) {
    Ints sum = ints_add(low[r][0], high[r][0]);
    if constexpr (Parts == 2) sum = ints_add(shift_left<7>(sum), ints_add(low[r][1], high[r][1]));
    const Vec score = fma(to_floats(sum), f.scale, mul(f.offset, fill(q.sum[row + r])));
    best[r] = max(best[r], score);
    store(scores + r * kBatch * kLanes, score);
  }
}

// Log-sum-exp of each of the 16 rows of 16 scores times `scale`, of which `best` is the largest. One origin does for
// all rows: what is 2^100 below another cluster weighs nothing. NaN in any score makes its sum NaN.
template <int Parts>
inline Vec lse_of_rows(const float* scores, float best, float scale) {
  constexpr float kLeast = 1.17549435e-38f;
  const float top = best * scale;
  const Vec origin = fill(-top), factor = fill(scale);
  const Vec sums = sums_of_rows(
      [&](int i) { return power_of_two<Parts>(fma(load(scores + i * kLanes), factor, origin)); });
  return add(fill(top), log2_lanes(max(fill(kLeast), sums)));
}

template <int R, int Parts, bool Listed>
inline void scan_rows(const ScanBlock& b, int row, int first, int count) {
  alignas(64) float scores[R][kBatch * kLanes];
  Vec best[R];
  for (int r = 0; r < R; ++r) {
    best[r] = fill(kNothing);
    std::fill(&scores[r][count * kLanes], &scores[r][0] + kBatch * kLanes, 0.0f);
  }
  for (int i = first; i < first + count; ++i)
    score_nibbles<R, Parts>(b.query, row, ClusterPlane::of(b, b.cluster(i)), ClusterPlane::ahead<Listed>(b, i),
                            b.split_keys, &scores[0][(i - first) * kLanes], best);
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

// One row's weights relative to everything, before they are divided by `sum`.
struct WeighedRow {
  float total;    // log-sum-exp in base 2
  float inverse;  // of the sum; 0 where there is nothing
};

inline WeighedRow weigh_row(const float* lse, std::int64_t count, float other, float* weights) {
  Vec best = fill(other);
  for (std::int64_t i = 0; i < count; i += kLanes) best = max(best, load(lse + i));
  const float maximum = max_lanes(best);
  if (maximum == kNothing) {
    bool is_nan = false;
    for (std::int64_t i = 0; i < count; ++i) is_nan |= lse[i] != lse[i];
    const float nothing = is_nan ? __builtin_nanf("") : 0.0f;
    std::fill_n(weights, count, nothing);
    return {is_nan ? nothing : kNothing, nothing};
  }
  Vec total = zero();
  const Vec origin = fill(maximum);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec w = power_of_two<2>(sub(load(lse + i), origin));
    store(weights + i, w);
    total = add(total, w);
  }
  const float sum = sum_lanes(total) + (other == kNothing ? 0.0f : exp2f(other - maximum));
  return {maximum + log2f(sum), 1.0f / sum};
}

inline void rank(const RankBlock& b) {
  constexpr float kLeast = -3.40282347e38f, kNone = -1.0f, kFirst = __builtin_inff();
  for (int r = 0; r < b.rows; ++r) {
    const float* const lse = b.lse + r * b.lse_stride;
    const WeighedRow row = weigh_row(lse, b.count, b.other[r], b.weights);
    b.totals[r] = row.total;
    const Vec inverse = fill(row.inverse);
    for (std::int64_t i = 0; i < b.count; i += kLanes) {
      const Vec share = mul(load(b.weights + i), inverse);
      store(b.importance + i, r == 0 ? share : add(load(b.importance + i), share));
    }
  }
  for (std::int64_t i = 0; i < b.count; i += kLanes) {
    Vec x = load(b.importance + i);
    x = select(below(fill(kNone), x), x, fill(kFirst));
    x = select(below(load(b.lse + i), fill(kLeast)), fill(kNone), x);
    store(b.importance + i, x);
    b.largest[i / kLanes] = max_lanes(x);
  }
}

}  // namespace h3::H3_ISA

#include "means_impl.hpp"
#include "cluster_impl.hpp"

namespace h3::H3_ISA {

constexpr IndexKernels kIndex = {scan, rank, sum_means, cluster};

}  // namespace h3::H3_ISA
