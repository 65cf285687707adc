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
//
// Over pages of codes, up to kCodeRowsMax query rows are multiplied with the codes as they lie. For more rows a batch of
// pages is decoded into raw pages that stay in cache, and the raw kernels run. Both work on rotated numbers: queries are
// rotated first, and the result last.
namespace h3 {
namespace {

constexpr int kDecodeRowsMax = 32;  // query rows per KV head up to which a part never grows
constexpr int kBlockRows = 192;     // query rows of one unit: a batch of pages is read once for all of them
constexpr int kWidePartsMax = 32;   // parts for more rows than kDecodeRowsMax
constexpr int kFloorPages = 2;      // newest pages from which it is known what a large weight is, before others are read
constexpr int kPartPages = kPartTokens / kPageTokens;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.44269504088896341f;

bool has_codes(const AttendArgs& a) { return a.encoding != Encoding::kRaw; }

// One query row in fp32, rotated where the pages are. Row order is (token, query head of the group): neighbours share
// their position.
void load_row(const AttendArgs& a, int kv_head, int row, float* wide) {
  const int group = a.heads / a.kv_heads;
  const std::int64_t at = (static_cast<std::int64_t>(row / group) * a.heads + kv_head * group + row % group) * a.head_dim;
  to_fp32(static_cast<const char*>(a.q) + at * size_bytes(a.q_dtype), a.q_dtype, wide, a.head_dim);
  if (has_codes(a)) rotate_rows(wide, 1, a.head_dim);
}

// Raw pages of one thread, into which a batch of codes is decoded. fp16 pages become fp32 ones, whose kernel takes the same
// query rows.
class DecodedPages {
 public:
  const Page* decode(const AttendArgs& a, const Page* pages, int count) {
    const std::int64_t part = static_cast<std::int64_t>(kPageTokens) * a.head_dim * 4;
    memory_.resize(static_cast<std::size_t>(2 * kBatchPages * kPageTokens * a.head_dim));
    char* at = reinterpret_cast<char*>(memory_.data());
    const auto decode = kernels().decode_page[dtype(a) == DType::kBf16][static_cast<int>(a.encoding)];
    for (int i = 0; i < count; ++i, at += 2 * part) {
      pages_[i] = pages[i];
      pages_[i].keys = reinterpret_cast<std::uint64_t>(at);
      pages_[i].values = reinterpret_cast<std::uint64_t>(at + part);
      decode(pages[i], a.head_dim, at, at + part);
    }
    return pages_;
  }

  static DType dtype(const AttendArgs& a) { return a.page_dtype == DType::kBf16 ? DType::kBf16 : DType::kFp32; }

 private:
  std::vector<float> memory_;
  Page pages_[kBatchPages];
};

// Running softmax of some query rows of one KV head: everything that one unit of work needs.
class Rows {
 public:
  void prepare(const AttendArgs& a, int kv_head, int token_first, int token_count) {
    const int group = a.heads / a.kv_heads;
    head_dim_ = a.head_dim;
    count_ = token_count * group;
    const auto size = static_cast<std::size_t>(count_) * static_cast<std::size_t>(a.head_dim);
    packed_.resize(std::max(size, packed_.size()));
    positions_.resize(static_cast<std::size_t>(count_));
    float wide[kHeadDimMax];
    const int packed_floats = a.head_dim / pack(a.page_dtype);
    for (int r = 0; r < count_; ++r) {
      load_row(a, kv_head, token_first * group + r, wide);
      kernels().pack_rows[static_cast<int>(a.page_dtype)](wide, packed_.data() + r * packed_floats, head_dim_);
      positions_[static_cast<std::size_t>(r)] = a.position + token_first + r / group;
    }
  }

  void attend(const AttendArgs& a, const Page* pages, int page_count, float* out, float* maximum, float* sum) {
    if (!has_codes(a)) return attend_raw(a, a.page_dtype, pages, page_count, out, maximum, sum);
    for (int p = 0; p < page_count; p += kBatchPages) {
      const int count = std::min(kBatchPages, page_count - p);
      attend_raw(a, DecodedPages::dtype(a), decoded_.decode(a, pages + p, count), count, out, maximum, sum);
    }
  }

 private:
  void attend_raw(const AttendArgs& a, DType dtype, const Page* pages, int page_count, float* out, float* maximum,
                  float* sum) const {
    const RowBlock block{packed_.data(), positions_.data(), out,        maximum,   sum,
                         pages,          count_,            head_dim_,  page_count, a.scale * kLog2e};
    kernels().attend_rows[static_cast<int>(dtype)](block);
  }

  std::vector<float> packed_;
  std::vector<int> positions_;
  DecodedPages decoded_;
  int head_dim_ = 0;
  int count_ = 0;
};

// Pages of one unit, and the first one of the unit after it, or null.
struct PageRun {
  const Page* pages;
  int count;
  const Page* next;
};

// The few rows of each KV head in parts, made once for all units.
class PartedRows {
 public:
  void prepare(const AttendArgs& a, int rows) {
    rows_ = rows;
    head_dim_ = a.head_dim;
    parts_each_ = query_parts(a.encoding, a.page_dtype);
    const auto count = static_cast<std::size_t>(a.kv_heads * rows);
    parts_.resize(count * static_cast<std::size_t>(parts_each_ * a.head_dim));
    scales_.resize(count);
    sums_.resize(count);
    positions_.resize(static_cast<std::size_t>(rows));
    float wide[kCodeRowsMax * kHeadDimMax];
    for (int head = 0; head < a.kv_heads; ++head) {
      for (int r = 0; r < rows; ++r) load_row(a, head, r, wide + r * head_dim_);
      const int at = head * rows;
      pack_code_rows(wide, rows, head_dim_, parts_each_, parts_.data() + at * parts_each_ * head_dim_, scales_.data() + at,
                     sums_.data() + at);
    }
    for (int r = 0; r < rows; ++r) positions_[static_cast<std::size_t>(r)] = a.position + r / (a.heads / a.kv_heads);
    refined_from_.assign(count, kNothing);
    for (int head = 0; head < a.kv_heads; ++head) find_floors(a, head);
  }

