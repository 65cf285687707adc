// Runs every kernel on every instruction set under the sanitizers: buffers have exactly the size that the contract
// promises, so that a byte read or written beyond them ends the run. Numbers are checked against plain loops; the
// Python tests check them in depth.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "h3/attend.hpp"
#include "h3/dispatch.hpp"
#include "h3/linear.hpp"
#include "h3/memory.hpp"
#include "h3/pool.hpp"
#include "h3/transform.hpp"

namespace {

using h3::DType;

std::mt19937 generator(7);
std::atomic<int> failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  ++failures;
}

// Elements of one type with their values as fp32.
struct Array {
  Array(std::int64_t count, DType dtype) : dtype(dtype), values(static_cast<std::size_t>(count)) {
    std::normal_distribution<float> normal;
    for (float& v : values) v = normal(generator);
    bytes.reset(new char[static_cast<std::size_t>(count) * h3::size_bytes(dtype)]);
    h3::from_fp32(values.data(), dtype, bytes.get(), count);
    h3::to_fp32(bytes.get(), dtype, values.data(), count);
  }
  DType dtype;
  std::vector<float> values;
  std::unique_ptr<char[]> bytes;
};

struct Case {
  int tokens, heads, kv_heads, head_dim, stored;
  DType dtype;
};

// One row of attention by plain loops.
void attend_row(const Case& c, const Array& q, const Array& k, const Array& v, int t, int h, std::vector<double>& out) {
  const int kv = h / (c.heads / c.kv_heads);
  const int seen = c.stored - c.tokens + t + 1;
  std::vector<double> weights(static_cast<std::size_t>(seen));
  double top = -INFINITY, sum = 0;
  for (int s = 0; s < seen; ++s) {
    double score = 0;
    for (int d = 0; d < c.head_dim; ++d)
      score += double(q.values[(t * c.heads + h) * c.head_dim + d]) * k.values[(s * c.kv_heads + kv) * c.head_dim + d];
    weights[s] = score / std::sqrt(double(c.head_dim));
    top = std::max(top, weights[s]);
  }
  for (double& w : weights) sum += w = std::exp(w - top);
  out.assign(static_cast<std::size_t>(c.head_dim), 0.0);
  for (int s = 0; s < seen; ++s)
    for (int d = 0; d < c.head_dim; ++d)
      out[d] += weights[s] / sum * v.values[(s * c.kv_heads + kv) * c.head_dim + d];
}

void check_attend(const Case& c) {
  const Array q(std::int64_t{c.tokens} * c.heads * c.head_dim, c.dtype);
  const Array k(std::int64_t{c.stored} * c.kv_heads * c.head_dim, c.dtype);
  const Array v(std::int64_t{c.stored} * c.kv_heads * c.head_dim, c.dtype);
  const int pages = (c.stored + h3::kPageTokens - 1) / h3::kPageTokens;
  const int keys_bytes = h3::kPageTokens * c.head_dim * h3::size_bytes(c.dtype);
  // Unwritten room is full of NaN: it may be read, never used.
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<h3::Page> table;
  for (int i = 0; i < c.kv_heads * pages; ++i) {
    memory.emplace_back(new char[2 * static_cast<std::size_t>(keys_bytes)]);
    std::fill_n(memory.back().get(), 2 * keys_bytes, static_cast<char>(0xff));
    const auto address = reinterpret_cast<std::uint64_t>(memory.back().get());
    const int first = i % pages * h3::kPageTokens;
    table.push_back({address, address + keys_bytes, 0, first, std::min(h3::kPageTokens, c.stored - first)});
  }
  const int half = c.stored / 2;
  const std::int64_t token_bytes = std::int64_t{c.kv_heads} * c.head_dim * h3::size_bytes(c.dtype);
  h3::append({k.bytes.get(), v.bytes.get(), table.data(), pages, 0, half, c.kv_heads, c.head_dim, c.dtype, 2});
  h3::append({k.bytes.get() + half * token_bytes, v.bytes.get() + half * token_bytes, table.data(), pages, half,
              c.stored - half, c.kv_heads, c.head_dim, c.dtype, 2});
  std::vector<float> out(static_cast<std::size_t>(c.tokens * c.heads * c.head_dim));
  std::vector<float> lse(static_cast<std::size_t>(c.tokens * c.heads));
  h3::attend({q.bytes.get(), out.data(), lse.data(), table.data(), pages, std::int64_t{c.heads} * c.head_dim, c.dtype,
              DType::kFp32, c.dtype, c.tokens, c.heads, c.kv_heads, c.head_dim, pages, c.stored - c.tokens,
              1.0f / std::sqrt(static_cast<float>(c.head_dim)), 2});
  const double tolerance = c.dtype == DType::kBf16 ? 2e-2 : 1e-5;
  std::vector<double> expected;
  for (int t = 0; t < c.tokens; t += 7) {
    for (int h = 0; h < c.heads; ++h) {
      attend_row(c, q, k, v, t, h, expected);
      for (int d = 0; d < c.head_dim; ++d)
        expect(std::abs(out[(t * c.heads + h) * c.head_dim + d] - expected[d]) < tolerance, "attend");
      expect(std::isfinite(lse[t * c.heads + h]), "log-sum-exp is finite");
    }
  }
}

