#include "h3/retrieve.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "h3/attend.hpp"
#include "h3/dispatch.hpp"
#include "h3/pool.hpp"

// All loops are cut by shapes alone and every sum has one order, so that results never depend on threads.
namespace h3 {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLogTokens = 4.0f;  // log2(kClusterTokens)
constexpr int kListRun = 64;        // listed clusters of one unit
constexpr int kMeanRun = 16;        // segments whose mean values one unit sums up
constexpr int kTokensAtOnce = 8;    // query tokens whose weights of all clusters are kept at the same time
constexpr int kEverything = 1 << 30;  // a position that sees all tokens

template <class T>
T* grown(std::vector<T>& room, std::int64_t count) {
  if (room.size() < static_cast<std::size_t>(count)) room.resize(static_cast<std::size_t>(count));
  return room.data();
}

struct Shape {
  int group;                // query heads of a KV head
  int rows;                 // query rows of a KV head: (token, head of the group)
  std::int64_t clusters;    // numbers of clusters, used or not

  explicit Shape(const RetrieveArgs& a)
      : group(a.heads / a.shape.kv_heads),
        rows(a.tokens * group),
        clusters(std::int64_t{kSegmentClusters} * a.segment_count) {}
};

int used_clusters(const Indexed& segment) { return segment.blocks * kPageClusters; }

// Log-sum-exps of the clusters for the first head of a group; the next heads' follow, `clusters` apart.
float* lse_of(const RetrieveArgs& a, const Shape& s, int token, int kv_head) {
  return a.lse + (std::int64_t{token} * a.heads + kv_head * s.group) * s.clusters;
}

// Rotated and coded query rows of every KV head, [K][T, group].
class Queries {
 public:
  Queries(const RetrieveArgs& a, int part_count) : part_count_(part_count), head_dim_(a.shape.head_dim) {
    const int group = a.heads / a.shape.kv_heads;
    rows_ = a.tokens * group;
    const std::int64_t count = std::int64_t{a.tokens} * a.heads;
    parts_.resize(static_cast<std::size_t>(count * part_count * head_dim_));
    scale_.resize(static_cast<std::size_t>(count));
    sum_.resize(static_cast<std::size_t>(count));
    float row[kHeadDimMax];
    for (int t = 0; t < a.tokens; ++t)
      for (int h = 0; h < a.heads; ++h) {
        const std::int64_t source = (std::int64_t{t} * a.heads + h) * head_dim_;
        const std::int64_t r = std::int64_t{h / group} * rows_ + t * group + h % group;
        to_fp32(static_cast<const char*>(a.q) + source * size_bytes(a.q_dtype), a.q_dtype, row, head_dim_);
        rotate_rows(row, 1, head_dim_);
        pack_code_rows(row, 1, head_dim_, part_count, parts_.data() + r * part_count * head_dim_,
                       scale_.data() + r, sum_.data() + r);
      }
  }

  // Scores come out in base 2, scaled for the softmax.
  void to_base2(float softmax_scale) {
    for (float& scale : scale_) scale *= softmax_scale * kLog2e;
  }

  CodeRows rows(int kv_head) const { return rows(kv_head, 0, rows_); }

  CodeRows rows(int kv_head, int first, int count) const {
    const auto r = static_cast<std::size_t>(kv_head * rows_ + first);
    const std::int8_t* parts = parts_.data() + r * static_cast<std::size_t>(part_count_ * head_dim_);
    return {parts, scale_.data() + r, sum_.data() + r, count, part_count_, head_dim_};
  }

