#include "h3/seal.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/index.hpp"
#include "h3/pool.hpp"

namespace h3 {
namespace {

constexpr int kSegmentTokens = kSegmentBlocks * kPageTokens;
constexpr int kGroup = 8;  // tokens of values, or dimensions of keys, that share a 32-bit lane of nibbles

// The pages of one slab and KV head.
class Head {
 public:
  Head(const SealArgs& args, int slab, int head)
      : shape_(args.shape), head_(head), slab_(reinterpret_cast<char*>(args.slabs[slab])) {}

  char* keys(int block) const { return slab_ + shape_.page_offset(block, head_); }
  char* values(int block) const { return keys(block) + shape_.keys_bytes(); }
  char* nibbles(int block) const { return slab_ + shape_.plane_offset(block, head_); }
  char* scales(int block) const { return nibbles(block) + shape_.nibbles_bytes(); }
  char* places(int block) const { return scales(block) + shape_.scales_bytes(); }
  char* residues(int block) const { return slab_ + shape_.residue_offset(block, head_); }
  char* summary() const { return slab_ + shape_.summary_offset(head_); }

  Page page(int block) const {
    const auto address = [](char* p) { return reinterpret_cast<std::uint64_t>(p); };
    return {address(keys(block)),   address(values(block)), 0, address(nibbles(block)),
            address(scales(block)), 0,                      kPageTokens};
  }

 private:
  const SlabShape& shape_;
  int head_;
  char* slab_;
};

// Everything that one unit of work needs, kept from unit to unit.
class Sealer {
 public:
  void seal(const SealArgs& args, int slab, int head) {
    const Head source(args, slab, head);
    head_dim_ = args.shape.head_dim;
    blocks_ = args.blocks;
    const auto tokens = static_cast<std::size_t>(blocks_) * kPageTokens;
    keys_.resize(tokens * static_cast<std::size_t>(head_dim_));
    values_.resize(keys_.size());
    order_.resize(tokens);
    const auto encoding = static_cast<int>(args.shape.encoding());
    for (int b = 0; b < blocks_; ++b)
      kernels().codes.decode_rows[encoding](source.page(b), head_dim_, row(keys_, b * kPageTokens), row(values_, b * kPageTokens));
    index_kernels().cluster({keys_.data(), blocks_ * kPageClusters, head_dim_, order_.data()});
    permute_words(source, &Head::nibbles);
    if (args.shape.split_keys) {
      permute_words(source, &Head::keys);
      permute_residues(source);
    }
    permute_values(source);
    permute_scales(source);
    for (int b = 0; b < blocks_; ++b)
      for (int i = 0; i < kPageTokens; ++i) {
        const auto place = static_cast<std::uint16_t>(order_[at(b, i)]);
        std::memcpy(source.places(b) + 2 * i, &place, 2);
      }
    summarise(source);
  }

 private:
  static std::size_t at(int block, int i) { return static_cast<std::size_t>(block * kPageTokens + i); }
  float* row(std::vector<float>& rows, int token) const {
    return rows.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(head_dim_);
  }

  // Keys as nibbles, [block][cluster][D / 8][16 tokens] 32-bit lanes: a token's lanes move together.
  void permute_words(const Head& head, char* (Head::*part)(int) const) {
    const int lanes = head_dim_ / kGroup;
    const std::size_t page_words = static_cast<std::size_t>(lanes) * kPageTokens;
    words_.resize(static_cast<std::size_t>(blocks_) * page_words);
    for (int b = 0; b < blocks_; ++b) std::memcpy(words_.data() + b * page_words, (head.*part)(b), page_words * 4);
    const auto lane = [&](int token, int i) {
      return static_cast<std::size_t>((token / kClusterTokens * lanes + i) * kClusterTokens + token % kClusterTokens);
    };
    for (int b = 0; b < blocks_; ++b) {
      char* target = (head.*part)(b);
      for (int t = 0; t < kPageTokens; ++t)
        for (int i = 0; i < lanes; ++i) std::memcpy(target + 4 * lane(t, i), &words_[lane(order_[at(b, t)], i)], 4);
    }
  }

