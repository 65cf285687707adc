#define H3_ISA index_avx512
#include "simd_avx512.hpp"

namespace h3::H3_ISA {

// 2^x for x <= 0 with a relative error of 3e-7; NaN stays NaN. `vscalefps` takes the whole part of x by itself.
inline Vec power_of_two(Vec x) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = fill(1.867130703e-3f);
  p = fma(p, f, fill(9.017028957e-3f));
  p = fma(p, f, fill(5.579991411e-2f));
  p = fma(p, f, fill(2.401644499e-1f));
  p = fma(p, f, fill(6.931513118e-1f));
  p = fma(p, f, fill(1.0f));
  return _mm512_scalef_ps(p, x);
}

// Of a positive normal number, by the series of atanh on [3/4, 3/2); absolute error 2e-7.
inline Vec log2_lanes(Vec x) {
  const Vec m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const Vec exponent = _mm512_roundscale_ps(_mm512_getexp_ps(_mm512_div_ps(x, m)), _MM_FROUND_TO_NEAREST_INT);
  const Vec s = _mm512_div_ps(sub(m, fill(1.0f)), add(m, fill(1.0f)));
  const Vec t = mul(s, s);
  Vec p = fill(0.41219858311f);
  p = fma(p, t, fill(0.57707801636f));
  p = fma(p, t, fill(0.96179669393f));
  p = fma(p, t, fill(2.88539008178f));
  return fma(p, s, exponent);
}

inline void transpose(float* m) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_ps(m + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + j + 2])));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + j]), _mm512_castps_pd(b[i + j + 2])));
    }
  }
  for (int i = 0; i < 4; ++i) {  // a[4 g + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 g to 4 g + 3
    const __m512 low01 = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high01 = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    _mm512_store_ps(m + 16 * i, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_store_ps(m + 16 * (8 + i), _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_store_ps(m + 16 * (4 + i), _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_store_ps(m + 16 * (12 + i), _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}

}  // namespace h3::H3_ISA

#include "index_impl.hpp"

namespace h3 {
const IndexKernels kAvx512Index = index_avx512::kIndex;
}
