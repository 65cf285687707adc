// Choice of the instruction set at run time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "h3/attend.hpp"
#include "h3/codes.hpp"
#include "h3/linear.hpp"

namespace h3 {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// What one thread does for one block of query rows: attends to `page_count` pages and leaves an unnormalised result.
struct RowBlock {
  const void* q;           // packed rows, see Kernels::pack_rows
  const int* positions;    // [rows]: last position that a row may see
  float* out;              // [rows, D]: sum of exp2(score - maximum) * value; updated
  float* maximum;          // [rows]: running maximum of scores in base 2; updated
  float* sum;              // [rows]: running sum of weights; updated
  const Page* pages;
  int rows;
  int head_dim;
  int page_count;
  float scale_log2;        // softmax scale times log2(e)
};

constexpr int kCodeRowsMax = 16;  // query rows up to which codes are summed as they are; more rows decode them first

// The same for a few rows over pages of codes.
struct CodeBlock {
  CodeRows rows;           // at most kCodeRowsMax
  const int* positions;
  float* out;
  float* maximum;
  float* sum;
  const Page* pages;
  int page_count;
  int weight_parts;
  float scale_log2;
  const float* refined_from = nullptr;  // [rows]: tokens with smaller scores in base 2 are not refined; null: unknown
  const Page* next = nullptr;           // the page that the caller will most likely come with after these; null: unknown
};

// Values are refined whose weight is at least a sixteenth of the largest one, and a thirty-second of all, rounded down to
// a power of two. In base 2.
constexpr float kRefinedScore = -4.0f;
constexpr float kRefinedShare = -5.0f;

// The score from which on values are refined, as far as a largest score and the sum of weights relative to it tell.
inline float refined_limit(float largest, float sum) {
  const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(sum) >> 23 & 255) - 127;
  const float by_sum = static_cast<float>(exponent) + kRefinedShare;
  return largest + (by_sum > kRefinedScore ? by_sum : kRefinedScore);
}

struct Kernels {
  // Query rows as attend_rows wants them: 4 bytes for each `pack` elements.
  void (*pack_rows[3])(const float* source, void* target, int count);
  void (*attend_rows[3])(const RowBlock& block);
  // Rows [row_first, row_last) of the output features, for all tokens; x is already packed.
  void (*linear_rows[3])(const LinearArgs& args, const void* x_packed, int x_stride, int row_first, int row_last);
  void (*rms_norm)(const float* x, const float* weight, float* out, int count, float eps);
  std::uint64_t (*read_bytes)(const void* data, std::size_t size_bytes, int variant);
  CodeKernels codes;
  void (*attend_codes[kEncodings])(const CodeBlock& block);
  // A page of codes becomes a raw page of fp32 ([0]) or bf16 ([1]).
  void (*decode_page[2][kEncodings])(const Page& page, int head_dim, void* keys, void* values);
};

extern const Kernels kPortableKernels;
#ifdef H3_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

bool isa_supported(Isa isa);
Isa isa_best();
Isa isa_current();
void isa_select(Isa isa);  // precondition: isa_supported(isa)
const Kernels& kernels();

// Element conversions that no kernel is fast enough to need: inputs of a few rows.
void to_fp32(const void* source, DType dtype, float* target, std::int64_t count);
void from_fp32(const float* source, DType dtype, void* target, std::int64_t count);

}  // namespace h3
