#include "h3/codes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "convert.hpp"

namespace h3 {
namespace {

constexpr std::uint16_t kNan = 0x7e00;
constexpr int kNibbleTokens = 8;  // values that share a 32-bit lane, where they have 4 bits
constexpr int kByteTokens = 4;    // the same, where they have 8

// What stands for a token's keys or values: codes, and how to read them.
struct Coded {
  std::uint8_t codes[kHeadDimMax];
  std::uint16_t scale;
  std::uint16_t offset;
};

void encode_row(const float* x, int count, int levels, Coded& out) {
  float least = x[0], most = x[0];
  float finite = 0.0f;  // NaN as soon as one number is not finite
  for (int d = 0; d < count; ++d) {
    least = std::min(least, x[d]);
    most = std::max(most, x[d]);
    finite += x[d] * 0.0f;
  }
  out.scale = fp32_to_fp16((most - least) / static_cast<float>(levels));
  out.offset = fp32_to_fp16(least);
  const float scale = fp16_to_fp32(out.scale);
  const float offset = fp16_to_fp32(out.offset);
  if (!(finite == 0.0f) || !std::isfinite(scale) || !std::isfinite(offset)) {
    out.scale = out.offset = kNan;
    std::fill_n(out.codes, count, std::uint8_t{0});
    return;
  }
  if (scale == 0.0f) {
    std::fill_n(out.codes, count, std::uint8_t{0});
    return;
  }
  const auto top = static_cast<float>(levels);
  for (int d = 0; d < count; ++d) {
    const float code = std::nearbyint((x[d] - offset) / scale);
    out.codes[d] = static_cast<std::uint8_t>(std::min(std::max(code, 0.0f), top));
  }
}

void put_scales(const Page& page, int place, int first, const Coded& coded) {
  auto* scales = reinterpret_cast<std::uint16_t*>(page.scales) + place;
  scales[first * kPageTokens] = coded.scale;
  scales[(first + 1) * kPageTokens] = coded.offset;
}

// The token's lane of its cluster's keys; `bits` of each dimension.
std::uint8_t* key_lane(std::uint64_t keys, int place, int head_dim, int bits) {
  const int cluster = place / kLanes * kLanes * head_dim * bits / 8;
  return reinterpret_cast<std::uint8_t*>(keys) + cluster + place % kLanes * 4;
}

void put_byte_keys(const Page& page, int place, int head_dim, const std::uint8_t* codes) {
  std::uint8_t* lane = key_lane(page.keys, place, head_dim, 8);
  for (int d = 0; d < head_dim; d += 4) std::memcpy(lane + d * kLanes, codes + d, 4);
}

// Four bits of each code, from bit `shift` on.
void put_nibble_keys(std::uint64_t keys, int place, int head_dim, const std::uint8_t* codes, int shift) {
  std::uint8_t* lane = key_lane(keys, place, head_dim, 4);
  for (int d = 0; d < head_dim; d += 8)
    for (int b = 0; b < 4; ++b)
      lane[d / 8 * 64 + b] =
          static_cast<std::uint8_t>((codes[d + b] >> shift & 15) | (codes[d + 4 + b] >> shift & 15) << 4);
}

void put_byte_values(const Page& page, int place, int head_dim, const std::uint8_t* codes) {
  auto* group = reinterpret_cast<std::uint8_t*>(page.values) + place / kByteTokens * kByteTokens * head_dim;
  for (int d = 0; d < head_dim; ++d) group[4 * d + place % kByteTokens] = codes[d];
}

// Leaves the other nibbles of the lane as they are: they are other tokens'.
void put_nibble_values(const Page& page, int place, int head_dim, const std::uint8_t* codes) {
  auto* group = reinterpret_cast<std::uint8_t*>(page.values) + place / kNibbleTokens * kNibbleTokens * head_dim / 2;
  const int shift = place % kNibbleTokens / 4 * 4;
  std::uint8_t* lane = group + place % 4;
  for (int d = 0; d < head_dim; ++d)
    lane[4 * d] = static_cast<std::uint8_t>((lane[4 * d] & ~(15 << shift)) | codes[d] << shift);
}

// What a value of 4 bits leaves out, in sixteenths of its step: the byte b of 16 dimensions holds number b low and number
// 8 + b high.
void put_residues(const Page& page, int place, int head_dim, const float* x, const Coded& coded) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(page.residues) + place * head_dim / 2;
  const float scale = fp16_to_fp32(coded.scale);
  const float offset = fp16_to_fp32(coded.offset);
  const auto residue = [&](int d) {
    if (!(scale > 0.0f)) return 8;
    const float step = (x[d] - offset) / scale - static_cast<float>(coded.codes[d]);
    return static_cast<int>(std::min(std::max(std::floor((step + 0.5f) * 16.0f), 0.0f), 15.0f));
  };
  for (int d = 0; d < head_dim; d += kLanes)
    for (int b = 0; b < 8; ++b) bytes[d / 2 + b] = static_cast<std::uint8_t>(residue(d + b) | residue(d + 8 + b) << 4);
}

int block_of(int head_dim) { return head_dim & -head_dim; }

}  // namespace

