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
  DType page_dtype;
  int tokens;               // T
  int heads;                // H, a multiple of kv_heads
  int kv_heads;             // K
  int head_dim;             // D, a multiple of 16, at most kHeadDimMax
  int page_count;
  int position;             // row t sees the tokens whose position is <= position + t
  float scale;              // of the scores, above 0
  int threads;              // at most; results do not depend on it
};

void attend(const AttendArgs& args);

}  // namespace h3
