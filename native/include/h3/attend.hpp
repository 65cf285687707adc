// Attention of T query tokens over lists of pages, grouped by KV head.
#pragma once

#include "h3/types.hpp"

namespace h3 {

struct AttendArgs {
  const void* q;            // [T, H, D] of q_dtype, contiguous
  void* out;                // [T, H, D] of out_dtype, contiguous
  float* lse;               // [T, H], natural logarithm; -inf where a row sees no token
  const Page* pages;        // [K, pages_stride], the first `page_count` of each row in use
  std::int64_t pages_stride;
  DType q_dtype;
  DType out_dtype;
  DType page_dtype;         // of raw pages; other encodings keep the precision that it has
  Encoding encoding;
  int tokens;               // T
  int heads;                // H, a multiple of kv_heads
  int kv_heads;             // K
  int head_dim;             // D, a multiple of 16, at most kHeadDimMax
  int page_count;
  int position;             // row t sees the tokens whose position is <= position + t
  float scale;              // of the scores, above 0
  int threads;              // at most; results do not depend on it
  // The run of pages to attend to now; runs follow each other from page 0. A run ends at a multiple of kBatchPages or with
  // the last page; that one writes `out` and `lse`.
  int page_first;
  int page_last;
  float* state;             // attend_state_floats(), kept from run to run; null: the only run
};

void attend(const AttendArgs& args);
std::int64_t attend_state_floats(const AttendArgs& args);

}  // namespace h3
