// What one unit of attention computes with: its query rows, and the pages that it reads.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "h3/attend.hpp"
#include "h3/dispatch.hpp"

namespace h3 {

constexpr int kFloorPages = 2;  // newest pages from which it is known what a large weight is, before others are read
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.44269504088896341f;

inline bool has_codes(const AttendArgs& a) { return a.encoding != Encoding::kRaw; }

// One query row in fp32, rotated where the pages are. Row order is (token, query head of the group): neighbours share
// their position.
inline void load_row(const AttendArgs& a, int kv_head, int row, float* wide) {
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

// The few rows of each KV head in parts, wherever they lie.
struct PartedView {
  const std::int8_t* parts;   // [KV head][rows][parts_each][D]
  const float* scales;        // [KV head][rows]
  const float* sums;          // [KV head][rows]
  const float* refined_from;  // [KV head][rows]
  const int* positions;       // [rows]
  int rows;
  int parts_each;

  void attend(const AttendArgs& a, int head, const PageRun& run, float* out, float* maximum, float* sum) const {
    const std::int64_t at = std::int64_t{head} * rows;
    const CodeRows of_head{parts + at * parts_each * a.head_dim, scales + at, sums + at, rows, parts_each, a.head_dim};
    const CodeBlock block{of_head, positions, out, maximum, sum, run.pages, run.count,
                          weight_parts(a.encoding, a.page_dtype), a.scale * kLog2e, refined_from + at, run.next};
    kernels().attend_codes[static_cast<int>(a.encoding)](block);
  }
};

// The same, made once for all units.
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

  PartedView view() const {
    return {parts_.data(), scales_.data(), sums_.data(), refined_from_.data(), positions_.data(), rows_, parts_each_};
  }

 private:
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
    view().attend(a, head, {newest + first, kFloorPages - first, nullptr}, floor_out_.data(), floors_.data(),
                  floor_sums_.data());
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

}  // namespace h3
