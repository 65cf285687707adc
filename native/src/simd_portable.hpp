// Sixteen fp32 lanes as an array: any processor. Included by one translation unit only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "convert.hpp"

namespace h3::H3_ISA {

struct Vec {
  float x[16];
};
struct Bits {
  bool x[16];
};

#define H3_LANES(body)          \
  {                             \
    Vec r;                      \
    for (int i = 0; i < 16; ++i) r.x[i] = (body); \
    return r;                   \
  }

inline Vec zero() H3_LANES(0.0f)
inline Vec fill(float v) H3_LANES(v)
inline Vec load(const float* p) H3_LANES(p[i])
inline void store(float* p, const Vec& a) { std::memcpy(p, a.x, sizeof a.x); }
inline Vec add(const Vec& a, const Vec& b) H3_LANES(a.x[i] + b.x[i])
inline Vec sub(const Vec& a, const Vec& b) H3_LANES(a.x[i] - b.x[i])
inline Vec mul(const Vec& a, const Vec& b) H3_LANES(a.x[i] * b.x[i])
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) H3_LANES(a.x[i] * b.x[i] + c.x[i])
inline Vec max(const Vec& a, const Vec& b) H3_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i])
inline float sum_lanes(Vec a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.x[i] += a.x[i + width];
  return a.x[0];
}
inline float max_lanes(const Vec& a) {
  float best = a.x[0];
  for (int i = 1; i < 16; ++i) best = a.x[i] > best ? a.x[i] : best;
  return best;
}

inline Bits lanes_below(int n) {
  Bits m;
  for (int i = 0; i < 16; ++i) m.x[i] = i < n;
  return m;
}
inline Bits positions_at_most(const std::int32_t* p, std::int32_t limit) {
  Bits m;
  for (int i = 0; i < 16; ++i) m.x[i] = p[i] <= limit;
  return m;
}
inline Bits both(const Bits& a, const Bits& b) {
  Bits m;
  for (int i = 0; i < 16; ++i) m.x[i] = a.x[i] && b.x[i];
  return m;
}
inline Vec select(const Bits& m, const Vec& a, const Vec& b) H3_LANES(m.x[i] ? a.x[i] : b.x[i])

inline Vec round_nearest(const Vec& a) H3_LANES(std::nearbyintf(a.x[i]))
inline Vec scale_by_power(const Vec& a, const Vec& n) H3_LANES(
    n.x[i] != n.x[i] ? n.x[i] : n.x[i] < -126.0f ? 0.0f : a.x[i] * float_of_bits(static_cast<std::uint32_t>(static_cast<int>(n.x[i]) + 127) << 23))

inline Vec load_fp16(const void* p) {
  const auto* h = static_cast<const std::uint16_t*>(p);
  H3_LANES(fp16_to_fp32(h[i]))
}

struct Bf16Pairs {
  Vec even, odd;
};
inline Bf16Pairs load_pairs(const void* p) {
  const auto* h = static_cast<const std::uint16_t*>(p);
  Bf16Pairs r;
  for (int i = 0; i < 16; ++i) {
    r.even.x[i] = bf16_to_fp32(h[2 * i]);
    r.odd.x[i] = bf16_to_fp32(h[2 * i + 1]);
  }
  return r;
}
inline Bf16Pairs fill_pair(const void* p) {
  const auto* h = static_cast<const std::uint16_t*>(p);
  return {fill(bf16_to_fp32(h[0])), fill(bf16_to_fp32(h[1]))};
}
inline Vec dot(const Vec& acc, const Bf16Pairs& a, const Bf16Pairs& b) {
  return fma(a.odd, b.odd, fma(a.even, b.even, acc));
}
inline void store_bf16(void* p, const Vec& a) {
  auto* h = static_cast<std::uint16_t*>(p);
  for (int i = 0; i < 16; ++i) h[i] = fp32_to_bf16(a.x[i]);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

struct Word {
  std::uint64_t x[8];
};
inline Word word_zero() { return {}; }
inline Word word_xor(Word a, const void* p) {
  const auto* w = static_cast<const std::uint64_t*>(p);
  for (int i = 0; i < 8; ++i) a.x[i] ^= w[i];
  return a;
}
inline std::uint64_t word_fold(const Word& a) {
  std::uint64_t r = 0;
  for (int i = 0; i < 8; ++i) r ^= a.x[i];
  return r;
}

constexpr int kTileRows = 2;
constexpr int kTileVectors = 1;

#undef H3_LANES

}  // namespace h3::H3_ISA
