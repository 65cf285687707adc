// The search of an index as work for helpers: a unit is a run of segments, with the planes of all KV heads.
//
//   units          query rows         segments        log-sum-exps
//   +--------------+------------------+---------------+--------------------------+
//   | segments of  | parts, scales,   | planes and    | [T, H, clusters] of each |
//   | each unit    | sums             | blocks        | unit                     |
//   +--------------+------------------+---------------+--------------------------+
#include <algorithm>
#include <vector>

#include "h3/dispatch.hpp"
#include "offload_job.hpp"
#include "retrieve_scan.hpp"

namespace h3::offload {

namespace {

// Planes of one unit: some 20 us of a thread, many times what it costs to hand the unit over.
constexpr std::int64_t kUnitBytes = 256 << 10;
constexpr std::uint32_t kSegmentsMax = 1u << 16;
constexpr std::uint32_t kRowsMax = 1u << 14;
constexpr std::uint32_t kPartsOfRowsMax = 2;  // what the scan knows

struct ScanFields {
  JobHead head;
  std::uint32_t tokens, heads, kv_heads, head_dim;
  std::uint32_t split_keys;
  std::uint32_t part_count;     // of query rows
  std::uint32_t segments_each;  // of a unit, at most
  std::uint32_t segments;       // entries, of all units

  bool is_sound() const {
    const bool has_heads = kv_heads > 0 && heads > 0 && heads <= kHeadsMax && heads % kv_heads == 0;
    const bool has_rows = tokens > 0 && tokens <= kRowsMax && has_heads && tokens * heads <= kRowsMax;
    const bool has_dims = head_dim > 0 && head_dim <= static_cast<std::uint32_t>(kHeadDimMax) && head_dim % kLanes == 0;
    const bool has_parts = part_count > 0 && part_count <= kPartsOfRowsMax && split_keys <= 1;
    return head.is_sound() && has_rows && has_dims && has_parts && segments_each > 0 && segments_each <= kSegmentsMax &&
           segments <= kSegmentsMax;
  }
  SlabShape slab() const { return {static_cast<int>(kv_heads), static_cast<int>(head_dim), split_keys != 0, 0}; }
};

struct ScanUnit {
  std::uint32_t first;  // of its segments, among the job's
  std::uint32_t count;
};

struct ScanSegment {
  std::uint64_t planes;
  std::uint32_t blocks;
  std::uint32_t zero;
};
static_assert(sizeof(ScanUnit) == 8 && sizeof(ScanSegment) == 16);

// Where everything lies. Precondition: the fields are sound.
struct ScanShape {
  std::size_t units = 0, parts = 0, scales = 0, row_sums = 0, segments = 0, lse = 0, lse_each = 0, end = 0;

  ScanShape() = default;
  explicit ScanShape(const ScanFields& f) {
    const std::size_t rows = std::size_t{f.tokens} * f.heads;
    JobLayout layout(f.head.units);
    units = layout.take(f.head.units * sizeof(ScanUnit));
    parts = layout.take(rows * f.part_count * f.head_dim);
    scales = layout.take(rows * sizeof(float));
    row_sums = layout.take(rows * sizeof(float));
    segments = layout.take(f.segments * sizeof(ScanSegment));
    lse_each = rows * f.segments_each * kSegmentClusters * sizeof(float);
    lse = layout.take(f.head.units * lse_each);
    end = layout.end();
  }
};

int segments_of_unit(const SlabShape& shape) {
  const std::int64_t each = shape.kv_heads * kSegmentBlocks * shape.plane_bytes();
  return static_cast<int>((kUnitBytes + each - 1) / each);
}

class ScanWork final : public Work {
 public:
  ScanWork(const RetrieveArgs& args, const Queries& queries)
      : a_(args), s_(args), queries_(queries), each_(segments_of_unit(args.shape)) {}

  std::uint32_t units() const override { return static_cast<std::uint32_t>((a_.segment_count + each_ - 1) / each_); }
  int threads() const override { return a_.threads; }
  bool is_shareable(std::uint32_t unit, const MappedRange& shared) const override;
  std::size_t lay_out(std::span<const std::uint32_t> offered) override;
  void write(Job& job) const override;
  void compute(std::uint32_t unit, std::uint32_t next) const override;
  void fetch(const Job& job, std::uint32_t place) const override;

