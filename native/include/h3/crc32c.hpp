// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78): the checksum of pages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h3 {

enum class CrcMethod {
  kPortable,   // tables, eight bytes at a time
  kSse42,      // the crc32 instruction on three runs at once: its latency is three cycles, its throughput one
  kVpclmul,    // carry-less multiplication of 64-byte vectors, four at once
};

bool crc32c_supported(CrcMethod method);
CrcMethod crc32c_best();

// Of `size` bytes, by the best method of this processor. The checksum of nothing is 0.
std::uint32_t crc32c(const void* data, std::size_t size);
// By one method; precondition: crc32c_supported(method).
std::uint32_t crc32c(const void* data, std::size_t size, CrcMethod method);

namespace crc {

// These take and give the register of the algorithm, which is the complement of the checksum.
std::uint32_t update_portable(std::uint32_t state, const unsigned char* data, std::size_t size);
#ifdef H3_X86
std::uint32_t update_sse42(std::uint32_t state, const unsigned char* data, std::size_t size);
std::uint32_t update_vpclmul(std::uint32_t state, const unsigned char* data, std::size_t size);
#endif

constexpr std::uint32_t kPolynomial = 0x82f63b78;

// a * x mod P. Bit 31 is x^0, as everywhere in the reflected form.
constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

// a * b mod P.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; b != 0; b <<= 1) {
    if ((b & 0x80000000u) != 0) product ^= a;
    a = times_x(a);
  }
  return product;
}

// x^n mod P.
constexpr std::uint32_t power_of_x(std::uint64_t n) {
  std::uint32_t result = 0x80000000u;
  for (std::uint32_t square = 0x40000000u; n != 0; n >>= 1, square = multiply(square, square))
    if ((n & 1) != 0) result = multiply(result, square);
  return result;
}

}  // namespace crc
}  // namespace h3
