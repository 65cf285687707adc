// The newest token of each of several sequences: written into the sequence's pages, then attended to all of them.
#pragma once

#include <vector>

#include "h3/attend.hpp"

namespace h3 {

struct BatchRow {
  std::uint64_t pages;         // [K, pages_stride] of Page: what the token reads, itself included
  std::uint64_t append_page;   // the first KV head's entry of the page that the token is written to; one row further, the next head's
  std::int64_t pages_stride;
  std::int32_t page_count;
  std::int32_t position;       // of the token; it is written to place position % 64
};

// All tensors are contiguous and of `dtype`.
struct BatchArgs {
  const void* q;   // [B, H, D]
  const void* k;   // [B, K, D]
  const void* v;   // [B, K, D]
  void* out;       // [B, H, D]
  const BatchRow* rows;  // [B]
  int count;       // B
  int heads;
  int kv_heads;
  int head_dim;
  DType dtype;     // of the tensors, and of raw pages
  Encoding encoding;
  float scale;
  int threads;     // at most; results do not depend on it
};

// The attentions of a batch, each as if it were alone. Scratch of the calling thread: one batch at a time.
class BatchCalls {
 public:
  // Writes the tokens.
  explicit BatchCalls(const BatchArgs& args);

  const std::vector<AttendArgs>& calls() const { return calls_; }

 private:
  std::vector<AttendArgs>& calls_;
};

// Every row gets the numbers that it gets alone, bit for bit.
void attend_batch(const BatchArgs& args);

}  // namespace h3
