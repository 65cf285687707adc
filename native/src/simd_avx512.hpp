// Sixteen fp32 lanes in one register. Included by one translation unit only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace h3::H3_ISA {

using Vec = __m512;
using Bits = __mmask16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec fill(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum_lanes(Vec a) { return _mm512_reduce_add_ps(a); }
// sum_lanes of each, with the same pairs added in the same order: neighbours meet in one vector on the way down.
inline void sum_lanes_of_8(const Vec* v, float* sums) {
  Vec quarter[2];
  for (int i = 0; i < 2; ++i) {
    const Vec* const a = v + 4 * i;
    const Vec ab = add(_mm512_shuffle_f32x4(a[0], a[1], 0x44), _mm512_shuffle_f32x4(a[0], a[1], 0xee));
    const Vec cd = add(_mm512_shuffle_f32x4(a[2], a[3], 0x44), _mm512_shuffle_f32x4(a[2], a[3], 0xee));
    quarter[i] = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const __m512d low = _mm512_castps_pd(quarter[0]), high = _mm512_castps_pd(quarter[1]);
  const Vec pairs = add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  alignas(64) float all[16];
  _mm512_store_ps(all, add(pairs, _mm512_permute_ps(pairs, 0xb1)));
  for (int i = 0; i < 4; ++i) {
    sums[i] = all[4 * i];
    sums[4 + i] = all[4 * i + 2];
  }
}
inline float max_lanes(Vec a) { return _mm512_reduce_max_ps(a); }

inline Bits lanes_below(int n) { return static_cast<Bits>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
inline Bits positions_at_most(const std::int32_t* p, std::int32_t limit) {
  return _mm512_cmple_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(limit));
}
inline Bits below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline unsigned mask_of(Bits a) { return a; }
inline Bits both(Bits a, Bits b) { return a & b; }
inline Vec select(Bits m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }

// x = n + f with integral n and |f| <= 1/2.
inline Vec round_nearest(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }

inline Vec load_fp16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

// Pairs of bf16 in 16 lanes of 32 bits: `dot` adds both products of each lane.
struct Bf16Pairs {
  __m512bh pairs;
};
inline Bf16Pairs load_pairs(const void* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline Bf16Pairs fill_pair(const void* p) {
  return {(__m512bh)_mm512_set1_epi32(*static_cast<const std::int32_t*>(p))};
}
inline Vec dot(Vec acc, Bf16Pairs a, Bf16Pairs b) { return _mm512_dpbf16_ps(acc, a.pairs, b.pairs); }
inline void store_bf16(void* p, Vec a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
}

// Two of them, lane by lane.
inline void store_pairs(void* p, Vec even, Vec odd) {
  const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(packed));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(packed, 1));
  _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Codes in bytes, four to each of 16 lanes, and sums of their products.
using Bytes = __m512i;
using Ints = __m512i;
inline Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes fill_quad(const void* p) { return _mm512_set1_epi32(*static_cast<const std::int32_t*>(p)); }
inline Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes a) { return _mm512_and_si512(_mm512_srli_epi32(a, 4), _mm512_set1_epi8(15)); }
// a where the mask's bits are set, b elsewhere.
inline Bytes choose(Bytes mask, Bytes a, Bytes b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
// 16 * high + low of the low and of the high halves.
inline Bytes join_low(Bytes high, Bytes low) {
  return choose(_mm512_set1_epi8(15), low, _mm512_slli_epi32(high, 4));
}
inline Bytes join_high(Bytes high, Bytes low) {
  return choose(_mm512_set1_epi8(15), _mm512_srli_epi32(low, 4), high);
}
inline Ints ints_zero() { return _mm512_setzero_si512(); }
inline Ints ints_add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
template <int Bits>
inline Ints shift_left(Ints a) { return _mm512_slli_epi32(a, Bits); }
inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
// GCC copies the intrinsic's sums to and fro, which takes a third of these loops' time: hence assembly.
// codes up to 255, a quad of signed numbers in memory
inline Ints dot_bytes(Ints acc, Bytes codes, const void* quad) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*static_cast<const std::int32_t*>(quad)));
  return acc;
}
// codes up to 15, a quad of signed numbers in memory
inline Ints dot_nibbles(Ints acc, Bytes codes, const void* quad) { return dot_bytes(acc, codes, quad); }
// The same with quads in registers, which serve several vectors of codes.
inline Ints dot_signed(Ints acc, Bytes codes, Bytes quad) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(quad));
  return acc;
}
inline Ints dot_nibbles(Ints acc, Bytes codes, Bytes quad) { return dot_signed(acc, codes, quad); }
// codes up to 255, quads of signed numbers, for loops that the compiler does well with
inline Ints dot_bytes(Ints acc, Bytes codes, Bytes quad) { return _mm512_dpbusd_epi32(acc, codes, quad); }
// codes up to 15, quads of numbers up to 255
inline Ints dot_unsigned(Ints acc, Bytes codes, Bytes quad) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(quad), "v"(codes));
  return acc;
}
// Sixteen nibbles as numbers: byte b holds number b in its low half and number 8 + b in its high half.
inline Vec load_nibbles(const void* p) {
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  const __m128i halves = _mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(halves, _mm_set1_epi8(15))));
}
// (a >> Shift) & 255 of each lane
template <int Shift>
inline Vec byte_at(Bytes a) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a, Shift), _mm512_set1_epi32(255)));
}
// The nearest whole number, ties to even.
inline Ints to_ints(Vec a) { return _mm512_cvtps_epi32(a); }
// Bits [Shift, Shift + Count) of each lane, as 16 bytes.
template <int Shift, int Count>
inline void store_bits(std::uint8_t* p, Ints a) {
  const Ints moved = Shift == 0 ? a : _mm512_srli_epi32(a, Shift);
  const Ints bits = Count == 8 ? moved : _mm512_and_si512(moved, _mm512_set1_epi32((1 << Count) - 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(bits));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second-level cache, whose misses are many at a time.
inline void prefetch_later(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct Word {
  __m512i bits;
};
inline Word word_zero() { return {_mm512_setzero_si512()}; }
inline Word word_xor(Word a, const void* p) { return {_mm512_xor_si512(a.bits, _mm512_load_si512(p))}; }
inline std::uint64_t word_fold(Word a) {
  alignas(64) std::uint64_t parts[8];
  _mm512_store_si512(parts, a.bits);
  std::uint64_t sum = 0;
  for (const std::uint64_t part : parts) sum ^= part;
  return sum;
}

// Accumulators of the largest register tile: rows x vectors, with room for one column of B and one broadcast.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

// The same of sums of codes, where rows count once for each part.
constexpr int kCodeTileRows = 8;
constexpr int kCodeTileSums = 12;
constexpr int kCodeScoreSums = 16;

}  // namespace h3::H3_ISA
