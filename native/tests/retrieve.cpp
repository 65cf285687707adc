// Sealing and retrieval on memory of exactly the size that they may touch.
#include "retrieve.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/retrieve.hpp"
#include "h3/seal.hpp"

namespace {

using h3::kPageTokens;

constexpr int kGroup = 3;

class Slab {
 public:
  Slab(const h3::SlabShape& shape, int blocks, std::mt19937& generator)
      : shape_(shape), blocks_(blocks), size_(static_cast<std::size_t>(
            shape.split_keys ? shape.residue_offset(0, shape.kv_heads) : shape.summary_offset(shape.kv_heads))) {
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, (size_ + 63) / 64 * 64)));
    std::memset(memory_.get(), 0xff, size_);
    std::normal_distribution<float> normal;
    std::vector<float> keys(static_cast<std::size_t>(kPageTokens * shape.head_dim)), values(keys.size());
    for (int head = 0; head < shape.kv_heads; ++head)
      for (int block = 0; block < blocks; ++block) {
        for (float& x : keys) x = normal(generator);
        for (float& x : values) x = normal(generator);
        h3::encode_rows(shape.encoding(), keys.data(), values.data(), kPageTokens, shape.head_dim, page(block, head), 0);
      }
  }

  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_.get()); }

  h3::Page page(int block, int head) const {
    const auto keys = address() + static_cast<std::uint64_t>(shape_.page_offset(block, head));
    const auto plane = address() + static_cast<std::uint64_t>(shape_.plane_offset(block, head));
    return {keys, keys + static_cast<std::uint64_t>(shape_.keys_bytes()), 0, plane,
            plane + static_cast<std::uint64_t>(shape_.nibbles_bytes()), 0, kPageTokens};
  }

  h3::Indexed indexed() const {
    return {address(), address() + static_cast<std::uint64_t>(shape_.planes_offset()),
            address() + static_cast<std::uint64_t>(shape_.summary_offset(0)), blocks_, 0};
  }

  int place(int head, int i) const {
    const char* places = memory_.get() + shape_.plane_offset(i / kPageTokens, head) + shape_.plane_bytes() - 2 * kPageTokens;
    std::uint16_t token;
    std::memcpy(&token, places + 2 * (i % kPageTokens), 2);
    return token;
  }

  // Keys, then values, of one head.
  std::vector<float> decode(int head) const {
    const auto rows = static_cast<std::size_t>(blocks_ * kPageTokens * shape_.head_dim);
    std::vector<float> out(2 * rows);
    for (int b = 0; b < blocks_; ++b) {
      float* keys = out.data() + static_cast<std::size_t>(b * kPageTokens * shape_.head_dim);
      h3::kernels().codes.decode_rows[static_cast<int>(shape_.encoding())](page(b, head), shape_.head_dim, keys, keys + rows);
    }
    return out;
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };

  h3::SlabShape shape_;
  int blocks_;
  std::size_t size_;
  std::unique_ptr<char, Free> memory_;
};

void check_seal(const Expect& expect, const Slab& slab, const h3::SlabShape& shape, int blocks) {
  std::vector<std::vector<float>> before;
  for (int head = 0; head < shape.kv_heads; ++head) before.push_back(slab.decode(head));
  const std::uint64_t address = slab.address();
  h3::seal({&address, 1, shape, blocks, 2});
  const auto width = static_cast<std::size_t>(shape.head_dim);
  for (int head = 0; head < shape.kv_heads; ++head) {
    const std::vector<float> after = slab.decode(head);
    const int tokens = blocks * kPageTokens;
    std::vector<int> seen(static_cast<std::size_t>(tokens));
    for (int i = 0; i < tokens; ++i) {
      const int token = slab.place(head, i);
      expect(token < tokens && seen[static_cast<std::size_t>(token)]++ == 0, "a sealed slab has every token once");
      for (int part = 0; part < 2; ++part) {
        const auto row = [&](int t) { return static_cast<std::size_t>(part * tokens + t) * width; };
        const float* x = after.data() + row(i);
        expect(std::equal(x, x + width, before[static_cast<std::size_t>(head)].data() + row(token)), "tokens keep their codes");
      }
    }
  }
}

