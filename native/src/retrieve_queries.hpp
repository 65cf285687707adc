// Rotated and coded query rows of every KV head.
#pragma once

#include <cstdint>
#include <vector>

#include "h3/codes.hpp"
#include "h3/retrieve.hpp"

namespace h3 {

class Queries {
 public:
  Queries(const RetrieveArgs& args, int part_count);

  // Scores come out in base 2, scaled for the softmax.
  void to_base2(float softmax_scale);

  // Rows of a KV head, (token, head of the group).
  CodeRows rows(int kv_head) const { return rows(kv_head, 0, rows_); }
  CodeRows rows(int kv_head, int first, int count) const;

 private:
  int part_count_;
  int head_dim_;
  int rows_;
  std::vector<std::int8_t> parts_;  // [K][T, group][part][D]
  std::vector<float> scale_, sum_;
};

}  // namespace h3
