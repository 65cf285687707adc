// Sums over pages of codes, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
//
// Both sums are of integers: parts of query rows times codes of keys, 16 tokens at a time, and parts of weights times
// codes of values, 16 dimensions at a time. What is rounded is rounded before, and the few steps on fp32 after it are the
// same on every instruction set: so are the results, bit for bit.
#pragma once

namespace h3::H3_ISA {

constexpr int kClustersMax = kPageTokens / kLanes;

inline int clusters_of(const Page& page) { return (page.count + kLanes - 1) / kLanes; }

enum Scale { kKeyScale, kKeyOffset, kValueScale, kValueOffset };
inline Vec load_scale(const Page& page, Scale which, int cluster) {
  return load_fp16(reinterpret_cast<const std::uint16_t*>(page.scales) + which * kPageTokens + cluster * kLanes);
}

// How keys come: `quads` vectors of 4 dimensions for each step, whose codes are multiplied by kFactor and moved by kCentre.
struct ByteKeys {
  static constexpr int kQuads = 1;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* codes;
  const char* ahead;  // the same of the page that will be read next
  ByteKeys(const Page& page, const Page& next, int cluster, int head_dim)
      : codes(reinterpret_cast<const char*>(page.keys) + cluster * kLanes * head_dim),
        ahead(reinterpret_cast<const char*>(next.keys) + cluster * kLanes * head_dim) {}
  void load(int step, Bytes* quads) const {
    prefetch(ahead + 64 * step);
    quads[0] = load_bytes(codes + 64 * step);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& row) { return dot_bytes(acc, quad, row); }
};

struct SplitKeys {
  static constexpr int kQuads = 2;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* low;
  const char* high;
  const char* low_ahead;
  const char* high_ahead;
  SplitKeys(const Page& page, const Page& next, int cluster, int head_dim) {
    const int offset = cluster * kLanes * head_dim / 2;
    low = reinterpret_cast<const char*>(page.keys) + offset;
    high = reinterpret_cast<const char*>(page.nibbles) + offset;
    low_ahead = reinterpret_cast<const char*>(next.keys) + offset;
    high_ahead = reinterpret_cast<const char*>(next.nibbles) + offset;
  }
  void load(int step, Bytes* quads) const {
    prefetch(low_ahead + 64 * step);
    prefetch(high_ahead + 64 * step);
    const Bytes l = load_bytes(low + 64 * step);
    const Bytes h = load_bytes(high + 64 * step);
    quads[0] = join_low(h, l);
    quads[1] = join_high(h, l);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& row) { return dot_bytes(acc, quad, row); }
};

struct NibbleKeys {
  static constexpr int kQuads = 2;
  static constexpr float kFactor = 1.0f, kCentre = 0.0f;
  const char* nibbles;
  const char* ahead;
  NibbleKeys(const Page& page, const Page& next, int cluster, int head_dim)
      : nibbles(reinterpret_cast<const char*>(page.nibbles) + cluster * kLanes * head_dim / 2),
        ahead(reinterpret_cast<const char*>(next.nibbles) + cluster * kLanes * head_dim / 2) {}
  void load(int step, Bytes* quads) const {
    prefetch(ahead + 64 * step);
    const Bytes codes = load_bytes(nibbles + 64 * step);
    quads[0] = low_nibbles(codes);
    quads[1] = high_nibbles(codes);
  }
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

template <class K, int Parts, int Rows>
inline void score_rows(const CodeRows& q, int row, const Page& page, const Page& next, float* scores) {
  const int head_dim = q.head_dim;
  const int steps = head_dim / (4 * K::kQuads);
  const std::int8_t* parts = q.parts + static_cast<std::int64_t>(row) * Parts * head_dim;
  for (int c = 0; c < clusters_of(page); ++c) {
    const K keys(page, next, c, head_dim);
    Ints sums[K::kQuads][Rows * Parts];
    for (auto& quad : sums)
      for (Ints& sum : quad) sum = ints_zero();
    for (int s = 0; s < steps; ++s) {
      Bytes quads[K::kQuads];
      keys.load(s, quads);
      for (int i = 0; i < K::kQuads; ++i)
        for (int r = 0; r < Rows * Parts; ++r)
          sums[i][r] = K::dot(sums[i][r], quads[i], fill_quad(parts + r * head_dim + 4 * (K::kQuads * s + i)));
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

template <class K, int Parts, int Rows = kCodeTileRows / Parts>
inline void score_tile(const CodeRows& q, int row, int rows, const Page& page, const Page& next, float* scores) {
  if constexpr (Rows > 1)
    if (rows < Rows) return score_tile<K, Parts, Rows - 1>(q, row, rows, page, next, scores);
  score_rows<K, Parts, Rows>(q, row, page, next, scores);
}

// Rows of one tile, so that tiles are about equal.
inline int tile_rows(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return tiles == 0 ? 1 : (rows + tiles - 1) / tiles;
}

template <class K, int Parts>
inline void score_parts(const CodeRows& q, const Page& page, const Page& next, float* scores) {
  constexpr int kMost = kCodeTileRows / Parts;
  const int tile = tile_rows(q.rows, kMost);
  for (int row = 0; row < q.rows; row += tile)
    score_tile<K, Parts>(q, row, q.rows - row < tile ? q.rows - row : tile, page, next, scores);
}

template <class K>
inline void score_ahead(const CodeRows& q, const Page& page, const Page& next, float* scores) {
  switch (q.part_count) {
    case 1: return score_parts<K, 1>(q, page, next, scores);
    case 2: return score_parts<K, 2>(q, page, next, scores);
    default: return score_parts<K, 3>(q, page, next, scores);
  }
}

template <class K>
void score_codes(const CodeRows& q, const Page& page, float* scores) {
  score_ahead<K>(q, page, page, scores);
}

// How values come: `quads` vectors of 4 tokens for each group. A weight is cut into digits of kBits bits.
struct ByteValues {
  static constexpr int kQuads = 1;
  static constexpr int kBits = 7;
  static constexpr float kCentre = 127.5f;
  static constexpr int top(int) { return 127; }
  static void load(const char* codes, Bytes* quads) { quads[0] = load_bytes(codes); }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& weights) { return dot_bytes(acc, quad, weights); }
};

struct NibbleValues {
  static constexpr int kQuads = 2;
  static constexpr int kBits = 8;
  static constexpr float kCentre = 7.5f;
  // Three digits of 8 bits would not leave fp32 the half that rounding needs.
  static constexpr int top(int parts) { return parts < 3 ? 255 : 127; }
  static void load(const char* codes, Bytes* quads) {
    const Bytes both = load_bytes(codes);
    quads[0] = low_nibbles(both);
    quads[1] = high_nibbles(both);
  }
  static Ints dot(const Ints& acc, const Bytes& quad, const Bytes& weights) { return dot_unsigned(acc, quad, weights); }
};

// One row's weights of a page: v_d = unit * sum of digits * codes_d + constant.
struct Digits {
  float unit;
  float constant;
};

constexpr float kUnitMin = 1e-30f;  // below it a page's weights are nothing beside the others': their inverse would overflow

// What rounding leaves out of the weights is given to the middle of the codes.
template <class V, int Parts>
inline Digits cut_weights(const float* weights, const Page& page, std::uint8_t* digits) {
  Vec scaled[kClustersMax];
  Vec offsets = zero();
  Vec largest = zero();
  const int clusters = clusters_of(page);
  for (int c = 0; c < clusters; ++c) {
    const Bits keep = lanes_below(page.count - c * kLanes);
    const Vec w = select(keep, load(weights + c * kLanes), zero());
    scaled[c] = mul(w, select(keep, load_scale(page, kValueScale, c), zero()));
    offsets = fused(w, select(keep, load_scale(page, kValueOffset, c), zero()), offsets);
    largest = max(largest, scaled[c]);
  }
  const float most = max_lanes(largest);
  const float constant = sum_lanes(offsets);
  if (!(most > kUnitMin)) return {0.0f, constant};
  const float whole = static_cast<float>(V::top(Parts) << V::kBits * (Parts - 1));
  const float unit = most / whole;
  const Vec inverse = fill(whole / most);
  Vec left = zero();
  for (int c = 0; c < clusters; ++c) {
    Vec number = round_nearest(mul(scaled[c], inverse));
    left = add(left, sub(scaled[c], mul(number, fill(unit))));
    for (int p = 0; p < Parts; ++p) {
      Vec digit = number;
      if (p + 1 < Parts) {
        const float base = static_cast<float>(1 << V::kBits * (Parts - 1 - p));
        digit = round_nearest(mul(sub(number, fill((base - 1.0f) / 2.0f)), fill(1.0f / base)));
        number = sub(number, mul(digit, fill(base)));
      }
      store_bytes(digits + p * kPageTokens + c * kLanes, digit);
    }
  }
  return {unit, constant + V::kCentre * sum_lanes(left)};
}

// Of one tile of rows, N vectors of dimensions.
template <class V, int Parts, int Rows, int N>
inline void sum_vectors(const Page& page, const char* codes, const char* ahead, int stride, const std::uint8_t* digits,
                        const Digits* rows, float* out, int out_row) {
  constexpr int kGroup = 4 * V::kQuads;
  Ints sums[N][Rows * Parts];
  for (auto& vector : sums)
    for (Ints& sum : vector) sum = ints_zero();
  for (int g = 0; g < (page.count + kGroup - 1) / kGroup; ++g, codes += stride, ahead += stride) {
    for (int n = 0; n < N; ++n) {
      Bytes quads[V::kQuads];
      prefetch(ahead + 64 * n);
      V::load(codes + 64 * n, quads);
      for (int i = 0; i < V::kQuads; ++i)
        for (int r = 0; r < Rows * Parts; ++r)
          sums[n][r] = V::dot(sums[n][r], quads[i], fill_quad(digits + r * kPageTokens + g * kGroup + 4 * i));
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int r = 0; r < Rows; ++r) {
      float* target = out + r * out_row + n * kLanes;
      const Vec part = add(mul(joined<Parts, V::kBits>(&sums[n][r * Parts]), fill(rows[r].unit)), fill(rows[r].constant));
      store(target, add(load(target), part));
    }
  }
}

template <class V, int Parts, int Rows>
inline void sum_rows(const CodeWeights& w, int row, const Page& page, const Page& next, float* out) {
  constexpr int kRows = Rows * Parts;
  constexpr int kMost = kRows * 4 <= kCodeTileSums ? 4 : kRows * 2 <= kCodeTileSums ? 2 : 1;
  alignas(64) std::uint8_t digits[kRows * kPageTokens];
  Digits each[Rows];
  for (int r = 0; r < Rows; ++r) {
    std::uint8_t* at = digits + r * Parts * kPageTokens;
    each[r] = cut_weights<V, Parts>(w.weights + (row + r) * kPageTokens, page, at);
    if (each[r].unit == 0.0f) memset(at, 0, Parts * kPageTokens);
  }
  const int vectors = w.head_dim / kLanes;
  const auto* codes = reinterpret_cast<const char*>(page.values);
  const auto* ahead = reinterpret_cast<const char*>(next.values);
  float* target = out + static_cast<std::int64_t>(row) * w.head_dim;
  int v = 0;
  const auto step = [&]<int N>() {
    sum_vectors<V, Parts, Rows, N>(page, codes + 64 * v, ahead + 64 * v, 64 * vectors, digits, each, target + v * kLanes,
                                   w.head_dim);
    v += N;
  };
  while (v + kMost <= vectors) step.template operator()<kMost>();
  if constexpr (kMost >= 4)
    if (v + 2 <= vectors) step.template operator()<2>();
  if constexpr (kMost >= 2)
    if (v < vectors) step.template operator()<1>();
}

template <class V, int Parts, int Rows = kCodeTileRows / Parts>
inline void sum_tile(const CodeWeights& w, int row, int rows, const Page& page, const Page& next, float* out) {
  if constexpr (Rows > 1)
    if (rows < Rows) return sum_tile<V, Parts, Rows - 1>(w, row, rows, page, next, out);
  sum_rows<V, Parts, Rows>(w, row, page, next, out);
}

template <class V, int Parts>
inline void sum_parts(const CodeWeights& w, const Page& page, const Page& next, float* out) {
  constexpr int kMost = kCodeTileRows / Parts;
  const int tile = tile_rows(w.rows, kMost);
  for (int row = 0; row < w.rows; row += tile)
    sum_tile<V, Parts>(w, row, w.rows - row < tile ? w.rows - row : tile, page, next, out);
}

template <class V>
inline void sum_ahead(const CodeWeights& w, const Page& page, const Page& next, float* out) {
  switch (w.part_count) {
    case 1: return sum_parts<V, 1>(w, page, next, out);
    case 2: return sum_parts<V, 2>(w, page, next, out);
    default: return sum_parts<V, 3>(w, page, next, out);
  }
}

template <class V>
void sum_codes(const CodeWeights& w, const Page& page, float* out) {
  sum_ahead<V>(w, page, page, out);
}

// Attention of a few rows, page by page.
template <class K, class V>
struct CodeAttention {
  const CodeBlock& block;
  alignas(64) float scores[kCodeRowsMax * kPageTokens];

  // 2^x for x <= 0, as exp2_nonpositive, but 0 below 2^-125 and equal on every instruction set.
  static Vec weight_of(const Vec& x) {
    const Vec floor = fill(-125.0f);
    const Vec bounded = max(floor, x);  // the second operand wins over NaN
    const Vec n = round_nearest(bounded);
    const Vec f = sub(bounded, n);
    Vec p = fill(1.326472753e-3f);
    p = fused(p, f, fill(9.671512709e-3f));
    p = fused(p, f, fill(5.550733742e-2f));
    p = fused(p, f, fill(2.402224208e-1f));
    p = fused(p, f, fill(6.931469776e-1f));
    p = fused(p, f, fill(1.0f));
    return select(below(x, floor), zero(), scale_by_power(p, n));
  }

  // Hides what a row may not see; gives back its largest score.
  float mask_row(const Page& page, int r) {
    float* s = scores + r * kPageTokens;
    const int position = block.positions[r];
    const std::int64_t seen = static_cast<std::int64_t>(position) - page.first + 1;
    const int limit = page.positions != 0 || seen > page.count ? page.count : seen < 0 ? 0 : static_cast<int>(seen);
    const Vec hidden = fill(kNothing);
    Vec best = hidden;
    for (int c = 0; c < clusters_of(page); ++c) {
      Vec x = load(s + c * kLanes);
      if (limit < (c + 1) * kLanes || page.positions != 0) {
        Bits keep = lanes_below(limit - c * kLanes);
        if (page.positions != 0) {
          alignas(64) std::int32_t p[kLanes] = {};
          const auto* source = reinterpret_cast<const std::int32_t*>(page.positions) + c * kLanes;
          for (int l = 0; l < kLanes && c * kLanes + l < page.count; ++l) p[l] = source[l];
          keep = both(keep, positions_at_most(p, position));
        }
        x = select(keep, x, hidden);
        store(s + c * kLanes, x);
      }
      best = max(best, x);
    }
    return max_lanes(best);
  }

  bool has_nan(const Page& page, int r) const {
    const float* s = scores + r * kPageTokens;
    for (int j = 0; j < page.count; ++j)
      if (s[j] != s[j]) return true;
    return false;
  }

  // Turns a row's scores into weights relative to its new maximum; rescales what was summed before.
  void weigh_row(const Page& page, int r) {
    float* s = scores + r * kPageTokens;
    const float best = mask_row(page, r);
    const float before = block.maximum[r];
    const float scaled = best * block.scale_log2;
    float now = scaled > before || scaled != scaled ? scaled : before;
    if (now == kNothing && has_nan(page, r)) now = __builtin_nanf("");  // a largest score may drop what is not a number
    Vec total = zero();
    for (int c = 0; c < clusters_of(page); ++c) {
      Vec w = zero();
      if (now != kNothing) w = weight_of(fused(load(s + c * kLanes), fill(block.scale_log2), fill(-now)));
      total = add(total, w);
      store(s + c * kLanes, w);
    }
    if (now == kNothing) return;
    if (now != before) {
      const float shrink = before == kNothing ? 0.0f : exp2f(before - now);
      block.sum[r] *= shrink;
      float* out = block.out + static_cast<std::int64_t>(r) * block.rows.head_dim;
      for (int d = 0; d < block.rows.head_dim; d += kLanes) store(out + d, mul(load(out + d), fill(shrink)));
      block.maximum[r] = now;
    }
    block.sum[r] += sum_lanes(total);
  }

  void run() {
    const CodeWeights weights{scores, block.rows.rows, block.weight_parts, block.rows.head_dim};
    for (int p = 0; p < block.page_count; ++p) {
      const Page& page = block.pages[p];
      if (page.count == 0) continue;
      const Page& next = block.pages[p + 1 < block.page_count ? p + 1 : p];
      score_ahead<K>(block.rows, page, next, scores);
      for (int r = 0; r < block.rows.rows; ++r) weigh_row(page, r);
      sum_ahead<V>(weights, page, next, block.out);
    }
  }
};

template <class K, class V>
void attend_codes(const CodeBlock& block) {
  CodeAttention<K, V>{block, {}}.run();
}

}  // namespace h3::H3_ISA
