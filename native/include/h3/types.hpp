// Plain data that crosses between the dispatcher and the kernels of one instruction set.
#pragma once

#include <cstdint>

namespace h3 {

enum class DType : std::int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

enum class Encoding : std::int32_t { kRaw = 0, kInt8 = 1, kK8V4 = 2, kInt4 = 3 };

constexpr int kEncodings = 4;

constexpr int size_bytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

// Neighbouring elements that share one 32-bit lane; see src/h3kv/core/layout.py.
constexpr int pack(DType dtype) { return dtype == DType::kBf16 ? 2 : 1; }

constexpr int kLanes = 16;         // fp32 lanes of one vector
constexpr int kPanel = 64;         // dimensions of values that lie together
constexpr int kPageTokens = 64;    // room of one page
constexpr int kPartTokens = 1024;   // tokens of one part of a decode step
constexpr int kBatchPages = 4;      // pages between two updates of the running softmax where many rows share them
constexpr int kHeadDimMax = 256;   // scratch is sized by it

// One page of one layer and KV head. 56 bytes; equals PAGE_DTYPE in attention/native.py.
struct Page {
  std::uint64_t keys;       // address of the keys
  std::uint64_t values;     // address of the values
  std::uint64_t positions;  // address of int32[count], or 0: token i has position first + i
  std::uint64_t nibbles;    // address of the keys' nibbles in the plane, or 0 where the encoding has none
  std::uint64_t scales;     // address of fp16[4][64], or 0: raw pages have none
  std::int32_t first;
  std::int32_t count;       // tokens in use, 0 to 64
  std::uint64_t residues = 0;  // address of the values' residues, or 0: values are taken as they are coded
};
static_assert(sizeof(Page) == 56);
static_assert(kPartTokens % (kBatchPages * kPageTokens) == 0);

}  // namespace h3
