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
// Rounded once, as the instruction of other processors does: where results must be equal on all of them.
inline Vec fused(const Vec& a, const Vec& b, const Vec& c) H3_LANES(std::fma(a.x[i], b.x[i], c.x[i]))
inline Vec max(const Vec& a, const Vec& b) H3_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i])
inline float sum_lanes(Vec a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.x[i] += a.x[i + width];
  return a.x[0];
}
inline void sum_lanes_of_8(const Vec* v, float* sums) {
  for (int i = 0; i < 8; ++i) sums[i] = sum_lanes(v[i]);
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
inline Bits below(const Vec& a, const Vec& b) {
  Bits m;
  for (int i = 0; i < 16; ++i) m.x[i] = a.x[i] < b.x[i];
  return m;
}
inline unsigned mask_of(const Bits& a) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(a.x[i]) << i;
  return mask;
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

// Two of them, lane by lane.
inline void store_pairs(void* p, const Vec& even, const Vec& odd) {
  auto* h = static_cast<std::uint16_t*>(p);
  for (int i = 0; i < 16; ++i) {
    h[2 * i] = fp32_to_bf16(even.x[i]);
    h[2 * i + 1] = fp32_to_bf16(odd.x[i]);
  }
}

// Codes in bytes, four to each of 16 lanes, and sums of their products.
struct Bytes {
  std::uint8_t x[64];
};
struct Ints {
  std::int32_t x[16];
};
inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.x, p, sizeof r.x);
  return r;
}
inline Bytes fill_quad(const void* p) {
  Bytes r;
  for (int i = 0; i < 16; ++i) std::memcpy(r.x + 4 * i, p, 4);
  return r;
}
#define H3_BYTES(body)          \
  {                             \
    Bytes r;                    \
    for (int i = 0; i < 64; ++i) r.x[i] = static_cast<std::uint8_t>(body); \
    return r;                   \
  }
#define H3_INTS(body)           \
  {                             \
    Ints r;                     \
    for (int i = 0; i < 16; ++i) r.x[i] = (body); \
    return r;                   \
  }
inline Bytes low_nibbles(const Bytes& a) H3_BYTES(a.x[i] & 15)
inline Bytes high_nibbles(const Bytes& a) H3_BYTES(a.x[i] >> 4)
// 16 * high + low of the low and of the high halves.
inline Bytes join_low(const Bytes& high, const Bytes& low) H3_BYTES((high.x[i] & 15) << 4 | (low.x[i] & 15))
inline Bytes join_high(const Bytes& high, const Bytes& low) H3_BYTES((high.x[i] & 240) | low.x[i] >> 4)
inline Ints ints_zero() { return {}; }
inline Ints ints_add(const Ints& a, const Ints& b) H3_INTS(a.x[i] + b.x[i])
template <int Bits>
inline Ints shift_left(const Ints& a) H3_INTS(a.x[i] * (1 << Bits))
inline Vec to_floats(const Ints& a) H3_LANES(static_cast<float>(a.x[i]))
inline std::int32_t signed_byte(const Bytes& a, int i) { return static_cast<std::int8_t>(a.x[i]); }
// codes up to 255, a quad of signed numbers, in registers or in memory
inline Ints dot_bytes(const Ints& acc, const Bytes& codes, const Bytes& quad) H3_INTS(
    acc.x[i] + codes.x[4 * i] * signed_byte(quad, 4 * i) + codes.x[4 * i + 1] * signed_byte(quad, 4 * i + 1) +
    codes.x[4 * i + 2] * signed_byte(quad, 4 * i + 2) + codes.x[4 * i + 3] * signed_byte(quad, 4 * i + 3))
inline Ints dot_bytes(const Ints& acc, const Bytes& codes, const void* quad) {
  return dot_bytes(acc, codes, fill_quad(quad));
}
inline Ints dot_signed(const Ints& acc, const Bytes& codes, const Bytes& quad) { return dot_bytes(acc, codes, quad); }
// codes up to 15, a quad of signed numbers, in registers or in memory
inline Ints dot_nibbles(const Ints& acc, const Bytes& codes, const Bytes& quad) { return dot_bytes(acc, codes, quad); }
inline Ints dot_nibbles(const Ints& acc, const Bytes& codes, const void* quad) { return dot_bytes(acc, codes, quad); }
// codes up to 15, quads of numbers up to 255
inline Ints dot_unsigned(const Ints& acc, const Bytes& codes, const Bytes& quad) { return dot_bytes(acc, quad, codes); }
// Sixteen nibbles as numbers: byte b holds number b in its low half and number 8 + b in its high half.
inline Vec load_nibbles(const void* p) {
  const auto* bytes = static_cast<const std::uint8_t*>(p);
  H3_LANES(static_cast<float>(i < 8 ? bytes[i] & 15 : bytes[i - 8] >> 4))
}
// (a >> Shift) & 255 of each lane
template <int Shift>
inline Vec byte_at(const Bytes& a) H3_LANES(static_cast<float>(a.x[4 * i + Shift / 8]))
// The nearest whole number, ties to even; 0 for what is not a number.
inline Ints to_ints(const Vec& a) H3_INTS(a.x[i] == a.x[i] ? static_cast<std::int32_t>(std::nearbyintf(a.x[i])) : 0)
// Bits [Shift, Shift + Count) of each lane, as 16 bytes.
template <int Shift, int Count>
inline void store_bits(std::uint8_t* p, const Ints& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<std::uint8_t>(a.x[i] >> Shift & ((1 << Count) - 1));
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
// Into the second-level cache, whose misses are many at a time.
inline void prefetch_later(const void* p) { __builtin_prefetch(p, 0, 2); }

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

// The same of sums of codes, where rows count once for each part.
constexpr int kCodeTileRows = 3;
constexpr int kCodeTileSums = 3;
constexpr int kCodeScoreSums = 3;

#undef H3_LANES
#undef H3_BYTES
#undef H3_INTS

}  // namespace h3::H3_ISA
