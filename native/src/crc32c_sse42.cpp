// Three runs of equal length at once, joined by shifting each over what lies behind it:
//
//   [ run a, n bytes ][ run b, n bytes ][ run c, n bytes ][ tail ]      state = a * x^16n + b * x^8n + c
#include <nmmintrin.h>
#include <wmmintrin.h>

#include <cstring>

#include "h3/crc32c.hpp"

namespace h3::crc {
namespace {

std::uint64_t word_at(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

std::uint32_t update_plain(std::uint64_t state, const unsigned char* data, std::size_t size) {
  for (; size >= 8; data += 8, size -= 8) state = _mm_crc32_u64(state, word_at(data));
  auto narrow = static_cast<std::uint32_t>(state);
  for (; size > 0; ++data, --size) narrow = _mm_crc32_u8(narrow, *data);
  return narrow;
}

// state * factor * x^33 mod P: the product of two reflected 32-bit polynomials lies one bit low in 64 bits, and the crc32
// instruction multiplies by x^32 and reduces.
std::uint64_t shift(std::uint64_t state, std::uint32_t factor) {
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)), _mm_cvtsi64_si128(factor), 0);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

// Pages of one size follow each other, so the factors of the last length are kept.
struct Factors {
  std::size_t run_bytes = 0;
  std::uint32_t one = 0;  // x^(8n - 33)
  std::uint32_t two = 0;  // x^(16n - 33)
};
thread_local Factors factors;

constexpr std::size_t kRunBytesMin = 64;  // below, joining costs more than one run after the other

}  // namespace

std::uint32_t update_sse42(std::uint32_t state, const unsigned char* data, std::size_t size) {
  const std::size_t run = size / 24 * 8;
  if (run < kRunBytesMin) return update_plain(state, data, size);
  if (factors.run_bytes != run) factors = {run, power_of_x(8 * run - 33), power_of_x(16 * run - 33)};
  std::uint64_t a = state, b = 0, c = 0;
  for (std::size_t i = 0; i < run; i += 8) {
    a = _mm_crc32_u64(a, word_at(data + i));
    b = _mm_crc32_u64(b, word_at(data + run + i));
    c = _mm_crc32_u64(c, word_at(data + 2 * run + i));
  }
  return update_plain(shift(a, factors.two) ^ shift(b, factors.one) ^ c, data + 3 * run, size - 3 * run);
}

}  // namespace h3::crc
