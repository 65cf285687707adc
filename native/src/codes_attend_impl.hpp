// Attention of a few rows over pages of codes, written once over the vectors of simd_*.hpp; included by kernels_impl.hpp.
#pragma once

namespace h3::H3_ISA {

// Page by page: its keys, its values, then the next one's. What comes next is asked for a page ahead where keys lie apart
// from values, into the second-level cache: asking for the first-level one is slower than not to ask, since few of its misses
// can wait at a time.
template <class K, class V, int QueryParts, int WeightParts>
class CodeAttention {
 public:
  explicit CodeAttention(const CodeBlock& block) : block_(block) {}

  void run() {
    if constexpr (K::kIsOneLine)
      if (block_.rows.head_dim <= kPanel) return attend_pages<ScalesAhead>();
    attend_pages<Ahead>();
  }

 private:
  template <class A>
  void attend_pages() {
    for (int p = 0; p < block_.page_count; ++p) {
      const Page& page = block_.pages[p];
      const Page* const next = p + 1 < block_.page_count ? &page + 1 : block_.next;
      const A ahead(next != nullptr ? *next : page);
      if (page.count == kPageTokens) attend_page<true>(page, ahead);
      else if (page.count > 0) attend_page<false>(page, ahead);
      if ((p + 1) % kBatchPages == 0) refine();
    }
    refine();
  }

  // A token whose value is refined, if its weight still counts when its batch of pages ends.
  struct Refined {
    const Page* page;
    int token;
    int row;
    float weight;   // times the value's scale, relative to `maximum`
    float scale;
    float maximum;
  };
  static constexpr int kRefinedMax = 4 * kPageTokens;

  // Step by step for all rows: what waits for one row's sums across lanes goes on with another's.
  template <bool Whole, class A>
  void attend_page(const Page& page, const A& ahead) {
    const int rows = block_.rows.rows;
    score_parts<K, QueryParts>(block_.rows, page, ahead, scores_);
    ahead.fetch_scales();
    scales_.template load<Whole>(page);
    for (int r = 0; r < rows; ++r) best_[r] = max_lanes(mask_row(page, r, scores_ + r * kPageTokens));
    for (int r = 0; r < rows; ++r) scaled_[r] = weigh_row<Whole>(page, r);
    for (int r = 0; r < rows; ++r)
      digits_of_[r] = cut_weights<V, WeightParts, Whole>(scaled_[r], page, digits_ + r * WeightParts * kPageTokens);
    sum_parts<V, WeightParts>(rows, page, block_.rows.head_dim, digits_, digits_of_, ahead, block_.out);
  }

  // The score from which on values are refined: large beside the largest and beside the sum, as far as these are known, here
  // or from the newest tokens. Both only grow, so that what is large in the end is large now.
  float refined_score(int r) const {
    const float limit = refined_limit(block_.maximum[r], block_.sum[r]);
    return block_.refined_from != nullptr && block_.refined_from[r] > limit ? block_.refined_from[r] : limit;
  }

  // Notes the tokens of a page, with weights in `scores_`, that may be refined, and asks for their residues, which lie apart.
  void note_refined(const Page& page, int r, float largest) {
    const float limit = refined_score(r);
    if (!(largest >= limit)) return;
    if (refined_count_ > kRefinedMax - kPageTokens) refine();
    const float least = exp2f(limit - block_.maximum[r]);
    const float* weights = scores_ + r * kPageTokens;
    for (int at = 0; at < page.count; at += kLanes) {
      const Vec each = load(weights + at);
      const Bits is_small = below(each, mul(load(scales_.scale + at), fill(least)));
      for (unsigned left = mask_of(below(zero(), each)) & ~mask_of(is_small); left != 0; left &= left - 1) {
        const int j = at + __builtin_ctz(left);
        refined_[refined_count_++] = {&page, j, r, weights[j], scales_.scale[j], block_.maximum[r]};
        const int bytes = block_.rows.head_dim / 2;
        for (int line = 0; line < bytes; line += 64)
          prefetch(reinterpret_cast<const char*>(page.residues) + j * bytes + line);
      }
    }
  }

  // Adds what the values of tokens with large weights leave out. Their error would be seen: small weights are many, and their
  // errors cancel.
  void refine() {
    const int head_dim = block_.rows.head_dim;
    for (int i = 0; i < refined_count_; ++i) {
      const Refined& token = refined_[i];
      const float now = block_.maximum[token.row];
      const float weight = token.maximum == now ? token.weight : token.weight * exp2f(token.maximum - now);
      if (!(weight >= exp2f(refined_score(token.row) - now) * token.scale)) continue;
      float* out = block_.out + static_cast<std::int64_t>(token.row) * head_dim;
      for (int d = 0; d < head_dim; d += kLanes)
        store(out + d, fused(load_residues(*token.page, token.token, d, head_dim), fill(weight), load(out + d)));
    }
    refined_count_ = 0;
  }

  // 2^x for x <= 0 by the polynomials of exp2_nonpositive; never below 2^-100, which is nothing beside the largest weight of
  // 1. Equal on every instruction set.
  static Vec weight_of(const Vec& x) {
    const Vec bounded = max(fill(-100.0f), x);  // the second operand wins over NaN
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
    return scale_by_power(p, n);
  }

  // Hides what a row may not see; gives back the largest score of each lane.
  Vec mask_row(const Page& page, int r, float* s) const {
    const int position = block_.positions[r];
    const std::int64_t seen = static_cast<std::int64_t>(position) - page.first + 1;
    const int limit = page.positions != 0 || seen > page.count ? page.count : seen < 0 ? 0 : static_cast<int>(seen);
    const Vec hidden = fill(kNothing);
    Vec best = hidden;
    if (limit == kPageTokens && page.positions == 0) {
      for (int at = 0; at < kPageTokens; at += kLanes) best = max(best, load(s + at));
      return best;
    }
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
  template <bool Whole>
  Scaled weigh_row(const Page& page, int r) {
    float* s = scores_ + r * kPageTokens;
    const float scaled = best_[r] * block_.scale_log2;
    const float before = block_.maximum[r];
    float now = scaled > before || scaled != scaled ? scaled : before;
    if (now == kNothing && has_nan(page, s)) now = __builtin_nanf("");  // a maximum may drop what is not a number
    if (now == kNothing) return {s, 0.0f, 0.0f, 0.0f};
    const Vec scale = fill(block_.scale_log2), lowered = fill(-now);
    Vec total = zero(), largest = zero(), sum = zero(), offsets = zero();
    for (int at = 0; at < tokens_of<Whole>(page); at += kLanes) {
      const Vec weight = weight_of(fused(load(s + at), scale, lowered));
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
    if (page.residues != 0) note_refined(page, r, scaled);
    return {s, max_lanes(largest), sum_lanes(sum), sum_lanes(offsets)};
  }

  const CodeBlock& block_;
  ValueScales scales_;
  alignas(64) float scores_[kCodeRowsMax * kPageTokens];
  alignas(64) std::uint8_t digits_[kCodeRowsMax * WeightParts * kPageTokens];
  Digits digits_of_[kCodeRowsMax];
  float best_[kCodeRowsMax];
  Scaled scaled_[kCodeRowsMax];
  Refined refined_[kRefinedMax];
  int refined_count_ = 0;
};

template <class K, class V>
void attend_codes(const CodeBlock& block) {
  for_parts(block.rows.part_count, [&]<int QueryParts>() {
    for_parts(block.weight_parts, [&]<int WeightParts>() { CodeAttention<K, V, QueryParts, WeightParts>(block).run(); });
  });
}

}  // namespace h3::H3_ISA
