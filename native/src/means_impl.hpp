// Sums of mean values. Included by index_impl.hpp alone.
#pragma once

namespace h3::H3_ISA {

// Weights are cut into two digits of 7 bits relative to the largest of their segment: sums over clusters are of integers.
constexpr int kDigitBits = 7;
constexpr int kWholeDigits = (1 << 2 * kDigitBits) - 1;

// One row's weights times the scales of the values: sum of w_c v_c = unit * (sum of digits_c * codes_c) + constant.
struct MeanDigits {
  alignas(64) std::uint8_t upper[kSegmentClusters];
  alignas(64) std::uint8_t lower[kSegmentClusters];
  float unit;
  float constant;
};

inline bool has_nan(const float* x, int count) {
  for (int i = 0; i < count; ++i)
    if (x[i] != x[i]) return true;
  return false;
}

// Gives the row's maximum and sum what this segment adds; what was summed before shrinks to the new maximum.
inline MeanDigits weigh_means(const MeanBlock& b, int row) {
  constexpr float kLeast = 1e-30f;  // below it weights are nothing beside others, and their inverse would overflow
  const float* lse = b.lse + row * kSegmentClusters;
  Vec best = load(lse);
  for (int c = kLanes; c < kSegmentClusters; c += kLanes) best = max(best, load(lse + c));
  const float largest_lse = max_lanes(best), before = b.maximum[row];
  float now = largest_lse > before || largest_lse != largest_lse ? largest_lse : before;
  if (now == kNothing && has_nan(lse, kSegmentClusters)) now = __builtin_nanf("");  // a maximum may drop what is not a number
  MeanDigits digits;
  if (now == kNothing) {
    std::memset(&digits, 0, sizeof digits);
    return digits;
  }
  const auto scale = [&](int which, int c) { return load_fp16(b.scales + (which * kPageTokens + c) * 2); };
  alignas(64) float products[kSegmentClusters];
  Vec total = zero(), largest = zero(), offsets = zero();
  for (int c = 0; c < kSegmentClusters; c += kLanes) {
    const Vec weight = power_of_two<2>(sub(load(lse + c), fill(now)));
    const Vec product = mul(weight, scale(kValueScale, c));
    total = add(total, weight);
    largest = max(largest, product);
    offsets = fma(weight, scale(kValueOffset, c), offsets);
    store(products + c, product);
  }
  if (now != before) {
    const float shrink = before == kNothing ? 0.0f : exp2f(before - now);
    float* out = b.out + std::int64_t{row} * b.head_dim;
    for (int d = 0; d < b.head_dim; d += kLanes) store(out + d, mul(load(out + d), fill(shrink)));
    b.sum[row] *= shrink;
    b.maximum[row] = now;
  }
  b.sum[row] += sum_lanes(total);
  const float whole = max_lanes(largest);
  const Vec inverse = fill(whole > kLeast ? kWholeDigits / whole : 0.0f);
  for (int c = 0; c < kSegmentClusters; c += kLanes) {
    const Ints number = to_ints(mul(load(products + c), inverse));
    store_bits<kDigitBits, kDigitBits>(digits.upper + c, number);
    store_bits<0, kDigitBits>(digits.lower + c, number);
  }
  digits.unit = whole / kWholeDigits;
  digits.constant = sum_lanes(offsets);
  return digits;
}

// Sixteen dimensions times N for R rows.
template <int R, int N>
inline void sum_means_of(const MeanBlock& b, int row, int vector, const MeanDigits* digits) {
  constexpr int kGroup = 4;  // clusters that share a lane
  const int vectors = b.head_dim / kLanes;
  Ints upper[N][R], lower[N][R];
  for (int n = 0; n < N; ++n)
    for (int r = 0; r < R; ++r) upper[n][r] = lower[n][r] = ints_zero();
  const char* codes = b.values + 64 * vector;
  for (int c = 0; c < b.clusters; c += kGroup, codes += 64 * vectors)
    for (int n = 0; n < N; ++n) {
      const Bytes four = load_bytes(codes + 64 * n);
      for (int r = 0; r < R; ++r) {
        upper[n][r] = dot_bytes(upper[n][r], four, digits[r].upper + c);
        lower[n][r] = dot_bytes(lower[n][r], four, digits[r].lower + c);
      }
    }
  for (int n = 0; n < N; ++n)
    for (int r = 0; r < R; ++r) {
      float* out = b.out + std::int64_t{row + r} * b.head_dim + (vector + n) * kLanes;
      const Vec sum = to_floats(ints_add(shift_left<kDigitBits>(upper[n][r]), lower[n][r]));
      store(out, add(load(out), fma(sum, fill(digits[r].unit), fill(digits[r].constant))));
    }
}

template <int R>
inline void sum_means_rows(const MeanBlock& b, int row) {
  MeanDigits digits[R];
  for (int r = 0; r < R; ++r) digits[r] = weigh_means(b, row + r);
  const int vectors = b.head_dim / kLanes;
  int v = 0;
  for (; v + 2 <= vectors; v += 2) sum_means_of<R, 2>(b, row, v, digits);
  if (v < vectors) sum_means_of<R, 1>(b, row, v, digits);
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