  void attend(const AttendArgs& a, int head, const PageRun& run, float* out, float* maximum, float* sum) const {
    const CodeBlock block{rows_of(head), positions_.data(), out, maximum, sum, run.pages, run.count,
                          weight_parts(a.encoding, a.page_dtype), a.scale * kLog2e,
                          refined_from_.data() + head * rows_, run.next};
    kernels().attend_codes[static_cast<int>(a.encoding)](block);
  }

 private:
  CodeRows rows_of(int head) const {
    const int at = head * rows_;
    return {parts_.data() + at * parts_each_ * head_dim_, scales_.data() + at, sums_.data() + at,
            rows_, parts_each_, head_dim_};
  }

  // What the newest tokens weigh, in the last two pages, which are always there: tokens that weigh little beside them need
  // no refinement, whatever else is in their part.
  void find_floors(const AttendArgs& a, int head) {
    const Page* const pages = a.pages + head * a.pages_stride;
    Page newest[kFloorPages];
    int first = kFloorPages;
    for (int p = a.page_count - 1, left = kFloorPages; p >= 0 && left > 0; --p) {
      const Page& page = pages[p];
      if (page.count == 0) continue;
      if (page.residues == 0 || page.positions != 0) return;
      newest[--first] = page;
      newest[first].residues = 0;
      --left;
    }
    const std::size_t at = static_cast<std::size_t>(head * rows_);
    floors_.assign(static_cast<std::size_t>(rows_), kNothing);
    floor_sums_.assign(static_cast<std::size_t>(rows_), 0.0f);
    floor_out_.assign(static_cast<std::size_t>(rows_ * head_dim_), 0.0f);
    attend(a, head, {newest + first, kFloorPages - first, nullptr}, floor_out_.data(), floors_.data(), floor_sums_.data());
    for (std::size_t r = 0; r < static_cast<std::size_t>(rows_); ++r)
      if (floors_[r] != kNothing) refined_from_[at + r] = refined_limit(floors_[r], floor_sums_[r]);
  }

  std::vector<std::int8_t> parts_;
  std::vector<float> floors_, floor_sums_, floor_out_, refined_from_;
  std::vector<float> scales_;
  std::vector<float> sums_;
  std::vector<int> positions_;
  int rows_ = 0;
  int parts_each_ = 0;
  int head_dim_ = 0;
};

void put_row(const AttendArgs& a, int token, int head, const float* out, float maximum, float sum) {
  float row[kHeadDimMax];
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
  for (int d = 0; d < a.head_dim; ++d) row[d] = out[d] * inverse;
  if (has_codes(a)) rotate_rows(row, 1, a.head_dim);
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
  thread_local PartedRows parted_of_caller;
  const PartedRows* parted = nullptr;
  if (has_codes(a) && cut.rows <= kCodeRowsMax) {
    parted_of_caller.prepare(a, cut.rows);
    parted = &parted_of_caller;
  }
  const auto run_of = [&](int unit) {
    const int start = (part_first + unit / a.kv_heads / cut.blocks) * cut.pages_each;
    const int first = std::max(a.page_first, start);
    const int last = std::min(a.page_last, start + cut.pages_each);
    return PageRun{a.pages + unit % a.kv_heads * a.pages_stride + first, last - first, nullptr};
  };
  parallel(units, a.threads, cut.blocks > 1 ? Share::kOne : Share::kGuided, [&](int begin, int end) {
    thread_local Rows rows;
    for (int unit = begin; unit < end; ++unit) {
      const int head = unit % a.kv_heads;
      const int part = part_first + unit / a.kv_heads / cut.blocks;
      // The last tokens see most: longest work first.
      const int token = (cut.blocks - 1 - unit / a.kv_heads % cut.blocks) * cut.block;
      const int row_count = std::min(cut.block, a.tokens - token) * cut.group;
      const Sums sums(cut, state, part, head, token * cut.group);
      PageRun run = run_of(unit);
      if (part * cut.pages_each >= a.page_first) sums.clear(row_count, a.head_dim);
      if (parted != nullptr) {
        if (unit + 1 < end) run.next = run_of(unit + 1).pages;
        parted->attend(a, head, run, sums.out, sums.maximum, sums.sum);
      } else {
        rows.prepare(a, head, token, row_count / cut.group);
        rows.attend(a, run.pages, run.count, sums.out, sums.maximum, sums.sum);
      }
      if (!is_last || cut.parts > 1) continue;
      for (int r = 0; r < row_count; ++r)
        put_row(a, token + r / cut.group, head * cut.group + r % cut.group, sums.out + r * a.head_dim, sums.maximum[r],
                sums.sum[r]);
    }
  });
  if (!is_last || cut.parts == 1) return;
  for (int head = 0; head < a.kv_heads; ++head)
    for (int row = 0; row < cut.rows; ++row) merge_row(a, cut, state, head, row);
}

}  // namespace h3
