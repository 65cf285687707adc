// Python face of the page cache's table. Records arrive as addresses; engine/page_slots.py is the typed wrapper.
#include "module_pages.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <utility>

#include "h3/page_cache.hpp"

namespace nb = nanobind;

namespace {

using h3::PageCache;
using h3::PageKey;
using h3::PageRead;
using Address = std::uint64_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::pair<std::size_t, std::size_t> read_ahead(PageCache& cache, Address keys, std::size_t count, std::size_t room,
                                               Address reads, Address segments) {
  std::size_t looked_at = 0;
  const std::size_t started = cache.read_ahead(at<PageKey>(keys), count, room, {at<PageRead>(reads), at<std::uint64_t>(segments)},
                                               &looked_at);
  return {started, looked_at};
}

nb::dict counts(const PageCache& cache) {
  const h3::PageCounts& c = cache.counts();
  nb::dict all;
  all["hits"] = c.hits;
  all["useful"] = c.useful;
  all["late"] = c.late;
  all["misses"] = c.misses;
  all["wasted"] = c.wasted;
  all["read_ahead"] = c.read_ahead;
  all["evicted"] = c.evicted;
  all["failed"] = c.failed;
  all["pinned"] = cache.pinned();
  all["in_flight"] = cache.in_flight();
  all["evictable"] = cache.evictable();
  return all;
}

}  // namespace

void bind_pages(nb::module_& m) {
  nb::class_<PageCache>(m, "PageCache")
      .def("__init__", [](PageCache* self, Address addresses, std::uint32_t slots, std::uint32_t unit_bytes,
                          std::uint32_t run_units) {
        new (self) PageCache(at<std::uint64_t>(addresses), slots, unit_bytes, run_units);
      })
      .def("take", [](PageCache& c, Address keys, std::size_t count, Address slots, Address reads,
                      Address segments) {
        return c.take(at<PageKey>(keys), count, at<std::uint32_t>(slots),
                      {at<PageRead>(reads), at<std::uint64_t>(segments)});
      })
      .def("read_ahead", &read_ahead)
      .def("end", [](PageCache& c, Address tags, std::size_t count, bool well) {
        c.end(at<std::uint64_t>(tags), count, well);
      })
      .def("spare", [](PageCache& c, Address tags, std::size_t count) {
        c.spare(at<std::uint64_t>(tags), count);
      })
      .def("give_back", [](PageCache& c, Address slots, std::size_t count) {
        c.give_back(at<std::uint32_t>(slots), count);
      })
      .def("loading", [](const PageCache& c, Address slots, std::size_t count) {
        return c.loading(at<std::uint32_t>(slots), count);
      })
      .def("states", [](const PageCache& c, Address slots, std::size_t count, Address states) {
        c.states(at<std::uint32_t>(slots), count, at<std::uint8_t>(states));
      })
      .def("forget", &PageCache::forget)
      .def("fault", &PageCache::fault)
      .def("counts", &counts)
      .def_prop_ro("in_flight", &PageCache::in_flight);
}
