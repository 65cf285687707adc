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
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum_lanes(Vec a) { return _mm512_reduce_add_ps(a); }
inline float max_lanes(Vec a) { return _mm512_reduce_max_ps(a); }

inline Bits lanes_below(int n) { return static_cast<Bits>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
inline Bits positions_at_most(const std::int32_t* p, std::int32_t limit) {
  return _mm512_cmple_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(limit));
}
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

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

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

}  // namespace h3::H3_ISA
