#include "h3/linear.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

namespace h3 {
namespace {

constexpr std::size_t kLineFloats = 16;
constexpr int kUnitRows = 16;  // output rows that a thread takes at least

// Activations as the kernels want them: normalised if asked, then fp32 or pairs of bf16.
class Activations {
 public:
  const void* prepare(const LinearArgs& a) {
    const auto count = static_cast<std::size_t>(a.in_features);
    wide_.resize(count);
    weight_.resize(count);
    packed_.resize(count * static_cast<std::size_t>(a.tokens) + kLineFloats);
    // Whole cache lines: a vector that lies across two costs as much as two.
    const auto past = reinterpret_cast<std::uintptr_t>(packed_.data()) / sizeof(float) % kLineFloats;
    float* const packed = packed_.data() + (kLineFloats - past) % kLineFloats;
    if (a.norm != nullptr) to_fp32(a.norm, a.dtype, weight_.data(), a.in_features);
    for (int t = 0; t < a.tokens; ++t) {
      const auto offset = static_cast<std::int64_t>(t) * a.in_features;
      to_fp32(static_cast<const char*>(a.x) + offset * size_bytes(a.dtype), a.dtype, wide_.data(), a.in_features);
      if (a.norm != nullptr) kernels().rms_norm(wide_.data(), weight_.data(), wide_.data(), a.in_features, a.eps);
      kernels().pack_rows[static_cast<int>(a.dtype)](wide_.data(), packed + t * stride_floats(a),
                                                     a.in_features);
    }
    return packed;
  }

  static std::int64_t stride_floats(const LinearArgs& a) { return a.in_features / pack(a.dtype); }

 private:
  std::vector<float> wide_, weight_, packed_;
};

}  // namespace

void linear(const LinearArgs& a) {
  thread_local Activations activations;
  const void* x = activations.prepare(a);
  const int x_stride = static_cast<int>(Activations::stride_floats(a) * 4);
  const int units = (a.out_features + kUnitRows - 1) / kUnitRows;
  // `residual` may be `out`: every element is read and written by one thread, and x was copied above.
  parallel(units, a.threads, Share::kGuided, [&](int begin, int end) {
    const int last = std::min(a.out_features, end * kUnitRows);
    kernels().linear_rows[static_cast<int>(a.dtype)](a, x, x_stride, begin * kUnitRows, last);
  });
}

}  // namespace h3
