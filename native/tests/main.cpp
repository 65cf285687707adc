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
#include "io.hpp"
#include "mailbox.hpp"
#include "offload.hpp"
#include "pages.hpp"
#include "retrieve.hpp"

namespace {

using h3::DType;
using h3::Encoding;

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
  Encoding encoding;
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
  const bool is_raw = c.encoding == Encoding::kRaw;
  const int elements = h3::kPageTokens * c.head_dim;
  const int keys_bytes = is_raw                           ? elements * h3::size_bytes(c.dtype)
                         : c.encoding == Encoding::kInt8 ? elements
                         : c.encoding == Encoding::kK8V4 ? elements / 2
                                                         : 0;
  const int values_bytes = c.encoding == Encoding::kInt4 ? elements / 2 : keys_bytes;
  const int nibbles_bytes = is_raw || c.encoding == Encoding::kInt8 ? 0 : elements / 2;
  const int page_bytes = keys_bytes + values_bytes + (is_raw ? 0 : nibbles_bytes + 8 * h3::kPageTokens);
  // Unwritten room is full of NaN: it may be read, never used.
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<h3::Page> table;
  for (int i = 0; i < c.kv_heads * pages; ++i) {
    memory.emplace_back(new char[static_cast<std::size_t>(page_bytes)]);
    std::fill_n(memory.back().get(), page_bytes, static_cast<char>(0xff));
    const auto address = reinterpret_cast<std::uint64_t>(memory.back().get());
    const int first = i % pages * h3::kPageTokens;
    const std::uint64_t plane = address + keys_bytes + values_bytes;
    table.push_back({address, address + keys_bytes, 0, nibbles_bytes == 0 ? 0 : plane, is_raw ? 0 : plane + nibbles_bytes,
                     first, std::min(h3::kPageTokens, c.stored - first)});
  }
  const int half = c.stored / 2;
  const std::int64_t token_bytes = std::int64_t{c.kv_heads} * c.head_dim * h3::size_bytes(c.dtype);
  h3::append({k.bytes.get(), v.bytes.get(), table.data(), pages, 0, half, c.kv_heads, c.head_dim, c.dtype, c.encoding,
              2});
  h3::append({k.bytes.get() + half * token_bytes, v.bytes.get() + half * token_bytes, table.data(), pages, half,
              c.stored - half, c.kv_heads, c.head_dim, c.dtype, c.encoding, 2});
  std::vector<float> out(static_cast<std::size_t>(c.tokens * c.heads * c.head_dim));
  std::vector<float> lse(static_cast<std::size_t>(c.tokens * c.heads));
  h3::AttendArgs args{q.bytes.get(), out.data(), lse.data(), table.data(), pages, c.dtype,
                      DType::kFp32, c.dtype, c.encoding, c.tokens, c.heads, c.kv_heads, c.head_dim, pages, c.stored - c.tokens,
                      1.0f / std::sqrt(static_cast<float>(c.head_dim)), 2, 0, pages, nullptr};
  h3::attend(args);
  const std::vector<float> whole = out;
  std::vector<float> state(static_cast<std::size_t>(h3::attend_state_floats(args)));
  args.state = state.data();
  for (int first = 0; first < pages; first = args.page_last) {
    args.page_first = first;
    args.page_last = std::min(pages, first + h3::kBatchPages);
    h3::attend(args);
  }
  expect(out == whole, "attention in runs equals attention at once");
  // Of codes only what 8 and 4 bits lose of normal numbers; the Python tests compare with decoded pages.
  const double tolerance = c.encoding == Encoding::kInt8 ? 0.1 : !is_raw ? 1.0 : c.dtype == DType::kBf16 ? 2e-2 : 1e-5;
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

struct LinearCase {
  DType dtype;
  int tokens, in_features, out_features;
  bool gated, normed, biased, in_place;
};

// With `in_place` the residual is the output and has the weights' type, as decode uses it; else the output is fp32.
void check_linear(const LinearCase& c) {
  const int rows = c.gated ? 2 * c.out_features : c.out_features;
  const Array x(std::int64_t{c.tokens} * c.in_features, c.dtype), norm(c.in_features, c.dtype), bias(rows, c.dtype);
  const Array weight(std::int64_t{rows} * c.in_features, c.dtype);
  Array residual(std::int64_t{c.tokens} * c.out_features, c.dtype);
  std::vector<float> out(static_cast<std::size_t>(c.tokens * c.out_features));
  h3::linear({x.bytes.get(), c.normed ? norm.bytes.get() : nullptr, weight.bytes.get(),
              c.biased ? bias.bytes.get() : nullptr, residual.bytes.get(),
              c.in_place ? static_cast<void*>(residual.bytes.get()) : out.data(), c.tokens, c.in_features,
              c.out_features, 1e-5f, c.dtype, c.gated, !c.in_place, 2});
  if (c.in_place) h3::to_fp32(residual.bytes.get(), c.dtype, out.data(), c.tokens * c.out_features);
  for (int t = 0; t < c.tokens; ++t) {
    const float* row = x.values.data() + t * c.in_features;
    double squares = 0;
    for (int i = 0; i < c.in_features; ++i) squares += double(row[i]) * row[i];
    const double inverse = c.normed ? 1 / std::sqrt(squares / c.in_features + 1e-5) : 1;
    const auto product = [&](int o) {
      double sum = c.biased ? bias.values[o] : 0;
      for (int i = 0; i < c.in_features; ++i)
        sum += row[i] * inverse * (c.normed ? norm.values[i] : 1) * weight.values[o * c.in_features + i];
      return sum;
    };
    const double tolerance = c.dtype == DType::kFp32 ? 1e-4 : c.dtype == DType::kFp16 ? 0.05 : 0.4;
    for (int o = 0; o < c.out_features; ++o) {
      double value = product(o);
      double scale = 1 + std::abs(value) / 8;
      if (c.gated) {
        const double up = product(o + c.out_features);
        scale = (1 + std::abs(value)) * (1 + std::abs(up));  // an error of either factor is multiplied by the other
        value = value / (1 + std::exp(-value)) * up;
      }
      const int at = t * c.out_features + o;
      expect(std::abs(out[at] - value - residual.values[at]) < tolerance * scale, "linear");
    }
  }
}

// Heads of q and k against plain loops, v to the bit.
void check_rotate(DType dtype, int tokens, int head_dim) {
  const int heads = 4, kv_heads = 2, half = head_dim / 2, row = (heads + 2 * kv_heads) * head_dim;
  const Array qkv(std::int64_t{tokens} * row, dtype), norm(head_dim, dtype);
  const Array cos(std::int64_t{tokens} * half, DType::kFp32), sin(std::int64_t{tokens} * half, DType::kFp32);
  Array q(std::int64_t{tokens} * heads * head_dim, dtype), k(std::int64_t{tokens} * kv_heads * head_dim, dtype);
  Array v(std::int64_t{tokens} * kv_heads * head_dim, dtype);
  h3::rotate({qkv.bytes.get(), q.bytes.get(), k.bytes.get(), v.bytes.get(), cos.values.data(), sin.values.data(), nullptr,
              norm.bytes.get(), tokens, heads, kv_heads, head_dim, 1e-6f, dtype, 2});
  for (Array* array : {&q, &k, &v})
    h3::to_fp32(array->bytes.get(), dtype, array->values.data(), static_cast<std::int64_t>(array->values.size()));
  const double tolerance = dtype == DType::kFp32 ? 1e-5 : dtype == DType::kFp16 ? 2e-2 : 1e-1;
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads + kv_heads; ++h) {
      const bool is_key = h >= heads;
      const float* x = qkv.values.data() + t * row + h * head_dim;
      double squares = 0;
      for (int d = 0; d < head_dim; ++d) squares += double(x[d]) * x[d];
      const double inverse = is_key ? 1 / std::sqrt(squares / head_dim + 1e-6) : 1;
      const auto scaled = [&](int d) { return x[d] * inverse * (is_key ? norm.values[d] : 1); };
      const float* actual = is_key ? k.values.data() + (t * kv_heads + h - heads) * head_dim
                                   : q.values.data() + (t * heads + h) * head_dim;
      for (int i = 0; i < half; ++i) {
        const double c = cos.values[t * half + i], s = sin.values[t * half + i];
        expect(std::abs(actual[i] - (scaled(i) * c - scaled(i + half) * s)) < tolerance, "rotate, first half");
        expect(std::abs(actual[i + half] - (scaled(i + half) * c + scaled(i) * s)) < tolerance, "rotate, second half");
      }
    }
    for (int i = 0; i < kv_heads * head_dim; ++i)
      expect(v.values[t * kv_heads * head_dim + i] == qkv.values[t * row + (heads + kv_heads) * head_dim + i], "values");
  }
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
  // A late thread must not take a range of the last loop by the size of the next one: short loops before long ones.
  for (int i = 0; i < 1'000'000; ++i) {
    const int units = i % 2 == 0 ? 2 + i % 13 : 200;
    std::atomic<int> visits{0};
    h3::parallel(units, 3, h3::Share::kGuided, [&](int begin, int end) { visits.fetch_add(end - begin); });
    if (visits != units) return expect(false, "a parallel loop has exactly its units");
  }
}

}  // namespace