 private:
  int part_count_;
  int head_dim_;
  int rows_;
  std::vector<std::int8_t> parts_;
  std::vector<float> scale_, sum_;
};

Page summary_page(const RetrieveArgs& a, const Indexed& segment, int kv_head) {
  const std::uint64_t keys = segment.summary + static_cast<std::uint64_t>(kv_head * a.shape.summary_bytes());
  const auto means = static_cast<std::uint64_t>(a.shape.means_bytes());
  return {keys, keys + means / 2, 0, 0, keys + means, 0, used_clusters(segment)};
}

void clear_unused(const RetrieveArgs& a, const Shape& s, int segment, int kv_head) {
  const int used = used_clusters(a.segments[segment]);
  for (int t = 0; t < a.tokens && used < kSegmentClusters; ++t)
    for (int g = 0; g < s.group; ++g)
      std::fill_n(lse_of(a, s, t, kv_head) + g * s.clusters + segment * kSegmentClusters + used, kSegmentClusters - used, kNothing);
}

// Every cluster's log-sum-exp as if all its keys were their mean.
void rank_all(const RetrieveArgs& a, const Shape& s, const Queries& queries) {
  parallel(a.segment_count * a.shape.kv_heads, a.threads, Share::kGuided, [&](int begin, int end) {
    thread_local std::vector<float> room;
    float* const scores = grown(room, std::int64_t{s.rows} * kPageTokens);
    for (int unit = begin; unit < end; ++unit) {
      const int segment = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
      const Page page = summary_page(a, a.segments[segment], head);
      kernels().codes.score_page[static_cast<int>(Encoding::kInt8)](queries.rows(head), page, scores);
      for (int r = 0; r < s.rows; ++r) {
        float* lse = lse_of(a, s, r / s.group, head) + r % s.group * s.clusters + segment * kSegmentClusters;
        for (int i = 0; i < page.count; ++i) lse[i] = scores[r * kPageTokens + i] + kLogTokens;
      }
      clear_unused(a, s, segment, head);
    }
  });
}

ScanBlock scan_block(const RetrieveArgs& a, const Shape& s, int head) {
  ScanBlock block{};
  block.segments = a.segments;
  block.head_offset = head * kSegmentBlocks * a.shape.plane_bytes();
  block.split_keys = a.shape.split_keys;
  block.lse_stride = s.clusters;
  return block;
}

void scan_all(const RetrieveArgs& a, const Shape& s, const Queries& queries) {
  parallel(a.segment_count * a.shape.kv_heads, a.threads, Share::kGuided, [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      // Heads of a segment follow each other as their planes do: memory is read in a straight line.
      const int segment = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
      ScanBlock block = scan_block(a, s, head);
      block.first = segment * kSegmentClusters;
      block.count = used_clusters(a.segments[segment]);
      // A segment's planes of one head stay in cache from token to token.
      for (int t = 0; t < a.tokens; ++t) {
        block.query = queries.rows(head, t * s.group, s.group);
        block.lse = lse_of(a, s, t, head);
        index_kernels().scan(block);
      }
      clear_unused(a, s, segment, head);
    }
  });
}

// The clusters listed for each (token, KV head): `count` each, -1 at the end where there are fewer.
void scan_listed(const RetrieveArgs& a, const Shape& s, const Queries& queries, const std::int32_t* lists, int count) {
  const int runs = (count + kListRun - 1) / kListRun;
  parallel(a.tokens * a.shape.kv_heads * runs, a.threads, Share::kGuided, [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      const int row = unit / runs, head = row % a.shape.kv_heads, token = row / a.shape.kv_heads;
      const int first = unit % runs * kListRun;
      ScanBlock block = scan_block(a, s, head);
      block.clusters = lists + std::int64_t{row} * count + first;
      const int room = std::min(kListRun, count - first);
      while (block.count < room && block.clusters[block.count] >= 0) ++block.count;
      block.query = queries.rows(head, token * s.group, s.group);
      block.lse = lse_of(a, s, token, head);
      index_kernels().scan(block);
    }
  });
}