// One row of exact attention over all segments, on rotated numbers.
void attend_row(const std::vector<Slab>& slabs, int head, const float* q, int head_dim, std::vector<double>& out) {
  const auto width = static_cast<std::size_t>(head_dim);
  std::vector<double> sums(width);
  double total = 0;
  for (const Slab& slab : slabs) {
    const std::vector<float> rows = slab.decode(head);
    const std::size_t tokens = rows.size() / width / 2;
    for (std::size_t t = 0; t < tokens; ++t) {
      double score = 0;
      for (std::size_t d = 0; d < width; ++d) score += double(q[d]) * rows[t * width + d];
      const double weight = std::exp(score / std::sqrt(double(head_dim)));
      total += weight;
      for (std::size_t d = 0; d < width; ++d) sums[d] += weight * rows[(tokens + t) * width + d];
    }
  }
  out.resize(width);
  for (std::size_t d = 0; d < width; ++d) out[d] = sums[d] / total;
}

void check_step(const Expect& expect, const std::vector<Slab>& slabs, const h3::SlabShape& shape, std::mt19937& generator) {
  const int tokens = 2, heads = shape.kv_heads * kGroup, clusters = h3::kSegmentClusters * static_cast<int>(slabs.size());
  const auto rows = static_cast<std::size_t>(tokens * heads);
  std::normal_distribution<float> normal;
  std::vector<float> q(rows * static_cast<std::size_t>(shape.head_dim)), exact(rows, 1.0f);
  for (float& x : q) x = normal(generator);
  std::vector<h3::Indexed> segments;
  int used = 0;
  for (const Slab& slab : slabs) segments.push_back(slab.indexed()), used += segments.back().blocks * h3::kPageClusters;
  std::vector<float> first;
  for (const int budget : {used, 5, 0})
    for (const int shortlist : {used, used / 3})
      for (const int threads : {1, 3}) {
        std::vector<float> lse(rows * static_cast<std::size_t>(clusters)), out(q.size()), out_lse(rows), chosen_lse(rows),
            totals(rows);
        std::vector<std::int32_t> chosen(static_cast<std::size_t>(tokens * shape.kv_heads * budget));
        const h3::RetrieveArgs args{q.data(), segments.data(), lse.data(), totals.data(), shape, h3::DType::kFp32, h3::DType::kFp32, tokens,
                                    heads, static_cast<int>(segments.size()), 1.0f / std::sqrt(float(shape.head_dim)), threads};
        h3::select({args, exact.data(), chosen.data(), budget, shortlist});
        h3::attend_chosen({args, chosen.data(), nullptr, nullptr, nullptr, out.data(), out_lse.data(), chosen_lse.data(), budget, true});
        for (const float x : out) expect(std::isfinite(x), "retrieval gives numbers");
        if (threads == 1) first = out;
        else expect(out == first, "retrieval does not depend on threads");
        if (budget < used) continue;
        std::vector<double> expected;
        for (int r = 0; r < tokens * heads; ++r) {
          float* row = q.data() + r * shape.head_dim;
          std::vector<float> rotated(row, row + shape.head_dim), result(out.data() + r * shape.head_dim, out.data() + (r + 1) * shape.head_dim);
          h3::rotate_rows(rotated.data(), 1, shape.head_dim);
          h3::rotate_rows(result.data(), 1, shape.head_dim);
          attend_row(slabs, r % heads / kGroup, rotated.data(), shape.head_dim, expected);
          for (int d = 0; d < shape.head_dim; ++d)
            expect(std::abs(result[static_cast<std::size_t>(d)] - expected[static_cast<std::size_t>(d)]) < 1e-4,
                   "a budget for everything is exact attention");
        }
      }
}

}  // namespace

void check_retrieve(const Expect& expect) {
  std::mt19937 generator(3);
  for (const bool split_keys : {true, false})
    for (const int head_dim : {64, 80}) {
      const h3::SlabShape shape{2, head_dim, split_keys, 8192};
      std::vector<Slab> slabs;
      for (const int blocks : {2, 16, 3}) {
        slabs.emplace_back(shape, blocks, generator);
        check_seal(expect, slabs.back(), shape, blocks);
      }
      check_step(expect, slabs, shape, generator);
    }
}
