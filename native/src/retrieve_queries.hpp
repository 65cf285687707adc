// Rotated and coded query rows of every KV head.
#pragma once

#include <cstdint>
#include <vector>

#include "h3/codes.hpp"
#include "h3/retrieve.hpp"

namespace h3 {

// Rows as they lie in memory.
struct QueryRows {
  const std::int8_t* parts;  // [K][T, group][part][D]
  const float* scale;        // [K][T, group]
  const float* sum;
  int rows;                  // of a KV head
  int part_count;
  int head_dim;
};

class Queries {
 public:
  Queries(const RetrieveArgs& args, int part_count);
  // Rows that were made before, and stay where they are.
  explicit Queries(const QueryRows& rows)
      : part_count_(rows.part_count), head_dim_(rows.head_dim), rows_(rows.rows), parts_(rows.parts), scale_(rows.scale),
        sum_(rows.sum) {}
  Queries(const Queries&) = delete;
  Queries& operator=(const Queries&) = delete;

  // Scores come out in base 2, scaled for the softmax. Of rows that were made here.
  void to_base2(float softmax_scale);

  QueryRows all() const { return {parts_, scale_, sum_, rows_, part_count_, head_dim_}; }

  // Rows of a KV head, (token, head of the group).
  CodeRows rows(int kv_head) const { return rows(kv_head, 0, rows_); }
  CodeRows rows(int kv_head, int first, int count) const;

 private:
  int part_count_;
  int head_dim_;
  int rows_;
  const std::int8_t* parts_;
  const float* scale_;
  const float* sum_;
  std::vector<std::int8_t> own_parts_;
  std::vector<float> own_scale_, own_sum_;
};

}  // namespace h3
