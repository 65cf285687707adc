// Sums over pages of codes, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
//
// Both sums are of integers: parts of query rows times codes of keys, 16 tokens at a time, and parts of weights times
// codes of values, 16 dimensions at a time. What is rounded is rounded before, and the few steps on fp32 after it are the
// same on every instruction set: so are the results, bit for bit.
#pragma once

namespace h3::H3_ISA {

inline int clusters_of(const Page& page) { return (page.count + kLanes - 1) / kLanes; }

enum Scale { kKeyScale, kKeyOffset, kValueScale, kValueOffset };
inline Vec load_scale(const Page& page, Scale which, int cluster) {
  return load_fp16(reinterpret_cast<const std::uint16_t*>(page.scales) + which * kPageTokens + cluster * kLanes);
}

// What 16 values of a token leave out, in steps of their scale: the middle of each sixteenth of [-1/2, 1/2].
inline Vec load_residues(const Page& page, int token, int d, int head_dim) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(page.residues) + token * head_dim / 2 + d / 2;
  alignas(64) float lanes[kLanes];
  for (int b = 0; b < 8; ++b) {
    lanes[b] = static_cast<float>(bytes[b] & 15);
    lanes[8 + b] = static_cast<float>(bytes[b] >> 4);
  }
  return add(mul(load(lanes), fill(0.0625f)), fill(0.03125f - 0.5f));
}

// How keys come: `quads` vectors of 4 dimensions for each step, whose codes are multiplied by kFactor and moved by kCentre.
struct ByteKeys {
  static constexpr int kQuads = 1;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* codes;
  ByteKeys(const Page& page, int cluster, int head_dim)
      : codes(reinterpret_cast<const char*>(page.keys) + cluster * kLanes * head_dim) {}
  void load(int step, Bytes* quads) const { quads[0] = load_bytes(codes + 64 * step); }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_bytes(acc, quad, row); }
};

struct SplitKeys {
  static constexpr int kQuads = 2;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* low;
  const char* high;
  SplitKeys(const Page& page, int cluster, int head_dim)
      : low(reinterpret_cast<const char*>(page.keys) + cluster * kLanes * head_dim / 2),
        high(reinterpret_cast<const char*>(page.nibbles) + cluster * kLanes * head_dim / 2) {}
  void load(int step, Bytes* quads) const {
    const Bytes l = load_bytes(low + 64 * step);
    const Bytes h = load_bytes(high + 64 * step);
    quads[0] = join_low(h, l);
    quads[1] = join_high(h, l);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_bytes(acc, quad, row); }
};

struct NibbleKeys {
  static constexpr int kQuads = 2;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* nibbles;
  NibbleKeys(const Page& page, int cluster, int head_dim)
      : nibbles(reinterpret_cast<const char*>(page.nibbles) + cluster * kLanes * head_dim / 2) {}
  void load(int step, Bytes* quads) const {
    const Bytes codes = load_bytes(nibbles + 64 * step);
    quads[0] = low_nibbles(codes);
    quads[1] = high_nibbles(codes);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_nibbles(acc, quad, row); }
};

// The plane of keys of 8 bits: the middle of what the low nibble may be.
struct PlaneKeys : NibbleKeys {
  static constexpr float kFactor = 16.0f, kCentre = 7.5f;
  using NibbleKeys::NibbleKeys;
};

// The number whose parts were summed apart.
template <int Parts, int Bits>
inline Vec joined(const Ints* sums) {
  if constexpr (Parts == 1) {
    return to_floats(sums[0]);
  } else {
    const Vec upper = to_floats(ints_add(shift_left<Bits>(sums[0]), sums[1]));
    if constexpr (Parts == 2) return upper;
    else return add(mul(upper, fill(1 << Bits)), to_floats(sums[2]));
  }
}

// scores[r][j] of rows [row, row + Rows) with the tokens of one page.
template <class K, int Parts, int Rows>
inline void score_rows(const CodeRows& q, int row, const Page& page, float* scores) {
  const int head_dim = q.head_dim;
  const int steps = head_dim / (4 * K::kQuads);
  const std::int8_t* parts = q.parts + static_cast<std::int64_t>(row) * Parts * head_dim;
  for (int c = 0; c < clusters_of(page); ++c) {
    const K keys(page, c, head_dim);
    Ints sums[K::kQuads][Rows * Parts];
    for (auto& quad : sums)
      for (Ints& sum : quad) sum = ints_zero();
    for (int s = 0; s < steps; ++s) {
      Bytes quads[K::kQuads];
      keys.load(s, quads);
      for (int i = 0; i < K::kQuads; ++i)
        for (int r = 0; r < Rows * Parts; ++r)
          sums[i][r] = K::dot(sums[i][r], quads[i], parts + r * head_dim + 4 * (K::kQuads * s + i));
    }
    if constexpr (K::kQuads == 2)
      for (int r = 0; r < Rows * Parts; ++r) sums[0][r] = ints_add(sums[0][r], sums[1][r]);
    const Vec scale = load_scale(page, kKeyScale, c);
    const Vec offset = load_scale(page, kKeyOffset, c);
    for (int r = 0; r < Rows; ++r) {
      const Vec total = fill(q.sum[row + r]);
      Vec codes = joined<Parts, 7>(&sums[0][r * Parts]);
      if constexpr (K::kFactor != 1.0f) codes = add(mul(codes, fill(K::kFactor)), mul(total, fill(K::kCentre)));
      const Vec score = mul(add(mul(scale, codes), mul(offset, total)), fill(q.scale[row + r]));
      store(scores + (row + r) * kPageTokens + c * kLanes, score);
    }
  }
}

