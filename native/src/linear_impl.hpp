// Products of a few activation rows with a weight matrix, written once over the vectors of simd_*.hpp. Included by
// kernels_impl.hpp.
#pragma once

namespace h3::H3_ISA {

// How far before they are multiplied weights are fetched, where the arithmetic of several tokens would hold fetching up.
constexpr int kAheadBytes = 4096;

// Dot products of one weight row with T activation rows, in lanes. Rows are read one after the other: a straight line
// through memory. Two chains of sums for any T, so that a token's result does not depend on how many come with it.
template <class E, int T>
inline void dot_row(const char* weight, const char* x, int x_stride, int count, Vec* sums) {
  Vec even[T], odd[T];
  for (int t = 0; t < T; ++t) even[t] = odd[t] = zero();
  const int vectors = count / kLanes / E::kPack;
  int i = 0;
  for (; i + 2 <= vectors; i += 2) {
    const typename E::Operand w0 = E::load(weight + i * E::kVectorBytes);
    const typename E::Operand w1 = E::load(weight + (i + 1) * E::kVectorBytes);
    if constexpr (T > 1)
      for (int n = 0; n < 2 * E::kVectorBytes; n += 64) prefetch(weight + i * E::kVectorBytes + kAheadBytes + n);
    for (int t = 0; t < T; ++t) {
      even[t] = E::multiply_add(even[t], w0, E::activation(x + t * x_stride + i * 64));
      odd[t] = E::multiply_add(odd[t], w1, E::activation(x + t * x_stride + (i + 1) * 64));
    }
  }
  if (i < vectors) {
    const typename E::Operand w = E::load(weight + i * E::kVectorBytes);
    for (int t = 0; t < T; ++t) even[t] = E::multiply_add(even[t], w, E::activation(x + t * x_stride + i * 64));
  }
  for (int t = 0; t < T; ++t) sums[t] = add(even[t], odd[t]);
}

template <class E>
struct WithActivation : E {
  // Packed activations: bf16 pairs, or fp32 for the other types.
  static typename E::Operand activation(const char* p) {
    if constexpr (E::kPack == 2) return E::load(p);
    else return h3::H3_ISA::load(reinterpret_cast<const float*>(p));
  }
};

inline float value_at(const void* p, DType dtype, std::int64_t i) {
  if (dtype == DType::kFp32) return static_cast<const float*>(p)[i];
  const std::uint16_t h = static_cast<const std::uint16_t*>(p)[i];
  return dtype == DType::kBf16 ? bf16_to_fp32(h) : fp16_to_fp32(h);
}

inline void put(void* p, DType dtype, std::int64_t i, float value) {
  if (dtype == DType::kFp32) static_cast<float*>(p)[i] = value;
  else static_cast<std::uint16_t*>(p)[i] = dtype == DType::kBf16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
}

constexpr int kCachedRows = 8;  // output rows whose weights are read again from cache, for the next tile of activations

// Weight rows whose sums are taken together: as many as make up eight, or one.
template <int T>
constexpr int kRowsTogether = T > 4 ? 1 : 8 / T;

// Sums of some weight rows with T tokens each, bias included: [rows][T].
template <class E, int T>
inline void product_rows(const LinearArgs& a, const void* x, int x_stride, int row, int rows, float* sums) {
  const std::int64_t row_bytes = static_cast<std::int64_t>(a.in_features) * size_bytes(a.dtype);
  Vec lanes[8];
  for (int r = 0; r < rows; ++r)
    dot_row<WithActivation<E>, T>(static_cast<const char*>(a.weight) + (row + r) * row_bytes, static_cast<const char*>(x),
                                  x_stride, a.in_features, lanes + r * T);
  for (int i = rows * T; i < 8; ++i) lanes[i] = zero();
  sum_lanes_of_8(lanes, sums);
  if (a.bias == nullptr) return;
  for (int r = 0; r < rows; ++r) {
    const float bias = value_at(a.bias, a.dtype, row + r);
    for (int t = 0; t < T; ++t) sums[r * T + t] += bias;
  }
}

template <class E, int T>
inline void linear_tokens(const LinearArgs& a, const void* x, int x_stride, int first, int last) {
  const DType out_dtype = a.out_fp32 ? DType::kFp32 : a.dtype;
  for (int row = first; row < last; row += kRowsTogether<T>) {
    const int rows = last - row < kRowsTogether<T> ? last - row : kRowsTogether<T>;
    float sums[8];
    product_rows<E, T>(a, x, x_stride, row, rows, sums);
    if (a.gated) {
      float ups[8];
      product_rows<E, T>(a, x, x_stride, row + a.out_features, rows, ups);
      for (int i = 0; i < rows * T; ++i) sums[i] = sums[i] / (1.0f + expf(-sums[i])) * ups[i];
    }
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < rows; ++r) {
        const std::int64_t at = static_cast<std::int64_t>(t) * a.out_features + row + r;
        const float sum = sums[r * T + t];
        put(a.out, out_dtype, at, a.residual == nullptr ? sum : sum + value_at(a.residual, a.dtype, at));
      }
    }
  }
}

template <class E>
inline void linear_tile(const LinearArgs& a, const void* x, int x_stride, int first, int last) {
  switch (a.tokens) {
    case 1: return linear_tokens<E, 1>(a, x, x_stride, first, last);
    case 2: return linear_tokens<E, 2>(a, x, x_stride, first, last);
    case 3: return linear_tokens<E, 3>(a, x, x_stride, first, last);
    case 4: return linear_tokens<E, 4>(a, x, x_stride, first, last);
    case 5: return linear_tokens<E, 5>(a, x, x_stride, first, last);
    case 6: return linear_tokens<E, 6>(a, x, x_stride, first, last);
    case 7: return linear_tokens<E, 7>(a, x, x_stride, first, last);
    default: return linear_tokens<E, kLinearTileRows>(a, x, x_stride, first, last);
  }
}

// Output rows, few enough for their weights to stay in cache, with one tile of activations after the other. What a token
// gets does not depend on its tile.
template <class E>
void linear_rows(const LinearArgs& a, const void* x, int x_stride, int first, int last) {
  if (a.tokens <= kLinearTileRows) return linear_tile<E>(a, x, x_stride, first, last);
  const std::int64_t out_size = a.out_fp32 ? 4 : size_bytes(a.dtype);
  for (int row = first; row < last; row += kCachedRows) {
    const int end = row + kCachedRows < last ? row + kCachedRows : last;
    for (int token = 0; token < a.tokens; token += kLinearTileRows) {
      const std::int64_t before = static_cast<std::int64_t>(token) * a.out_features;
      LinearArgs tile = a;
      tile.tokens = a.tokens - token < kLinearTileRows ? a.tokens - token : kLinearTileRows;
      tile.out = static_cast<char*>(a.out) + before * out_size;
      if (a.residual != nullptr) tile.residual = static_cast<const char*>(a.residual) + before * size_bytes(a.dtype);
      linear_tile<E>(tile, static_cast<const char*>(x) + static_cast<std::int64_t>(token) * x_stride, x_stride, row, end);
    }
  }
}

}  // namespace h3::H3_ISA
