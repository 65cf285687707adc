#include "retrieve_queries.hpp"

#include "h3/dispatch.hpp"
#include "retrieve_shape.hpp"

namespace h3 {

Queries::Queries(const RetrieveArgs& a, int part_count)
    : part_count_(part_count), head_dim_(a.shape.head_dim) {
  const int group = a.heads / a.shape.kv_heads;
  rows_ = a.tokens * group;
  const std::int64_t count = std::int64_t{a.tokens} * a.heads;
  parts_.resize(static_cast<std::size_t>(count * part_count * head_dim_));
  scale_.resize(static_cast<std::size_t>(count));
  sum_.resize(static_cast<std::size_t>(count));
  float row[kHeadDimMax];
  for (int t = 0; t < a.tokens; ++t)
    for (int h = 0; h < a.heads; ++h) {
      const std::int64_t source = (std::int64_t{t} * a.heads + h) * head_dim_;
      const std::int64_t r = std::int64_t{h / group} * rows_ + t * group + h % group;
      to_fp32(static_cast<const char*>(a.q) + source * size_bytes(a.q_dtype), a.q_dtype, row, head_dim_);
      rotate_rows(row, 1, head_dim_);
      pack_code_rows(row, 1, head_dim_, part_count, parts_.data() + r * part_count * head_dim_,
                     scale_.data() + r, sum_.data() + r);
    }
}

void Queries::to_base2(float softmax_scale) {
  for (float& scale : scale_) scale *= softmax_scale * kLog2e;
}

CodeRows Queries::rows(int kv_head, int first, int count) const {
  const auto r = static_cast<std::size_t>(kv_head * rows_ + first);
  const std::int8_t* parts = parts_.data() + r * static_cast<std::size_t>(part_count_ * head_dim_);
  return {parts, scale_.data() + r, sum_.data() + r, count, part_count_, head_dim_};
}

}  // namespace h3
