// One attention as units that anybody may compute, and what is done before and after them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attend_rows.hpp"

namespace h3 {

constexpr int kDecodeRowsMax = 32;  // query rows per KV head up to which a part never grows
constexpr int kBlockRows = 192;     // query rows of one unit: a batch of pages is read once for all of them
constexpr int kWidePartsMax = 32;   // parts for more rows than kDecodeRowsMax
constexpr int kPartPages = kPartTokens / kPageTokens;

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

  Sums(float* out, float* maximum, float* sum) : out(out), maximum(maximum), sum(sum) {}
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

// Part, KV head and query rows of a unit, and the pages that it reads.
struct Unit {
  int part;
  int head;
  int token;  // the first
  int rows;
  PageRun run;
};

// An attention that is under way in this thread. Without a state and rows of its own it uses the thread's scratch: one at a
// time.
class AttendPlan {
 public:
  explicit AttendPlan(const AttendArgs& args, PartedRows* rows = nullptr);

  const AttendArgs& args() const { return args_; }
  const Cut& cut() const { return cut_; }
  int units() const { return units_; }
  const PartedRows* parted() const { return parted_; }  // null: units prepare their rows themselves

  Unit unit(int index) const;
  // Whether a unit takes up sums that an earlier run left.
  bool is_continued(const Unit& unit) const { return unit.part * cut_.pages_each < args_.page_first; }
  Sums sums(const Unit& unit) const { return Sums(cut_, state_, unit.part, unit.head, unit.token * cut_.group); }
  // Computes units [begin, end); distinct ones at once from any threads.
  void compute(int begin, int end) const;
  // Computes one; `next` is the one that this thread will most likely compute after it.
  void compute_one(int index, int next) const;
  // Writes the result, when this is the last run and all units are computed.
  void finish() const;

 private:
  const AttendArgs& args_;
  Cut cut_;
  float* state_;
  const PartedRows* parted_ = nullptr;
  int part_first_;
  int units_;
  bool is_last_;
};

// What others may compute: every unit of few rows, which one block of rows is all there is of.
inline bool has_few_rows(const Cut& cut) { return cut.blocks == 1 && cut.rows <= kBlockRows; }

// Sums of one unit over its pages, from cleared or earlier sums.
void attend_unit(const AttendArgs& args, const PartedView* parted, const Unit& unit, const Sums& sums);

}  // namespace h3
