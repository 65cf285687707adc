// The caller's side of attention, and where everything lies in its jobs.
#include "offload_attend.hpp"

#include <algorithm>

#include "h3/pool.hpp"

namespace h3::offload {

bool AttendFields::is_sound() const {
  const bool has_types = q_dtype <= 2 && page_dtype <= 2 && encoding < static_cast<std::uint32_t>(kEncodings);
  const bool has_heads = kv_heads > 0 && heads <= kHeadsMax && heads > 0 && heads % kv_heads == 0;
  const bool has_dims = head_dim > 0 && head_dim <= static_cast<std::uint32_t>(kHeadDimMax) && head_dim % kLanes == 0;
  const bool has_rows = tokens > 0 && tokens <= static_cast<std::uint32_t>(kBlockRows) && has_heads &&
                        tokens * (heads / kv_heads) <= static_cast<std::uint32_t>(kBlockRows);
  return head.is_sound() && has_types && has_dims && has_rows && pages <= kPagesMax && positions <= pages &&
         position >= 0 && scale > 0.0f && scale < 1e30f;
}

AttendShape::AttendShape(const AttendFields& f) {
  const auto encoding = static_cast<Encoding>(f.encoding);
  const std::size_t heads = f.kv_heads, dims = f.head_dim;
  rows = static_cast<int>(f.tokens * (f.heads / f.kv_heads));
  is_parted = encoding != Encoding::kRaw && rows <= kCodeRowsMax;
  parts_each = is_parted ? query_parts(encoding, static_cast<DType>(f.page_dtype)) : 0;
  const std::size_t row_count = heads * static_cast<std::size_t>(rows);
  JobLayout layout(f.head.units);
  units = layout.take(f.head.units * sizeof(AttendUnit));
  rows_at = layout.take(is_parted ? row_count * static_cast<std::size_t>(parts_each) * dims
                                  : f.tokens * f.heads * dims * static_cast<std::size_t>(size_bytes(static_cast<DType>(f.q_dtype))));
  const std::size_t each = is_parted ? row_count * sizeof(float) : 0;
  scales = layout.take(each);
  row_sums = layout.take(each);
  refined = layout.take(each);
  row_positions = layout.take(is_parted ? static_cast<std::size_t>(rows) * sizeof(int) : 0);
  pages = layout.take(f.pages * sizeof(Page));
  positions = layout.take(f.positions * kPageTokens * sizeof(std::int32_t));
  sums_each = (static_cast<std::size_t>(rows) * (dims + 2) * sizeof(float) + 63) / 64 * 64;
  sums = layout.take(f.head.units * sums_each);
  end = layout.end();
}

bool AttendWork::is_shareable(std::uint32_t index, const MappedRange& shared) const {
  const Unit unit = this->unit(index);
  if (plan_.is_continued(unit)) return false;
  for (const Page* page = unit.run.pages; page != unit.run.pages + unit.run.count; ++page)
    if (page->count != 0 && !shared.holds(page->values)) return false;
  return true;
}

std::size_t AttendWork::lay_out(std::span<const std::uint32_t> offered) {
  const AttendArgs& a = plan_.args();
  offered_ = offered;
  std::uint32_t pages = 0, positions = 0;
  for (const std::uint32_t index : offered) {
    const Unit unit = this->unit(index);
    pages += static_cast<std::uint32_t>(unit.run.count);
    for (int p = 0; p < unit.run.count; ++p) positions += unit.run.pages[p].positions != 0;
  }
  fields_ = {{Kind::kAttend, static_cast<std::uint32_t>(isa_current()), static_cast<std::uint32_t>(offered.size())},
             static_cast<std::uint32_t>(a.q_dtype),
             static_cast<std::uint32_t>(a.page_dtype),
             static_cast<std::uint32_t>(a.encoding),
             static_cast<std::uint32_t>(a.tokens),
             static_cast<std::uint32_t>(a.heads),
             static_cast<std::uint32_t>(a.kv_heads),
             static_cast<std::uint32_t>(a.head_dim),
             a.position,
             a.scale,
             pages,
             positions};
  if (!fields_.is_sound()) return 0;
  shape_ = AttendShape(fields_);
  return shape_.end;
}

void AttendWork::write(Job& job) const {
  job.put_fields(fields_);
  write_rows(job);
  write_units(job);
}

void AttendWork::write_rows(Job& job) const {
  const AttendArgs& a = plan_.args();
  if (!shape_.is_parted)
    return job.put(shape_.rows_at, a.q,
                   std::size_t{fields_.tokens} * fields_.heads * fields_.head_dim * static_cast<std::size_t>(size_bytes(a.q_dtype)));
  const PartedView rows = plan_.parted()->view();
  const std::size_t count = std::size_t{fields_.kv_heads} * static_cast<std::size_t>(rows.rows);
  job.put(shape_.rows_at, rows.parts, count * static_cast<std::size_t>(rows.parts_each) * fields_.head_dim);
  job.put(shape_.scales, rows.scales, count * sizeof(float));
  job.put(shape_.row_sums, rows.sums, count * sizeof(float));
  job.put(shape_.refined, rows.refined_from, count * sizeof(float));
  job.put(shape_.row_positions, rows.positions, static_cast<std::size_t>(rows.rows) * sizeof(int));
}

void AttendWork::write_units(Job& job) const {
  auto* page = reinterpret_cast<Page*>(job.at(shape_.pages));
  auto* position = reinterpret_cast<std::int32_t*>(job.at(shape_.positions));
  auto* target = reinterpret_cast<AttendUnit*>(job.at(shape_.units));
  std::uint32_t first = 0;
  for (const std::uint32_t index : offered_) {
    const Unit unit = this->unit(index);
    *target = {static_cast<std::uint32_t>(unit.head), first, static_cast<std::uint32_t>(unit.run.count), 0};
    first += target++->count;
    for (const Page* source = unit.run.pages; source != unit.run.pages + unit.run.count; ++source, ++page) {
      *page = *source;
      if (source->positions == 0) continue;
      std::copy_n(reinterpret_cast<const std::int32_t*>(source->positions), source->count, position);
      page->positions = reinterpret_cast<std::uint64_t>(position);
      position += kPageTokens;
    }
  }
}

void AttendWork::compute(std::uint32_t unit, std::uint32_t next) const {
  plan_.compute_one(static_cast<int>(unit), static_cast<int>(next));
}

void AttendWork::fetch(const Job& job, std::uint32_t place) const {
  const Unit unit = this->unit(offered_[place]);
  const int numbers = unit.rows * plan_.args().head_dim;
  const auto* const from = reinterpret_cast<const float*>(job.at(shape_.sums + place * shape_.sums_each));
  const Sums to = plan_.sums(unit);
  std::copy_n(from, numbers, to.out);
  std::copy_n(from + numbers, unit.rows, to.maximum);
  std::copy_n(from + numbers + unit.rows, unit.rows, to.sum);
}

}  // namespace h3::offload

namespace h3 {

void OffloadCaller::attend(const AttendArgs& args, Trace trace) {
  const AttendPlan plan(args);
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) ++attending_.counts.asked;
  const bool is_cut = has_few_rows(plan.cut()) && plan.cut().parts > 1;
  offload::AttendWork work(plan);
  if (!lock.owns_lock() || !is_cut || !share(work, attending_, trace))
    parallel(plan.units(), args.threads, plan.cut().blocks > 1 ? Share::kOne : Share::kGuided,
             [&](int begin, int end) { plan.compute(begin, end); });
  plan.finish();
}

}  // namespace h3