void check_linear(DType dtype, int tokens, int in_features, int out_features, bool gated) {
  const int rows = gated ? 2 * out_features : out_features;
  const Array x(std::int64_t{tokens} * in_features, dtype), norm(in_features, dtype), bias(rows, dtype);
  const Array weight(std::int64_t{rows} * in_features, dtype), residual(std::int64_t{tokens} * out_features, dtype);
  std::vector<float> out(static_cast<std::size_t>(tokens * out_features));
  h3::linear({x.bytes.get(), norm.bytes.get(), weight.bytes.get(), bias.bytes.get(), residual.bytes.get(), out.data(),
              tokens, in_features, out_features, 1e-5f, dtype, gated, true, 2});
  for (const float value : out) expect(std::isfinite(value), "linear is finite");
  double squares = 0;
  for (int i = 0; i < in_features; ++i) squares += double(x.values[i]) * x.values[i];
  const double inverse = 1 / std::sqrt(squares / in_features + 1e-5);
  auto product = [&](int row) {
    double sum = bias.values[row];
    for (int i = 0; i < in_features; ++i)
      sum += x.values[i] * inverse * norm.values[i] * weight.values[row * in_features + i];
    return sum;
  };
  const double tolerance = dtype == DType::kBf16 ? 0.2 * std::sqrt(in_features / 64.0) : 1e-2;
  for (int o = 0; o < out_features; ++o) {
    double value = product(o);
    if (gated) value = value / (1 + std::exp(-value)) * product(o + out_features);
    const double scale = gated ? 1 + std::abs(value) : 1;
    expect(std::abs(out[o] - value - residual.values[o]) < tolerance * scale, "linear");
  }
}

void check_rotate(DType dtype, int tokens, int head_dim) {
  const int heads = 4, kv_heads = 2;
  const Array qkv(std::int64_t{tokens} * (heads + 2 * kv_heads) * head_dim, dtype), norm(head_dim, dtype);
  const Array cos(std::int64_t{tokens} * head_dim / 2, DType::kFp32), sin(std::int64_t{tokens} * head_dim / 2, DType::kFp32);
  Array q(std::int64_t{tokens} * heads * head_dim, dtype), k(std::int64_t{tokens} * kv_heads * head_dim, dtype);
  Array v(std::int64_t{tokens} * kv_heads * head_dim, dtype);
  h3::rotate({qkv.bytes.get(), q.bytes.get(), k.bytes.get(), v.bytes.get(), cos.values.data(), sin.values.data(), nullptr,
              norm.bytes.get(), tokens, heads, kv_heads, head_dim, 1e-6f, dtype, 2});
  std::vector<float> turned(static_cast<std::size_t>(head_dim));
  h3::to_fp32(q.bytes.get(), dtype, turned.data(), head_dim);
  const double expected = double(qkv.values[0]) * cos.values[0] - double(qkv.values[head_dim / 2]) * sin.values[0];
  expect(std::abs(turned[0] - expected) < (dtype == DType::kFp32 ? 1e-5 : 5e-2), "rotate");
}

// Every unit exactly once, whatever the number of threads, while two callers compete.
void check_pool() {
  const auto loops = [](int seed) {
    for (int i = 0; i < 3000; ++i) {
      const int units = (i * 7 + seed) % 200;
      std::vector<std::atomic<int>> visits(static_cast<std::size_t>(units));
      h3::parallel(units, 1 + (i + seed) % 5, i % 2 == 0 ? h3::Share::kOne : h3::Share::kGuided, [&](int begin, int end) {
        for (int unit = begin; unit < end; ++unit) visits[static_cast<std::size_t>(unit)].fetch_add(1);
      });
      for (const std::atomic<int>& count : visits) expect(count == 1, "every unit of a parallel loop once");
    }
  };
  std::thread other(loops, 3);
  loops(11);
  other.join();
}

}  // namespace

int main() {
  check_pool();
  for (const h3::Isa isa : {h3::Isa::kPortable, h3::Isa::kAvx2, h3::Isa::kAvx512}) {
    if (!h3::isa_supported(isa)) continue;
    h3::isa_select(isa);
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const int head_dim : {64, 80, 96, 128})
        for (const int stored : {1, 15, 64, 131, 1100})
          for (const int tokens : {1, 3, 70})
            if (tokens <= stored) check_attend({tokens, 6, 2, head_dim, stored, dtype});
      for (const int tokens : {1, 2, 5, 8}) {
        check_linear(dtype, tokens, 64, 50, false);
        check_linear(dtype, tokens, 96, 33, true);
      }
      for (const int tokens : {1, 40}) check_rotate(dtype, tokens, 80);
    }
    const std::vector<char> data(64 << 12, 1);
    void* aligned = std::aligned_alloc(4096, data.size());
    std::copy(data.begin(), data.end(), static_cast<char*>(aligned));
    for (int variant = 0; variant < h3::kReadVariants; ++variant) h3::read_all(aligned, data.size(), variant, 2);
    std::free(aligned);
  }
  std::printf(failures == 0 ? "native tests passed\n" : "native tests: %d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