// Rows of one tile, so that tiles are about equal.
inline int tile_rows(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return tiles == 0 ? 1 : (rows + tiles - 1) / tiles;
}

// Calls body<Rows>() for 1 to Most rows.
template <int Most, class Body>
inline void for_rows(int rows, const Body& body) {
  if constexpr (Most > 1)
    if (rows < Most) return for_rows<Most - 1>(rows, body);
  body.template operator()<Most>();
}

// Calls body<Rows>(row) for tiles of rows that cover [0, rows).
template <int Most, class Body>
inline void for_tiles(int rows, const Body& body) {
  const int tile = tile_rows(rows, Most);
  for (int row = 0; row < rows; row += tile)
    for_rows<Most>(rows - row < tile ? rows - row : tile, [&]<int Rows>() { body.template operator()<Rows>(row); });
}

// Calls body<Parts>().
template <class Body>
inline void for_parts(int parts, const Body& body) {
  switch (parts) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    default: return body.template operator()<3>();
  }
}

template <class K, int Parts>
inline void score_parts(const CodeRows& q, const Page& page, float* scores) {
  for_tiles<kCodeTileRows / Parts>(q.rows, [&]<int Rows>(int row) { score_rows<K, Parts, Rows>(q, row, page, scores); });
}

template <class K>
void score_codes(const CodeRows& q, const Page& page, float* scores) {
  for_parts(q.part_count, [&]<int Parts>() { score_parts<K, Parts>(q, page, scores); });
}

// How values come: `quads` vectors of 4 tokens for each group. A weight is cut into digits of kBits bits.
struct ByteValues {
  static constexpr int kQuads = 1;
  static constexpr int kBits = 7;
  static constexpr float kCentre = 127.5f;
  static void load(const char* codes, Bytes* quads) { quads[0] = load_bytes(codes); }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* weights) {
    return dot_bytes(acc, quad, fill_quad(weights));
  }
};

struct NibbleValues {
  static constexpr int kQuads = 2;
  static constexpr int kBits = 8;
  static constexpr float kCentre = 7.5f;
  static void load(const char* codes, Bytes* quads) {
    const Bytes both = load_bytes(codes);
    quads[0] = low_nibbles(both);
    quads[1] = high_nibbles(both);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* weights) {
    return dot_unsigned(acc, quad, fill_quad(weights));
  }
};

// The digits of one row's weights: sum of w_j v_j = unit * (sum of digits_j * codes_j) + constant.
struct Digits {
  float unit;
  float constant;
};

constexpr float kUnitMin = 1e-30f;  // below it weights are nothing beside others, and their inverse would overflow

// Of the values of a page. Lanes past its count are zero, up to the end of their cluster.
struct ValueScales {
  alignas(64) float scale[kPageTokens];
  alignas(64) float offset[kPageTokens];

  void load(const Page& page) {
    for (int at = 0; at < page.count; at += kLanes) {
      const Bits keep = lanes_below(page.count - at);
      store(scale + at, select(keep, load_scale(page, kValueScale, at / kLanes), zero()));
      store(offset + at, select(keep, load_scale(page, kValueOffset, at / kLanes), zero()));
    }
  }
};

// One row's weights, times the values' scales.
struct Scaled {
  float* weights;
  float largest;
  float sum;
  float offsets;  // sum of weights, before the scales, times offsets
};

// Cuts them into digits, relative to their largest. Where there is only one, what rounding leaves out is given to the
// middle of the codes.
template <class V, int Parts>
inline Digits cut_weights(const Scaled& row, const Page& page, std::uint8_t* digits) {
  if (!(row.largest > kUnitMin)) {
    memset(digits, 0, Parts * kPageTokens);
    return {0.0f, row.offsets};
  }
  constexpr auto kWhole = static_cast<float>(((1 << V::kBits) - 1) << V::kBits * (Parts - 1));
  const float unit = row.largest / kWhole;
  const Vec inverse = fill(kWhole / row.largest);
  Ints total = ints_zero();
  for (int at = 0; at < page.count; at += kLanes) {
    const Ints number = to_ints(mul(load(row.weights + at), inverse));
    std::uint8_t* digit = digits + at;
    if constexpr (Parts == 3) {
      store_bits<2 * V::kBits, V::kBits>(digit, number);
      digit += kPageTokens;
    }
    if constexpr (Parts >= 2) {
      store_bits<V::kBits, V::kBits>(digit, number);
      digit += kPageTokens;
    }
    store_bits<0, V::kBits>(digit, number);
    if constexpr (Parts == 1) total = ints_add(total, number);
  }
  if constexpr (Parts == 1) {
    const float left = row.sum - unit * sum_lanes(to_floats(total));
    return {unit, row.offsets + V::kCentre * left};
  } else {
    return {unit, row.offsets};
  }
}

