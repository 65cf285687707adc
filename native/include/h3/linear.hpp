// Products of a few activation rows with a large weight matrix: one pass over the weights.
#pragma once

#include "h3/types.hpp"

namespace h3 {

constexpr int kLinearRowsMax = 32;  // activation rows that one pass over the weights serves
constexpr int kLinearTileRows = 8;  // of them, those that a weight is multiplied with while it is in a register

// out[t] = epilogue(weight · prologue(x[t]) + bias). All pointers are of `dtype` unless said otherwise.
struct LinearArgs {
  const void* x;         // [T, I], contiguous
  const void* norm;      // [I]: x is RMS-normalised and multiplied with it first; null: x as it is
  const void* weight;    // [O, I] row-major; when `gated`: [2 O, I], the gate's rows first
  const void* bias;      // [O] or [2 O], or null
  const void* residual;  // [T, O], added to the result; may be `out`; null: nothing is added
  void* out;             // [T, O], contiguous; of dtype, or fp32 when `out_fp32`
  int tokens;            // T, 1 to kLinearRowsMax
  int in_features;       // I
  int out_features;      // O
  float eps;
  DType dtype;
  bool gated;            // out = silu(gate) * up
  bool out_fp32;
  int threads;           // at most; results do not depend on it
};

void linear(const LinearArgs& args);

}  // namespace h3
