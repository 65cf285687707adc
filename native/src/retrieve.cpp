#include "h3/retrieve.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

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
constexpr int kMeanRun = 8;         // segments whose mean values one unit sums up
constexpr int kPageRun = 16;        // pages with chosen clusters of one unit
constexpr int kPagesAhead = 2;      // pages that are fetched before they are read
constexpr int kTokensAtOnce = 8;    // query tokens whose partial sums are kept at the same time
constexpr int kEverything = 1 << 30;  // a position that sees all tokens

template <class T>
T* grown(std::vector<T>& room, std::int64_t count) {
  if (room.size() < static_cast<std::size_t>(count)) room.resize(static_cast<std::size_t>(count));
  return room.data();
}

// Into the second cache.
void fetch(std::uint64_t address, std::int64_t size) {
  for (std::int64_t at = 0; at < size; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(address) + at, 0, 2);
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
      if (segment + 1 < a.segment_count) {
        const Page next = summary_page(a, a.segments[segment + 1], head);
        fetch(next.keys, a.shape.means_bytes() / 2);
        fetch(next.scales, a.shape.scales_bytes() / 2);
      }
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
  // Where numbers of clusters go: ascending, then -1.
  struct List {
    std::int32_t* found;
    int count;
  };

  // The best ones, and the best ones of the others.
  void find(const RetrieveArgs& a, const Shape& s, const float* lse, const float* exact_lse, List chosen, List runners) {
    if (chosen.count == 0) return;
    weigh(a, s, lse, exact_lse);
    const Limit limit = fill(a, s, chosen, kNobody);
    if (runners.count > 0) {
      best_ = chosen.count;
      fill(a, s, runners, limit);
    }
    best_ = 0;
  }

 private:
  // The worst one that is chosen.
  struct Limit {
    std::uint32_t key;
    std::int64_t cluster;

    bool includes(std::uint32_t other_key, std::int64_t other) const {
      return other_key > key || (other_key == key && other <= cluster);
    }
  };
  static constexpr Limit kNobody{~0u, -1};

  // The best ones behind those that `before` includes, of which there are `best_`.
  Limit fill(const RetrieveArgs& a, const Shape& s, List list, Limit before) {
    std::int64_t used = 0;
    for (int i = 0; i < a.segment_count; ++i) used += used_clusters(a.segments[i]);
    const auto wanted = static_cast<int>(std::min<std::int64_t>(best_ + list.count, used));
    const Limit limit = wanted == 0 ? kNobody : limit_of(s.clusters, wanted);
    int taken = 0;
    for (std::int64_t c = 0; c < s.clusters && taken < wanted - best_; ++c) {
      const std::uint32_t key = keys_[static_cast<std::size_t>(c)];
      if (limit.includes(key, c) && !before.includes(key, c)) list.found[taken++] = static_cast<std::int32_t>(c);
    }
    std::fill(list.found + taken, list.found + list.count, -1);
    return limit;
  }

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
  int best_ = 0;
};

void choose(const SelectArgs& args, const Shape& s, int count, std::int32_t* found, int runner_count) {
  const RetrieveArgs& a = args.of;
  parallel(a.tokens * a.shape.kv_heads, a.threads, Share::kOne, [&](int begin, int end) {
    thread_local Best best;
    for (int unit = begin; unit < end; ++unit) {
      const int token = unit / a.shape.kv_heads, head = unit % a.shape.kv_heads;
      best.find(a, s, lse_of(a, s, token, head), args.exact_lse + token * a.heads + head * s.group,
                {found + std::int64_t{unit} * count, count},
                {args.runners + std::int64_t{unit} * runner_count, runner_count});
    }
  });
}

// A running softmax in base 2 of a group's heads: sums are relative to 2^maximum.
struct Sums {
  float* out;      // [group][D], rotated
  float* maximum;  // [group]
  float* sum;      // [group]
};