// Of one tile of rows, N vectors of dimensions from `vector` on.
template <class V, int Parts, int Rows, int N>
inline void sum_vectors(const Page& page, int vector, int head_dim, const std::uint8_t* digits, const Digits* rows,
                        float* out) {
  constexpr int kGroup = 4 * V::kQuads;
  const int vectors = head_dim / kLanes;
  Ints sums[N][Rows * Parts];
  for (auto& each : sums)
    for (Ints& sum : each) sum = ints_zero();
  const auto* codes = reinterpret_cast<const char*>(page.values) + 64 * vector;
  const int groups = (page.count + kGroup - 1) / kGroup;
  for (int g = 0; g < groups; ++g, codes += 64 * vectors) {
    for (int n = 0; n < N; ++n) {
      Bytes quads[V::kQuads];
      V::load(codes + 64 * n, quads);
      for (int j = 0; j < V::kQuads; ++j)
        for (int r = 0; r < Rows * Parts; ++r)
          sums[n][r] = V::dot(sums[n][r], quads[j], digits + r * kPageTokens + g * kGroup + 4 * j);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int r = 0; r < Rows; ++r) {
      float* target = out + r * head_dim + (vector + n) * kLanes;
      const Vec part = add(mul(joined<Parts, V::kBits>(&sums[n][r * Parts]), fill(rows[r].unit)), fill(rows[r].constant));
      store(target, add(load(target), part));
    }
  }
}

template <class V, int Parts, int Rows>
inline void sum_rows(const Page& page, int head_dim, const std::uint8_t* digits, const Digits* rows, float* out) {
  constexpr int kRows = Rows * Parts;
  constexpr int kMost = kRows * 4 <= kCodeTileSums ? 4 : kRows * 2 <= kCodeTileSums ? 2 : 1;
  const int vectors = head_dim / kLanes;
  int v = 0;
  for (; v + kMost <= vectors; v += kMost)
    sum_vectors<V, Parts, Rows, kMost>(page, v, head_dim, digits, rows, out);
  if constexpr (kMost >= 4) {
    if (v + 2 <= vectors) {
      sum_vectors<V, Parts, Rows, 2>(page, v, head_dim, digits, rows, out);
      v += 2;
    }
  }
  if constexpr (kMost >= 2)
    if (v < vectors) sum_vectors<V, Parts, Rows, 1>(page, v, head_dim, digits, rows, out);
}

// out[r] += what the digits of row r say of this page, for all rows.
template <class V, int Parts>
inline void sum_parts(int rows, const Page& page, int head_dim, const std::uint8_t* digits, const Digits* each,
                      float* out) {
  for_tiles<kCodeTileRows / Parts>(rows, [&]<int Rows>(int row) {
    sum_rows<V, Parts, Rows>(page, head_dim, digits + row * Parts * kPageTokens, each + row,
                             out + static_cast<std::int64_t>(row) * head_dim);
  });
}

template <class V>
void sum_codes(const CodeWeights& w, const Page& page, float* out) {
  ValueScales scales;
  scales.load(page);
  for_parts(w.part_count, [&]<int Parts>() {
    for (int row = 0; row < w.rows; row += kCodeTileRows / Parts) {
      constexpr int kMost = kCodeTileRows / Parts;
      const int rows = w.rows - row < kMost ? w.rows - row : kMost;
      alignas(64) std::uint8_t digits[kMost * Parts * kPageTokens];
      Digits each[kMost];
      for (int r = 0; r < rows; ++r) {
        const float* weights = w.weights + static_cast<std::int64_t>(row + r) * kPageTokens;
        alignas(64) float scaled[kPageTokens];
        Vec largest = zero(), sum = zero(), offsets = zero();
        for (int at = 0; at < page.count; at += kLanes) {
          const Vec weight = select(lanes_below(page.count - at), load(weights + at), zero());
          const Vec product = mul(weight, load(scales.scale + at));
          offsets = fused(weight, load(scales.offset + at), offsets);
          sum = add(sum, product);
          largest = max(largest, product);
          store(scaled + at, product);
        }
        const Scaled of_row{scaled, max_lanes(largest), sum_lanes(sum), sum_lanes(offsets)};
        each[r] = cut_weights<V, Parts>(of_row, page, digits + r * Parts * kPageTokens);
      }
      for_rows<kMost>(rows, [&]<int Rows>() {
        sum_rows<V, Parts, Rows>(page, w.head_dim, digits, each, out + static_cast<std::int64_t>(row) * w.head_dim);
      });
    }
  });
}

}  // namespace h3::H3_ISA
