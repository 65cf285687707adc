// What index_impl.hpp needs beside simd_*.hpp, where there is no AVX-512.
#pragma once

#include <cmath>
#include <cstdint>

namespace h3::H3_ISA {

constexpr int kMeanSums = 12;  // sums of mean values that are kept at the same time

// 2^x with a relative error of 1e-7; below 2^-126 the result is 0 or a denormal number. NaN stays NaN.
template <int Parts>
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

inline Vec log2_lanes(const Vec& a) {
  alignas(64) float x[16];
  store(x, a);
  for (float& lane : x) lane = std::log2(lane);
  return load(x);
}

// Lane i of the result is the sum over the lanes of vector(i), for 16 of them.
template <class Vector>
inline Vec sums_of_rows(const Vector& vector) {
  alignas(64) float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum_lanes(vector(i));
  return load(sums);
}

}  // namespace h3::H3_ISA
