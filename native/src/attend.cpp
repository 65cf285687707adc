#include "h3/attend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

// Two ways to cut the work, chosen by shapes alone, so that results never depend on threads:
//
//     few rows (decode, a question):  unit = (part of the tokens, KV head)         parts merged in position order
//     many rows (prefill):            unit = (block of query tokens, KV head)      pages in position order inside
//
// A part has 1,024 tokens, or more where many query rows over a long context would need too much room for partial results.
namespace h3 {
namespace {

constexpr int kDecodeRowsMax = 32;  // query rows per KV head up to which a part never grows
constexpr int kBlockRows = 192;     // query rows of one unit: a batch of pages is read once for all of them
constexpr int kWidePartsMax = 32;   // parts for more rows than kDecodeRowsMax
constexpr int kPartPages = kPartTokens / kPageTokens;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.44269504088896341f;

// Running softmax of some query rows of one KV head: everything that one unit of work needs.
class Rows {
 public:
  // Row order is (token, query head of the group): neighbours share their position.
  void prepare(const AttendArgs& a, int kv_head, int token_first, int token_count) {
    group_ = a.heads / a.kv_heads;
    head_dim_ = a.head_dim;
    count_ = token_count * group_;
    const auto size = static_cast<std::size_t>(count_) * static_cast<std::size_t>(a.head_dim);
    const std::size_t floats = std::max(size, packed_.size());
    packed_.resize(floats);
    positions_.resize(static_cast<std::size_t>(count_));
    float wide[kHeadDimMax];
    const int packed_floats = a.head_dim / pack(a.page_dtype);
    for (int r = 0; r < count_; ++r) {
      const int token = token_first + r / group_;
      const std::int64_t at = (static_cast<std::int64_t>(token) * a.heads + kv_head * group_ + r % group_) * head_dim_;
      to_fp32(static_cast<const char*>(a.q) + at * size_bytes(a.q_dtype), a.q_dtype, wide, head_dim_);
      kernels().pack_rows[static_cast<int>(a.page_dtype)](wide, packed_.data() + r * packed_floats, head_dim_);
      positions_[static_cast<std::size_t>(r)] = a.position + token;
    }
  }

  void attend(const AttendArgs& a, const Page* pages, int page_count, float* out, float* maximum, float* sum) const {
    std::fill_n(out, count_ * head_dim_, 0.0f);
    std::fill_n(maximum, count_, kNothing);
    std::fill_n(sum, count_, 0.0f);
    const RowBlock block{packed_.data(), positions_.data(), out,        maximum,   sum,
                         pages,          count_,            head_dim_,  page_count, a.scale * kLog2e};
    kernels().attend_rows[static_cast<int>(a.page_dtype)](block);
  }

  int count() const { return count_; }

