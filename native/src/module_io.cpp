// Python face of the I/O engine and of the checksum. Records arrive as addresses; tiers/io.py is the typed wrapper.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "h3/crc32c.hpp"
#include "h3/io_engine.hpp"
#include "module_io.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using h3::CrcMethod;
using h3::io::Engine;
using h3::io::Fault;
using Address = std::uint64_t;

constexpr const char* kCrcNames[] = {"portable", "sse42", "vpclmul"};
constexpr const char* kEffects[] = {"full", "short", "error", "torn", "repeat", "stale", "hold", "late", "flip"};

std::vector<std::string> crc32c_methods() {
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i)
    if (h3::crc32c_supported(static_cast<CrcMethod>(i))) names.emplace_back(kCrcNames[i]);
  return names;
}

std::uint32_t crc32c(Address data, std::size_t size, const std::string& method) {
  const void* const bytes = reinterpret_cast<const void*>(data);
  if (method.empty()) return h3::crc32c(bytes, size);
  for (int i = 0; i < 3; ++i)
    if (method == kCrcNames[i] && h3::crc32c_supported(static_cast<CrcMethod>(i)))
      return h3::crc32c(bytes, size, static_cast<CrcMethod>(i));
  throw std::invalid_argument("checksum method not available here: " + method);
}

using FaultTuple = std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint64_t>;

Fault fault_of(const FaultTuple& tuple) {
  const auto& [name, first, count, value] = tuple;
  for (std::uint32_t i = 0; i < std::size(kEffects); ++i)
    if (name == kEffects[i]) return {static_cast<Fault::Effect>(i), first, count, value};
  throw std::invalid_argument("no fault is called " + name);
}

void open(Engine* self, std::vector<int> files, std::uint32_t depth,
          std::vector<std::pair<std::uint64_t, std::uint64_t>> buffers, std::string backend, std::uint32_t threads,
          std::uint64_t deadline_ms, const std::vector<FaultTuple>& faults) {
  h3::io::Options options{std::move(files), depth, std::move(buffers), std::move(backend), threads, deadline_ms, {}};
  for (const FaultTuple& tuple : faults) options.faults.push_back(fault_of(tuple));
  try {
    const nb::gil_scoped_release released;
    new (self) Engine(std::move(options));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

nb::dict statistics(Engine& engine) {
  const h3::io::Statistics s = engine.statistics();
  nb::dict all;
  all["reads"] = s.reads;
  all["writes"] = s.writes;
  all["flushes"] = s.flushes;
  all["bytes_read"] = s.bytes_read;
  all["bytes_written"] = s.bytes_written;
  all["failed"] = s.failed;
  all["checksum_mismatches"] = s.checksum_mismatches;
  all["deadlines"] = s.deadlines;
  all["cancelled"] = s.cancelled;
  all["short_transfers"] = s.short_transfers;
  all["retries"] = s.retries;
  all["stale_completions"] = s.stale_completions;
  all["kernel_calls"] = s.kernel_calls;
  all["pending"] = s.pending;
  all["in_flight"] = s.in_flight;
  return all;
}

}  // namespace

void bind_io(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.def("crc32c_methods", &crc32c_methods);
  m.def("crc32c", &crc32c, "data"_a, "size"_a, "method"_a = "", Released());
  nb::class_<Engine>(m, "IoEngine")
      .def("__init__", &open)
      .def("submit", [](Engine& e, Address ops, std::size_t count) {
        return e.submit(reinterpret_cast<const h3::io::Op*>(ops), count);
      }, Released())
      .def("ready", &Engine::ready)
      .def("outstanding", &Engine::outstanding)
      .def("poll", [](Engine& e, Address results, std::size_t capacity) {
        return e.poll(reinterpret_cast<h3::io::Result*>(results), capacity);
      })
      .def("wait", &Engine::wait, Released())
      .def("set_bell", [](Engine& e, Address bell) { e.set_bell(reinterpret_cast<h3::Bell*>(bell)); })
      .def("cancel_all", &Engine::cancel_all, Released())
      .def("close", &Engine::close, Released())
      .def("statistics", &statistics)
      .def_prop_ro("backend", [](const Engine& e) { return e.backend(); })
      .def_prop_ro("reason", [](const Engine& e) { return e.reason(); })
      .def_prop_ro("buffers_reason", [](const Engine& e) { return e.buffers_reason(); })
      .def_prop_ro("fixed_buffers", &Engine::fixed_buffers);
}
