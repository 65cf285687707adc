// Attention to chosen clusters, to all others by their mean values, and to what was read before.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "h3/dispatch.hpp"
#include "h3/pool.hpp"
#include "retrieve_queries.hpp"
#include "retrieve_shape.hpp"

namespace h3 {
namespace {

constexpr int kRunClusters = 16;      // chosen clusters of one unit: four pages of them
constexpr int kTokensAtOnce = 8;      // query tokens whose partial sums are kept at the same time
constexpr int kEverything = 1 << 30;  // a position that sees all tokens

// Mean values are not read of segments whose clusters all weigh less than so much of everything, in base 2. The 2^15
// clusters of 512K tokens would be 2^-9 of it together, which rounding to bf16 loses as well, if all were just below.
constexpr float kNegligible = -24.0f;
constexpr float kNegligibleFp32 = -40.0f;

// A running softmax in base 2 of a group's heads: sums are relative to 2^maximum.
struct Sums {
  float* out;      // [group][D], rotated
  float* maximum;  // [group]
  float* sum;      // [group]
};

// Where the parts of a cluster lie.
struct Source {
  std::uint64_t keys, values, nibbles, scales;
};

struct alignas(64) Line {
  char bytes[64];
};

// Attention of some query tokens: units of chosen clusters and units of mean values, then all of them together. Memory is
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
    const int chosen_units = lists * chosen_runs_, units = chosen_units + lists * mean_runs_;
    parallel(units, a_.threads, Share::kOne, [&](int begin, int end) {
      for (int unit = begin; unit < end; ++unit) {
        if (unit < chosen_units) read_clusters(queries, unit / chosen_runs_, unit % chosen_runs_);
        else sum_means((unit - chosen_units) % lists, (unit - chosen_units) / lists);
      }
    });
    parallel(lists * group_, a_.threads, Share::kOne, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) merge(row / group_, row % group_);
    });
    ChosenReads all{};
    for (int list = 0; list < lists; ++list) {
      all.clusters += reads_[at(list)].clusters;
      all.pages += reads_[at(list)].pages;
    }
    return all;
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  void set(const ChosenArgs& args, int first, int tokens) {
    args_ = args;
    a_ = args.of;
    const RetrieveShape shape(a_);
    clusters_ = shape.clusters;
    group_ = shape.group;
    const std::int64_t row = std::int64_t{first} * a_.heads;
    const std::int64_t skipped = std::int64_t{first} * a_.shape.kv_heads * args.budget;
    a_.tokens = tokens;
    a_.q = static_cast<const char*>(a_.q) + row * a_.shape.head_dim * size_bytes(a_.q_dtype);
    a_.lse += row * clusters_;
    a_.totals += row;
    args_.chosen += skipped;
    if (args_.addresses != nullptr) args_.addresses += skipped;
    if (args_.exact_out != nullptr) args_.exact_out += row * a_.shape.head_dim, args_.exact_lse += row;
    args_.out += row * a_.shape.head_dim;
    args_.out_lse += row;
    args_.read_lse += row;
    chosen_runs_ = (args.budget + kRunClusters - 1) / kRunClusters;
    mean_runs_ = args.estimate ? (a_.segment_count + kMeanSegmentsMax - 1) / kMeanSegmentsMax : 0;
    const std::int64_t lists = std::int64_t{tokens} * a_.shape.kv_heads;
    grown(sources_, lists * args.budget);
    grown(reads_, lists);
    grown(is_read_, lists * a_.segment_count);
    grown(sums_, lists * (chosen_runs_ + mean_runs_) * sums_floats());
  }

  std::int64_t sums_floats() const { return std::int64_t{group_} * (a_.shape.head_dim + 2); }

  // Of a run: first those of pages, then those of mean values.
  Sums sums(int list, int run) {
    float* const out = sums_.data() + (std::int64_t{list} * (chosen_runs_ + mean_runs_) + run) * sums_floats();
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
    const auto offset = static_cast<std::uint64_t>(a_.shape.page_offset(block, head));
    return a_.segments[cluster / kSegmentClusters].pages + offset;
  }

  Source source_of(std::int64_t choice, std::int32_t cluster, int head) const {
    const SlabShape& shape = a_.shape;
    const int block = cluster % kSegmentClusters / kPageClusters;
    const int place = cluster % kPageClusters;
    const std::uint64_t keys = page_address(choice, cluster, head);
    const std::uint64_t plane = a_.segments[cluster / kSegmentClusters].planes +
                                static_cast<std::uint64_t>((head * kSegmentBlocks + block) * shape.plane_bytes());
    const auto moved = [&](std::int64_t size) { return static_cast<std::uint64_t>(size * place / kPageClusters); };
    const auto nibbles = static_cast<std::uint64_t>(shape.nibbles_bytes());
    const std::uint64_t values = keys + static_cast<std::uint64_t>(shape.keys_bytes());
    return {keys + moved(shape.keys_bytes()), values + moved(shape.nibbles_bytes()),
            plane + moved(shape.nibbles_bytes()), plane + nibbles + moved(2 * kPageTokens)};
  }

  std::size_t cluster_bytes() const { return at(a_.shape.nibbles_bytes() / kPageClusters); }

  // Into the first cache: four clusters are few.
  void fetch_cluster(const Source& source) const {
    const auto fetch_near = [](std::uint64_t address, std::size_t size) {
      for (std::size_t at = 0; at < size; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(address) + at);
    };
    fetch_near(source.nibbles, cluster_bytes());
    if (a_.shape.split_keys) fetch_near(source.keys, cluster_bytes());
    fetch_near(source.values, cluster_bytes());
    for (std::uint64_t array = 0; array < 4; ++array) fetch_near(source.scales + array * kPageTokens * 2, 1);
  }

  // Clusters of one (token, KV head), and which they are.
  void prepare(int list) {
    const int head = list % a_.shape.kv_heads;
    Source* const sources = sources_.data() + std::int64_t{list} * args_.budget;
    std::uint64_t* const is_read = is_read_.data() + std::int64_t{list} * a_.segment_count;
    std::fill_n(is_read, a_.segment_count, 0);
    std::int32_t last = -kSegmentClusters;
    ChosenReads reads{};
    for (int i = 0; i < args_.budget; ++i) {
      const std::int64_t choice = std::int64_t{list} * args_.budget + i;
      const std::int32_t cluster = args_.chosen[choice];
      if (cluster < 0) break;
      if (args_.addresses != nullptr && args_.addresses[choice] == kMissing) continue;
      sources[reads.clusters++] = source_of(choice, cluster, head);
      reads.pages += cluster / kPageClusters != last / kPageClusters;
      last = cluster;
      is_read[cluster / kSegmentClusters] |= std::uint64_t{1} << cluster % kSegmentClusters;
    }
    reads_[at(list)] = reads;
  }

  // Clusters side by side as one page: what a page costs once is paid once for four of them.
  Page gather(const Source* sources, int count, char* room) const {
    const std::size_t each = cluster_bytes(), all = each * kPageClusters;
    char* const low = room;
    char* const values = low + all;
    char* const nibbles = values + all;
    char* const scales = nibbles + all;
    const auto from = [](std::uint64_t address) { return reinterpret_cast<const char*>(address); };
    for (int i = 0; i < count; ++i) {
      if (a_.shape.split_keys) std::memcpy(low + i * each, from(sources[i].keys), each);
      std::memcpy(values + i * each, from(sources[i].values), each);
      std::memcpy(nibbles + i * each, from(sources[i].nibbles), each);
      for (int array = 0; array < 4; ++array) {
        char* const target = scales + 2 * (array * kPageTokens + i * kClusterTokens);
        std::memcpy(target, from(sources[i].scales) + 2 * array * kPageTokens, 2 * kClusterTokens);
      }
    }
    const auto address = [](const char* p) { return reinterpret_cast<std::uint64_t>(p); };
    return {address(low), address(values), 0, address(nibbles), address(scales), 0, count * kClusterTokens};
  }

  void read_clusters(const Queries& queries, int list, int run) {
    thread_local std::vector<Line> memory;
    const std::int64_t page_bytes = 3 * a_.shape.nibbles_bytes() + a_.shape.scales_bytes();
    char* const room = grown(memory, page_bytes / static_cast<std::int64_t>(sizeof(Line)))->bytes;
    const Sums s = cleared(list, run);
    const int head = list % a_.shape.kv_heads, token = list / a_.shape.kv_heads;
    const Source* const sources = sources_.data() + std::int64_t{list} * args_.budget;
    const int first = run * kRunClusters;
    const int last = std::min(first + kRunClusters, static_cast<int>(reads_[at(list)].clusters));
    int positions[kCodeRowsMax];
    std::fill_n(positions, kCodeRowsMax, kEverything);
    for (int i = first; i < std::min(first + kPageClusters, last); ++i) fetch_cluster(sources[i]);
    for (int i = first; i < last; i += kPageClusters) {
      const int count = std::min(kPageClusters, last - i);
      const Page page = gather(sources + i, count, room);
      for (int next = i + kPageClusters; next < std::min(i + 2 * kPageClusters, last); ++next)
        fetch_cluster(sources[next]);
      for (int g = 0; g < group_; g += kCodeRowsMax) {
        const CodeRows rows = queries.rows(head, token * group_ + g, std::min(kCodeRowsMax, group_ - g));
        const CodeBlock block{rows, positions, s.out + g * a_.shape.head_dim, s.maximum + g, s.sum + g, &page, 1,
                              weight_parts(a_.shape.encoding(), a_.page_dtype), a_.scale * kLog2e};
        kernels().attend_codes[static_cast<int>(a_.shape.encoding())](block);
      }
    }
  }

  // Mean values of some segments. Their maximum is what everything weighs: nothing weighs more.
  void sum_means(int list, int run) {
    const Sums s = cleared(list, chosen_runs_ + run);
    const int head = list % a_.shape.kv_heads, token = list / a_.shape.kv_heads;
    const std::int64_t row = std::int64_t{token} * a_.heads + head * group_;
    std::copy_n(a_.totals + row, group_, s.maximum);
    MeanBlock block{};
    block.segments = a_.segments;
    block.first = run * kMeanSegmentsMax;
    block.last = std::min(block.first + kMeanSegmentsMax, a_.segment_count);
    block.head_offset = head * a_.shape.summary_bytes();
    block.lse = a_.lse + row * clusters_;
    block.lse_stride = clusters_;
    block.is_read = is_read_.data() + std::int64_t{list} * a_.segment_count;
    block.origin = s.maximum;
    block.negligible = a_.page_dtype == DType::kFp32 ? kNegligibleFp32 : kNegligible;
    block.rows = group_;
    block.head_dim = a_.shape.head_dim;
    block.out = s.out;
    block.sum = s.sum;
    index_kernels().sum_means(block);
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
    const float read = joined(exact, lse_over(list, g, 0, chosen_runs_));
    const float lse = joined(read, lse_over(list, g, chosen_runs_, chosen_runs_ + mean_runs_));
    float out[kHeadDimMax] = {};
    for (int run = 0; run < chosen_runs_ + mean_runs_; ++run) {
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
  int chosen_runs_ = 0;
  int mean_runs_ = 0;
  std::vector<Source> sources_;
  std::vector<ChosenReads> reads_;
  std::vector<std::uint64_t> is_read_;  // [list][segment], a bit for each cluster
  std::vector<float> sums_;
};

}  // namespace

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
