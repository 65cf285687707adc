#include "h3/linear.hpp"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "h3/dispatch.hpp"

namespace h3 {
namespace {

constexpr int kRowsPerUnit = 16;  // output rows that a thread takes at least

// Activations as the kernels want them: normalised if asked, then fp32 or pairs of bf16.
class Activations {
 public:
  const void* prepare(const LinearArgs& a) {
    const auto count = static_cast<std::size_t>(a.in_features);
    wide_.resize(count);
    weight_.resize(count);
    packed_.resize(count * static_cast<std::size_t>(a.tokens));
    if (a.norm != nullptr) to_fp32(a.norm, a.dtype, weight_.data(), a.in_features);
    for (int t = 0; t < a.tokens; ++t) {
      const auto offset = static_cast<std::int64_t>(t) * a.in_features;
      to_fp32(static_cast<const char*>(a.x) + offset * size_bytes(a.dtype), a.dtype, wide_.data(), a.in_features);
      if (a.norm != nullptr) kernels().rms_norm(wide_.data(), weight_.data(), wide_.data(), a.in_features, a.eps);
      kernels().pack_rows[static_cast<int>(a.dtype)](wide_.data(), packed_.data() + t * stride_floats(a),
                                                     a.in_features);
    }
    return packed_.data();
  }

  static std::int64_t stride_floats(const LinearArgs& a) { return a.in_features / pack(a.dtype); }

 private:
  std::vector<float> wide_, weight_, packed_;
};

}  // namespace

void linear(const LinearArgs& a) {
  const int units = (a.out_features + kRowsPerUnit - 1) / kRowsPerUnit;
  const int x_stride = static_cast<int>(Activations::stride_floats(a) * 4);
#pragma omp parallel num_threads(thread_count(a.threads))
  {
    // Each thread prepares its own copy: a few microseconds less than waiting for one.
    thread_local Activations activations;
    const void* x = activations.prepare(a);
    const std::int64_t team = omp_get_num_threads();
    const std::int64_t index = omp_get_thread_num();
    const int first = static_cast<int>(units * index / team) * kRowsPerUnit;
    const int last = std::min(a.out_features, static_cast<int>(units * (index + 1) / team) * kRowsPerUnit);
    // `residual` may be `out`: every element is read and written by one thread, x was copied above.
    kernels().linear_rows[static_cast<int>(a.dtype)](a, x, x_stride, first, last);
  }
}

}  // namespace h3
