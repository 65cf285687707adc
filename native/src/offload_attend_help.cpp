// A helper's side of attention.
#include <algorithm>
#include <vector>

#include "offload_attend.hpp"

namespace h3::offload {

namespace {

// Sums of one unit that lie together: out [rows][D], maximum [rows], sum [rows].
Sums packed_sums(float* base, int rows, int head_dim) {
  float* const maximum = base + static_cast<std::int64_t>(rows) * head_dim;
  return {base, maximum, maximum + rows};
}

// Bytes that the kernels read of one page, by address.
struct PageBytes {
  std::uint64_t keys, values, nibbles, scales, residues;

  PageBytes(Encoding encoding, DType dtype, int head_dim) : keys(0), values(0), nibbles(0), scales(0), residues(0) {
    const std::uint64_t elements = std::uint64_t{kPageTokens} * static_cast<std::uint64_t>(head_dim);
    const std::uint64_t raw = elements * static_cast<std::uint64_t>(size_bytes(dtype));
    switch (encoding) {
      case Encoding::kRaw: keys = values = raw; return;
      case Encoding::kInt8: keys = values = elements; break;
      case Encoding::kK8V4: keys = values = nibbles = residues = elements / 2; break;
      case Encoding::kInt4: values = nibbles = elements / 2; break;
    }
    scales = 4 * 2 * kPageTokens;
  }

  std::uint64_t read(const Page& page) const {
    return page.count == 0 ? 0 : keys + values + nibbles + scales;
  }
};

// What was copied from a job, and where sums are computed.
class AttendHelp final : public Help {
 public:
  bool open(const FieldWords& words, const Job& job, std::size_t job_bytes) override;
  bool read(const Job& job, std::uint32_t unit, const MappedRanges& ranges) override;
  std::span<const float> compute() override;
  std::size_t result_at(std::uint32_t unit) const override { return shape_.sums + unit * shape_.sums_each; }
  std::uint64_t read_bytes() const override;

 private:
  bool is_page_sound(const Page& page, const MappedRanges& ranges) const;

  AttendFields fields_{};
  AttendShape shape_;
  AttendArgs args_{};
  PartedView parted_{};
  std::vector<Page> pages_;
  std::vector<float> sums_;
  int head_ = 0;
};

bool AttendHelp::open(const FieldWords& words, const Job& job, std::size_t job_bytes) {
  const auto f = fields_of<AttendFields>(words);
  if (!f.is_sound() || f.head.isa != static_cast<std::uint32_t>(isa_current())) return false;
  const AttendShape shape(f);
  if (shape.end > job_bytes) return false;
  fields_ = f;
  shape_ = shape;
  AttendArgs& a = args_;
  a = AttendArgs{};
  a.q = shape.is_parted ? nullptr : job.at(shape.rows_at);
  a.q_dtype = static_cast<DType>(f.q_dtype);
  a.page_dtype = static_cast<DType>(f.page_dtype);
  a.encoding = static_cast<Encoding>(f.encoding);
  a.tokens = static_cast<int>(f.tokens);
  a.heads = static_cast<int>(f.heads);
  a.kv_heads = static_cast<int>(f.kv_heads);
  a.head_dim = static_cast<int>(f.head_dim);
  a.position = f.position;
  a.scale = f.scale;
  parted_ = {reinterpret_cast<const std::int8_t*>(job.at(shape.rows_at)),
             reinterpret_cast<const float*>(job.at(shape.scales)),
             reinterpret_cast<const float*>(job.at(shape.row_sums)),
             reinterpret_cast<const float*>(job.at(shape.refined)),
             reinterpret_cast<const int*>(job.at(shape.row_positions)),
             shape.rows,
             shape.parts_each};
  return true;
}

bool AttendHelp::read(const Job& job, std::uint32_t unit, const MappedRanges& ranges) {
  AttendUnit found;
  std::memcpy(&found, job.at(shape_.units + unit * sizeof found), sizeof found);
  if (found.head >= fields_.kv_heads || found.count > fields_.pages || found.first > fields_.pages - found.count)
    return false;
  head_ = static_cast<int>(found.head);
  pages_.resize(found.count);
  if (found.count > 0)
    std::memcpy(pages_.data(), job.at(shape_.pages + found.first * sizeof(Page)), found.count * sizeof(Page));
  return std::all_of(pages_.begin(), pages_.end(), [&](const Page& page) { return is_page_sound(page, ranges); });
}

bool AttendHelp::is_page_sound(const Page& page, const MappedRanges& ranges) const {
  if (page.count < 0 || page.count > kPageTokens || page.first < 0) return false;
  if (page.count == 0) return true;
  const PageBytes bytes(args_.encoding, args_.page_dtype, args_.head_dim);
  const auto is_there = [&ranges](std::uint64_t address, std::uint64_t size) {
    return size == 0 || (address % 4 == 0 && ranges.holds(address, size));
  };
  const bool has_residues = page.residues == 0 || is_there(page.residues, bytes.residues);
  const bool has_positions = page.positions == 0 || is_there(page.positions, 4u * static_cast<unsigned>(page.count));
  return is_there(page.keys, bytes.keys) && is_there(page.values, bytes.values) && is_there(page.nibbles, bytes.nibbles) &&
         is_there(page.scales, bytes.scales) && has_residues && has_positions;
}

std::span<const float> AttendHelp::compute() {
  sums_.resize(static_cast<std::size_t>(shape_.rows) * static_cast<std::size_t>(args_.head_dim + 2));
  const Sums sums = packed_sums(sums_.data(), shape_.rows, args_.head_dim);
  sums.clear(shape_.rows, args_.head_dim);
  const Unit whole{0, head_, 0, shape_.rows, {pages_.data(), static_cast<int>(pages_.size()), nullptr}};
  attend_unit(args_, shape_.is_parted ? &parted_ : nullptr, whole, sums);
  return sums_;
}

std::uint64_t AttendHelp::read_bytes() const {
  const PageBytes bytes(args_.encoding, args_.page_dtype, args_.head_dim);
  std::uint64_t all = 0;
  for (const Page& page : pages_) all += bytes.read(page);
  return all;
}

}  // namespace

std::unique_ptr<Help> make_attend_help() { return std::make_unique<AttendHelp>(); }

}  // namespace h3::offload
