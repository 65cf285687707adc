// Sums of mean values. Included by index_impl.hpp alone.
#pragma once

namespace h3::H3_ISA {

// Weights are cut into two digits of 7 bits relative to the largest of their segment: sums over clusters are of
// integers.
constexpr int kDigitBits = 7;
constexpr int kWholeDigits = (1 << 2 * kDigitBits) - 1;

// One row's weights times the scales of the values: sum of w_c (v_c - offset_c) = unit * sum of digits_c * codes_c.
struct MeanDigits {
  alignas(64) std::uint8_t upper[kSegmentClusters];
  alignas(64) std::uint8_t lower[kSegmentClusters];
  float unit;
};

// A segment and its rows' log-sum-exps; -inf where a cluster does not count.
template <int R>
struct MeanSegment {
  int index;
  alignas(64) float lse[R][kSegmentClusters];
};

// What a run of segments gives a row beside the sums of codes, which are written at its end.
struct MeanTotals {
  Vec weights;
  Vec offsets;
};

// The code of what a segment's summary holds: mean values, then scales.
struct MeanValues {
  const char* codes;
  const char* scales;

  MeanValues(const MeanBlock& b, int segment) {
    const std::int64_t size = kPageTokens * std::int64_t{b.head_dim};
    codes = reinterpret_cast<const char*>(b.segments[segment].summary) + b.head_offset + size;
    scales = codes + size;
  }

  Vec scale(int which, int cluster) const { return load_fp16(scales + (which * kPageTokens + cluster) * 2); }

  void fetch_scales() const {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(scales + kValueScale * kPageTokens * 2 + 64 * line, 0, 2);
  }
};

// Gives back whether any row's weights in this segment count. What is not a number does.
template <int R>
inline bool gather_lse(const MeanBlock& b, int row, int index, MeanSegment<R>& segment) {
  segment.index = index;
  bool counts = false;
  for (int r = 0; r < R; ++r) {
    float* const lse = segment.lse[r];
    std::memcpy(lse, b.lse + (row + r) * b.lse_stride + index * kSegmentClusters, sizeof segment.lse[r]);
    for (std::uint64_t left = b.is_read[index]; left != 0; left &= left - 1) lse[__builtin_ctzll(left)] = kNothing;
    Vec best = load(lse);
    for (int c = kLanes; c < kSegmentClusters; c += kLanes) best = max(best, load(lse + c));
    const float origin = b.origin[row + r];
    counts |= origin != kNothing && !(max_lanes(best) - origin < b.negligible);
  }
  return counts;
}

inline MeanDigits weigh_means(const MeanValues& values, const float* lse, float origin, MeanTotals& totals) {
  constexpr float kLeast = 1e-30f;  // below it weights are nothing beside others, and their inverse would overflow
  const Vec moved = fill(origin == kNothing ? 0.0f : origin);
  Vec products[kSegmentClusters / kLanes];
  Vec largest = zero();
  for (int i = 0; i < kSegmentClusters / kLanes; ++i) {
    const Vec weight = power_of_two<2>(sub(load(lse + i * kLanes), moved));
    products[i] = mul(weight, values.scale(kValueScale, i * kLanes));
    totals.weights = add(totals.weights, weight);
    totals.offsets = fma(weight, values.scale(kValueOffset, i * kLanes), totals.offsets);
    largest = max(largest, products[i]);
  }
  MeanDigits digits;
  const float whole = max_lanes(largest);
  digits.unit = whole / kWholeDigits;
  const Vec inverse = fill(whole > kLeast ? kWholeDigits / whole : 0.0f);
  for (int i = 0; i < kSegmentClusters / kLanes; ++i) {
    const Ints number = to_ints(mul(products[i], inverse));
    store_bits<kDigitBits, kDigitBits>(digits.upper + i * kLanes, number);
    store_bits<0, kDigitBits>(digits.lower + i * kLanes, number);
  }
  return digits;
}

// Sixteen dimensions times N for R rows; what is read next is fetched, line by line.
template <int R, int N>
inline void sum_means_of(const MeanBlock& b, int row, int vector, const MeanDigits* digits, const MeanValues& values,
                         const MeanValues& next) {
  constexpr int kGroup = 4;  // clusters that share a lane
  const int vectors = b.head_dim / kLanes;
  Ints upper[N][R], lower[N][R];
  for (int n = 0; n < N; ++n)
    for (int r = 0; r < R; ++r) upper[n][r] = lower[n][r] = ints_zero();
  for (int c = 0; c < kSegmentClusters; c += kGroup) {
    const std::int64_t at = 64 * (std::int64_t{c} / kGroup * vectors + vector);
    for (int n = 0; n < N; ++n) {
      __builtin_prefetch(next.codes + at + 64 * n, 0, 2);
      const Bytes four = load_bytes(values.codes + at + 64 * n);
      for (int r = 0; r < R; ++r) {
        upper[n][r] = dot_bytes(upper[n][r], four, digits[r].upper + c);
        lower[n][r] = dot_bytes(lower[n][r], four, digits[r].lower + c);
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int r = 0; r < R; ++r) {
      float* out = b.out + std::int64_t{row + r} * b.head_dim + (vector + n) * kLanes;
      const Vec sum = to_floats(ints_add(shift_left<kDigitBits>(upper[n][r]), lower[n][r]));
      store(out, fma(sum, fill(digits[r].unit), load(out)));
    }
}

template <int R>
inline void sum_means_rows(const MeanBlock& b, int row) {
  constexpr int kMost = R * 2 * 4 <= kMeanSums ? 4 : R * 2 * 2 <= kMeanSums ? 2 : 1;
  MeanSegment<R> segments[kMeanSegmentsMax];
  int count = 0;
  for (int s = b.first; s < b.last; ++s) count += gather_lse<R>(b, row, s, segments[count]);
  MeanTotals totals[R];
  for (int r = 0; r < R; ++r) totals[r] = {zero(), zero()};
  const int vectors = b.head_dim / kLanes;
  for (int i = 0; i < count; ++i) {
    const MeanValues values(b, segments[i].index), next(b, segments[std::min(i + 1, count - 1)].index);
    next.fetch_scales();
    MeanDigits digits[R];
    for (int r = 0; r < R; ++r) digits[r] = weigh_means(values, segments[i].lse[r], b.origin[row + r], totals[r]);
    int v = 0;
    for (; v + kMost <= vectors; v += kMost) sum_means_of<R, kMost>(b, row, v, digits, values, next);
    for (; v < vectors; ++v) sum_means_of<R, 1>(b, row, v, digits, values, next);
  }
  for (int r = 0; r < R; ++r) {
    const Vec constant = fill(sum_lanes(totals[r].offsets));
    b.sum[row + r] += sum_lanes(totals[r].weights);
    float* out = b.out + std::int64_t{row + r} * b.head_dim;
    for (int d = 0; d < b.head_dim; d += kLanes) store(out + d, add(load(out + d), constant));
  }
}

inline void sum_means(const MeanBlock& b) {
  for (int row = 0; row < b.rows; row += kRowsMax) switch (b.rows - row) {
      case 1: sum_means_rows<1>(b, row); break;
      case 2: sum_means_rows<2>(b, row); break;
      case 3: sum_means_rows<3>(b, row); break;
      default: sum_means_rows<4>(b, row); break;
    }
}

}  // namespace h3::H3_ISA
