// Attention as work for helpers: a unit is (part of the tokens, KV head).
//
//   units        rows                pages      positions    sums
//   +------------+-------------------+----------+------------+---------+
//   | pages of   | query rows        | page     | of pages   | of each |
//   | each unit  |                   | entries  | that have  | unit    |
//   |            |                   |          | them       |         |
//   +------------+-------------------+----------+------------+---------+
#pragma once

#include "attend_plan.hpp"
#include "offload_job.hpp"

namespace h3::offload {

constexpr std::uint32_t kPagesMax = 1u << 20;

struct AttendFields {
  JobHead head;
  std::uint32_t q_dtype, page_dtype, encoding;
  std::uint32_t tokens, heads, kv_heads, head_dim;
  std::int32_t position;
  float scale;
  std::uint32_t pages;      // entries, of all units
  std::uint32_t positions;  // entries of which have positions in the job

  bool is_sound() const;
};

struct AttendUnit {
  std::uint32_t head;
  std::uint32_t first;  // of its pages, among the job's
  std::uint32_t count;
  std::uint32_t zero;
};
static_assert(sizeof(AttendUnit) == 16);

// Where everything lies. Precondition: the fields are sound.
struct AttendShape {
  bool is_parted = false;  // query rows lie there in parts; else as queries
  int rows = 0, parts_each = 0;
  std::size_t units = 0, rows_at = 0, scales = 0, row_sums = 0, refined = 0, row_positions = 0, pages = 0, positions = 0,
              sums = 0, sums_each = 0, end = 0;

  AttendShape() = default;
  explicit AttendShape(const AttendFields& fields);
};

class AttendWork final : public Work {
 public:
  // The plan outlives it.
  explicit AttendWork(const AttendPlan& plan) : plan_(plan) {}

  std::uint32_t units() const override { return static_cast<std::uint32_t>(plan_.units()); }
  int threads() const override { return plan_.args().threads; }
  bool is_shareable(std::uint32_t unit, const MappedRange& shared) const override;
  std::size_t lay_out(std::span<const std::uint32_t> offered) override;
  void write(Job& job) const override;
  void compute(std::uint32_t unit, std::uint32_t next) const override;
  void fetch(const Job& job, std::uint32_t place) const override;

 private:
  Unit unit(std::uint32_t index) const { return plan_.unit(static_cast<int>(index)); }
  void write_rows(Job& job) const;
  void write_units(Job& job) const;

  const AttendPlan& plan_;
  std::span<const std::uint32_t> offered_;
  AttendFields fields_{};
  AttendShape shape_;
};

}  // namespace h3::offload