 private:
  std::vector<float> packed_;
  std::vector<int> positions_;
  int group_ = 1;
  int head_dim_ = 0;
  int count_ = 0;
};

void put_row(const AttendArgs& a, int token, int head, const float* out, float maximum, float sum) {
  float row[kHeadDimMax];
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
  for (int d = 0; d < a.head_dim; ++d) row[d] = out[d] * inverse;
  const std::int64_t at = (static_cast<std::int64_t>(token) * a.heads + head);
  from_fp32(row, a.out_dtype, static_cast<char*>(a.out) + at * a.head_dim * size_bytes(a.out_dtype), a.head_dim);
  a.lse[at] = sum == 0.0f ? kNothing : maximum * kLn2 + std::log(sum);
}

// Partial results of all parts: [part][row][D + 2], the maximum and the sum behind each row.
void merge_row(const AttendArgs& a, const float* partials, int parts, std::int64_t part_stride, float* out,
               float* maximum, float* sum) {
  const int d_max = a.head_dim;
  *maximum = kNothing;
  for (int p = 0; p < parts; ++p) {
    const float top = partials[p * part_stride + d_max];
    if (top > *maximum || top != top) *maximum = top;  // once NaN, always NaN
  }
  *sum = 0.0f;
  std::fill_n(out, d_max, 0.0f);
  if (*maximum == kNothing) return;
  for (int p = 0; p < parts; ++p) {
    const float* part = partials + p * part_stride;
    const float weight = std::exp2(part[d_max] - *maximum);
    if (weight == 0.0f) continue;
    for (int d = 0; d < d_max; ++d) out[d] += weight * part[d];
    *sum += weight * part[d_max + 1];
  }
}

int part_pages(const AttendArgs& a, int rows) {
  if (rows <= kDecodeRowsMax) return kPartPages;
  const int wide = (a.page_count + kWidePartsMax - 1) / kWidePartsMax;
  return std::max(1, (wide + kPartPages - 1) / kPartPages) * kPartPages;
}

void attend_parts(const AttendArgs& a) {
  const int group = a.heads / a.kv_heads;
  const int rows = a.tokens * group;
  const int pages_each = part_pages(a, rows);
  const int parts = (a.page_count + pages_each - 1) / pages_each;
  const int row_floats = a.head_dim + 2;
  const std::int64_t part_stride = static_cast<std::int64_t>(a.kv_heads) * rows * row_floats;
  thread_local std::vector<float> scratch;  // the caller's, shared with the pool for this call
  scratch.resize(static_cast<std::size_t>(std::max<std::int64_t>(parts * part_stride, 1)));
  float* partials = scratch.data();
  const auto attend_units = [&](int begin, int end) {
    thread_local Rows state;
    thread_local std::vector<float> buffer;
    buffer.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(row_floats));
    float* out = buffer.data();
    float* maximum = out + rows * a.head_dim;
    float* sum = maximum + rows;
    for (int unit = begin; unit < end; ++unit) {
      const int part = unit / a.kv_heads;
      const int head = unit % a.kv_heads;
      const int first = part * pages_each;
      state.prepare(a, head, 0, a.tokens);
      state.attend(a, a.pages + head * a.pages_stride + first, std::min(pages_each, a.page_count - first), out, maximum,
                   sum);
      for (int r = 0; r < rows; ++r) {
        float* target = partials + part * part_stride + static_cast<std::int64_t>(head * rows + r) * row_floats;
        std::copy_n(out + r * a.head_dim, a.head_dim, target);
        target[a.head_dim] = maximum[r];
        target[a.head_dim + 1] = sum[r];
      }
    }
  };
  parallel(parts * a.kv_heads, a.threads, Share::kGuided, attend_units);
  for (int i = 0; i < a.kv_heads * rows; ++i) {
    float merged[kHeadDimMax];
    float top = kNothing;
    float total = 0.0f;
    merge_row(a, partials + static_cast<std::int64_t>(i) * row_floats, parts, part_stride, merged, &top, &total);
    const int r = i % rows;
    put_row(a, r / group, i / rows * group + r % group, merged, top, total);
  }
}

void attend_blocks(const AttendArgs& a) {
  const int group = a.heads / a.kv_heads;
  const int block = std::max(1, kBlockRows / group);
  const int blocks = (a.tokens + block - 1) / block;
  const auto attend_units = [&](int begin, int end) {
    thread_local Rows state;
    thread_local std::vector<float> buffer;
    buffer.resize(static_cast<std::size_t>(block * group) * static_cast<std::size_t>(a.head_dim + 2));
    for (int unit = begin; unit < end; ++unit) {
      const int first = (blocks - 1 - unit / a.kv_heads) * block;  // the last tokens see most: longest work first
      const int head = unit % a.kv_heads;
      const int tokens = std::min(block, a.tokens - first);
      state.prepare(a, head, first, tokens);
      float* out = buffer.data();
      float* maximum = out + state.count() * a.head_dim;
      float* sum = maximum + state.count();
      state.attend(a, a.pages + head * a.pages_stride, a.page_count, out, maximum, sum);
      for (int r = 0; r < state.count(); ++r)
        put_row(a, first + r / group, head * group + r % group, out + r * a.head_dim, maximum[r], sum[r]);
    }
  };
  parallel(blocks * a.kv_heads, a.threads, Share::kOne, attend_units);
}

}  // namespace

void attend(const AttendArgs& args) {
  if (args.tokens * (args.heads / args.kv_heads) <= kBlockRows) attend_parts(args);
  else attend_blocks(args);
}

}  // namespace h3
