#include "h3/attend.hpp"

#include <cmath>
#include <vector>

#include "attend_plan.hpp"
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

void put_row(const AttendArgs& a, int token, int head, const float* out, float maximum, float sum) {
  float row[kHeadDimMax];
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
  for (int d = 0; d < a.head_dim; ++d) row[d] = out[d] * inverse;
  if (has_codes(a)) rotate_rows(row, 1, a.head_dim);
  const std::int64_t at = (static_cast<std::int64_t>(token) * a.heads + head);
  from_fp32(row, a.out_dtype, static_cast<char*>(a.out) + at * a.head_dim * size_bytes(a.out_dtype), a.head_dim);
  a.lse[at] = sum == 0.0f ? kNothing : maximum * kLn2 + std::log(sum);
}

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

AttendPlan::AttendPlan(const AttendArgs& args, PartedRows* rows) : args_(args), cut_(args), state_(args.state) {
  thread_local std::vector<float> scratch;  // the caller's, shared with the pool for this call
  thread_local PartedRows parted_of_caller;
  if (state_ == nullptr) {
    scratch.resize(static_cast<std::size_t>(cut_.floats()));
    state_ = scratch.data();
  }
  is_last_ = args.page_last == args.page_count;
  part_first_ = args.page_first / cut_.pages_each;
  const int part_last = std::max(part_first_ + 1, (args.page_last + cut_.pages_each - 1) / cut_.pages_each);
  units_ = (part_last - part_first_) * cut_.blocks * args.kv_heads;
  if (has_codes(args) && cut_.rows <= kCodeRowsMax) {
    if (rows == nullptr) rows = &parted_of_caller;
    rows->prepare(args, cut_.rows);
    parted_ = rows;
  }
}

Unit AttendPlan::unit(int index) const {
  const int head = index % cut_.kv_heads;
  const int part = part_first_ + index / cut_.kv_heads / cut_.blocks;
  // The last tokens see most: longest work first.
  const int token = (cut_.blocks - 1 - index / cut_.kv_heads % cut_.blocks) * cut_.block;
  const int start = part * cut_.pages_each;
  const int first = std::max(args_.page_first, start);
  const int last = std::min(args_.page_last, start + cut_.pages_each);
  return {part, head, token, std::min(cut_.block, args_.tokens - token) * cut_.group,
          {args_.pages + head * args_.pages_stride + first, last - first, nullptr}};
}

void AttendPlan::compute(int begin, int end) const {
  for (int index = begin; index < end; ++index) compute_one(index, std::min(index + 1, end - 1));
}

void AttendPlan::compute_one(int index, int next) const {
  Unit unit = this->unit(index);
  const Sums sums = this->sums(unit);
  if (!is_continued(unit)) sums.clear(unit.rows, args_.head_dim);
  if (next != index) unit.run.next = this->unit(next).run.pages;
  PartedView parted{};
  if (parted_ != nullptr) parted = parted_->view();
  attend_unit(args_, parted_ == nullptr ? nullptr : &parted, unit, sums);
  if (!is_last_ || cut_.parts > 1) return;
  for (int r = 0; r < unit.rows; ++r)
    put_row(args_, unit.token + r / cut_.group, unit.head * cut_.group + r % cut_.group, sums.out + r * args_.head_dim,
            sums.maximum[r], sums.sum[r]);
}

void AttendPlan::finish() const {
  if (!is_last_ || cut_.parts == 1) return;
  for (int head = 0; head < args_.kv_heads; ++head)
    for (int row = 0; row < cut_.rows; ++row) merge_row(args_, cut_, state_, head, row);
}

void attend_unit(const AttendArgs& a, const PartedView* parted, const Unit& unit, const Sums& sums) {
  thread_local Rows rows;
  if (parted != nullptr) return parted->attend(a, unit.head, unit.run, sums.out, sums.maximum, sums.sum);
  rows.prepare(a, unit.head, unit.token, unit.rows / (a.heads / a.kv_heads));
  rows.attend(a, unit.run.pages, unit.run.count, sums.out, sums.maximum, sums.sum);
}

void attend(const AttendArgs& args) {
  const AttendPlan plan(args);
  parallel(plan.units(), args.threads, plan.cut().blocks > 1 ? Share::kOne : Share::kGuided,
           [&](int begin, int end) { plan.compute(begin, end); });
  plan.finish();
}

}  // namespace h3
