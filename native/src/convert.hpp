// Scalar conversions between fp32, bf16 and fp16. No processor-specific instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace h3 {

static inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bf16_to_fp32(std::uint16_t h) { return float_of_bits(static_cast<std::uint32_t>(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
static inline std::uint16_t fp32_to_bf16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float fp16_to_fp32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1f;
  const std::uint32_t mantissa = h & 0x3ff;
  if (exponent == 0x1f) return float_of_bits(sign | 0x7f800000 | (mantissa << 13));
  if (exponent != 0) return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero
  return float_of_bits(sign | bits_of_float(magnitude));
}

// Round to nearest, ties to even; overflow becomes infinity.
static inline std::uint16_t fp32_to_fp16(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x47800000) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below 2^-14: the sum's last bits are multiples of 2^-24
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_of_float(shifted) - bits_of_float(0.5f)));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

}  // namespace h3