// The best clusters of one (token, KV head) by importance.
class Best {
 public:
  // Ascending numbers, then -1.
  void find(const RetrieveArgs& a, const Shape& s, const float* lse, const float* exact_lse, int count, std::int32_t* found) {
    if (count == 0) return;
    weigh(a, s, lse, exact_lse);
    std::int64_t used = 0;
    for (int i = 0; i < a.segment_count; ++i) used += used_clusters(a.segments[i]);
    const auto wanted = static_cast<int>(std::min<std::int64_t>(count, used));
    const Limit limit = wanted == 0 ? Limit{~0u, -1} : limit_of(s.clusters, wanted);
    int taken = 0;
    for (std::int64_t c = 0; c < s.clusters && taken < wanted; ++c)
      if (keys_[static_cast<std::size_t>(c)] > limit.key || (keys_[static_cast<std::size_t>(c)] == limit.key && c <= limit.cluster))
        found[taken++] = static_cast<std::int32_t>(c);
    std::fill(found + taken, found + count, -1);
  }

 private:
  // The worst one that is chosen.
  struct Limit {
    std::uint32_t key;
    std::int64_t cluster;
  };

  // keys_[c] orders clusters by importance: the bits of a float of at least 0 do, plus 1; 0 where there is no cluster.
  // What is not a number comes first, so that it is read and seen.
  void weigh(const RetrieveArgs& a, const Shape& s, const float* lse, const float* exact_lse) {
    float* const weights = grown(weights_, s.clusters);
    float* const importance = grown(importance_, s.clusters);
    std::fill_n(importance, s.clusters, 0.0f);
    for (int g = 0; g < s.group; ++g) {
      const Weighed all = index_kernels().weigh({lse + g * s.clusters, weights, s.clusters, exact_lse[g] * kLog2e});
      const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
      for (std::int64_t c = 0; c < s.clusters; ++c) importance[c] += weights[c] * inverse;
    }
    std::uint32_t* const keys = grown(keys_, s.clusters);
    std::memcpy(keys, importance, static_cast<std::size_t>(s.clusters) * 4);
    for (std::int64_t c = 0; c < s.clusters; ++c) keys[c] = std::min(keys[c], 0xfffffffeu) + 1u;
    for (int i = 0; i < a.segment_count; ++i) {
      const int used = used_clusters(a.segments[i]);
      std::fill_n(keys + std::int64_t{i} * kSegmentClusters + used, kSegmentClusters - used, 0u);
    }
  }

  // By a histogram of the upper bits, then exactly inside the one bin that the limit falls into.
  Limit limit_of(std::int64_t clusters, int wanted) {
    constexpr int kShift = 20;
    std::uint32_t* const bins = grown(bins_, 1 << (32 - kShift));
    std::fill_n(bins, 1 << (32 - kShift), 0u);
    for (std::int64_t c = 0; c < clusters; ++c) ++bins[keys_[static_cast<std::size_t>(c)] >> kShift];
    std::uint32_t bin = 1u << (32 - kShift);
    auto left = static_cast<std::uint32_t>(wanted);
    while (bins[--bin] < left) left -= bins[bin];
    inside_.clear();
    for (std::int64_t c = 0; c < clusters; ++c)
      if (keys_[static_cast<std::size_t>(c)] >> kShift == bin) inside_.push_back({keys_[static_cast<std::size_t>(c)], c});
    const auto at = inside_.begin() + (left - 1);
    std::nth_element(inside_.begin(), at, inside_.end(), [](const Limit& x, const Limit& y) {
      return x.key != y.key ? x.key > y.key : x.cluster < y.cluster;
    });
    return *at;
  }

  std::vector<float> weights_, importance_;
  std::vector<std::uint32_t> keys_, bins_;
  std::vector<Limit> inside_;
};

void choose(const SelectArgs& args, const Shape& s, int count, std::int32_t* found) {
  const RetrieveArgs& a = args.of;
  parallel(a.tokens * a.shape.kv_heads, a.threads, Share::kOne, [&](int begin, int end) {
    thread_local Best best;
    for (int unit = begin; unit < end; ++unit) {
      const int token = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
      best.find(a, s, lse_of(a, s, token, head), args.exact_lse + token * a.heads + head * s.group, count,
                found + std::int64_t{unit} * count);
    }
  });
}