int query_parts(Encoding encoding, DType dtype) {
  if (dtype == DType::kFp32) return 3;
  return encoding == Encoding::kInt4 ? 1 : 2;
}

int weight_parts(Encoding encoding, DType dtype) {
  if (dtype == DType::kFp32) return 3;
  return encoding == Encoding::kInt8 ? 2 : 1;
}

void rotate_rows(float* x, int rows, int head_dim) {
  const int block = block_of(head_dim);
  const float norm = 1.0f / std::sqrt(static_cast<float>(block));
  for (float* run = x; run < x + static_cast<std::int64_t>(rows) * head_dim; run += block) {
    for (int half = 1; half < block; half *= 2) {
      for (int start = 0; start < block; start += 2 * half) {
        for (int i = start; i < start + half; ++i) {
          const float a = run[i];
          const float b = run[i + half];
          run[i] = a + b;
          run[i + half] = a - b;
        }
      }
    }
    for (int i = 0; i < block; ++i) run[i] *= norm;
  }
}

void pack_code_rows(const float* rotated, int rows, int head_dim, int part_count, std::int8_t* parts, float* scale,
                    float* sum) {
  const auto whole = static_cast<float>(127 << 7 * (part_count - 1));
  for (int r = 0; r < rows; ++r) {
    const float* x = rotated + static_cast<std::int64_t>(r) * head_dim;
    std::int8_t* row = parts + static_cast<std::int64_t>(r) * part_count * head_dim;
    float most = 0.0f, finite = 0.0f;
    for (int d = 0; d < head_dim; ++d) {
      most = std::max(most, std::fabs(x[d]));
      finite += x[d] * 0.0f;
    }
    const float unit = most / whole;
    const bool is_number = finite == 0.0f;
    const float inverse = is_number && unit > 1e-35f ? 1.0f / unit : 0.0f;
    scale[r] = is_number ? unit : std::numeric_limits<float>::quiet_NaN();
    std::int32_t total = 0;
    for (int d = 0; d < head_dim; ++d) {
      auto number = is_number ? static_cast<std::int32_t>(std::nearbyint(x[d] * inverse)) : 0;
      total += number;
      // Digits from -64 to 63, but for the first one.
      for (int p = part_count - 1; p > 0; --p) {
        const std::int32_t digit = ((number + 64) & 127) - 64;
        row[p * head_dim + d] = static_cast<std::int8_t>(digit);
        number = (number - digit) / 128;
      }
      row[d] = static_cast<std::int8_t>(number);
    }
    sum[r] = static_cast<float>(total);
  }
}

void encode_rows(Encoding encoding, const float* keys, const float* values, int count, int head_dim, const Page& page,
                 int place) {
  Coded coded;
  for (int i = 0; i < count; ++i, keys += head_dim, values += head_dim) {
    const int at = place + i;
    encode_row(keys, head_dim, encoding == Encoding::kInt4 ? 15 : 255, coded);
    put_scales(page, at, 0, coded);
    switch (encoding) {
      case Encoding::kInt8: put_byte_keys(page, at, head_dim, coded.codes); break;
      case Encoding::kK8V4: put_nibble_keys(page.keys, at, head_dim, coded.codes, 0); [[fallthrough]];
      default: put_nibble_keys(page.nibbles, at, head_dim, coded.codes, encoding == Encoding::kInt4 ? 0 : 4);
    }
    encode_row(values, head_dim, encoding == Encoding::kInt8 ? 255 : 15, coded);
    put_scales(page, at, 2, coded);
    if (encoding == Encoding::kInt8) put_byte_values(page, at, head_dim, coded.codes);
    else put_nibble_values(page, at, head_dim, coded.codes);
    if (page.residues != 0) put_residues(page, at, head_dim, values, coded);
  }
}

}  // namespace h3
