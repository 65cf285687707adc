// Python face of the mailbox and of the access probe. memory/mailbox.py and telemetry/access_probe.py are the typed
// wrappers.
#include "module_mailbox.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "h3/access_probe.hpp"
#include "h3/mailbox.hpp"
#include "mailbox_wait.hpp"

namespace nb = nanobind;

namespace {

using h3::Burial;
using h3::Mailbox;
using h3::MailboxCaller;
using h3::MailboxGeometry;
using h3::MailboxRequest;
using h3::MailboxResult;
using h3::MailboxWorker;
using h3::Member;
using Address = std::uint64_t;
using MemberTuple = std::pair<std::uint32_t, std::uint32_t>;
using BurialTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using Released = nb::call_guard<nb::gil_scoped_release>;

// How long a wait keeps Python from looking for signals.
constexpr std::uint64_t kSliceNs = 100'000'000;

void* at(Address address) { return reinterpret_cast<void*>(address); }

Member member(MemberTuple tuple) { return {tuple.first, tuple.second}; }

BurialTuple tuple(const Burial& burial) {
  return {burial.reposted, burial.failed, burial.freed, burial.abandoned};
}

void require_fits(std::size_t size, std::uint32_t room) {
  if (size > room) throw std::length_error(std::to_string(size) + " bytes, where " + std::to_string(room) + " fit");
}

std::span<const char> span_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Waits in slices without the GIL, and lets an interrupt end it between two.
template <class Wait>
MailboxResult sliced(std::uint64_t deadline_ns, const Wait& wait) {
  for (;;) {
    const std::uint64_t until = std::min(deadline_ns, h3::mailbox::now_ns() + kSliceNs);
    MailboxResult result;
    {
      const nb::gil_scoped_release released;
      result = wait(until);
    }
    if (result != MailboxResult::kTimeout || until == deadline_ns) return result;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

class Caller {
 public:
  Caller(const Mailbox& mailbox, MemberTuple tuple, std::uint64_t spin_ns)
      : room_(mailbox.geometry().request_bytes), caller_(mailbox, member(tuple), spin_ns) {}

  std::pair<int, std::vector<std::uint64_t>> post(const nb::sequence& requests, std::uint64_t deadline_ns) {
    std::vector<nb::bytes> held;
    std::vector<std::span<const char>> spans;
    for (nb::handle request : requests) {
      held.push_back(nb::cast<nb::bytes>(request));
      spans.push_back(span_of(held.back()));
      require_fits(spans.back().size(), room_);
    }
    std::vector<std::uint64_t> tickets;
    tickets.reserve(spans.size());
    MailboxResult result;
    {
      const nb::gil_scoped_release released;
      result = caller_.post(spans, deadline_ns, tickets);
    }
    return {static_cast<int>(result), std::move(tickets)};
  }

  std::pair<int, nb::object> wait(std::uint64_t ticket, std::uint64_t deadline_ns) {
    h3::MailboxBytes reply;
    const MailboxResult result =
        sliced(deadline_ns, [&](std::uint64_t until) { return caller_.wait(ticket, until, reply); });
    if (result != MailboxResult::kOk) return {static_cast<int>(result), nb::none()};
    return {static_cast<int>(result), nb::bytes(reply.view().data(), reply.view().size())};
  }

  bool cancel(std::uint64_t ticket) { return caller_.cancel(ticket); }

 private:
  std::uint32_t room_;
  MailboxCaller caller_;
};

class Worker {
 public:
  Worker(const Mailbox& mailbox, MemberTuple tuple, std::uint64_t spin_ns)
      : room_(mailbox.geometry().reply_bytes), worker_(mailbox, member(tuple), spin_ns) {}

  std::tuple<int, std::uint64_t, std::uint64_t, std::uint64_t, nb::object> take(std::uint64_t deadline_ns) {
    const Use use(*this);
    const MailboxResult result =
        sliced(deadline_ns, [&](std::uint64_t until) { return worker_.take(request_, until); });
    if (result != MailboxResult::kOk) return {static_cast<int>(result), 0, 0, 0, nb::none()};
    return {static_cast<int>(result), request_.ticket, request_.deadline_ns, request_.word,
            nb::bytes(request_.bytes.view().data(), request_.bytes.view().size())};
  }

  int reply(std::uint64_t word, const nb::bytes& bytes) {
    const Use use(*this);
    require_fits(bytes.size(), room_);
    MailboxRequest request{};
    request.word = word;
    const nb::gil_scoped_release released;
    return static_cast<int>(worker_.reply(request, span_of(bytes)));
  }

 private:
  // A worker is one thread's.
  class Use {
   public:
    explicit Use(Worker& worker) : worker_(worker) {
      if (worker.is_used_.exchange(true)) throw std::runtime_error("a worker is used by two threads at once");
    }
    ~Use() { worker_.is_used_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Worker& worker_;
  };

  std::uint32_t room_;
  MailboxWorker worker_;
  MailboxRequest request_{};
  std::atomic<bool> is_used_{false};
};

nb::object registered(bool is_registered, Member member) {
  return is_registered ? nb::cast(MemberTuple{member.id, member.epoch}) : nb::none();
}

using GeometryTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

MailboxGeometry geometry(const GeometryTuple& tuple) {
  const auto [entries, request_bytes, reply_bytes, callers, workers] = tuple;
  return {entries, request_bytes, reply_bytes, callers, workers};
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  m.def("probe_access", [](Address address, std::size_t size_bytes, std::uint32_t batches, std::uint64_t seed) {
    return h3::probe_access(at(address), size_bytes, batches, seed);
  }, Released());
  m.attr("PROBE_BATCH_ACCESSES") = h3::kProbeBatchAccesses;
  m.attr("MAILBOX_ENTRIES_MAX") = h3::kMailboxEntriesMax;
  m.attr("MAILBOX_MEMBERS_MAX") = h3::kMailboxMembersMax;
  m.attr("MAILBOX_BYTES_MAX") = h3::kMailboxBytesMax;
  m.attr("MAILBOX_ATTEMPTS_MAX") = h3::kMailboxAttemptsMax;
  m.attr("MAILBOX_SPIN_NS") = h3::kMailboxSpinNs;
  m.def("mailbox_size_bytes", [](const GeometryTuple& tuple) {
    const MailboxGeometry wanted = geometry(tuple);
    return wanted.is_valid() ? wanted.size_bytes() : 0;
  });
  m.def("mailbox_calls", [] {
    const h3::MailboxCalls calls = h3::mailbox_calls();
    return std::pair<std::uint64_t, std::uint64_t>{calls.wakes, calls.sleeps};
  });
  nb::class_<Mailbox>(m, "Mailbox")
      .def_static("create", [](Address address, std::size_t size_bytes, const GeometryTuple& tuple) {
        return Mailbox::create(at(address), size_bytes, geometry(tuple));
      })
      .def_static("attach", [](Address address, std::size_t size_bytes) {
        return Mailbox::attach(at(address), size_bytes);
      })
      .def_prop_ro("geometry", [](const Mailbox& mailbox) {
        const MailboxGeometry& g = mailbox.geometry();
        return GeometryTuple{g.entries, g.request_bytes, g.reply_bytes, g.callers, g.workers};
      })
      .def("register_caller", [](Mailbox& mailbox) {
        Member made{};
        const bool is_registered = mailbox.register_caller(made);
        return registered(is_registered, made);
      })
      .def("register_worker", [](Mailbox& mailbox) {
        Member made{};
        const bool is_registered = mailbox.register_worker(made);
        return registered(is_registered, made);
      })
      .def("bury_caller", [](Mailbox& mailbox, MemberTuple dead) { return tuple(mailbox.bury_caller(member(dead))); },
           Released())
      .def("bury_worker", [](Mailbox& mailbox, MemberTuple dead) { return tuple(mailbox.bury_worker(member(dead))); },
           Released())
      .def("is_caller", [](const Mailbox& mailbox, MemberTuple who) { return mailbox.is_caller(member(who)); })
      .def("is_worker", [](const Mailbox& mailbox, MemberTuple who) { return mailbox.is_worker(member(who)); })
      .def("depth", &Mailbox::depth, Released())
      .def("census", [](const Mailbox& mailbox) {
        const h3::MailboxCensus c = mailbox.census();
        return std::vector<std::uint32_t>{c.free, c.claimed, c.posted, c.taken, c.done, c.failed, c.abandoned};
      }, Released())
      .def("fault", &Mailbox::fault, Released());
  nb::class_<Caller>(m, "MailboxCaller")
      .def(nb::init<const Mailbox&, MemberTuple, std::uint64_t>())
      .def("post", &Caller::post)
      .def("wait", &Caller::wait)
      .def("cancel", &Caller::cancel, Released());
  nb::class_<Worker>(m, "MailboxWorker")
      .def(nb::init<const Mailbox&, MemberTuple, std::uint64_t>())
      .def("take", &Worker::take)
      .def("reply", &Worker::reply);
}
