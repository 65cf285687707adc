// Python face of the ring of records, of its bell, and of what wraps slabs. tiers/remote/ring.py and tiers/cold/wrap.py
// are the typed wrappers.
#include "module_ring.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "h3/byte_planes.hpp"
#include "h3/lz4_decode.hpp"
#include "h3/record_ring.hpp"

namespace nb = nanobind;

namespace {

using h3::Bell;
using h3::RecordRing;
using h3::RingResult;
using Address = std::uint64_t;

// How long a wait keeps Python from looking for signals.
constexpr std::uint64_t kSliceNs = 100'000'000;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

bool push(RecordRing& ring, const nb::bytes& payload) {
  const RingResult result = ring.push({payload.c_str(), payload.size()});
  if (result == RingResult::kDamaged) throw std::invalid_argument("the reader's position is none");
  return result == RingResult::kOk;
}

nb::object pop(RecordRing& ring) {
  std::vector<char> payload;
  const RingResult result = ring.pop(payload);
  if (result == RingResult::kDamaged) throw std::invalid_argument("what was written is no record");
  if (result == RingResult::kNone) return nb::none();
  return nb::bytes(payload.data(), payload.size());
}

// Room for the planes of one slab, kept from call to call: new pages cost as much as what is done with them.
Address planes(std::size_t size) {
  thread_local std::vector<unsigned char> room;
  if (room.size() < size) room.resize(size);
  return reinterpret_cast<Address>(room.data());
}

bool lz4_unwrap(Address source, std::size_t source_size, Address target, std::size_t target_size, std::size_t element) {
  if (element == 1) return h3::lz4_decode(at(source), source_size, at(target), target_size);
  const Address joined = planes(target_size);
  if (!h3::lz4_decode(at(source), source_size, at(joined), target_size)) return false;
  h3::join_planes(at(joined), target_size / element, element, at(target));
  return true;
}

}  // namespace

void bind_ring(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.attr("RING_HEADER_BYTES") = h3::kRingHeaderBytes;
  m.attr("RECORD_HEADER_BYTES") = h3::kRecordHeaderBytes;
  m.def("bell_signal", [](Address bell) { return at<Bell>(bell)->signal.load(); });
  m.def("bell_ring", [](Address bell) { at<Bell>(bell)->ring(); }, Released());
  m.def("bell_wait", [](Address bell, std::uint32_t seen, std::uint64_t timeout_ns, std::uint64_t spin_ns) {
    at<Bell>(bell)->wait(seen, std::min(timeout_ns, kSliceNs), spin_ns);
  }, Released());
  m.def("ring_clear", [](Address ring) { RecordRing::clear(at(ring)); });
  m.def("lz4_unwrap", &lz4_unwrap, Released());
  m.def("split_planes", [](Address source, std::size_t elements, std::size_t bytes, Address target) {
    h3::split_planes(at(source), elements, bytes, at(target));
  }, Released());
  nb::class_<RecordRing>(m, "RecordRing")
      .def("__init__", [](RecordRing* self, Address memory, std::size_t capacity, std::uint32_t record_bytes_max) {
        if (capacity == 0 || (capacity & (capacity - 1)) != 0) throw std::invalid_argument("no power of two");
        new (self) RecordRing(at(memory), capacity, record_bytes_max);
      })
      .def("room", &RecordRing::room)
      .def("push", &push)
      .def("pop", &pop);
}
