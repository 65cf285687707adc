// Attention of a few rows over pages of codes, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
#pragma once

namespace h3::H3_ISA {

// Page by page: its keys, its values, then the next one's. The processor's own prefetch follows such lines; larger batches
// and prefetch instructions were slower by a third to a half, though they compute faster from cache.
template <class K, class V, int QueryParts, int WeightParts>
class CodeAttention {
 public:
  explicit CodeAttention(const CodeBlock& block) : block_(block) {}

  void run() {
    for (int p = 0; p < block_.page_count; ++p)
      if (block_.pages[p].count > 0) attend_page(block_.pages[p]);
  }

 private:
  void attend_page(const Page& page) {
    const int rows = block_.rows.rows;
    score_parts<K, QueryParts>(block_.rows, page, scores_);
    scales_.load(page);
    for (int r = 0; r < rows; ++r) scaled_[r] = weigh_row(page, r);
    for (int r = 0; r < rows; ++r)
      digits_of_[r] = cut_weights<V, WeightParts>(scaled_[r], page, digits_ + r * WeightParts * kPageTokens);
    sum_parts<V, WeightParts>(rows, page, block_.rows.head_dim, digits_, digits_of_, block_.out);
    if (page.residues != 0)
      for (int r = 0; r < rows; ++r)
        if (is_refined_[r]) refine_row(page, r);
  }

  // Which weights of a page are refined: those that are large beside the largest and beside the sum, as far as these are
  // known, here or from the newest tokens. Both only grow, so that what is large in the end is large now.
  void find_refined(int r, float scaled, float now) {
    float limit = refined_limit(now, block_.sum[r]);
    if (block_.refined_from != nullptr && block_.refined_from[r] > limit) limit = block_.refined_from[r];
    is_refined_[r] = scaled >= limit;
    if (is_refined_[r]) refined_weight_[r] = exp2f(limit - now);
  }

  // Adds what the values of the tokens with large weights leave out. Their error would be seen: small weights are many,
  // and their errors cancel.
  void refine_row(const Page& page, int r) const {
    const int head_dim = block_.rows.head_dim;
    const float* weights = scores_ + r * kPageTokens;
    float* out = block_.out + static_cast<std::int64_t>(r) * head_dim;
    for (int j = 0; j < page.count; ++j) {
      const float scale = scales_.scale[j];
      if (!(weights[j] >= refined_weight_[r] * scale) || scale == 0.0f) continue;
      for (int d = 0; d < head_dim; d += kLanes)
        store(out + d, fused(load_residues(page, j, d, head_dim), fill(weights[j]), load(out + d)));
    }
  }

  // 2^x for x <= 0 by the polynomials of exp2_nonpositive, but 0 below 2^-125 and equal on every instruction set.
  static Vec weight_of(const Vec& x) {
    const Vec floor = fill(-125.0f);
    const Vec bounded = max(floor, x);  // the second operand wins over NaN
    const Vec n = round_nearest(bounded);
    const Vec f = sub(bounded, n);
    Vec p;
    if constexpr (WeightParts == kPartsMax) {
      p = fill(1.326472753e-3f);
      p = fused(p, f, fill(9.671512709e-3f));
      p = fused(p, f, fill(5.550733742e-2f));
      p = fused(p, f, fill(2.402224208e-1f));
      p = fused(p, f, fill(6.931469776e-1f));
    } else {
      p = fill(9.582849431e-3f);
      p = fused(p, f, fill(5.590642464e-2f));
      p = fused(p, f, fill(2.402409870e-1f));
      p = fused(p, f, fill(6.931241934e-1f));
    }
    p = fused(p, f, fill(1.0f));
    return select(below(x, floor), zero(), scale_by_power(p, n));
  }

  // Hides what a row may not see; gives back the largest score of each lane.
  Vec mask_row(const Page& page, int r, float* s) const {
    const int position = block_.positions[r];
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
    return best;
  }

  static bool has_nan(const Page& page, const float* s) {
    for (int j = 0; j < page.count; ++j)
      if (s[j] != s[j]) return true;
    return false;
  }

  // Turns a row's scores into weights relative to its new maximum, times the values' scales; rescales what was summed
  // before.
  Scaled weigh_row(const Page& page, int r) {
    float* s = scores_ + r * kPageTokens;
    const float scaled = max_lanes(mask_row(page, r, s)) * block_.scale_log2;
    const float before = block_.maximum[r];
    float now = scaled > before || scaled != scaled ? scaled : before;
    if (now == kNothing && has_nan(page, s)) now = __builtin_nanf("");  // a maximum may drop what is not a number
    is_refined_[r] = false;
    if (now == kNothing) return {s, 0.0f, 0.0f, 0.0f};
    Vec total = zero(), largest = zero(), sum = zero(), offsets = zero();
    for (int at = 0; at < page.count; at += kLanes) {
      const Vec weight = weight_of(fused(load(s + at), fill(block_.scale_log2), fill(-now)));
      const Vec product = mul(weight, load(scales_.scale + at));
      total = add(total, weight);
      offsets = fused(weight, load(scales_.offset + at), offsets);
      if constexpr (WeightParts == 1) sum = add(sum, product);
      largest = max(largest, product);
      store(s + at, product);
    }
    if (now != before) {
      const float shrink = before == kNothing ? 0.0f : exp2f(before - now);
      block_.sum[r] *= shrink;
      float* out = block_.out + static_cast<std::int64_t>(r) * block_.rows.head_dim;
      for (int d = 0; d < block_.rows.head_dim; d += kLanes) store(out + d, mul(load(out + d), fill(shrink)));
      block_.maximum[r] = now;
    }
    block_.sum[r] += sum_lanes(total);
    if (page.residues != 0) find_refined(r, scaled, now);
    return {s, max_lanes(largest), sum_lanes(sum), sum_lanes(offsets)};
  }

  const CodeBlock& block_;
  ValueScales scales_;
  alignas(64) float scores_[kCodeRowsMax * kPageTokens];
  alignas(64) std::uint8_t digits_[kCodeRowsMax * WeightParts * kPageTokens];
  Digits digits_of_[kCodeRowsMax];
  Scaled scaled_[kCodeRowsMax];
  bool is_refined_[kCodeRowsMax] = {};
  float refined_weight_[kCodeRowsMax];
};

template <class K, class V>
void attend_codes(const CodeBlock& block) {
  for_parts(block.rows.part_count, [&]<int QueryParts>() {
    for_parts(block.weight_parts, [&]<int WeightParts>() { CodeAttention<K, V, QueryParts, WeightParts>(block).run(); });
  });
}

}  // namespace h3::H3_ISA
