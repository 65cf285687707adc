// Sixteen fp32 lanes in two registers. Included by one translation unit only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace h3::H3_ISA {

struct Vec {
  __m256 lo, hi;
};
struct Bits {
  __m256 lo, hi;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline float sum_lanes(Vec a) {
  const __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
inline void sum_lanes_of_8(const Vec* v, float* sums) {
  for (int i = 0; i < 8; ++i) sums[i] = sum_lanes(v[i]);
}
inline float max_lanes(Vec a) {
  const __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

inline Bits lanes_below(int n) {
  const __m256i limit = _mm256_set1_epi32(n);
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high))};
}
inline Bits positions_at_most(const std::int32_t* p, std::int32_t limit) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8));
  const __m256i bound = _mm256_set1_epi32(limit);
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(low, bound), ones)),
          _mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(high, bound), ones))};
}
inline Bits below(Vec a, Vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
inline unsigned mask_of(Bits a) {
  return static_cast<unsigned>(_mm256_movemask_ps(a.lo)) | static_cast<unsigned>(_mm256_movemask_ps(a.hi)) << 8;
}
inline Bits both(Bits a, Bits b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
inline Vec select(Bits m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

inline Vec round_nearest(Vec x) {
  return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n; 0 below the smallest normal number.
inline __m256 scale_half(__m256 a, __m256 n) {
  const __m256 tiny = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  const __m256i shifted = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(a, _mm256_castsi256_ps(shifted)));
}
inline Vec scale_by_power(Vec a, Vec n) { return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)}; }

inline Vec load_fp16(const void* p) {
  const auto* h = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}

// Pairs of bf16 spread to fp32: a bf16 is the upper half of an fp32.
struct Bf16Pairs {
  Vec even, odd;
};
inline __m256 even_of(__m256i raw) { return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)); }
inline __m256 odd_of(__m256i raw) {
  return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Bf16Pairs load_pairs(const void* p) {
  const __m256i low = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  const __m256i high = _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1);
  return {{even_of(low), even_of(high)}, {odd_of(low), odd_of(high)}};
}
inline Bf16Pairs fill_pair(const void* p) {
  const __m256i raw = _mm256_set1_epi32(*static_cast<const std::int32_t*>(p));
  return {{even_of(raw), even_of(raw)}, {odd_of(raw), odd_of(raw)}};
}
inline Vec dot(Vec acc, Bf16Pairs a, Bf16Pairs b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }

