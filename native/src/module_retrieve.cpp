// Python face of sealing and retrieval. Nothing is checked: attention/sealing.py and attention/retrieval.py do.
#include "module_retrieve.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "h3/offload.hpp"
#include "h3/retrieve.hpp"
#include "h3/seal.hpp"

namespace nb = nanobind;

namespace {

using Address = std::uint64_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void seal(Address slabs, int slab_count, int kv_heads, int head_dim, bool split_keys, std::int64_t page_bytes,
          int blocks, int threads) {
  h3::seal({at<std::uint64_t>(slabs), slab_count, {kv_heads, head_dim, split_keys, page_bytes}, blocks, threads});
}

// What both halves of a retrieval share.
struct Retrieval {
  Retrieval(Address q, Address segments, Address lse, Address totals, int kv_heads, int head_dim, bool split_keys,
            std::int64_t page_bytes, int q_dtype, int page_dtype, int tokens, int heads, int segment_count, float scale,
            int threads, h3::OffloadScanner* scanner)
      : args{at(q), at<h3::Indexed>(segments), at<float>(lse), at<float>(totals),
             {kv_heads, head_dim, split_keys, page_bytes},
             static_cast<h3::DType>(q_dtype), static_cast<h3::DType>(page_dtype), tokens, heads, segment_count, scale,
             threads, scanner} {}

  void select(Address exact_lse, Address chosen, int budget, int shortlist, Address runners, int runner_count) const {
    h3::select({args, at<float>(exact_lse), at<std::int32_t>(chosen), budget, shortlist, at<std::int32_t>(runners),
                runner_count});
  }

  std::pair<std::int64_t, std::int64_t> attend_chosen(Address chosen, Address addresses, Address out, Address out_lse,
                                                      Address read_lse, int budget, bool estimate, Address exact_out,
                                                      Address exact_lse) const {
    const h3::ChosenReads reads = h3::attend_chosen({args, at<std::int32_t>(chosen), at<std::uint64_t>(addresses),
                                                     at<float>(exact_out), at<float>(exact_lse), at<float>(out),
                                                     at<float>(out_lse), at<float>(read_lse), budget, estimate});
    return {reads.clusters, reads.pages};
  }

  h3::RetrieveArgs args;
};

// Both halves at once. Gives back how many clusters there are, how many were read, and how many pages hold these.
std::tuple<std::int64_t, std::int64_t, std::int64_t> retrieve(const Retrieval& of, int budget, double shortlist_share,
                                                              Address exact_out, Address exact_lse, Address out,
                                                              Address out_lse, Address read_lse) {
  const std::int64_t used = h3::used_clusters(of.args.segments, of.args.segment_count);
  const auto shortlist = static_cast<int>(std::ceil(shortlist_share * static_cast<double>(used)));
  const h3::ChosenReads reads =
      h3::retrieve({of.args, at<float>(exact_out), at<float>(exact_lse), at<float>(out), at<float>(out_lse),
                    at<float>(read_lse), static_cast<int>(std::min<std::int64_t>(budget, used)), shortlist});
  return {used, reads.clusters, reads.pages};
}

}  // namespace

void bind_retrieve(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.attr("MISSING") = h3::kMissing;
  m.attr("SEGMENT_CLUSTERS") = h3::kSegmentClusters;
  m.def("seal", &seal, Released());
  nb::class_<Retrieval>(m, "Retrieval")
      .def(nb::init<Address, Address, Address, Address, int, int, bool, std::int64_t, int, int, int, int, int, float, int,
                    h3::OffloadScanner*>(),
           nb::arg("q"), nb::arg("segments"), nb::arg("lse"), nb::arg("totals"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("split_keys"), nb::arg("page_bytes"), nb::arg("q_dtype"), nb::arg("page_dtype"), nb::arg("tokens"),
           nb::arg("heads"), nb::arg("segment_count"), nb::arg("scale"), nb::arg("threads"),
           nb::arg("scanner") = nb::none(), nb::keep_alive<1, 17>())
      .def("select", &Retrieval::select, Released())
      .def("attend_chosen", &Retrieval::attend_chosen, nb::arg("chosen"), nb::arg("addresses"), nb::arg("out"),
           nb::arg("out_lse"), nb::arg("read_lse"), nb::arg("budget"), nb::arg("estimate"), nb::arg("exact_out") = 0,
           nb::arg("exact_lse") = 0, Released())
      .def("run", &retrieve, Released());
  m.def("all_in_memory",
        [](Address segments, int count) { return h3::all_in_memory(at<h3::Indexed>(segments), count); });
}
