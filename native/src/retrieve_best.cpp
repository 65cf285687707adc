#include "retrieve_best.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

namespace h3 {
namespace {

// A cluster and its importance, in their order.
struct Ranked {
  float importance;
  std::int32_t cluster;

  bool operator<(const Ranked& other) const {
    return importance != other.importance ? importance > other.importance : cluster < other.cluster;
  }
};

// Before all and behind all.
constexpr Ranked kFirst{std::numeric_limits<float>::infinity(), -1};

// One (token, KV head). Memory is kept from call to call.
class Best {
 public:
  void find(const RankBlock& rows, std::int64_t used, ClusterLists chosen, ClusterLists runners) {
    RankBlock block = rows;
    clusters_ = block.count;
    block.weights = grown(weights_, clusters_);
    block.importance = importance_ = grown(importance_room_, clusters_);
    block.largest = largest_ = grown(largest_room_, clusters_ / kLanes);
    index_kernels().rank(block);
    const int wanted = static_cast<int>(std::min<std::int64_t>(std::int64_t{chosen.count} + runners.count, used));
    collect(wanted);
    const int best = std::min(chosen.count, wanted);
    const Ranked last = limit_of(wanted), chosen_last = best == wanted ? last : limit_of(best);
    fill(chosen, kFirst, chosen_last);
    fill(runners, chosen_last, last);
  }

 private:
  // What reaches `least` may be among the best; what reaches `sure` is. Not a number: nothing is sure.
  struct Bound {
    float least;
    float sure;
  };

  // Candidates reach a bound that as many clusters as are wanted reach.
  void collect(int wanted) {
    count_ = 0;
    if (wanted == 0) return;
    bound_ = bound_of(wanted);
    Ranked* const candidates = grown(candidates_, clusters_ + 1);
    for (std::int64_t run = 0; run < clusters_ / kLanes; ++run) {
      if (largest_[run] < bound_.least) continue;
      for (std::int64_t c = run * kLanes; c < (run + 1) * kLanes; ++c) {
        candidates[count_] = {importance_[c], static_cast<std::int32_t>(c)};
        count_ += importance_[c] >= bound_.least;
      }
    }
  }

  // Of as many runs of clusters as are wanted each has one that reaches the bound. Where so many are wanted that this
  // says little, the bound comes from a histogram.
  Bound bound_of(int wanted) {
    const std::int64_t runs = clusters_ / kLanes;
    if (2 * std::int64_t{wanted} > runs) return bound_by_bins(wanted);
    bounds_.assign(largest_, largest_ + runs);
    const auto at = bounds_.begin() + (wanted - 1);
    std::nth_element(bounds_.begin(), at, bounds_.end(), std::greater<>());
    return {std::max(0.0f, *at), std::numeric_limits<float>::quiet_NaN()};
  }

  // By the upper bits of floats of at least 0, which order them. What is no cluster goes to a bin of its own.
  Bound bound_by_bins(int wanted) {
    constexpr int kShift = 19, kBins = 1 << (31 - kShift);
    std::uint32_t* const bins = grown(bins_, 2 * kBins);
    std::fill_n(bins, 2 * kBins, 0u);
    for (std::int64_t c = 0; c < clusters_; ++c) ++bins[std::bit_cast<std::uint32_t>(importance_[c]) >> kShift];
    auto bin = std::uint32_t{kBins} - 1;
    for (auto left = static_cast<std::uint32_t>(wanted); bins[bin] < left; --bin) left -= bins[bin];
    return {std::bit_cast<float>(bin << kShift), std::bit_cast<float>((bin + 1) << kShift)};
  }

  // The worst one of so many of the best.
  Ranked limit_of(int count) {
    if (count == 0) return kFirst;
    const auto end = candidates_.begin() + count_;
    const auto is_sure = [&](const Ranked& each) { return each.importance >= bound_.sure; };
    const auto sure = static_cast<int>(std::count_if(candidates_.begin(), end, is_sure));
    ordered_.clear();
    std::copy_if(candidates_.begin(), end, std::back_inserter(ordered_),
                 [&](const Ranked& each) { return sure >= count || !is_sure(each); });
    const auto at = ordered_.begin() + (sure >= count ? count - 1 : count - sure - 1);
    std::nth_element(ordered_.begin(), at, ordered_.end());
    return *at;
  }

  // Those behind `first`, up to `last`.
  void fill(ClusterLists list, const Ranked& first, const Ranked& last) const {
    int taken = 0;
    for (std::int64_t i = 0; i < count_; ++i) {
      const Ranked& each = candidates_[static_cast<std::size_t>(i)];
      if (first < each && !(last < each)) list.clusters[taken++] = each.cluster;
    }
    std::fill(list.clusters + taken, list.clusters + list.count, -1);
  }

  std::int64_t clusters_ = 0;
  std::int64_t count_ = 0;  // of candidates
  Bound bound_{};
  float* importance_ = nullptr;
  float* largest_ = nullptr;
  std::vector<float> weights_, importance_room_, largest_room_, bounds_;
  std::vector<std::uint32_t> bins_;
  std::vector<Ranked> candidates_, ordered_;
};

}  // namespace

void choose(const RetrieveArgs& a, const RetrieveShape& s, const float* exact_lse, ClusterLists chosen,
            ClusterLists runners) {
  parallel(s.lists, a.threads, Share::kOne, [&](int begin, int end) {
    thread_local Best best;
    thread_local std::vector<float> others;
    float* const other = grown(others, s.group);
    for (int list = begin; list < end; ++list) {
      const int token = list / a.shape.kv_heads, head = list % a.shape.kv_heads;
      const std::int64_t row = std::int64_t{token} * a.heads + head * s.group;
      for (int g = 0; g < s.group; ++g) other[g] = exact_lse[row + g] * kLog2e;
      RankBlock block{};
      block.lse = lse_of(a, s, token, head);
      block.lse_stride = block.count = s.clusters;
      block.other = other;
      block.rows = s.group;
      block.totals = a.totals + row;
      best.find(block, s.used, {chosen.clusters + std::int64_t{list} * chosen.count, chosen.count},
                {runners.clusters + std::int64_t{list} * runners.count, runners.count});
    }
  });
}

}  // namespace h3
