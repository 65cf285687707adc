// Sums over pages of codes, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
//
// Both sums are of integers: parts of query rows times codes of keys, 16 tokens at a time, and parts of weights times
// codes of values, 16 dimensions at a time. What is rounded is rounded before, and the few steps on fp32 after it are the
// same on every instruction set: so are the results, bit for bit.
#pragma once

namespace h3::H3_ISA {

inline int clusters_of(const Page& page) { return (page.count + kLanes - 1) / kLanes; }

// Its count, known to the compiler where the page is whole: most are.
template <bool Whole>
inline int tokens_of(const Page& page) {
  if constexpr (Whole) return kPageTokens;
  else return page.count;
}

enum Scale { kKeyScale, kKeyOffset, kValueScale, kValueOffset };
inline Vec load_scale(const Page& page, Scale which, int cluster) {
  return load_fp16(reinterpret_cast<const std::uint16_t*>(page.scales) + which * kPageTokens + cluster * kLanes);
}

// What 16 values of a token leave out, in steps of their scale: the middle of each sixteenth of [-1/2, 1/2].
inline Vec load_residues(const Page& page, int token, int d, int head_dim) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(page.residues) + token * head_dim / 2 + d / 2;
  return add(mul(load_nibbles(bytes), fill(0.0625f)), fill(0.03125f - 0.5f));
}

// Asks for the page that comes next, line by line, while one is summed. Addresses may be of no page at all.
struct Ahead {
  const Page& page;
  explicit Ahead(const Page& next) : page(next) {}
  static void fetch(std::uint64_t address, std::int64_t line) {
    prefetch_later(reinterpret_cast<const void*>(address + 64 * static_cast<std::uint64_t>(line)));
  }
  void fetch_values(std::int64_t line) const { fetch(page.values, line); }
  void fetch_scales() const {
    for (int line = 0; line < 8 * kPageTokens / 64; ++line) fetch(page.scales, line);
  }
};

// The same where the processor follows the codes alone: only the scales, which lie apart from them.
struct ScalesAhead {
  Ahead next;
  explicit ScalesAhead(const Page& page) : next(page) {}
  void fetch_scales() const { next.fetch_scales(); }
  void fetch_values(std::int64_t) const {}
};

// In its place where nothing is known of what comes next.
struct NothingAhead {
  void fetch_values(std::int64_t) const {}
};

// How keys come: `quads` vectors of 4 dimensions for each step, whose codes are multiplied by kFactor and moved by kCentre.
// Keys and values in one line of bytes are followed best by the processor alone, cluster by cluster, as long as values are
// not read in many passes. Where they lie apart, pages are asked for ahead, and clusters are scored together.
struct ByteKeys {
  static constexpr int kQuads = 1;
  static constexpr bool kIsOneLine = true;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* codes;
  ByteKeys(const Page& page, int cluster, int head_dim)
      : codes(reinterpret_cast<const char*>(page.keys) + cluster * kLanes * head_dim) {}
  void load(int step, Bytes* quads) const { quads[0] = load_bytes(codes + 64 * step); }
  static void fetch(const Ahead& next, std::int64_t line) { Ahead::fetch(next.page.keys, line); }
  static void fetch(const ScalesAhead&, std::int64_t) {}
  static void fetch(const NothingAhead&, std::int64_t) {}
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_bytes(acc, quad, row); }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& row) { return dot_signed(acc, quad, row); }
};

struct SplitKeys {
  static constexpr int kQuads = 2;
  static constexpr bool kIsOneLine = false;
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
  static void fetch(const Ahead& next, std::int64_t line) {
    Ahead::fetch(next.page.keys, line);
    Ahead::fetch(next.page.nibbles, line);
  }
  static void fetch(const NothingAhead&, std::int64_t) {}
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_bytes(acc, quad, row); }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& row) { return dot_signed(acc, quad, row); }
};

