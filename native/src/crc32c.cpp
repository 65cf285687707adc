#include "h3/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace h3 {
namespace crc {
namespace {

// tables[k][b]: what byte b does to the register k bytes later.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    tables[0][byte] = state;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  return tables;
}();

}  // namespace

std::uint32_t update_portable(std::uint32_t state, const unsigned char* data, std::size_t size) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; data += 8, size -= 8) {
      std::uint64_t word;
      std::memcpy(&word, data, 8);
      word ^= state;
      state = 0;
      for (std::size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 255];
    }
  }
  for (; size > 0; ++data, --size) state = (state >> 8) ^ kTables[0][(state ^ *data) & 255];
  return state;
}

}  // namespace crc

bool crc32c_supported(CrcMethod method) {
#ifdef H3_X86
  switch (method) {
    case CrcMethod::kVpclmul:
      return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512vl") && crc32c_supported(CrcMethod::kSse42);
    case CrcMethod::kSse42: return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    case CrcMethod::kPortable: break;
  }
#endif
  return method == CrcMethod::kPortable;
}

CrcMethod crc32c_best() {
  static const CrcMethod best = [] {
    for (const CrcMethod method : {CrcMethod::kVpclmul, CrcMethod::kSse42})
      if (crc32c_supported(method)) return method;
    return CrcMethod::kPortable;
  }();
  return best;
}

std::uint32_t crc32c(const void* data, std::size_t size, CrcMethod method) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  switch (method) {
#ifdef H3_X86
    case CrcMethod::kVpclmul: return ~crc::update_vpclmul(~0u, bytes, size);
    case CrcMethod::kSse42: return ~crc::update_sse42(~0u, bytes, size);
#endif
    default: return ~crc::update_portable(~0u, bytes, size);
  }
}

std::uint32_t crc32c(const void* data, std::size_t size) { return crc32c(data, size, crc32c_best()); }

}  // namespace h3