 private:
  int first(std::uint32_t unit) const { return static_cast<int>(unit) * each_; }
  int last(std::uint32_t unit) const { return std::min(first(unit) + each_, a_.segment_count); }

  const RetrieveArgs& a_;
  RetrieveShape s_;
  const Queries& queries_;
  int each_;
  std::span<const std::uint32_t> offered_;
  ScanFields fields_{};
  ScanShape shape_;
};

bool ScanWork::is_shareable(std::uint32_t unit, const MappedRange& shared) const {
  return std::all_of(a_.segments + first(unit), a_.segments + last(unit),
                     [&shared](const Indexed& segment) { return shared.holds(segment.planes); });
}

std::size_t ScanWork::lay_out(std::span<const std::uint32_t> offered) {
  offered_ = offered;
  std::uint32_t segments = 0;
  for (const std::uint32_t unit : offered) segments += static_cast<std::uint32_t>(last(unit) - first(unit));
  fields_ = {{Kind::kScan, static_cast<std::uint32_t>(isa_current()), static_cast<std::uint32_t>(offered.size())},
             static_cast<std::uint32_t>(a_.tokens),
             static_cast<std::uint32_t>(a_.heads),
             static_cast<std::uint32_t>(a_.shape.kv_heads),
             static_cast<std::uint32_t>(a_.shape.head_dim),
             static_cast<std::uint32_t>(a_.shape.split_keys),
             static_cast<std::uint32_t>(queries_.all().part_count),
             static_cast<std::uint32_t>(each_),
             segments};
  if (!fields_.is_sound()) return 0;
  shape_ = ScanShape(fields_);
  return shape_.end;
}

void ScanWork::write(Job& job) const {
  job.put_fields(fields_);
  const QueryRows rows = queries_.all();
  const std::size_t count = std::size_t{fields_.tokens} * fields_.heads;
  job.put(shape_.parts, rows.parts, count * fields_.part_count * fields_.head_dim);
  job.put(shape_.scales, rows.scale, count * sizeof(float));
  job.put(shape_.row_sums, rows.sum, count * sizeof(float));
  auto* unit_at = reinterpret_cast<ScanUnit*>(job.at(shape_.units));
  auto* segment_at = reinterpret_cast<ScanSegment*>(job.at(shape_.segments));
  std::uint32_t begin = 0;
  for (const std::uint32_t unit : offered_) {
    *unit_at = {begin, static_cast<std::uint32_t>(last(unit) - first(unit))};
    begin += unit_at++->count;
    for (int i = first(unit); i < last(unit); ++i)
      *segment_at++ = {a_.segments[i].planes, static_cast<std::uint32_t>(a_.segments[i].blocks), 0};
  }
}

void ScanWork::compute(std::uint32_t unit, std::uint32_t) const {
  scan_units(a_, s_, queries_, first(unit) * a_.shape.kv_heads, last(unit) * a_.shape.kv_heads);
}

void ScanWork::fetch(const Job& job, std::uint32_t place) const {
  const std::uint32_t unit = offered_[place];
  const std::int64_t begin = std::int64_t{first(unit)} * kSegmentClusters;
  const std::int64_t width = std::int64_t{last(unit) - first(unit)} * kSegmentClusters;
  const auto* from = reinterpret_cast<const float*>(job.at(shape_.lse + place * shape_.lse_each));
  for (std::int64_t row = 0; row < std::int64_t{a_.tokens} * a_.heads; ++row, from += width)
    std::copy_n(from, width, a_.lse + row * s_.clusters + begin);
}

class ScanHelp final : public Help {
 public:
  bool open(const FieldWords& words, const Job& job, std::size_t job_bytes) override;
  bool read(const Job& job, std::uint32_t unit, const MappedRanges& ranges) override;
  std::span<const float> compute() override;
  std::size_t result_at(std::uint32_t unit) const override { return shape_.lse + unit * shape_.lse_each; }
  std::uint64_t read_bytes() const override;

