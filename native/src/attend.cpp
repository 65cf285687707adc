#include "h3/attend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

// The work is cut into units by shapes alone, so that results never depend on threads:
//
//     few rows (decode, a question):  unit = (part of the tokens, KV head)         parts merged in position order
//     many rows (prefill):            unit = (block of query tokens, KV head)      one part with all pages in it
//
// A part has 1,024 tokens, or more where many query rows over a long context would need too much room for partial results.
//
// Pages may come in runs. What a unit has summed up stays in the state between runs, and runs end where a kernel ends a
// batch of pages: however the pages are cut into runs, the same numbers are added in the same order.
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

// How the work is cut, and where a unit's sums lie in the state: [part][KV head] of {out [rows][D], maximum [rows],
// sum [rows]}.
struct Cut {
  int group;        // query heads of a KV head
  int rows;         // query rows of a KV head
  int pages_each;   // of a part
  int parts;
  int block;        // query tokens of a unit
  int blocks;
  int head_dim;
  int kv_heads;

  explicit Cut(const AttendArgs& a)
      : group(a.heads / a.kv_heads), rows(a.tokens * group), head_dim(a.head_dim), kv_heads(a.kv_heads) {
    const bool few = rows <= kBlockRows;
    pages_each = few ? part_pages(a.page_count) : std::max(a.page_count, 1);
    parts = std::max(1, (a.page_count + pages_each - 1) / pages_each);
    block = few ? a.tokens : std::max(1, kBlockRows / group);
    blocks = (a.tokens + block - 1) / block;
  }

  int part_pages(int page_count) const {
    if (rows <= kDecodeRowsMax) return kPartPages;
    const int wide = (page_count + kWidePartsMax - 1) / kWidePartsMax;
    return std::max(1, (wide + kPartPages - 1) / kPartPages) * kPartPages;
  }

  std::int64_t head_floats() const { return static_cast<std::int64_t>(rows) * (head_dim + 2); }
  std::int64_t part_floats() const { return kv_heads * head_floats(); }
  std::int64_t floats() const { return parts * part_floats(); }
};

// The sums of some rows of one part and KV head.
struct Sums {
  float* out;
  float* maximum;
  float* sum;

  Sums(const Cut& cut, float* state, int part, int head, int row) {
    float* base = state + part * cut.part_floats() + head * cut.head_floats();
    out = base + static_cast<std::int64_t>(row) * cut.head_dim;
    maximum = base + static_cast<std::int64_t>(cut.rows) * cut.head_dim + row;
    sum = maximum + cut.rows;
  }

  void clear(int rows, int head_dim) const {
    std::fill_n(out, rows * head_dim, 0.0f);
    std::fill_n(maximum, rows, kNothing);
    std::fill_n(sum, rows, 0.0f);
  }
};

// One row over all parts, in position order.
void merge_row(const AttendArgs& a, const Cut& cut, float* state, int head, int row) {
  float top = kNothing;
  for (int p = 0; p < cut.parts; ++p) {
    const float maximum = *Sums(cut, state, p, head, row).maximum;
    if (maximum > top || maximum != maximum) top = maximum;  // once NaN, always NaN
  }
  float merged[kHeadDimMax] = {};
  float total = 0.0f;
  for (int p = 0; p < cut.parts && top != kNothing; ++p) {
    const Sums sums(cut, state, p, head, row);
    const float weight = std::exp2(*sums.maximum - top);
    if (weight == 0.0f) continue;
    for (int d = 0; d < a.head_dim; ++d) merged[d] += weight * sums.out[d];
    total += weight * *sums.sum;
  }
  put_row(a, row / cut.group, head * cut.group + row % cut.group, merged, top, total);
}

}  // namespace

std::int64_t attend_state_floats(const AttendArgs& args) { return Cut(args).floats(); }

void attend(const AttendArgs& a) {
  const Cut cut(a);
  thread_local std::vector<float> scratch;  // the caller's, shared with the pool for this call
  float* state = a.state;
  if (state == nullptr) {
    scratch.resize(static_cast<std::size_t>(cut.floats()));
    state = scratch.data();
  }
  const bool is_last = a.page_last == a.page_count;
  const int part_first = a.page_first / cut.pages_each;
  const int part_last = std::max(part_first + 1, (a.page_last + cut.pages_each - 1) / cut.pages_each);
  const int units = (part_last - part_first) * cut.blocks * a.kv_heads;
  parallel(units, a.threads, cut.blocks > 1 ? Share::kOne : Share::kGuided, [&](int begin, int end) {
    thread_local Rows rows;
    for (int unit = begin; unit < end; ++unit) {
      const int head = unit % a.kv_heads;
      const int part = part_first + unit / a.kv_heads / cut.blocks;
      // The last tokens see most: longest work first.
      const int token = (cut.blocks - 1 - unit / a.kv_heads % cut.blocks) * cut.block;
      rows.prepare(a, head, token, std::min(cut.block, a.tokens - token));
      const Sums sums(cut, state, part, head, token * cut.group);
      const int start = part * cut.pages_each;
      const int first = std::max(a.page_first, start);
      const int last = std::min(a.page_last, start + cut.pages_each);
      if (first == start) sums.clear(rows.count(), a.head_dim);
      rows.attend(a, a.pages + head * a.pages_stride + first, last - first, sums.out, sums.maximum, sums.sum);
      if (!is_last || cut.parts > 1) continue;
      for (int r = 0; r < rows.count(); ++r)
        put_row(a, token + r / cut.group, head * cut.group + r % cut.group, sums.out + r * a.head_dim, sums.maximum[r],
                sums.sum[r]);
    }
  });
  if (!is_last || cut.parts == 1) return;
  for (int head = 0; head < a.kv_heads; ++head)
    for (int row = 0; row < cut.rows; ++row) merge_row(a, cut, state, head, row);
}

}  // namespace h3