int main() {
  check_io(expect);
  check_mailbox(expect);
  check_pages(expect);
  check_pool();
  for (const h3::Isa isa : {h3::Isa::kPortable, h3::Isa::kAvx2, h3::Isa::kAvx512}) {
    if (!h3::isa_supported(isa)) continue;
    h3::isa_select(isa);
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const int head_dim : {64, 80, 96, 128})
        for (const int stored : {1, 15, 64, 131, 1100})
          for (const int tokens : {1, 3, 70})
            for (const Encoding encoding : {Encoding::kRaw, Encoding::kInt8, Encoding::kK8V4, Encoding::kInt4})
              if (tokens <= stored) check_attend({tokens, 6, 2, head_dim, stored, dtype, encoding});
      for (const int tokens : {1, 2, 5, 8})
        for (const bool flag : {false, true}) {
          check_linear({dtype, tokens, 64, 50, false, flag, !flag, flag});
          check_linear({dtype, tokens, 96, 33, true, true, flag, false});
        }
      for (const int tokens : {1, 40}) check_rotate(dtype, tokens, 80);
    }
    check_retrieve(expect);
    check_offload(expect);
    const std::vector<char> data(64 << 12, 1);
    void* aligned = std::aligned_alloc(4096, data.size());
    std::copy(data.begin(), data.end(), static_cast<char*>(aligned));
    for (int variant = 0; variant < h3::kReadVariants; ++variant) h3::read_all(aligned, data.size(), variant, 2);
    std::free(aligned);
  }
  std::printf(failures == 0 ? "native tests passed\n" : "native tests: %d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