// Round to nearest, ties to even; NaN stays NaN.
inline __m256i round_bf16(__m256 a) {
  const __m256i raw = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(raw, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store_bf16(void* p, Vec a) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Two of them, lane by lane.
inline __m256i join_pairs(__m256 even, __m256 odd) {
  return _mm256_or_si256(round_bf16(even), _mm256_slli_epi32(round_bf16(odd), 16));
}
inline void store_pairs(void* p, Vec even, Vec odd) {
  auto* target = static_cast<__m256i*>(p);
  _mm256_storeu_si256(target, join_pairs(even.lo, odd.lo));
  _mm256_storeu_si256(target + 1, join_pairs(even.hi, odd.hi));
}

// Codes in bytes, four to each of 16 lanes, and sums of their products.
struct Bytes {
  __m256i lo, hi;
};
using Ints = Bytes;
inline Bytes load_bytes(const void* p) {
  const auto* source = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(source), _mm256_loadu_si256(source + 1)};
}
inline Bytes fill_quad(const void* p) {
  const __m256i quad = _mm256_set1_epi32(*static_cast<const std::int32_t*>(p));
  return {quad, quad};
}
inline __m256i lower(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline __m256i upper(__m256i a) { return lower(_mm256_srli_epi16(a, 4)); }
inline __m256i raised(__m256i a) { return _mm256_slli_epi16(lower(a), 4); }
inline Bytes low_nibbles(Bytes a) { return {lower(a.lo), lower(a.hi)}; }
inline Bytes high_nibbles(Bytes a) { return {upper(a.lo), upper(a.hi)}; }
// 16 * high + low of the low and of the high halves.
inline Bytes join_low(Bytes high, Bytes low) {
  return {_mm256_or_si256(raised(high.lo), lower(low.lo)), _mm256_or_si256(raised(high.hi), lower(low.hi))};
}
inline Bytes join_high(Bytes high, Bytes low) { return join_low(high_nibbles(high), high_nibbles(low)); }
inline Ints ints_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints ints_add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
template <int Bits>
inline Ints shift_left(Ints a) { return {_mm256_slli_epi32(a.lo, Bits), _mm256_slli_epi32(a.hi, Bits)}; }
inline Vec to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// Two products up to 2 * 15 * 255 fit the 16 bits of `maddubs`; bytes go through it as two nibbles.
inline __m256i add_products(__m256i acc, __m256i a, __m256i b, int factor) {
  const __m256i pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(static_cast<short>(factor))));
}
// codes up to 15, a quad of signed numbers, in registers or in memory
inline Ints dot_nibbles(Ints acc, Bytes codes, Bytes row) {
  return {add_products(acc.lo, codes.lo, row.lo, 1), add_products(acc.hi, codes.hi, row.hi, 1)};
}
inline Ints dot_nibbles(Ints acc, Bytes codes, const void* quad) { return dot_nibbles(acc, codes, fill_quad(quad)); }
// codes up to 255, a quad of signed numbers, in registers or in memory
inline Ints dot_bytes(Ints acc, Bytes codes, Bytes quad) {
  acc.lo = add_products(add_products(acc.lo, lower(codes.lo), quad.lo, 1), upper(codes.lo), quad.lo, 16);
  acc.hi = add_products(add_products(acc.hi, lower(codes.hi), quad.hi, 1), upper(codes.hi), quad.hi, 16);
  return acc;
}
inline Ints dot_bytes(Ints acc, Bytes codes, const void* quad) { return dot_bytes(acc, codes, fill_quad(quad)); }
inline Ints dot_signed(Ints acc, Bytes codes, Bytes quad) { return dot_bytes(acc, codes, quad); }
// codes up to 15, quads of numbers up to 255
inline Ints dot_unsigned(Ints acc, Bytes codes, Bytes quad) {
  return {add_products(acc.lo, quad.lo, codes.lo, 1), add_products(acc.hi, quad.hi, codes.hi, 1)};
}
// Sixteen nibbles as numbers: byte b holds number b in its low half and number 8 + b in its high half.
inline Vec load_nibbles(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  const __m128i fifteen = _mm_set1_epi8(15);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(bytes, fifteen))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(bytes, 4), fifteen)))};
}
// (a >> Shift) & 255 of each lane
template <int Shift>
inline __m256 half_byte_at(__m256i a) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a, Shift), _mm256_set1_epi32(255)));
}
template <int Shift>
inline Vec byte_at(Bytes a) { return {half_byte_at<Shift>(a.lo), half_byte_at<Shift>(a.hi)}; }
// The nearest whole number, ties to even.
inline Ints to_ints(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
// Bits [Shift, Shift + Count) of each lane, as 16 bytes.
template <int Shift, int Count>
inline void store_bits(std::uint8_t* p, Ints a) {
  const __m256i mask = _mm256_set1_epi32((1 << Count) - 1);
  const __m256i low = _mm256_and_si256(_mm256_srli_epi32(a.lo, Shift), mask);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi32(a.hi, Shift), mask);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second-level cache, whose misses are many at a time.
inline void prefetch_later(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct Word {
  __m256i lo, hi;
};
inline Word word_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Word word_xor(Word a, const void* p) {
  const auto* w = static_cast<const __m256i*>(p);
  return {_mm256_xor_si256(a.lo, _mm256_load_si256(w)), _mm256_xor_si256(a.hi, _mm256_load_si256(w + 1))};
}
inline std::uint64_t word_fold(Word a) {
  alignas(32) std::uint64_t parts[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_xor_si256(a.lo, a.hi));
  return parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
}

// Sixteen registers: 3 x 2 tiles of two registers leave four for operands.
constexpr int kTileRows = 3;
constexpr int kTileVectors = 2;

// The same of sums of codes, where rows count once for each part.
constexpr int kCodeTileRows = 3;
constexpr int kCodeTileSums = 3;
constexpr int kCodeScoreSums = 3;

}  // namespace h3::H3_ISA