struct NibbleKeys {
  static constexpr int kQuads = 2;
  static constexpr bool kIsOneLine = false;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* nibbles;
  NibbleKeys(const Page& page, int cluster, int head_dim)
      : nibbles(reinterpret_cast<const char*>(page.nibbles) + cluster * kLanes * head_dim / 2) {}
  void load(int step, Bytes* quads) const {
    const Bytes codes = load_bytes(nibbles + 64 * step);
    quads[0] = low_nibbles(codes);
    quads[1] = high_nibbles(codes);
  }
  static void fetch(const Ahead& next, std::int64_t line) { Ahead::fetch(next.page.nibbles, line); }
  static void fetch(const NothingAhead&, std::int64_t) {}
  static Ints dot(const Ints& acc, const Bytes& quad, const void* row) { return dot_nibbles(acc, quad, row); }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& row) { return dot_nibbles(acc, quad, row); }
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

// Scores of rows [row, row + Rows) with the tokens of `Clusters` clusters from `first` on. What is loaded of a row serves
// all of them.
template <class K, int Parts, int Rows, int Clusters, class A>
inline void score_clusters(const CodeRows& q, int row, const Page& page, int first, const A& ahead, float* scores) {
  const int head_dim = q.head_dim;
  const int steps = head_dim / (4 * K::kQuads);
  const std::int8_t* parts = q.parts + static_cast<std::int64_t>(row) * Parts * head_dim;
  const K keys(page, first, head_dim);
  Ints sums[Clusters][Rows * Parts];
  for (auto& cluster : sums)
    for (Ints& sum : cluster) sum = ints_zero();
  for (int s = 0; s < steps; ++s) {
    Bytes quads[Clusters][K::kQuads];
    for (int c = 0; c < Clusters; ++c) {
      keys.load(c * steps + s, quads[c]);
      K::fetch(ahead, (first + c) * steps + s);
    }
    for (int i = 0; i < K::kQuads; ++i) {
      for (int r = 0; r < Rows * Parts; ++r) {
        const std::int8_t* row_quad = parts + r * head_dim + 4 * (K::kQuads * s + i);
        if constexpr (Clusters == 1) {
          sums[0][r] = K::dot(sums[0][r], quads[0][i], static_cast<const void*>(row_quad));
        } else {
          const Bytes quad = fill_quad(row_quad);
          for (int c = 0; c < Clusters; ++c) sums[c][r] = K::dot(sums[c][r], quads[c][i], quad);
        }
      }
    }
  }
  for (int c = 0; c < Clusters; ++c) {
    const Vec scale = load_scale(page, kKeyScale, first + c);
    const Vec offset = load_scale(page, kKeyOffset, first + c);
    for (int r = 0; r < Rows; ++r) {
      const Vec total = fill(q.sum[row + r]);
      Vec codes = joined<Parts, 7>(&sums[c][r * Parts]);
      if constexpr (K::kFactor != 1.0f) codes = add(mul(codes, fill(K::kFactor)), mul(total, fill(K::kCentre)));
      const Vec score = mul(add(mul(scale, codes), mul(offset, total)), fill(q.scale[row + r]));
      store(scores + (row + r) * kPageTokens + (first + c) * kLanes, score);
    }
  }
}

