#include "h3/dispatch.hpp"

#include <atomic>

#include "convert.hpp"

namespace h3 {
namespace {

std::atomic<int> current{-1};

}  // namespace

bool isa_supported(Isa isa) {
#ifdef H3_X86
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("avx512vnni");
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::kPortable:
      return true;
  }
#endif
  return isa == Isa::kPortable;
}

Isa isa_best() {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2})
    if (isa_supported(isa)) return isa;
  return Isa::kPortable;
}

Isa isa_current() {
  int isa = current.load(std::memory_order_relaxed);
  if (isa < 0) {
    isa = static_cast<int>(isa_best());
    current.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

void isa_select(Isa isa) { current.store(static_cast<int>(isa), std::memory_order_relaxed); }

const Kernels& kernels() {
#ifdef H3_X86
  switch (isa_current()) {
    case Isa::kAvx512: return kAvx512Kernels;
    case Isa::kAvx2: return kAvx2Kernels;
    case Isa::kPortable: break;
  }
#endif
  return kPortableKernels;
}

void to_fp32(const void* source, DType dtype, float* target, std::int64_t count) {
  const auto* half = static_cast<const std::uint16_t*>(source);
  switch (dtype) {
    case DType::kFp32: std::memcpy(target, source, static_cast<std::size_t>(count) * 4); break;
    case DType::kBf16:
      for (std::int64_t i = 0; i < count; ++i) target[i] = bf16_to_fp32(half[i]);
      break;
    case DType::kFp16:
      for (std::int64_t i = 0; i < count; ++i) target[i] = fp16_to_fp32(half[i]);
      break;
  }
}

void from_fp32(const float* source, DType dtype, void* target, std::int64_t count) {
  auto* half = static_cast<std::uint16_t*>(target);
  switch (dtype) {
    case DType::kFp32: std::memcpy(target, source, static_cast<std::size_t>(count) * 4); break;
    case DType::kBf16:
      for (std::int64_t i = 0; i < count; ++i) half[i] = fp32_to_bf16(source[i]);
      break;
    case DType::kFp16:
      for (std::int64_t i = 0; i < count; ++i) half[i] = fp32_to_fp16(source[i]);
      break;
  }
}

}  // namespace h3
