// What index_impl.hpp needs beside simd_*.hpp, where there is no AVX-512.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

namespace h3::H3_ISA {

inline Vec log2_lanes(const Vec& a) {
  alignas(64) float x[16];
  store(x, a);
  for (float& lane : x) lane = std::log2(lane);
  return load(x);
}

inline void transpose(float* m) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) std::swap(m[16 * i + j], m[16 * j + i]);
}

}  // namespace h3::H3_ISA