// scores[r][j] of rows [row, row + Rows) with the tokens of one page.
template <class K, int Parts, int Rows, class A>
inline void score_rows(const CodeRows& q, int row, const Page& page, const A& ahead, float* scores) {
  constexpr int kRows = Rows * Parts;
  constexpr int kMost = K::kIsOneLine ? 1 : kRows * 4 <= kCodeScoreSums ? 4 : kRows * 2 <= kCodeScoreSums ? 2 : 1;
  const int clusters = clusters_of(page);
  int c = 0;
  for (; c + kMost <= clusters; c += kMost) score_clusters<K, Parts, Rows, kMost>(q, row, page, c, ahead, scores);
  if constexpr (kMost > 1)
    for (; c < clusters; ++c) score_clusters<K, Parts, Rows, 1>(q, row, page, c, ahead, scores);
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

template <class K, int Parts, class A>
inline void score_parts(const CodeRows& q, const Page& page, const A& ahead, float* scores) {
  for_tiles<kCodeTileRows / Parts>(q.rows,
                                   [&]<int Rows>(int row) { score_rows<K, Parts, Rows>(q, row, page, ahead, scores); });
}

template <class K>
void score_codes(const CodeRows& q, const Page& page, float* scores) {
  for_parts(q.part_count, [&]<int Parts>() { score_parts<K, Parts>(q, page, NothingAhead{}, scores); });
}

// How values come: `quads` vectors of 4 tokens for each group. A weight is cut into digits of kBits bits.
struct ByteValues {
  static constexpr int kQuads = 1;
  static constexpr int kBits = 7;
  static constexpr float kCentre = 127.5f;
  static void load(const char* codes, Bytes* quads) { quads[0] = load_bytes(codes); }
  static Ints dot(const Ints& acc, const Bytes& quad, const void* weights) {
    return dot_signed(acc, quad, fill_quad(weights));
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

  template <bool Whole = false>
  void load(const Page& page) {
    for (int at = 0; at < tokens_of<Whole>(page); at += kLanes) {
      if constexpr (Whole) {
        store(scale + at, load_scale(page, kValueScale, at / kLanes));
        store(offset + at, load_scale(page, kValueOffset, at / kLanes));
        continue;
      }
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
template <class V, int Parts, bool Whole = false>
inline Digits cut_weights(const Scaled& row, const Page& page, std::uint8_t* digits) {
  if (!(row.largest > kUnitMin)) {
    memset(digits, 0, Parts * kPageTokens);
    return {0.0f, row.offsets};
  }
  constexpr auto kWhole = static_cast<float>(((1 << V::kBits) - 1) << V::kBits * (Parts - 1));
  const float unit = row.largest / kWhole;
  const Vec inverse = fill(kWhole / row.largest);
  Ints total = ints_zero();
  for (int at = 0; at < tokens_of<Whole>(page); at += kLanes) {
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
template <class V, int Parts, int Rows, int N, class A>
inline void sum_vectors(const Page& page, int vector, int head_dim, const std::uint8_t* digits, const Digits* rows,
                        const A& ahead, float* out) {
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
      ahead.fetch_values(g * vectors + vector + n);
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

template <class V, int Parts, int Rows, class A>
inline void sum_rows(const Page& page, int head_dim, const std::uint8_t* digits, const Digits* rows, const A& ahead,
                     float* out) {
  constexpr int kRows = Rows * Parts;
  constexpr int kMost = kRows * 4 <= kCodeTileSums ? 4 : kRows * 2 <= kCodeTileSums ? 2 : 1;
  const int vectors = head_dim / kLanes;
  int v = 0;
  for (; v + kMost <= vectors; v += kMost)
    sum_vectors<V, Parts, Rows, kMost>(page, v, head_dim, digits, rows, ahead, out);
  if constexpr (kMost >= 4) {
    if (v + 2 <= vectors) {
      sum_vectors<V, Parts, Rows, 2>(page, v, head_dim, digits, rows, ahead, out);
      v += 2;
    }
  }
  if constexpr (kMost >= 2)
    if (v < vectors) sum_vectors<V, Parts, Rows, 1>(page, v, head_dim, digits, rows, ahead, out);
}

// out[r] += what the digits of row r say of this page, for all rows.
template <class V, int Parts, class A>
inline void sum_parts(int rows, const Page& page, int head_dim, const std::uint8_t* digits, const Digits* each,
                      const A& ahead, float* out) {
  for_tiles<kCodeTileRows / Parts>(rows, [&]<int Rows>(int row) {
    sum_rows<V, Parts, Rows>(page, head_dim, digits + row * Parts * kPageTokens, each + row,
                             ahead, out + static_cast<std::int64_t>(row) * head_dim);
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
        sum_rows<V, Parts, Rows>(page, w.head_dim, digits, each, NothingAhead{}, out + static_cast<std::int64_t>(row) * w.head_dim);
      });
    }
  });
}

}  // namespace h3::H3_ISA
