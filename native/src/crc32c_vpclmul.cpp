// Folding: a vector is multiplied by the power of x that carries it onto the vector so many bits behind it, where it is
// added. What is left at the end is 64 bytes whose checksum is that of everything.
#include <immintrin.h>

#include <cstring>

#include "h3/crc32c.hpp"

namespace h3::crc {
namespace {

// Factors for a distance of D bits. In a lane of 128 bits the low half stands x^64 above the high one. A factor in the
// low 32 of 64 bits is x^32 too large, and a product of reflected polynomials lies one bit low: 33 in all.
template <std::uint64_t D>
__m512i fold_factors() {
  constexpr std::uint64_t low = power_of_x(D + 64 - 33), high = power_of_x(D - 33);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

__m512i fold(__m512i x, __m512i factors, __m512i onto) {
  const __m512i low = _mm512_clmulepi64_epi128(x, factors, 0x00), high = _mm512_clmulepi64_epi128(x, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // exclusive or of all three
}

}  // namespace

std::uint32_t update_vpclmul(std::uint32_t state, const unsigned char* data, std::size_t size) {
  constexpr std::size_t kStep = 256;
  if (size < 2 * kStep) return update_sse42(state, data, size);
  const auto vector_at = [](const unsigned char* from) { return _mm512_loadu_si512(from); };
  __m512i x0 = vector_at(data), x1 = vector_at(data + 64), x2 = vector_at(data + 128), x3 = vector_at(data + 192);
  x0 = _mm512_xor_si512(x0, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  const __m512i far = fold_factors<kStep * 8>();
  for (data += kStep, size -= kStep; size >= kStep; data += kStep, size -= kStep) {
    x0 = fold(x0, far, vector_at(data));
    x1 = fold(x1, far, vector_at(data + 64));
    x2 = fold(x2, far, vector_at(data + 128));
    x3 = fold(x3, far, vector_at(data + 192));
  }
  const __m512i near = fold_factors<512>();
  x3 = fold(fold(fold(x0, near, x1), near, x2), near, x3);
  unsigned char rest[64];
  _mm512_storeu_si512(rest, x3);
  return update_sse42(update_sse42(0, rest, sizeof rest), data, size);
}

}  // namespace h3::crc