// Attention of some query tokens: units of chosen pages and units of mean values, then all of them together. Memory is
// kept from call to call.
class Chosen {
 public:
  ChosenReads run(const ChosenArgs& args, int first, int tokens) {
    set(args, first, tokens);
    const int lists = a_.tokens * a_.shape.kv_heads;
    const Queries queries(a_, query_parts(a_.shape.encoding(), a_.page_dtype));
    parallel(lists, a_.threads, Share::kOne, [&](int begin, int end) {
      for (int list = begin; list < end; ++list) prepare(list);
    });
    const int page_units = lists * page_runs_, units = page_units + lists * mean_runs_;
    parallel(units, a_.threads, Share::kOne, [&](int begin, int end) {
      for (int unit = begin; unit < end; ++unit) {
        if (unit < page_units) read_pages(queries, unit / page_runs_, unit % page_runs_);
        else sum_means((unit - page_units) % lists, (unit - page_units) / lists);
      }
    });
    for (int list = 0; list < lists; ++list)
      for (int g = 0; g < group_; ++g) merge(list, g);
    ChosenReads all{};
    for (int list = 0; list < lists; ++list) all = {all.clusters + reads_[at(list)].clusters, all.pages + reads_[at(list)].pages};
    return all;
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void set(const ChosenArgs& args, int first, int tokens) {
    args_ = args;
    a_ = args.of;
    clusters_ = Shape(a_).clusters;
    group_ = Shape(a_).group;
    const std::int64_t row = std::int64_t{first} * a_.heads, skipped = std::int64_t{first} * a_.shape.kv_heads * args.budget;
    a_.tokens = tokens;
    a_.q = static_cast<const char*>(a_.q) + row * a_.shape.head_dim * size_bytes(a_.q_dtype);
    a_.lse += row * clusters_;
    args_.chosen += skipped;
    if (args_.addresses != nullptr) args_.addresses += skipped;
    if (args_.exact_out != nullptr) args_.exact_out += row * a_.shape.head_dim, args_.exact_lse += row;
    args_.out += row * a_.shape.head_dim;
    args_.out_lse += row;
    args_.read_lse += row;
    page_runs_ = (args.budget + kPageRun - 1) / kPageRun;
    mean_runs_ = args.estimate ? (a_.segment_count + kMeanRun - 1) / kMeanRun : 0;
    const std::int64_t lists = std::int64_t{tokens} * a_.shape.kv_heads;
    grown(pages_, lists * args.budget);
    grown(page_counts_, lists);
    grown(reads_, lists);
    grown(is_read_, lists * a_.segment_count);
    grown(sums_, lists * (page_runs_ + mean_runs_) * sums_floats());
  }

  std::int64_t sums_floats() const { return std::int64_t{group_} * (a_.shape.head_dim + 2); }

  // Of a run: first those of pages, then those of mean values.
  Sums sums(int list, int run) {
    float* const out = sums_.data() + (std::int64_t{list} * (page_runs_ + mean_runs_) + run) * sums_floats();
    return {out, out + group_ * a_.shape.head_dim, out + group_ * (a_.shape.head_dim + 1)};
  }

  Sums cleared(int list, int run) {
    const Sums s = sums(list, run);
    std::fill_n(s.out, group_ * a_.shape.head_dim, 0.0f);
    std::fill_n(s.maximum, group_, kNothing);
    std::fill_n(s.sum, group_, 0.0f);
    return s;
  }

  std::uint64_t page_address(std::int64_t choice, std::int32_t cluster, int head) const {
    const std::uint64_t address = args_.addresses == nullptr ? 0 : args_.addresses[choice];
    if (address != 0) return address;
    const int block = cluster % kSegmentClusters / kPageClusters;
    return a_.segments[cluster / kSegmentClusters].pages + static_cast<std::uint64_t>(a_.shape.page_offset(block, head));
  }

  // A page from one of its clusters on.
  Page page_of(std::int64_t choice, std::int32_t cluster, int head) const {
    const SlabShape& shape = a_.shape;
    const int block = cluster % kSegmentClusters / kPageClusters;
    const int place = cluster % kPageClusters;
    const std::uint64_t keys = page_address(choice, cluster, head);
    const std::uint64_t plane = a_.segments[cluster / kSegmentClusters].planes +
                                static_cast<std::uint64_t>((head * kSegmentBlocks + block) * shape.plane_bytes());
    const auto moved = [&](std::int64_t size) { return static_cast<std::uint64_t>(size * place / kPageClusters); };
    const auto nibbles = static_cast<std::uint64_t>(shape.nibbles_bytes());
    return {keys + moved(shape.keys_bytes()), keys + static_cast<std::uint64_t>(shape.keys_bytes()) + moved(shape.nibbles_bytes()),
            0, plane + moved(shape.nibbles_bytes()), plane + nibbles + moved(2 * kPageTokens), 0, kClusterTokens};
  }

  void fetch_page(const Page& page) const {
    const std::int64_t cluster = a_.shape.nibbles_bytes() / kPageClusters, size = cluster * (page.count / kClusterTokens);
    fetch(page.nibbles, size);
    if (a_.shape.split_keys) fetch(page.keys, size);
    fetch(page.values, size);
    for (int array = 0; array < 4; ++array) fetch(page.scales + static_cast<std::uint64_t>(array) * kPageTokens * 2, 2 * page.count);
  }

  // Pages of one (token, KV head), and which clusters they hold.
  void prepare(int list) {
    const int head = list % a_.shape.kv_heads;
    Page* const pages = pages_.data() + std::int64_t{list} * args_.budget;
    std::uint64_t* const is_read = is_read_.data() + std::int64_t{list} * a_.segment_count;
    std::fill_n(is_read, a_.segment_count, 0);
    int count = 0;
    std::int32_t last = -kSegmentClusters;
    ChosenReads reads{};
    for (int i = 0; i < args_.budget; ++i) {
      const std::int64_t choice = std::int64_t{list} * args_.budget + i;
      const std::int32_t cluster = args_.chosen[choice];
      if (cluster < 0) break;
      if (args_.addresses != nullptr && args_.addresses[choice] == kMissing) continue;
      const Page page = page_of(choice, cluster, head);
      // Clusters of one page that follow each other are one run.
      const bool follows = cluster == last + 1 && cluster % kPageClusters != 0 &&
                           page.values == pages[count - 1].values + static_cast<std::uint64_t>(pages[count - 1].count) *
                               static_cast<std::uint64_t>(a_.shape.head_dim) / 2;
      if (follows) pages[count - 1].count += kClusterTokens;
      else pages[count++] = page;
      reads.pages += cluster / kPageClusters != last / kPageClusters;
      ++reads.clusters;
      last = cluster;
      is_read[cluster / kSegmentClusters] |= std::uint64_t{1} << cluster % kSegmentClusters;
    }
    page_counts_[at(list)] = count;
    reads_[at(list)] = reads;
  }

  void read_pages(const Queries& queries, int list, int run) {
    const Sums s = cleared(list, run);
    const int head = list % a_.shape.kv_heads, token = list / a_.shape.kv_heads;
    const Page* const pages = pages_.data() + std::int64_t{list} * args_.budget;
    const int count = page_counts_[at(list)], first = run * kPageRun;
    int positions[kCodeRowsMax];
    std::fill_n(positions, kCodeRowsMax, kEverything);
    for (int i = first; i < std::min(first + kPagesAhead, count); ++i) fetch_page(pages[i]);
    for (int i = first; i < std::min(first + kPageRun, count); ++i) {
      if (i + kPagesAhead < count) fetch_page(pages[i + kPagesAhead]);
      for (int g = 0; g < group_; g += kCodeRowsMax) {
        const CodeRows rows = queries.rows(head, token * group_ + g, std::min(kCodeRowsMax, group_ - g));
        const CodeBlock block{rows, positions, s.out + g * a_.shape.head_dim, s.maximum + g, s.sum + g, pages + i, 1,
                              weight_parts(a_.shape.encoding(), a_.page_dtype), a_.scale * kLog2e};
        kernels().attend_codes[static_cast<int>(a_.shape.encoding())](block);
      }
    }
  }

  void sum_means(int list, int run) {
    const Sums s = cleared(list, page_runs_ + run);
    const int head = list % a_.shape.kv_heads, token = list / a_.shape.kv_heads;
    const std::int64_t values = a_.shape.means_bytes() / 2;
    const auto summary = [&](int segment) {
      return a_.segments[segment].summary + static_cast<std::uint64_t>(head * a_.shape.summary_bytes());
    };
    thread_local std::vector<float> room;
    float* const lse = grown(room, std::int64_t{group_} * kSegmentClusters);
    const int last = std::min((run + 1) * kMeanRun, a_.segment_count);
    for (int segment = run * kMeanRun; segment < last; ++segment) {
      if (segment + 1 < a_.segment_count) fetch(summary(segment + 1) + static_cast<std::uint64_t>(values), values + a_.shape.scales_bytes());
      const float* const all = a_.lse + (std::int64_t{token} * a_.heads + head * group_) * clusters_ + segment * kSegmentClusters;
      for (int g = 0; g < group_; ++g) {
        float* const row = lse + g * kSegmentClusters;
        std::copy_n(all + g * clusters_, kSegmentClusters, row);
        for (std::uint64_t left = is_read_[at(std::int64_t{list} * a_.segment_count + segment)]; left != 0; left &= left - 1)
          row[__builtin_ctzll(left)] = kNothing;
      }
      const char* const codes = reinterpret_cast<const char*>(summary(segment)) + values;
      index_kernels().sum_means({lse, codes, codes + values, used_clusters(a_.segments[segment]), group_, a_.shape.head_dim, s.out,
                                 s.maximum, s.sum});
    }
  }

  // Log-sum-exp in base 2 of a row over some runs; NaN if one is.
  float lse_over(int list, int g, int first, int last) {
    float top = kNothing, total = 0.0f;
    for (int run = first; run < last; ++run) {
      const float maximum = sums(list, run).maximum[g];
      if (maximum > top || maximum != maximum) top = maximum;  // once NaN, always NaN
    }
    if (top == kNothing) return kNothing;
    for (int run = first; run < last; ++run) {
      const Sums s = sums(list, run);
      total += std::exp2(s.maximum[g] - top) * s.sum[g];
    }
    return total == 0.0f ? kNothing : top + std::log2(total);
  }

  static float joined(float a, float b) {
    const float top = a > b || a != a ? a : b;
    return top == kNothing || top != top ? top : top + std::log2(std::exp2(a - top) + std::exp2(b - top));
  }

  // One row of everything: pages, mean values, and what was read before.
  void merge(int list, int g) {
    const int head_dim = a_.shape.head_dim;
    const std::int64_t row = std::int64_t{list / a_.shape.kv_heads} * a_.heads + list % a_.shape.kv_heads * group_ + g;
    const float exact = args_.exact_lse == nullptr ? kNothing : args_.exact_lse[row] * kLog2e;
    const float read = joined(exact, lse_over(list, g, 0, page_runs_));
    const float lse = joined(read, lse_over(list, g, page_runs_, page_runs_ + mean_runs_));
    float out[kHeadDimMax] = {};
    for (int run = 0; run < page_runs_ + mean_runs_; ++run) {
      const Sums s = sums(list, run);
      if (s.maximum[g] == kNothing) continue;
      const float weight = std::exp2(s.maximum[g] - lse);
      for (int d = 0; d < head_dim; ++d) out[d] += weight * s.out[g * head_dim + d];
    }
    rotate_rows(out, 1, head_dim);
    if (exact != kNothing) {
      const float weight = std::exp2(exact - lse);
      for (int d = 0; d < head_dim; ++d) out[d] += weight * args_.exact_out[row * head_dim + d];
    }
    std::copy_n(out, head_dim, args_.out + row * head_dim);
    args_.out_lse[row] = lse * kLn2;
    args_.read_lse[row] = read * kLn2;
  }

  ChosenArgs args_{};
  RetrieveArgs a_{};
  std::int64_t clusters_ = 0;
  int group_ = 0;
  int page_runs_ = 0;
  int mean_runs_ = 0;
  std::vector<Page> pages_;
  std::vector<int> page_counts_;
  std::vector<ChosenReads> reads_;
  std::vector<std::uint64_t> is_read_;  // [list][segment], a bit for each cluster
  std::vector<float> sums_;
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
    choose(args, s, args.shortlist, lists, 0);
    scan_listed(a, s, queries, lists, args.shortlist);
  } else {
    scan_all(a, s, queries);
  }
  choose(args, s, args.budget, args.chosen, args.runner_count);
}

ChosenReads attend_chosen(const ChosenArgs& args) {
  thread_local Chosen chosen;
  ChosenReads all{};
  for (int first = 0; first < args.of.tokens; first += kTokensAtOnce) {
    const ChosenReads reads = chosen.run(args, first, std::min(kTokensAtOnce, args.of.tokens - first));
    all = {all.clusters + reads.clusters, all.pages + reads.pages};
  }
  return all;
}

}  // namespace h3
