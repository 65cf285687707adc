// The kernels, written once over the vectors of simd_*.hpp. Each kernels_*.cpp includes this with its own H3_ISA.
//
// One register tile serves scores, weighted sums, decode and prefill:
//
//     C[R rows][16 N] (+)= sum over steps s of broadcast(A[r][s]) * B[s][16 N]
//
// An A element is 32 bits: one fp32 or a pair of bf16. A vector of B is 16 lanes of the same. For scores A is the
// query, B the transposed keys and a lane is a token; for weighted sums A holds the weights, B the values and a lane is
// a dimension of the head.
#pragma once

#include <math.h>
#include <string.h>

#include "convert.hpp"
#include "h3/dispatch.hpp"

namespace h3::H3_ISA {

struct Fp32 {
  static constexpr int kPack = 1;
  static constexpr int kVectorBytes = 64;
  static constexpr int kExpDegree = 5;  // relative error 1e-7
  using Operand = Vec;
  static Operand load(const char* p) { return h3::H3_ISA::load(reinterpret_cast<const float*>(p)); }
  static Operand broadcast(const char* p) { return fill(*reinterpret_cast<const float*>(p)); }
  static Vec multiply_add(const Vec& acc, const Operand& a, const Operand& b) { return fma(a, b, acc); }
  static void store_weights(char* p, const Vec& w) { store(reinterpret_cast<float*>(p), w); }
};

struct Fp16 : Fp32 {
  static constexpr int kVectorBytes = 32;
  static Operand load(const char* p) { return load_fp16(p); }
};

struct Bf16 {
  static constexpr int kPack = 2;
  static constexpr int kVectorBytes = 64;
  static constexpr int kExpDegree = 4;  // relative error 3e-6, far below the 2^-9 of a bf16 weight
  using Operand = Bf16Pairs;
  static Operand load(const char* p) { return load_pairs(p); }
  static Operand broadcast(const char* p) { return fill_pair(p); }
  static Vec multiply_add(const Vec& acc, const Operand& a, const Operand& b) { return dot(acc, a, b); }
  static void store_weights(char* p, const Vec& w) { store_bf16(p, w); }
};

// 2^x for x <= 0; below 2^-126 the result is 0 or a denormal number. NaN stays NaN. Minimax polynomials on [-1/2, 1/2].
template <int Degree>
inline Vec exp2_nonpositive(Vec x) {
  x = max(fill(-200.0f), x);  // -inf would make inf - inf below; the second operand wins over NaN
  const Vec n = round_nearest(x);
  const Vec f = sub(x, n);
  Vec p;
  if constexpr (Degree == 5) {
    p = fill(1.326472753e-3f);
    p = fma(p, f, fill(9.671512709e-3f));
    p = fma(p, f, fill(5.550733742e-2f));
    p = fma(p, f, fill(2.402224208e-1f));
    p = fma(p, f, fill(6.931469776e-1f));
  } else {
    static_assert(Degree == 4);
    p = fill(9.582849431e-3f);
    p = fma(p, f, fill(5.590642464e-2f));
    p = fma(p, f, fill(2.402409870e-1f));
    p = fma(p, f, fill(6.931241934e-1f));
  }
  p = fma(p, f, fill(1.0f));
  return scale_by_power(p, n);
}

// A run of B with its number of steps.
struct Run {
  const char* b;
  int steps;
};

struct Tile {
  const char* a;     // element (r, s) of the first run at a + r * a_row + 4 s
  int a_row;         // bytes
  int a_run;         // bytes from one run's elements to the next run's
  const Run* runs;
  int run_count;
  int b_step;        // bytes from step to step
  int b_vector;      // bytes from vector to vector
  float* c;
  int c_row;         // floats
};

template <class E, int R, int N, bool Accumulate>
inline void multiply_tile(const Tile& t) {
  Vec acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = Accumulate ? load(t.c + r * t.c_row + 16 * n) : zero();
  const char* a_run = t.a;
  for (int i = 0; i < t.run_count; ++i, a_run += t.a_run) {
    const Run& run = t.runs[i];
    const char* a = a_run;
    const char* b = run.b;
    for (int s = 0; s < run.steps; ++s, a += 4, b += t.b_step) {
      typename E::Operand column[N];
      for (int n = 0; n < N; ++n) column[n] = E::load(b + n * t.b_vector);
      for (int r = 0; r < R; ++r) {
        const typename E::Operand row = E::broadcast(a + r * t.a_row);
        for (int n = 0; n < N; ++n) acc[r][n] = E::multiply_add(acc[r][n], column[n], row);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(t.c + r * t.c_row + 16 * n, acc[r][n]);
}

template <class E, int R, bool Accumulate>
inline void multiply_vectors(const Tile& t, int vectors) {
  if constexpr (kTileVectors >= 4) {
    if (vectors == 4) return multiply_tile<E, R, 4, Accumulate>(t);
    if (vectors == 3) return multiply_tile<E, R, 3, Accumulate>(t);
  }
  if constexpr (kTileVectors >= 2) {
    if (vectors == 2) return multiply_tile<E, R, 2, Accumulate>(t);
  }
  multiply_tile<E, R, 1, Accumulate>(t);
}

template <class E, bool Accumulate>
inline void multiply(const Tile& t, int rows, int vectors) {
  if constexpr (kTileRows >= 6) {
    if (rows == 6) return multiply_vectors<E, 6, Accumulate>(t, vectors);
    if (rows == 5) return multiply_vectors<E, 5, Accumulate>(t, vectors);
    if (rows == 4) return multiply_vectors<E, 4, Accumulate>(t, vectors);
  }
  if constexpr (kTileRows >= 3) {
    if (rows == 3) return multiply_vectors<E, 3, Accumulate>(t, vectors);
  }
  if (rows == 2) return multiply_vectors<E, 2, Accumulate>(t, vectors);
  multiply_vectors<E, 1, Accumulate>(t, vectors);
}

constexpr float kNothing = -__builtin_inff();  // the maximum of no scores

constexpr int kPageVectors = kPageTokens / kLanes;

// Rows of one tile: scores, weights and the running softmax of up to kTileRows rows over a batch of pages. A batch ends
// with an update of the running maximum. Decode takes one page at a time, so that memory is read in a straight line and
// the processor's own prefetch follows; prefill, whose pages come from cache, takes more to update less often.
template <class E, int kPages>
struct RowTile {
  static constexpr int kBatchTokens = kPages * kPageTokens;
  alignas(64) float scores[kTileRows][kBatchTokens];
  alignas(64) char weights[kTileRows][kBatchTokens * 4 / E::kPack];

  const RowBlock& block;
  int row;          // first row of the tile in the block
  int rows;
  int last_position;  // largest position that any row of the tile may see

  RowTile(const RowBlock& block, int row, int rows) : block(block), row(row), rows(rows) {
    last_position = block.positions[row];
    for (int r = 1; r < rows; ++r)
      if (block.positions[row + r] > last_position) last_position = block.positions[row + r];
  }

  // Tokens at the start of a page that some row of this tile may see.
  int visible(const Page& page) const {
    if (page.positions != 0) return page.count;
    const std::int64_t seen = static_cast<std::int64_t>(last_position) - page.first + 1;
    return seen <= 0 ? 0 : seen < page.count ? static_cast<int>(seen) : page.count;
  }

  // scores[r][64 i + j] = q_r . k_(page i, token j); lanes past the last visible group are not written.
  void score_page(const Page& page, int i, int tokens) {
    const int steps = block.head_dim / E::kPack;
    const int groups = (tokens + kLanes - 1) / kLanes;
    const int a_row = steps * 4;
    for (int g = 0; g < groups; g += kTileVectors) {
      const int vectors = groups - g < kTileVectors ? groups - g : kTileVectors;
      const Run run{reinterpret_cast<const char*>(page.keys) + g * E::kVectorBytes, steps};
      const Tile tile{static_cast<const char*>(block.q) + row * a_row, a_row, 0, &run, 1,
                      kPageVectors * E::kVectorBytes, E::kVectorBytes, &scores[0][i * kPageTokens + g * kLanes],
                      kBatchTokens};
      multiply<E, false>(tile, rows, vectors);
    }
  }

  // Hides what one row may not see, and gives back the largest score of each lane.
  Vec mask_row(const Page& page, int i, int r, int tokens) {
    const Vec hidden = fill(kNothing);
    const int position = block.positions[row + r];
    const std::int64_t seen = static_cast<std::int64_t>(position) - page.first + 1;
    const int limit = page.positions != 0 || seen > tokens ? tokens : seen < 0 ? 0 : static_cast<int>(seen);
    Vec best = hidden;
    float* s = &scores[r][i * kPageTokens];
    for (int j = 0; j < tokens; j += kLanes) {
      Vec x = load(s + j);
      if (limit < j + kLanes || page.positions != 0) {
        Bits keep = lanes_below(limit - j);
        if (page.positions != 0) {
          alignas(64) std::int32_t p[kLanes];
          const auto* source = reinterpret_cast<const std::int32_t*>(page.positions) + j;
          for (int l = 0; l < kLanes; ++l) p[l] = j + l < tokens ? source[l] : 0;
          keep = both(keep, positions_at_most(p, position));
        }
        x = select(keep, x, hidden);
        store(s + j, x);
      }
      best = max(best, x);
    }
    return best;
  }

  bool has_nan(int r, const int* tokens, int pages) const {
    for (int i = 0; i < pages; ++i)
      for (int j = 0; j < tokens[i]; ++j)
        if (scores[r][i * kPageTokens + j] != scores[r][i * kPageTokens + j]) return true;
    return false;
  }

  // Turns one row's scores into weights relative to the new maximum; rescales what was summed before. Only here do
  // scores meet the softmax scale, which is positive.
  void weigh_row(int r, float best, const int* tokens, int pages) {
    const int index = row + r;
    const float before = block.maximum[index];
    const float scaled = best * block.scale_log2;
    // A row whose scores are not numbers must not look like one that saw nothing.
    float now = scaled > before || scaled != scaled ? scaled : before;
    if (now == kNothing && has_nan(r, tokens, pages)) now = __builtin_nanf("");  // sums across lanes may drop it
    if (now == kNothing) {  // nothing seen so far
      for (int i = 0; i < pages; ++i)
        for (int j = 0; j < tokens[i]; j += kLanes)
          E::store_weights(weights[r] + (i * kPageTokens + j) * 4 / E::kPack, zero());
      return;
    }
    Vec total = zero();
    const Vec scale = fill(block.scale_log2);
    const Vec origin = fill(-now);
    for (int i = 0; i < pages; ++i) {
      for (int j = 0; j < tokens[i]; j += kLanes) {
        const int at = i * kPageTokens + j;
        const Vec w = exp2_nonpositive<E::kExpDegree>(fma(load(&scores[r][at]), scale, origin));
        total = add(total, w);
        E::store_weights(weights[r] + at * 4 / E::kPack, w);
      }
    }
    if (now != before) {
      const float shrink = before == kNothing ? 0.0f : exp2f(before - now);
      block.sum[index] *= shrink;
      float* out = block.out + static_cast<std::int64_t>(index) * block.head_dim;
      for (int d = 0; d < block.head_dim; d += kLanes) store(out + d, mul(load(out + d), fill(shrink)));
      block.maximum[index] = now;
    }
    block.sum[index] += sum_lanes(total);
  }

  // out[r] += sum over tokens of weight * value.
  void sum_values(const Page* pages, const int* tokens, int count) {
    Run runs[kPages];
    for (int d = 0; d < block.head_dim; d += kTileVectors * kLanes) {
      const int panel = d / kPanel * kPanel;
      const int width = block.head_dim - panel < kPanel ? block.head_dim - panel : kPanel;
      const int left = (panel + width - d) / kLanes;
      const int vectors = left < kTileVectors ? left : kTileVectors;
      // All panels before this one, then this vector's place in the first row of its own.
      const std::int64_t offset =
          static_cast<std::int64_t>(panel * (kPageTokens / E::kPack) + d - panel) * (E::kVectorBytes / kLanes);
      for (int i = 0; i < count; ++i)
        runs[i] = {reinterpret_cast<const char*>(pages[i].values) + offset, (tokens[i] + E::kPack - 1) / E::kPack};
      const Tile tile{weights[0], static_cast<int>(sizeof weights[0]), kPageTokens * 4 / E::kPack, runs, count,
                      width / kLanes * E::kVectorBytes, E::kVectorBytes,
                      block.out + static_cast<std::int64_t>(row) * block.head_dim + d, block.head_dim};
      multiply<E, true>(tile, rows, vectors);
    }
  }

  void attend_batch(const Page* pages, int count) {
    int tokens[kPages];
    int used = 0;
    for (int i = 0; i < count; ++i) {
      tokens[i] = visible(pages[i]);
      used += tokens[i];
    }
    if (used == 0) return;
    for (int i = 0; i < count; ++i) score_page(pages[i], i, tokens[i]);
    for (int r = 0; r < rows; ++r) {
      Vec best = fill(kNothing);
      for (int i = 0; i < count; ++i)
        if (tokens[i] > 0) best = max(best, mask_row(pages[i], i, r, tokens[i]));
      weigh_row(r, max_lanes(best), tokens, count);
    }
    sum_values(pages, tokens, count);
  }
};

template <class E, int kPages>
void attend_batches(const RowBlock& block) {
  for (int p = 0; p < block.page_count; p += kPages) {
    const int count = block.page_count - p < kPages ? block.page_count - p : kPages;
    for (int row = 0; row < block.rows; row += kTileRows) {
      const int rows = block.rows - row < kTileRows ? block.rows - row : kTileRows;
      RowTile<E, kPages>(block, row, rows).attend_batch(block.pages + p, count);
    }
  }
}

template <class E>
void attend_rows(const RowBlock& block) {
  if (block.rows <= kTileRows) attend_batches<E, 1>(block);
  else attend_batches<E, kBatchPages>(block);
}

// 4 bytes for each `pack` elements; count is a multiple of 16.
template <class E>
void pack_rows(const float* source, void* target, int count) {
  auto* bytes = static_cast<char*>(target);
  for (int i = 0; i < count; i += kLanes) E::store_weights(bytes + i * 4 / E::kPack, load(source + i));
}

inline void rms_norm(const float* x, const float* weight, float* out, int count, float eps) {
  Vec squares = zero();
  for (int i = 0; i < count; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const Vec inverse = fill(1.0f / sqrtf(sum_lanes(squares) / static_cast<float>(count) + eps));
  for (int i = 0; i < count; i += kLanes) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
}

// Four ways to walk through memory; which one is fastest depends on the machine.
template <int Streams, bool Fetch>
inline std::uint64_t read_streams(const char* p, std::size_t size) {
  Word sums[4] = {word_zero(), word_zero(), word_zero(), word_zero()};
  const std::size_t stride = size / Streams / 256 * 256;
  for (std::size_t i = 0; i < stride; i += 256) {
    for (int s = 0; s < Streams; ++s) {
      const char* line = p + s * stride + i;
      if (Fetch)
        for (int n = 0; n < 4; ++n) prefetch(line + 4096 + 64 * n);
      for (int n = 0; n < 4; ++n) sums[n] = word_xor(sums[n], line + 64 * n);
    }
  }
  return word_fold(sums[0]) ^ word_fold(sums[1]) ^ word_fold(sums[2]) ^ word_fold(sums[3]);
}

inline std::uint64_t read_bytes(const void* data, std::size_t size, int variant) {
  const auto* p = static_cast<const char*>(data);
  switch (variant) {
    case 0: return read_streams<1, false>(p, size);
    case 1: return read_streams<1, true>(p, size);
    case 2: return read_streams<4, false>(p, size);
    default: return read_streams<4, true>(p, size);
  }
}

}  // namespace h3::H3_ISA

#include "linear_impl.hpp"
#include "codes_impl.hpp"
#include "codes_attend_impl.hpp"
#include "codes_decode_impl.hpp"

namespace h3::H3_ISA {

constexpr Kernels kKernels = {
    {pack_rows<Fp32>, pack_rows<Bf16>, pack_rows<Fp16>},
    {attend_rows<Fp32>, attend_rows<Bf16>, attend_rows<Fp16>},
    {linear_rows<Fp32>, linear_rows<Bf16>, linear_rows<Fp16>},
    rms_norm,
    read_bytes,
    {
        {nullptr, score_codes<ByteKeys>, score_codes<SplitKeys>, score_codes<NibbleKeys>},
        {nullptr, nullptr, score_codes<PlaneKeys>, score_codes<NibbleKeys>},
        {nullptr, sum_codes<ByteValues>, sum_codes<NibbleValues>, sum_codes<NibbleValues>},
        {nullptr, decode_rows<ByteKeys, ByteValues>, decode_rows<SplitKeys, NibbleValues>,
         decode_rows<NibbleKeys, NibbleValues>},
    },
    {nullptr, attend_codes<ByteKeys, ByteValues>, attend_codes<SplitKeys, NibbleValues>,
     attend_codes<NibbleKeys, NibbleValues>},
    {{nullptr, decode_page<Fp32, ByteKeys, ByteValues>, decode_page<Fp32, SplitKeys, NibbleValues>,
      decode_page<Fp32, NibbleKeys, NibbleValues>},
     {nullptr, decode_page<Bf16, ByteKeys, ByteValues>, decode_page<Bf16, SplitKeys, NibbleValues>,
      decode_page<Bf16, NibbleKeys, NibbleValues>}},
};

}  // namespace h3::H3_ISA