// What attend_chosen() knows of some query tokens while it runs.
class Chosen {
 public:
  Chosen(const ChosenArgs& args, int first, int tokens) : args_(args), a_(args.of), s_(args.of) {
    a_.tokens = tokens;
    a_.q = static_cast<const char*>(args.of.q) + std::int64_t{first} * a_.heads * a_.shape.head_dim * size_bytes(a_.q_dtype);
    a_.lse = args.of.lse + std::int64_t{first} * a_.heads * s_.clusters;
    s_ = Shape(a_);
    const std::int64_t skipped = std::int64_t{first} * a_.shape.kv_heads * args.budget;
    args_.chosen += skipped;
    if (args_.addresses != nullptr) args_.addresses += skipped;
    args_.out += std::int64_t{first} * a_.heads * a_.shape.head_dim;
    args_.out_lse += first * a_.heads;
    args_.chosen_lse += first * a_.heads;
  }

  ChosenReads run() {
    const std::int64_t lists = std::int64_t{a_.tokens} * a_.shape.kv_heads;
    pages_.resize(static_cast<std::size_t>(lists * args_.budget));
    page_counts_.assign(static_cast<std::size_t>(lists), 0);
    reads_.assign(static_cast<std::size_t>(lists), {});
    if (args_.estimate) {
      weights_.resize(static_cast<std::size_t>(std::int64_t{a_.tokens} * a_.heads * s_.clusters));
      weighed_.assign(static_cast<std::size_t>(a_.tokens * a_.heads), {kNothing, 0.0f});
    }
    parallel(static_cast<int>(lists), a_.threads, Share::kOne, [&](int begin, int end) {
      for (int unit = begin; unit < end; ++unit) prepare(unit);
    });
    for (int t = 0; t < a_.tokens; ++t) read_exactly(t);
    if (!args_.estimate) {
      std::copy_n(args_.chosen_lse, a_.tokens * a_.heads, args_.out_lse);
    } else {
      sum_means();
      for (int t = 0; t < a_.tokens; ++t)
        for (int h = 0; h < a_.heads; ++h) merge(t, h);
    }
    ChosenReads all{};
    for (const ChosenReads& reads : reads_) all = {all.clusters + reads.clusters, all.pages + reads.pages};
    return all;
  }

 private:
  std::uint64_t page_address(std::int64_t at, std::int32_t cluster, int head) const {
    const std::uint64_t address = args_.addresses == nullptr ? 0 : args_.addresses[at];
    if (address != 0) return address;
    const int block = cluster % kSegmentClusters / kPageClusters;
    return a_.segments[cluster / kSegmentClusters].pages + static_cast<std::uint64_t>(a_.shape.page_offset(block, head));
  }

  // A page from one of its clusters on.
  Page page_of(std::int64_t at, std::int32_t cluster, int head) const {
    const SlabShape& shape = a_.shape;
    const int block = cluster % kSegmentClusters / kPageClusters;
    const int place = cluster % kPageClusters;
    const std::uint64_t keys = page_address(at, cluster, head);
    const std::uint64_t plane = a_.segments[cluster / kSegmentClusters].planes +
                                static_cast<std::uint64_t>((head * kSegmentBlocks + block) * shape.plane_bytes());
    const auto moved = [&](std::int64_t size) { return static_cast<std::uint64_t>(size * place / kPageClusters); };
    const auto nibbles = static_cast<std::uint64_t>(shape.nibbles_bytes());
    return {keys + moved(shape.keys_bytes()), keys + static_cast<std::uint64_t>(shape.keys_bytes()) + moved(shape.nibbles_bytes()),
            0, plane + moved(shape.nibbles_bytes()), plane + nibbles + moved(2 * kPageTokens), 0, kClusterTokens};
  }

