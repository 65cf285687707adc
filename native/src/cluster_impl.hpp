// Clusters of 16 tokens by halving: a node's tokens are cut at the median along the direction in which its keys spread
// most, until leaves have 16. Included by index_impl.hpp alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace h3::H3_ISA {

constexpr int kPowerSteps = 6;  // towards the principal direction; more change no measured quality

class Halving {
 public:
  explicit Halving(const ClusterBlock& block)
      : b_(block), ranked_(static_cast<std::size_t>(block.leaves) * kClusterTokens) {
    for (std::size_t i = 0; i < ranked_.size(); ++i) b_.order[i] = static_cast<std::int32_t>(i);
  }

  // Orders the tokens in places [16 first, 16 last). `along` is the parent's direction: children run the same way, so
  // that the last leaf of one is near the first leaf of the next.
  void halve(int first, int last, const float* along) {
    std::int32_t* tokens = b_.order + first * kClusterTokens;
    const int count = (last - first) * kClusterTokens;
    if (last - first == 1) return std::sort(tokens, tokens + count);
    alignas(64) float direction[kHeadDimMax];
    spread(tokens, count, along, direction);
    for (int i = 0; i < count; ++i) ranked_[static_cast<std::size_t>(i)] = {dot(tokens[i], direction), tokens[i]};
    const int middle = first + (last - first + 1) / 2;
    const auto begin = ranked_.begin();
    std::nth_element(begin, begin + (middle - first) * kClusterTokens, begin + count, before);
    for (int i = 0; i < count; ++i) tokens[i] = ranked_[static_cast<std::size_t>(i)].second;
    // Sums follow the tokens' order: without it they would depend on how the library cuts.
    std::sort(tokens, tokens + (middle - first) * kClusterTokens);
    std::sort(tokens + (middle - first) * kClusterTokens, tokens + count);
    halve(first, middle, direction);
    halve(middle, last, direction);
  }

 private:
  using Ranked = std::pair<float, std::int32_t>;

  // A total order even over NaN, which come last.
  static bool before(const Ranked& a, const Ranked& b) {
    const bool a_nan = a.first != a.first, b_nan = b.first != b.first;
    if (a_nan || b_nan) return a_nan != b_nan ? b_nan : a.second < b.second;
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  }

  const float* row(std::int32_t token) const { return b_.keys + std::int64_t{token} * b_.head_dim; }

  float dot(std::int32_t token, const float* direction) const {
    const float* x = row(token);
    Vec sum = mul(load(x), load(direction));
    for (int d = kLanes; d < b_.head_dim; d += kLanes) sum = fma(load(x + d), load(direction + d), sum);
    return sum_lanes(sum);
  }

  // out = sum over tokens of weight(token) * key.
  template <class Weight>
  void add_rows(const std::int32_t* tokens, int count, Weight weight, float* out) const {
    std::fill_n(out, b_.head_dim, 0.0f);
    for (int i = 0; i < count; ++i) {
      const Vec w = fill(weight(tokens[i]));
      const float* x = row(tokens[i]);
      for (int d = 0; d < b_.head_dim; d += kLanes) store(out + d, fma(load(x + d), w, load(out + d)));
    }
  }

  static float product(const float* a, const float* b, int count) {
    Vec sum = zero();
    for (int d = 0; d < count; d += kLanes) sum = fma(load(a + d), load(b + d), sum);
    return sum_lanes(sum);
  }

  // The principal direction of some keys, from the key that lies farthest from their mean.
  void spread(const std::int32_t* tokens, int count, const float* along, float* direction) const {
    alignas(64) float mean[kHeadDimMax];
    alignas(64) float next[kHeadDimMax];
    add_rows(tokens, count, [&](std::int32_t) { return 1.0f / static_cast<float>(count); }, mean);
    float farthest = -1.0f;
    std::int32_t start = tokens[0];
    for (int i = 0; i < count; ++i) {
      const float* x = row(tokens[i]);
      Vec sum = zero();
      for (int d = 0; d < b_.head_dim; d += kLanes) {
        const Vec gap = sub(load(x + d), load(mean + d));
        sum = fma(gap, gap, sum);
      }
      const float distance = sum_lanes(sum);
      if (distance > farthest) farthest = distance, start = tokens[i];
    }
    for (int d = 0; d < b_.head_dim; ++d) direction[d] = row(start)[d] - mean[d];
    for (int step = 0; step < kPowerSteps; ++step) {
      const float length = std::sqrt(product(direction, direction, b_.head_dim));
      if (!(length > 0.0f)) break;  // all keys are equal, or not numbers: any cut does
      for (int d = 0; d < b_.head_dim; ++d) direction[d] /= length;
      const float centre = product(mean, direction, b_.head_dim);
      float total = 0.0f;
      add_rows(tokens, count, [&](std::int32_t token) {
        const float along_it = dot(token, direction) - centre;
        total += along_it;
        return along_it;
      }, next);
      for (int d = 0; d < b_.head_dim; ++d) direction[d] = next[d] - total * mean[d];
    }
    if (along == nullptr || !(product(direction, along, b_.head_dim) < 0.0f)) return;
    for (int d = 0; d < b_.head_dim; ++d) direction[d] = -direction[d];
  }

  const ClusterBlock& b_;
  std::vector<Ranked> ranked_;
};

inline void cluster(const ClusterBlock& block) { Halving(block).halve(0, block.leaves, nullptr); }

}  // namespace h3::H3_ISA
