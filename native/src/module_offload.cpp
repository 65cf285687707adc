// Python face of attention and scans over processes. attention/offload.py has the typed wrappers.
#include "module_offload.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "h3/offload.hpp"
#include "mailbox_wait.hpp"
#include "module_attend.hpp"

namespace nb = nanobind;

namespace {

using h3::JobBoard;
using h3::Mailbox;
using h3::MailboxResult;
using Address = std::uint64_t;
using Released = nb::call_guard<nb::gil_scoped_release>;
using MemberTuple = std::pair<std::uint32_t, std::uint32_t>;
using RangeTuple = std::pair<std::uint64_t, std::uint64_t>;

// How long a helper keeps Python from looking for signals.
constexpr std::uint64_t kSliceNs = 100'000'000;

void* at(Address address) { return reinterpret_cast<void*>(address); }

h3::MappedRange range(const RangeTuple& tuple) { return {tuple.first, tuple.second}; }

using TraceContext = std::array<char, h3::kTraceBytes>;

// What is shorter ends in zeros.
TraceContext context_of(const nb::bytes& trace) {
  TraceContext context{};
  std::copy_n(trace.c_str(), std::min(trace.size(), context.size()), context.begin());
  return context;
}

class AttendCaller {
 public:
  AttendCaller(const JobBoard& board, const Mailbox& mailbox, MemberTuple member, RangeTuple shared)
      : caller_(board, mailbox, {member.first, member.second}, range(shared)) {}

  void attend(const nb::bytes& trace, const AttendTuple& tuple) {
    const TraceContext context = context_of(trace);
    const h3::AttendArgs args = attend_args(tuple);
    const nb::gil_scoped_release released;
    caller_.attend(args, context);
  }

  void attend_batch(const nb::bytes& trace, const BatchTuple& tuple) {
    const TraceContext context = context_of(trace);
    const h3::BatchArgs args = batch_args(tuple);
    const nb::gil_scoped_release released;
    // Several sequences have units enough for the threads here; handing out each one's apart pays where helpers have more.
    const auto helpers = static_cast<int>(caller_.helpers());
    if (helpers == 0 || (args.count > 1 && helpers <= args.threads)) return h3::attend_batch(args);
    for (const h3::AttendArgs& call : h3::BatchCalls(args).calls()) caller_.attend(call, context);
  }

  std::vector<std::uint64_t> counts() const { return listed(caller_.counts()); }
  std::vector<std::uint64_t> scan_counts() const { return listed(caller_.scan_counts()); }

  h3::OffloadScanner scanner(const nb::bytes& trace) {
    const TraceContext context = context_of(trace);
    return {caller_, context};
  }

  h3::OffloadCaller caller_;

 private:
  static std::vector<std::uint64_t> listed(const h3::OffloadCounts& c) {
    return {c.asked, c.shared, c.units, c.units_helped, c.units_revoked, c.units_refused, c.without_room};
  }
};

class AttendHelper {
 public:
  AttendHelper(const JobBoard& board, const Mailbox& mailbox, MemberTuple member, std::uint32_t helper,
         const std::vector<RangeTuple>& ranges, std::uint64_t spin_ns)
      : helper_(board, mailbox, {member.first, member.second}, helper, mapped(ranges), spin_ns) {}

  // Result, and what was done for a traced job: context, begin, end, units, bytes.
  nb::tuple serve(std::uint64_t deadline_ns) {
    for (;;) {
      const std::uint64_t until = std::min(deadline_ns, h3::mailbox::now_ns() + kSliceNs);
      h3::TracedHelp traced{};
      MailboxResult result;
      {
        const nb::gil_scoped_release released;
        result = helper_.serve(until, traced);
      }
      if (result == MailboxResult::kOk)
        return nb::make_tuple(static_cast<int>(result), nb::bytes(traced.trace, h3::kTraceBytes), traced.start_ns,
                              traced.end_ns, traced.units, traced.read_bytes);
      if (result != MailboxResult::kTimeout || until == deadline_ns)
        return nb::make_tuple(static_cast<int>(result), nb::none(), 0, 0, 0, 0);
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }

  std::uint64_t scans() const { return helper_.counts().scans; }

  std::vector<std::uint64_t> counts() const {
    const h3::HelperCounts c = helper_.counts();
    return {c.jobs, c.units, c.refused, c.late, c.read_bytes, c.busy_ns, c.in_flight};
  }

 private:
  static std::vector<h3::MappedRange> mapped(const std::vector<RangeTuple>& ranges) {
    std::vector<h3::MappedRange> all;
    for (const RangeTuple& each : ranges) all.push_back(range(each));
    return all;
  }

  h3::OffloadHelper helper_;
};

}  // namespace

void bind_offload(nb::module_& m) {
  m.attr("OFFLOAD_JOBS_MAX") = h3::kJobsMax;
  m.attr("OFFLOAD_HELPERS_MAX") = h3::kHelpersMax;
  m.def("job_board_bytes", &JobBoard::size_bytes);
  nb::class_<JobBoard>(m, "JobBoard")
      .def_static("open", [](Address address, std::size_t size_bytes, std::uint32_t jobs, std::size_t job_bytes) {
        return JobBoard::open(at(address), size_bytes, jobs, job_bytes);
      })
      .def_static("attach", [](Address address, std::size_t size_bytes) { return JobBoard::attach(at(address), size_bytes); })
      .def_prop_ro("jobs", &JobBoard::jobs)
      .def_prop_ro("job_bytes", &JobBoard::job_bytes)
      .def("next_helper", &JobBoard::next_helper);
  nb::class_<h3::OffloadScanner>(m, "OffloadScanner");
  nb::class_<AttendCaller>(m, "OffloadCaller")
      .def(nb::init<const JobBoard&, const Mailbox&, MemberTuple, RangeTuple>())
      .def("attend", &AttendCaller::attend)
      .def("attend_batch", &AttendCaller::attend_batch)
      .def("join", [](AttendCaller& caller, std::uint32_t helper) { caller.caller_.join(helper); }, Released())
      .def("bury", [](AttendCaller& caller, std::uint32_t helper) { caller.caller_.bury(helper); }, Released())
      .def("bury_earlier", [](AttendCaller& caller) { caller.caller_.bury_earlier(); }, Released())
      .def("counts", &AttendCaller::counts, Released())
      .def("scan_counts", &AttendCaller::scan_counts, Released())
      .def("scanner", &AttendCaller::scanner, nb::keep_alive<0, 1>())
      .def("helpers", [](const AttendCaller& caller) { return caller.caller_.helpers(); }, Released())
      .def("quarantined", [](AttendCaller& caller) { return caller.caller_.quarantined(); }, Released());
  nb::class_<AttendHelper>(m, "OffloadHelper")
      .def(nb::init<const JobBoard&, const Mailbox&, MemberTuple, std::uint32_t, const std::vector<RangeTuple>&,
                    std::uint64_t>())
      .def("serve", &AttendHelper::serve)
      .def("counts", &AttendHelper::counts, Released())
      .def("scans", &AttendHelper::scans);
}