  // Values as nibbles, [block][64 / 8][D] 32-bit lanes of eight tokens: spread to a byte each, then gathered anew.
  void permute_values(const Head& head) {
    const auto head_dim = static_cast<std::size_t>(head_dim_);
    bytes_.resize(static_cast<std::size_t>(blocks_) * kPageTokens * head_dim);
    for (int b = 0; b < blocks_; ++b)
      for (int g = 0; g < kPageTokens / kGroup; ++g) {
        const auto* lanes = reinterpret_cast<const std::uint8_t*>(head.values(b)) + static_cast<std::size_t>(g) * head_dim * 4;
        std::uint8_t* rows = &bytes_[at(b, g * kGroup) * head_dim];
        for (int j = 0; j < 4; ++j)
          for (std::size_t d = 0; d < head_dim; ++d) {
            rows[static_cast<std::size_t>(j) * head_dim + d] = lanes[4 * d + j] & 15;
            rows[static_cast<std::size_t>(4 + j) * head_dim + d] = static_cast<std::uint8_t>(lanes[4 * d + j] >> 4);
          }
      }
    for (int b = 0; b < blocks_; ++b)
      for (int g = 0; g < kPageTokens / kGroup; ++g) {
        auto* lanes = reinterpret_cast<std::uint8_t*>(head.values(b)) + static_cast<std::size_t>(g) * head_dim * 4;
        for (int j = 0; j < 4; ++j) {
          const std::uint8_t* low = &bytes_[static_cast<std::size_t>(order_[at(b, g * kGroup + j)]) * head_dim];
          const std::uint8_t* high = &bytes_[static_cast<std::size_t>(order_[at(b, g * kGroup + 4 + j)]) * head_dim];
          for (std::size_t d = 0; d < head_dim; ++d) lanes[4 * d + j] = static_cast<std::uint8_t>(low[d] | high[d] << 4);
        }
      }
  }

  // Residues of values, [block][64 tokens][D] nibbles: rows move whole.
  void permute_residues(const Head& head) {
    const auto row_bytes = static_cast<std::size_t>(head_dim_ / 2);
    bytes_.resize(static_cast<std::size_t>(blocks_) * kPageTokens * row_bytes);
    for (int b = 0; b < blocks_; ++b) std::memcpy(&bytes_[at(b, 0) * row_bytes], head.residues(b), kPageTokens * row_bytes);
    for (int b = 0; b < blocks_; ++b)
      for (int i = 0; i < kPageTokens; ++i)
        std::memcpy(head.residues(b) + static_cast<std::size_t>(i) * row_bytes,
                    &bytes_[static_cast<std::size_t>(order_[at(b, i)]) * row_bytes], row_bytes);
  }

  void permute_scales(const Head& head) {
    std::uint16_t before[kSegmentTokens];
    for (int array = 0; array < 4; ++array) {
      const std::size_t offset = static_cast<std::size_t>(array) * kPageTokens * 2;
      for (int b = 0; b < blocks_; ++b) std::memcpy(before + b * kPageTokens, head.scales(b) + offset, kPageTokens * 2);
      for (int b = 0; b < blocks_; ++b)
        for (int i = 0; i < kPageTokens; ++i) std::memcpy(head.scales(b) + offset + 2 * i, &before[order_[at(b, i)]], 2);
    }
  }

  void summarise(const Head& head) {
    const int clusters = blocks_ * kPageClusters;
    mean_keys_.assign(static_cast<std::size_t>(clusters) * static_cast<std::size_t>(head_dim_), 0.0f);
    mean_values_.assign(mean_keys_.size(), 0.0f);
    for (int c = 0; c < clusters; ++c) {
      mean_of(keys_, c, row(mean_keys_, c));
      mean_of(values_, c, row(mean_values_, c));
    }
    const std::size_t means = static_cast<std::size_t>(kPageTokens) * static_cast<std::size_t>(head_dim_);
    char* const summary = head.summary();
    std::memset(summary, 0, 2 * means + 4 * 2 * kPageTokens);  // clusters that are not there weigh nothing
    const auto address = reinterpret_cast<std::uint64_t>(summary);
    encode_rows(Encoding::kInt8, mean_keys_.data(), mean_values_.data(), clusters, head_dim_,
                {address, address + means, 0, 0, address + 2 * means, 0, kPageTokens}, 0);
  }

  void mean_of(std::vector<float>& rows, int cluster, float* mean) {
    for (int t = 0; t < kClusterTokens; ++t) {
      const float* x = row(rows, order_[static_cast<std::size_t>(cluster * kClusterTokens + t)]);
      for (int d = 0; d < head_dim_; ++d) mean[d] += x[d] * (1.0f / kClusterTokens);
    }
  }

  std::vector<float> keys_, values_, mean_keys_, mean_values_;
  std::vector<std::int32_t> order_;
  std::vector<std::uint32_t> words_;
  std::vector<std::uint8_t> bytes_;
  int head_dim_ = 0;
  int blocks_ = 0;
};

}  // namespace

void seal(const SealArgs& args) {
  parallel(args.slab_count * args.shape.kv_heads, args.threads, Share::kOne, [&](int begin, int end) {
    thread_local Sealer sealer;
    for (int unit = begin; unit < end; ++unit) sealer.seal(args, unit / args.shape.kv_heads, unit % args.shape.kv_heads);
  });
}

}  // namespace h3
