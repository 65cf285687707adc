#define H3_ISA index_avx512
#include "simd_avx512.hpp"

namespace h3::H3_ISA {

constexpr int kMeanSums = 24;  // sums of mean values that stay in registers

// 2^x with a relative error of 1e-4 for rows of one part, else 3e-7; NaN stays NaN. `vscalefps` takes the whole part of
// x by itself.
template <int Parts>
inline Vec power_of_two(Vec x) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p;
  if constexpr (Parts == 1) {
    p = fill(7.802450655e-02f);
    p = fma(p, f, fill(2.260671783e-01f));
    p = fma(p, f, fill(6.958335326e-01f));
    p = fma(p, f, fill(9.999252189e-01f));
  } else {
    p = fill(1.867130703e-3f);
    p = fma(p, f, fill(9.017028957e-3f));
    p = fma(p, f, fill(5.579991411e-2f));
    p = fma(p, f, fill(2.401644499e-1f));
    p = fma(p, f, fill(6.931513118e-1f));
    p = fma(p, f, fill(1.0f));
  }
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

// Lane i of the result is the sum over the lanes of vector(i), for 16 of them.
template <class Vector>
inline Vec sums_of_rows(const Vector& vector) {
  const auto two = [&](int i) {
    const Vec a = vector(i), b = vector(i + 1);
    return _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const auto four = [&](int i) {
    const __m512d a = two(i), b = two(i + 2);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const auto folded = [](Vec a, Vec b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const auto eight = [&](int i) {
    const Vec a = four(i), b = four(i + 4);
    return folded(a, b);
  };
  const Vec a = eight(0), b = eight(8);
  return folded(a, b);
}

}  // namespace h3::H3_ISA

#include "index_impl.hpp"

namespace h3 {
const IndexKernels kAvx512Index = index_avx512::kIndex;
}
