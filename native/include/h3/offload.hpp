// Attention of a few rows, and the search of their index, spread over other processes, with the numbers that they have in
// one.
//
//   caller                      job (shared memory)                          worker
//   writes the job        -->   [ rows | units | places | ... ]
//   "help with job J"     ----------------- mailbox ---------------------->  takes a unit, computes it in its own memory
//   takes units itself    -->   unit: FREE -> CLAIMED(helper) -> DONE   <--  copies numbers in while the claim is its own
//   merges, closes J                              |
//                               REVOKED(helper) <-+ the caller waited long enough and computes the unit itself
//                                     |
//                                  RELEASED: the helper has noticed; or it was buried
//
//   kind         unit                                 result
//   attention    (part of the tokens, KV head)        sums of its pages, which the caller merges in the order of positions
//   scan         run of indexed segments, all heads   log-sum-exps of their clusters, from which the caller chooses
//
// A unit is computed from copies of the query rows and of addresses in the job, by the kernel that a single process uses;
// units are cut by shapes alone. The caller alone puts results together. So it does not matter who computed what, and
// when.
//
// A job whose unit was revoked is not written to again until its helper released the unit or was buried: a helper that
// was stopped may still write there.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "h3/attend.hpp"
#include "h3/mailbox.hpp"
#include "h3/retrieve.hpp"

namespace h3 {

namespace offload {
class Help;
class Work;
enum class Kind : std::uint32_t;
struct Job;
}  // namespace offload

constexpr std::uint32_t kJobsMax = 64;
constexpr std::uint32_t kHelpersMax = 1u << 20;  // numbers of helpers: one for each that ever joined
constexpr std::size_t kTraceBytes = 24;

using Trace = std::span<const char, kTraceBytes>;

// Room for jobs, each in a place of its own, through this process's mapping of it.
//
//   0        64     64 + job_bytes
//   +--------+------+------+----
//   | header | job  | job  | ...
//   +--------+------+------+----
class JobBoard {
 public:
  // Makes a board in memory that is zero, or takes up the one that an earlier caller left there. Throws
  // std::invalid_argument: bad numbers, memory that is too small or not at a multiple of 64 bytes, or holds something
  // else.
  static JobBoard open(void* memory, std::size_t size_bytes, std::uint32_t jobs, std::size_t job_bytes);
  // Throws std::invalid_argument: no board lies there, or one of another version.
  static JobBoard attach(void* memory, std::size_t size_bytes);
  // 0 where the numbers are not valid: jobs from 1 to kJobsMax, job_bytes a multiple of 64 up to 1 GiB.
  static std::size_t size_bytes(std::uint32_t jobs, std::size_t job_bytes);

  std::uint32_t jobs() const { return jobs_; }
  std::size_t job_bytes() const { return job_bytes_; }
  offload::Job& job(std::uint32_t place) const;  // precondition: place < jobs()
  // A number that no other helper has had on this board.
  std::uint32_t next_helper() const;

 private:
  JobBoard(char* memory, std::uint32_t jobs, std::size_t job_bytes) : memory_(memory), jobs_(jobs), job_bytes_(job_bytes) {}

  char* memory_;
  std::uint32_t jobs_;
  std::size_t job_bytes_;
};

// Memory that a process has mapped, and in which alone a job may point.
struct MappedRange {
  std::uint64_t begin;
  std::uint64_t end;

  bool holds(std::uint64_t address) const { return address >= begin && address < end; }
};

// Some that do not overlap.
class MappedRanges {
 public:
  explicit MappedRanges(std::vector<MappedRange> ranges);

  // Whether so many bytes from an address lie in one of them.
  bool holds(std::uint64_t address, std::uint64_t size) const;

 private:
  std::vector<MappedRange> ranges_;  // by address
};

// Of one caller and one kind of work, since it began.
struct OffloadCounts {
  std::uint64_t asked;           // attentions or scans that it was asked for
  std::uint64_t shared;          // those of which helpers could take a part
  std::uint64_t units;           // of the shared ones
  std::uint64_t units_helped;    // computed by helpers
  std::uint64_t units_revoked;   // taken away from a helper that was too slow
  std::uint64_t units_refused;   // handed back by a helper
  std::uint64_t without_room;    // done alone: too large, or no place for a job was free
};

// The process that owns the sequences. All functions may be called from any thread; of several attentions and scans at
// once, one is shared.
class OffloadCaller {
 public:
  // Pages and planes in `shared` can be read by helpers. Jobs that helpers of an earlier caller still hold are left alone. Throws
  // std::invalid_argument: the mailbox has no such member.
  OffloadCaller(const JobBoard& board, const Mailbox& mailbox, Member member, MappedRange shared);

