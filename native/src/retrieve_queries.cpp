#include "retrieve_queries.hpp"

#include "h3/dispatch.hpp"
#include "retrieve_shape.hpp"

namespace h3 {

Queries::Queries(const RetrieveArgs& a, int part_count)
    : part_count_(part_count), head_dim_(a.shape.head_dim) {
  const int group = a.heads / a.shape.kv_heads;
  rows_ = a.tokens * group;
  const std::int64_t count = std::int64_t{a.tokens} * a.heads;
  own_parts_.resize(static_cast<std::size_t>(count * part_count * head_dim_));
  own_scale_.resize(static_cast<std::size_t>(count));
  own_sum_.resize(static_cast<std::size_t>(count));
  parts_ = own_parts_.data();
  scale_ = own_scale_.data();
  sum_ = own_sum_.data();
  float row[kHeadDimMax];
  for (int t = 0; t < a.tokens; ++t)
    for (int h = 0; h < a.heads; ++h) {
      const std::int64_t source = (std::int64_t{t} * a.heads + h) * head_dim_;
      const std::int64_t r = std::int64_t{h / group} * rows_ + t * group + h % group;
      to_fp32(static_cast<const char*>(a.q) + source * size_bytes(a.q_dtype), a.q_dtype, row, head_dim_);
      rotate_rows(row, 1, head_dim_);
      pack_code_rows(row, 1, head_dim_, part_count, own_parts_.data() + r * part_count * head_dim_,
                     own_scale_.data() + r, own_sum_.data() + r);
    }
}

void Queries::to_base2(float softmax_scale) {
  for (float& scale : own_scale_) scale *= softmax_scale * kLog2e;
}

CodeRows Queries::rows(int kv_head, int first, int count) const {
  const auto r = static_cast<std::size_t>(kv_head * rows_ + first);
  return {parts_ + r * static_cast<std::size_t>(part_count_ * head_dim_), scale_ + r, sum_ + r, count, part_count_, head_dim_};
}

}  // namespace h3