  // Pages of one (token, KV head), and the weights of what is not in them.
  void prepare(int unit) {
    const int token = unit / a_.shape.kv_heads, head = unit % a_.shape.kv_heads;
    Page* const pages = pages_.data() + std::int64_t{unit} * args_.budget;
    thread_local std::vector<float> room;
    thread_local std::vector<std::int32_t> read;
    read.clear();
    int count = 0;
    std::int32_t last = -kSegmentClusters;
    ChosenReads& reads = reads_[static_cast<std::size_t>(unit)];
    for (int i = 0; i < args_.budget; ++i) {
      const std::int64_t at = std::int64_t{unit} * args_.budget + i;
      const std::int32_t cluster = args_.chosen[at];
      if (cluster < 0) break;
      if (args_.addresses != nullptr && args_.addresses[at] == kMissing) continue;
      const Page page = page_of(at, cluster, head);
      // Clusters of one page that follow each other are one run.
      const bool follows = cluster == last + 1 && cluster % kPageClusters != 0 &&
                           page.values == pages[count - 1].values + static_cast<std::uint64_t>(pages[count - 1].count) *
                               static_cast<std::uint64_t>(a_.shape.head_dim) / 2;
      if (follows) pages[count - 1].count += kClusterTokens;
      else pages[count++] = page;
      reads.pages += cluster / kPageClusters != last / kPageClusters;
      ++reads.clusters;
      last = cluster;
      read.push_back(cluster);
    }
    page_counts_[static_cast<std::size_t>(unit)] = count;
    std::fill(pages + count, pages + args_.budget, Page{});
    if (!args_.estimate) return;
    float* const lse = grown(room, s_.clusters);
    for (int g = 0; g < s_.group; ++g) {
      std::copy_n(lse_of(a_, s_, token, head) + g * s_.clusters, s_.clusters, lse);
      for (const std::int32_t cluster : read) lse[cluster] = kNothing;
      const std::int64_t row = std::int64_t{token} * a_.heads + head * s_.group + g;
      float* const weights = weights_.data() + row * s_.clusters;
      weighed_[static_cast<std::size_t>(row)] = index_kernels().weigh({lse, weights, s_.clusters, kNothing});
    }
  }

  void read_exactly(int token) {
    const std::int64_t row = std::int64_t{token} * a_.heads;
    const auto list = static_cast<std::size_t>(token * a_.shape.kv_heads);
    int page_count = 0;
    for (int k = 0; k < a_.shape.kv_heads; ++k) page_count = std::max(page_count, page_counts_[list + static_cast<std::size_t>(k)]);
    AttendArgs attend_args{};
    attend_args.q = static_cast<const char*>(a_.q) + row * a_.shape.head_dim * size_bytes(a_.q_dtype);
    attend_args.out = args_.out + row * a_.shape.head_dim;
    attend_args.lse = args_.chosen_lse + row;
    attend_args.pages = pages_.data() + list * static_cast<std::size_t>(args_.budget);
    attend_args.pages_stride = args_.budget;
    attend_args.q_dtype = a_.q_dtype;
    attend_args.out_dtype = DType::kFp32;
    attend_args.page_dtype = a_.page_dtype;
    attend_args.encoding = a_.shape.encoding();
    attend_args.tokens = 1;
    attend_args.heads = a_.heads;
    attend_args.kv_heads = a_.shape.kv_heads;
    attend_args.head_dim = a_.shape.head_dim;
    attend_args.page_count = page_count;
    attend_args.position = kEverything;
    attend_args.scale = a_.scale;
    attend_args.threads = a_.threads;
    attend_args.page_last = page_count;
    attend(attend_args);
  }

  int mean_runs() const { return (a_.segment_count + kMeanRun - 1) / kMeanRun; }

