// Python face of the native core. Arrays arrive as addresses and nothing is checked: attention/native.py and
// models/native_kernels.py are the typed wrappers that do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "h3/attend.hpp"
#include "h3/attend_batch.hpp"
#include "h3/dispatch.hpp"
#include "h3/linear.hpp"
#include "h3/memory.hpp"
#include "h3/transform.hpp"
#include "attend_plan.hpp"
#include "module_attend.hpp"
#include "module_io.hpp"
#include "module_mailbox.hpp"
#include "module_offload.hpp"
#include "module_pages.hpp"
#include "module_retrieve.hpp"
#include "module_ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = std::uint64_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};

std::vector<std::string> isa_list() {
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i)
    if (h3::isa_supported(static_cast<h3::Isa>(i))) names.emplace_back(kIsaNames[i]);
  return names;
}

void isa_select(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name != kIsaNames[i]) continue;
    if (!h3::isa_supported(static_cast<h3::Isa>(i))) break;
    h3::isa_select(static_cast<h3::Isa>(i));
    return;
  }
  throw std::invalid_argument("instruction set not available here: " + name);
}

void attend(Address q, Address out, Address lse, Address pages, std::int64_t pages_stride,
            int q_dtype, int out_dtype, int page_dtype, int encoding, int tokens, int heads, int kv_heads, int head_dim,
            int page_count, int position, float scale, int threads, int page_first, int page_last, Address state) {
  h3::attend({at(q), at(out), at<float>(lse), at<h3::Page>(pages), pages_stride,
              static_cast<h3::DType>(q_dtype), static_cast<h3::DType>(out_dtype), static_cast<h3::DType>(page_dtype),
              static_cast<h3::Encoding>(encoding), tokens, heads, kv_heads, head_dim, page_count, position, scale, threads, page_first, page_last,
              at<float>(state)});
}

std::int64_t attend_state_floats(int tokens, int heads, int kv_heads, int head_dim, int page_count) {
  h3::AttendArgs args{};
  args.tokens = tokens;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = head_dim;
  args.page_count = page_count;
  return h3::attend_state_floats(args);
}

void append(Address k, Address v, Address pages, std::int64_t pages_stride, std::int64_t index, int tokens,
            int kv_heads, int head_dim, int dtype, int encoding, int threads) {
  h3::append({at(k), at(v), at<h3::Page>(pages), pages_stride, index, tokens, kv_heads, head_dim,
              static_cast<h3::DType>(dtype), static_cast<h3::Encoding>(encoding), threads});
}

void attend_batch(const BatchTuple& tuple) {
  const h3::BatchArgs args = batch_args(tuple);
  const nb::gil_scoped_release released;
  h3::attend_batch(args);
}

void copy_pages(Address sources, Address targets, int count, std::int64_t page_bytes, int threads) {
  h3::copy_pages(at<std::uint64_t>(sources), at<std::uint64_t>(targets), count, page_bytes, threads);
}

void rotate(Address qkv, Address q, Address k, Address v, Address cos, Address sin, Address q_norm, Address k_norm,
            int tokens, int heads, int kv_heads, int head_dim, float eps, int dtype, int threads) {
  h3::rotate({at(qkv), at(q), at(k), at(v), at<float>(cos), at<float>(sin), at(q_norm), at(k_norm), tokens, heads,
              kv_heads, head_dim, eps, static_cast<h3::DType>(dtype), threads});
}

void linear(Address x, Address norm, Address weight, Address bias, Address residual, Address out, int tokens,
            int in_features, int out_features, float eps, int dtype, bool gated, bool out_fp32, int threads) {
  h3::linear({at(x), at(norm), at(weight), at(bias), at(residual), at(out), tokens, in_features, out_features, eps,
              static_cast<h3::DType>(dtype), gated, out_fp32, threads});
}

std::uint64_t read_all(Address data, std::size_t size_bytes, int variant, int threads) {
  return h3::read_all(at(data), size_bytes, variant, threads);
}

}  // namespace

NB_MODULE(_native, m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.attr("PART_TOKENS") = h3::kPartTokens;
  m.attr("PAGE_TOKENS") = h3::kPageTokens;
  m.attr("BATCH_PAGES") = h3::kBatchPages;
  m.attr("HEAD_DIM_MAX") = h3::kHeadDimMax;
  m.attr("LANE_TOKENS") = h3::kLanes;
  m.attr("PANEL_DIMS") = h3::kPanel;
  m.attr("BLOCK_ROWS") = h3::kBlockRows;
  m.attr("LINEAR_ROWS_MAX") = h3::kLinearRowsMax;
  m.attr("READ_VARIANTS") = h3::kReadVariants;
  m.def("isa_list", &isa_list);
  m.def("isa_current", [] { return std::string(kIsaNames[static_cast<int>(h3::isa_current())]); });
  m.def("isa_select", &isa_select, "name"_a);
  m.def("attend", &attend, Released());
  m.def("attend_batch", &attend_batch);
  m.def("attend_state_floats", &attend_state_floats);
  m.def("append", &append, Released());
  m.def("copy_pages", &copy_pages, Released());
  m.def("rotate", &rotate, Released());
  m.def("linear", &linear, Released());
  m.def("read_all", &read_all, Released());
  bind_io(m);
  bind_mailbox(m);
  bind_offload(m);
  bind_pages(m);
  bind_retrieve(m);
  bind_ring(m);
}
