// Small per-token steps around attention: split, normalise and rotate heads; write keys and values into pages.
#pragma once

#include "h3/types.hpp"

namespace h3 {

struct RotateArgs {
  const void* qkv;      // [T, (H + 2K) D] of dtype
  void* q;              // [T, H, D]
  void* k;              // [T, K, D]
  void* v;              // [T, K, D]
  const float* cos;     // [T, D / 2]
  const float* sin;     // [T, D / 2]
  const void* q_norm;   // [D] of dtype, or null
  const void* k_norm;   // [D] of dtype, or null
  int tokens;
  int heads;
  int kv_heads;
  int head_dim;
  float eps;
  DType dtype;
  int threads;
};

void rotate(const RotateArgs& args);

struct AppendArgs {
  const void* k;        // [T, K, D] of dtype, contiguous
  const void* v;        // [T, K, D]
  const Page* pages;    // [K, pages_stride]; only the addresses are read
  std::int64_t pages_stride;
  std::int64_t index;   // the first token goes to page index / 64, place index % 64
  int tokens;
  int kv_heads;
  int head_dim;
  DType dtype;
  Encoding encoding;    // of the pages: tokens are rotated and coded on the way
  int threads;
};

void append(const AppendArgs& args);

// Copies `count` pages of `page_bytes` from one list of addresses to another. No two targets overlap.
void copy_pages(const std::uint64_t* sources, const std::uint64_t* targets, int count, std::int64_t page_bytes, int threads);

}  // namespace h3