  // means_[run][KV head][row][D]: weights times mean values, rotated.
  void sum_means() {
    const int head_dim = a_.shape.head_dim;
    const std::int64_t unit_floats = std::int64_t{s_.rows} * head_dim;
    const int units = mean_runs() * a_.shape.kv_heads;
    means_.assign(static_cast<std::size_t>(units * unit_floats), 0.0f);
    parallel(units, a_.threads, Share::kGuided, [&](int begin, int end) {
      thread_local std::vector<float> room;
      float* const weights = grown(room, std::int64_t{s_.rows} * kSegmentClusters);
      for (int unit = begin; unit < end; ++unit) {
        const int head = unit % a_.shape.kv_heads;
        const int first = unit / a_.shape.kv_heads * kMeanRun;
        for (int segment = first; segment < std::min(first + kMeanRun, a_.segment_count); ++segment) {
          for (int r = 0; r < s_.rows; ++r) {
            const std::int64_t row = std::int64_t{r / s_.group} * a_.heads + head * s_.group + r % s_.group;
            std::copy_n(weights_.data() + row * s_.clusters + segment * kSegmentClusters, kSegmentClusters,
                        weights + r * kSegmentClusters);
          }
          const CodeWeights coded{weights, s_.rows, weight_parts(Encoding::kInt8, a_.page_dtype), head_dim};
          kernels().codes.sum_page[static_cast<int>(Encoding::kInt8)](coded, summary_page(a_, a_.segments[segment], head),
                                                                      means_.data() + unit * unit_floats);
        }
      }
    });
  }

  // Adds what was estimated to what was read.
  void merge(int token, int head) {
    const int head_dim = a_.shape.head_dim;
    const std::int64_t row = std::int64_t{token} * a_.heads + head;
    const Weighed others = weighed_[static_cast<std::size_t>(row)];
    const float chosen_lse = args_.chosen_lse[row];
    args_.out_lse[row] = chosen_lse;
    if (others.sum == 0.0f) return;
    float mean[kHeadDimMax] = {};
    const int kv_head = head / s_.group, r = token * s_.group + head % s_.group;
    for (int run = 0; run < mean_runs(); ++run) {
      const float* part = means_.data() + ((run * a_.shape.kv_heads + kv_head) * std::int64_t{s_.rows} + r) * head_dim;
      for (int d = 0; d < head_dim; ++d) mean[d] += part[d];
    }
    rotate_rows(mean, 1, head_dim);
    const float others_lse = others.maximum * kLn2 + std::log(others.sum);
    const float top = others_lse > chosen_lse || others_lse != others_lse ? others_lse : chosen_lse;
    const float of_chosen = chosen_lse == kNothing ? 0.0f : std::exp(chosen_lse - top);
    const float of_others = std::exp(others_lse - top);
    const float total = of_chosen + of_others;
    float* const out = args_.out + row * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] = (of_chosen * out[d] + of_others * (mean[d] / others.sum)) / total;
    args_.out_lse[row] = top + std::log(total);
  }

  ChosenArgs args_;
  RetrieveArgs a_;
  Shape s_;
  std::vector<Page> pages_;
  std::vector<int> page_counts_;
  std::vector<ChosenReads> reads_;
  std::vector<float> weights_;
  std::vector<Weighed> weighed_;
  std::vector<float> means_;
};

}  // namespace

void select(const SelectArgs& args) {
  const RetrieveArgs& a = args.of;
  const Shape s(a);
  std::int64_t used = 0;
  for (int i = 0; i < a.segment_count; ++i) used += used_clusters(a.segments[i]);
  // Keys of 4 bits are the coarser side by far: seven bits of a query do, but where fp32 is asked for.
  Queries queries(a, a.page_dtype == DType::kFp32 ? 2 : 1);
  queries.to_base2(a.scale);
  if (args.shortlist < used) {
    rank_all(a, s, queries);
    thread_local std::vector<std::int32_t> room;
    std::int32_t* const lists = grown(room, std::int64_t{a.tokens} * a.shape.kv_heads * args.shortlist);
    choose(args, s, args.shortlist, lists);
    scan_listed(a, s, queries, lists, args.shortlist);
  } else {
    scan_all(a, s, queries);
  }
  choose(args, s, args.budget, args.chosen);
}

ChosenReads attend_chosen(const ChosenArgs& args) {
  ChosenReads all{};
  for (int first = 0; first < args.of.tokens; first += kTokensAtOnce) {
    const ChosenReads reads = Chosen(args, first, std::min(kTokensAtOnce, args.of.tokens - first)).run();
    all = {all.clusters + reads.clusters, all.pages + reads.pages};
  }
  return all;
}

}  // namespace h3