  // A helper takes work from now on.
  void join(std::uint32_t helper);
  // It is dead, or has gone for good: none of its writes is still to come.
  void bury(std::uint32_t helper);
  // The same for all helpers of earlier callers.
  void bury_earlier();

  // As attend(), and equal to it bit for bit.
  void attend(const AttendArgs& args, Trace trace);
  // As Scanner::scan().
  bool scan(const RetrieveArgs& args, const Queries& queries, Trace trace);

  OffloadCounts counts() const;       // of attention
  OffloadCounts scan_counts() const;
  std::uint32_t helpers() const;      // that joined and are not buried
  std::uint32_t quarantined();        // jobs that wait for a late helper

 private:
  struct Late {
    std::atomic<std::uint64_t>* word;
    std::uint64_t released;  // what it will be
    std::uint32_t helper;    // 0: of an earlier caller
  };
  struct Place {
    std::uint64_t sequence = 0;
    std::vector<Late> late;
  };
  struct Tally {
    OffloadCounts counts{};
    std::uint64_t unit_ns = 0;  // what a unit took here of late
  };
  // The work that is shared now.
  struct Shared;

  void hold_earlier(std::uint32_t place);
  void release_places();
  std::uint32_t active() const;
  bool share(offload::Work& work, Tally& tally, Trace trace);
  bool open_job(Shared& shared);
  void post(const Shared& shared, Trace trace);
  void work(Shared& shared);
  void collect(Shared& shared);
  void revoke(Shared& shared, std::uint32_t unit);

  JobBoard board_;
  MailboxCaller mailbox_;
  MappedRange shared_;
  mutable std::mutex mutex_;
  std::vector<Place> places_;
  std::map<std::uint32_t, std::uint32_t> helpers_;  // how many units of each are late
  bool are_earlier_gone_ = false;
  std::vector<std::uint32_t> own_, offered_, pending_;  // indices of units; of offered units
  std::vector<std::uint8_t> is_mine_;                   // of offered units: computed here
  std::vector<std::uint64_t> tickets_;
  Tally attending_, scanning_;
};

// A caller as what a retrieval hands its scans to. The caller outlives it.
class OffloadScanner final : public Scanner {
 public:
  OffloadScanner(OffloadCaller& caller, Trace trace) : caller_(caller) { std::copy_n(trace.data(), kTraceBytes, trace_); }

  bool scan(const RetrieveArgs& args, const Queries& queries) override { return caller_.scan(args, queries, trace_); }

 private:
  OffloadCaller& caller_;
  char trace_[kTraceBytes];
};

struct HelperCounts {
  std::uint64_t jobs, units, refused, late, read_bytes, busy_ns;
  std::uint32_t in_flight;  // units
  std::uint64_t scans;      // units of scans, among `units`
};

// What a helper did for a job that is traced.
struct TracedHelp {
  char trace[kTraceBytes];
  std::uint64_t start_ns, end_ns;  // monotonic
  std::uint32_t units;
  std::uint64_t read_bytes;
};

// A helper: one thread of a worker process. `counts` may be called from any thread.
class OffloadHelper {
 public:
  // `ranges` do not overlap. Throws std::invalid_argument: the board or the member.
  OffloadHelper(const JobBoard& board, const Mailbox& mailbox, Member member, std::uint32_t helper,
                std::vector<MappedRange> ranges, std::uint64_t spin_ns);
  ~OffloadHelper();

  // Helps until the deadline: kTimeout; or until it has helped with a job that is traced: kOk; or kBuried.
  MailboxResult serve(std::uint64_t deadline_ns, TracedHelp& traced);
  HelperCounts counts() const;

 private:
  // The job that is helped with.
  struct Taken {
    std::uint64_t sequence;
    std::uint32_t units;
  };

  std::uint32_t help(offload::Job& job, std::uint64_t sequence);
  offload::Help* help_with(offload::Kind kind) const;
  bool take_unit(offload::Job& job, Taken of, std::uint32_t& unit) const;
  bool compute(offload::Help& help, offload::Job& job, std::uint64_t sequence, std::uint32_t unit);

  JobBoard board_;
  MailboxWorker mailbox_;
  std::uint32_t helper_;
  MappedRanges ranges_;
  std::unique_ptr<offload::Help> attend_, scan_;
  MailboxRequest request_{};
  std::atomic<std::uint64_t> jobs_{0}, units_{0}, refused_{0}, late_{0}, read_bytes_{0}, busy_ns_{0}, scans_{0};
  std::atomic<std::uint32_t> in_flight_{0};
};

}  // namespace h3
