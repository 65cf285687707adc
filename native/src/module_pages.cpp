// Python face of the page cache's table. Records arrive as addresses; engine/page_slots.py is the typed wrapper.
#include "module_pages.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "h3/page_cache.hpp"
#include "h3/unit_ops.hpp"

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

// Addresses of what `PagesFound` names.
using FoundAddresses = std::tuple<Address, Address, Address, Address>;

h3::PagesFound found_at(const FoundAddresses& found) {
  const auto [keys, slots, addresses, pinned] = found;
  return {at<PageKey>(keys), at<std::uint32_t>(slots), at<std::uint64_t>(addresses), at<std::uint64_t>(pinned)};
}

bool take_present(PageCache& cache, Address wanted, std::size_t count, std::uint16_t layer, std::uint32_t page_bytes,
                  const FoundAddresses& found) {
  return cache.take_present(at<h3::WantedPage>(wanted), count, {layer, page_bytes}, found_at(found));
}

std::tuple<std::int64_t, std::size_t, std::size_t> take_pages(PageCache& cache, Address wanted, std::size_t count,
                                                              std::uint16_t layer, std::uint32_t page_bytes,
                                                              const FoundAddresses& found, Address reads,
                                                              Address segments) {
  const h3::PageTaking taking =
      cache.take_pages(at<h3::WantedPage>(wanted), count, {layer, page_bytes}, found_at(found),
                       {at<PageRead>(reads), at<std::uint64_t>(segments)});
  return {taking.reads, taking.missing, taking.loading};
}

// Gives back what a taking pinned, and notes that. A second time does nothing.
void give_back_taken(PageCache& cache, const FoundAddresses& found) {
  const h3::PagesFound taken = found_at(found);
  cache.give_back(taken.slots, *taken.pinned);
  *taken.pinned = 0;
}

std::uint64_t uses(const PageCache& cache) {
  const h3::PageCounts& c = cache.counts();
  return c.hits + c.late + c.misses + c.read_ahead;
}

std::pair<std::size_t, std::size_t> list_pages(Address chosen, int tokens, int kv_heads, int budget, Address segments,
                                               Address ids, Address pages, Address is_cold, Address page_of) {
  const h3::ListedCounts counts = h3::list_pages(
      {at<std::int32_t>(chosen), tokens, kv_heads, budget, at<h3::Indexed>(segments), at<std::uint64_t>(ids)},
      {at<h3::WantedPage>(pages), at<std::uint8_t>(is_cold), at<std::int64_t>(page_of)});
  return {counts.pages, counts.clusters};
}

std::pair<std::size_t, std::size_t> unit_ops(Address reads, std::size_t count, Address offsets, Address crcs,
                                             Address sizes, std::uint32_t slab_count, std::uint32_t check_bytes,
                                             std::uint64_t first_tag, std::uint32_t alignment, Address ops) {
  const h3::UnitSlabs slabs{at<std::uint64_t>(offsets), at<std::uint64_t>(crcs), at<std::uint64_t>(sizes), slab_count,
                            check_bytes};
  const h3::UnitOps found = h3::unit_ops(at<PageRead>(reads), count, slabs, first_tag, alignment, at<h3::io::Op>(ops));
  return {found.sound, found.ahead};
}

bool find_slabs(Address reads, Address read_segments, std::size_t count, Address segments, std::size_t segment_count) {
  return h3::find_slabs(at<PageRead>(reads), at<std::uint64_t>(read_segments), count, at<std::uint64_t>(segments),
                        segment_count);
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
  m.def("list_pages", &list_pages);
  m.def("unit_ops", &unit_ops);
  m.def("find_slabs", &find_slabs);
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
      .def("name", [](const PageCache& c, Address wanted, std::size_t count, std::uint16_t layer,
                      std::uint32_t page_bytes, Address keys) {
        c.name(at<h3::WantedPage>(wanted), count, {layer, page_bytes}, at<PageKey>(keys));
      })
      .def("take_present", &take_present)
      .def("take_pages", &take_pages)
      .def("give_back_taken", &give_back_taken)
      .def("read_ahead", &read_ahead)
      .def("end", [](PageCache& c, Address tags, std::size_t count, bool well, std::uint32_t ticket) {
        return c.end(at<std::uint64_t>(tags), count, well, ticket);
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
      .def_prop_ro("in_flight", &PageCache::in_flight)
      .def_prop_ro("uses", &uses);
}