 private:
  bool is_segment_sound(const Indexed& segment, const MappedRanges& ranges) const;

  ScanFields fields_{};
  ScanShape shape_;
  QueryRows rows_{};
  std::vector<ScanSegment> entries_;
  std::vector<Indexed> segments_;
  std::vector<float> lse_;
};

bool ScanHelp::open(const FieldWords& words, const Job& job, std::size_t job_bytes) {
  const auto f = fields_of<ScanFields>(words);
  if (!f.is_sound() || f.head.isa != static_cast<std::uint32_t>(isa_current())) return false;
  const ScanShape shape(f);
  if (shape.end > job_bytes) return false;
  fields_ = f;
  shape_ = shape;
  rows_ = {reinterpret_cast<const std::int8_t*>(job.at(shape.parts)),
           reinterpret_cast<const float*>(job.at(shape.scales)),
           reinterpret_cast<const float*>(job.at(shape.row_sums)),
           static_cast<int>(f.tokens * (f.heads / f.kv_heads)),
           static_cast<int>(f.part_count),
           static_cast<int>(f.head_dim)};
  return true;
}

bool ScanHelp::read(const Job& job, std::uint32_t unit, const MappedRanges& ranges) {
  ScanUnit found;
  std::memcpy(&found, job.at(shape_.units + unit * sizeof found), sizeof found);
  if (found.count == 0 || found.count > fields_.segments_each || found.count > fields_.segments ||
      found.first > fields_.segments - found.count)
    return false;
  entries_.resize(found.count);
  std::memcpy(entries_.data(), job.at(shape_.segments + found.first * sizeof(ScanSegment)), found.count * sizeof(ScanSegment));
  segments_.clear();
  for (const ScanSegment& entry : entries_)
    segments_.push_back({0, entry.planes, 0, static_cast<std::int32_t>(entry.blocks), 0});
  return std::all_of(segments_.begin(), segments_.end(),
                     [&](const Indexed& segment) { return is_segment_sound(segment, ranges); });
}

// The last head's planes end with its last block in use.
bool ScanHelp::is_segment_sound(const Indexed& segment, const MappedRanges& ranges) const {
  if (segment.blocks < 0 || segment.blocks > kSegmentBlocks) return false;
  const SlabShape slab = fields_.slab();
  const std::int64_t planes = std::int64_t{slab.kv_heads - 1} * kSegmentBlocks + segment.blocks;
  return segment.blocks == 0 ||
         (segment.planes % 4 == 0 && ranges.holds(segment.planes, static_cast<std::uint64_t>(planes * slab.plane_bytes())));
}

std::span<const float> ScanHelp::compute() {
  const std::size_t count = std::size_t{fields_.tokens} * fields_.heads * segments_.size() * kSegmentClusters;
  if (lse_.size() < count) lse_.resize(count);
  RetrieveArgs a{};
  a.segments = segments_.data();
  a.lse = lse_.data();
  a.shape = fields_.slab();
  a.tokens = static_cast<int>(fields_.tokens);
  a.heads = static_cast<int>(fields_.heads);
  a.segment_count = static_cast<int>(segments_.size());
  scan_units(a, RetrieveShape(a), Queries(rows_), 0, a.segment_count * a.shape.kv_heads);
  return {lse_.data(), count};
}

std::uint64_t ScanHelp::read_bytes() const {
  const SlabShape slab = fields_.slab();
  const std::int64_t page = slab.nibbles_bytes() + slab.scales_bytes() / 2;
  std::int64_t all = 0;
  for (const Indexed& segment : segments_) all += slab.kv_heads * segment.blocks * page;
  return static_cast<std::uint64_t>(all);
}

}  // namespace

std::unique_ptr<Help> make_scan_help() { return std::make_unique<ScanHelp>(); }

}  // namespace h3::offload

namespace h3 {

bool OffloadCaller::scan(const RetrieveArgs& args, const Queries& queries, Trace trace) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  ++scanning_.counts.asked;
  offload::ScanWork work(args, queries);
  return share(work, scanning_, trace);
}

}  // namespace h3
