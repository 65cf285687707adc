#include "h3/transform.hpp"

#include <algorithm>
#include <cstring>

#include "h3/codes.hpp"
#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

namespace h3 {
namespace {

constexpr int kParallelTokens = 16;  // below this a second thread costs more than it saves

void normalise(float* x, const void* weight, DType dtype, int count, float eps) {
  float wide[kHeadDimMax];
  to_fp32(weight, dtype, wide, count);
  kernels().rms_norm(x, wide, x, count, eps);
}

// Rotate-half: dimension i turns with dimension i + D / 2.
void turn(float* x, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i];
    const float b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

void rotate_heads(const RotateArgs& a, int token, int head_first, int heads, const void* norm, void* target) {
  const int d = a.head_dim;
  const std::int64_t row = static_cast<std::int64_t>(a.heads + 2 * a.kv_heads) * d;
  const std::int64_t half = static_cast<std::int64_t>(token) * (d / 2);
  float x[kHeadDimMax];
  for (int h = 0; h < heads; ++h) {
    const std::int64_t from = token * row + static_cast<std::int64_t>(head_first + h) * d;
    to_fp32(static_cast<const char*>(a.qkv) + from * size_bytes(a.dtype), a.dtype, x, d);
    if (norm != nullptr) normalise(x, norm, a.dtype, d, a.eps);
    turn(x, a.cos + half, a.sin + half, d);
    const std::int64_t to = (static_cast<std::int64_t>(token) * heads + h) * d;
    from_fp32(x, a.dtype, static_cast<char*>(target) + to * size_bytes(a.dtype), d);
  }
}

// Element (token place, dimension) of a page's keys; see src/h3kv/core/layout.py.
std::int64_t key_offset(int place, int d, int pack) {
  return (static_cast<std::int64_t>(d / pack) * kPageTokens + place) * pack + d % pack;
}

// The same of its values, which lie in panels of 64 dimensions.
std::int64_t value_offset(int place, int d, int head_dim, int pack) {
  const int panel = d / kPanel * kPanel;
  const int width = std::min(kPanel, head_dim - panel);
  return static_cast<std::int64_t>(panel) * kPageTokens +
         (static_cast<std::int64_t>(place / pack) * width + d - panel) * pack + place % pack;
}

// Tokens [first, last) of the sequence, all in one page. Keys are written dimension by dimension, so that a page fills in
// a straight line.
template <class T>
void append_page(const AppendArgs& a, int head, std::int64_t page_index) {
  const std::int64_t first = std::max(a.index, page_index * kPageTokens);
  const std::int64_t last = std::min(a.index + a.tokens, (page_index + 1) * kPageTokens);
  const Page& page = a.pages[head * a.pages_stride + page_index];
  const int place = static_cast<int>(first % kPageTokens);
  const int count = static_cast<int>(last - first);
  const std::int64_t stride = static_cast<std::int64_t>(a.kv_heads) * a.head_dim;
  const std::int64_t from = (first - a.index) * stride + static_cast<std::int64_t>(head) * a.head_dim;
  const T* k = static_cast<const T*>(a.k) + from;
  const T* v = static_cast<const T*>(a.v) + from;
  auto* keys = reinterpret_cast<T*>(page.keys);
  auto* values = reinterpret_cast<T*>(page.values);
  const int width = pack(a.dtype);
  for (int d = 0; d < a.head_dim; d += width)
    for (int i = 0; i < count; ++i)
      for (int w = 0; w < width; ++w) keys[key_offset(place + i, d + w, width)] = k[i * stride + d + w];
  for (int i = 0; i < count; ++i)
    for (int d = 0; d < a.head_dim; ++d) values[value_offset(place + i, d, a.head_dim, width)] = v[i * stride + d];
  // A pack is read whole: the rest of the last one must be numbers even before their tokens come.
  for (int next = place + count; next % width != 0; ++next)
    for (int d = 0; d < a.head_dim; ++d) values[value_offset(next, d, a.head_dim, width)] = T{0};
}

// The same for pages of codes: a token at a time, rotated and coded.
void append_codes(const AppendArgs& a, int head, std::int64_t page_index) {
  const std::int64_t first = std::max(a.index, page_index * kPageTokens);
  const std::int64_t last = std::min(a.index + a.tokens, (page_index + 1) * kPageTokens);
  const Page& page = a.pages[head * a.pages_stride + page_index];
  float k[kHeadDimMax], v[kHeadDimMax];
  for (std::int64_t token = first; token < last; ++token) {
    const std::int64_t from = ((token - a.index) * a.kv_heads + head) * a.head_dim * size_bytes(a.dtype);
    to_fp32(static_cast<const char*>(a.k) + from, a.dtype, k, a.head_dim);
    to_fp32(static_cast<const char*>(a.v) + from, a.dtype, v, a.head_dim);
    rotate_rows(k, 1, a.head_dim);
    rotate_rows(v, 1, a.head_dim);
    encode_rows(a.encoding, k, v, 1, a.head_dim, page, static_cast<int>(token % kPageTokens));
  }
}

}  // namespace

void rotate(const RotateArgs& a) {
  const std::int64_t row = static_cast<std::int64_t>(a.heads + 2 * a.kv_heads) * a.head_dim;
  const std::int64_t v_count = static_cast<std::int64_t>(a.kv_heads) * a.head_dim;
  const int size = size_bytes(a.dtype);
  parallel(a.tokens, a.tokens < kParallelTokens ? 1 : a.threads, Share::kGuided, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      rotate_heads(a, t, 0, a.heads, a.q_norm, a.q);
      rotate_heads(a, t, a.heads, a.kv_heads, a.k_norm, a.k);
      std::memcpy(static_cast<char*>(a.v) + t * v_count * size,
                  static_cast<const char*>(a.qkv) + (t * row + row - v_count) * size,
                  static_cast<std::size_t>(v_count * size));
    }
  });
}

void append(const AppendArgs& a) {
  if (a.tokens == 0) return;
  const std::int64_t page_first = a.index / kPageTokens;
  const std::int64_t page_last = (a.index + a.tokens - 1) / kPageTokens;
  const int units = static_cast<int>(page_last - page_first + 1) * a.kv_heads;
  parallel(units, a.tokens < kParallelTokens ? 1 : a.threads, Share::kGuided, [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      const int head = unit % a.kv_heads;
      const std::int64_t page = page_first + unit / a.kv_heads;
      if (a.encoding != Encoding::kRaw) append_codes(a, head, page);
      else if (a.dtype == DType::kFp32) append_page<float>(a, head, page);
      else append_page<std::uint16_t>(a, head, page);
    }
  });
}

void copy_pages(const std::uint64_t* sources, const std::uint64_t* targets, int count, std::int64_t page_bytes,
                int threads) {
  parallel(count, threads, Share::kGuided, [&](int begin, int end) {
    for (int i = begin; i < end; ++i)
      std::memcpy(reinterpret_cast<void*>(targets[i]), reinterpret_cast<const void*>(sources[i]),
                  static_cast<std::size_t>(page_bytes));
  });
}

}  // namespace h3
