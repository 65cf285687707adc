#include <algorithm>
#include <cstring>

#include "offload_job.hpp"

namespace h3 {

using namespace offload;

OffloadHelper::OffloadHelper(const JobBoard& board, const Mailbox& mailbox, Member member, std::uint32_t helper,
                             std::vector<MappedRange> ranges, std::uint64_t spin_ns)
    : board_(board),
      mailbox_(mailbox, member, spin_ns),
      helper_(helper),
      ranges_(std::move(ranges)),
      attend_(make_attend_help()),
      scan_(make_scan_help()) {}

OffloadHelper::~OffloadHelper() = default;

HelperCounts OffloadHelper::counts() const {
  return {jobs_, units_, refused_, late_, read_bytes_, busy_ns_, in_flight_, scans_};
}

MailboxResult OffloadHelper::serve(std::uint64_t deadline_ns, TracedHelp& traced) {
  for (;;) {
    const MailboxResult result = mailbox_.take(request_, deadline_ns);
    if (result != MailboxResult::kOk) return result;
    const std::uint64_t start = mailbox::now_ns();
    const std::uint64_t read_before = read_bytes_, refused_before = refused_;
    HelpRecord record{};
    const std::span<const char> bytes = request_.bytes.view();
    HelpReply reply{0, 0};
    if (bytes.size() == sizeof record) std::memcpy(&record, bytes.data(), sizeof record);
    if (bytes.size() != sizeof record || record.magic != kHelpMagic || record.version != kVersion ||
        record.place >= board_.jobs())
      ++refused_;
    else
      reply.units = help(board_.job(record.place), record.sequence);
    reply.is_refused = refused_ != refused_before;
    const std::uint64_t end = mailbox::now_ns();
    busy_ns_ += end - start;
    jobs_ += reply.units > 0;
    mailbox_.reply(request_, {reinterpret_cast<const char*>(&reply), sizeof reply});
    if (reply.units == 0 || std::all_of(record.trace, record.trace + kTraceBytes, [](char c) { return c == 0; })) continue;
    traced = {{}, start, end, reply.units, read_bytes_ - read_before};
    std::copy_n(record.trace, kTraceBytes, traced.trace);
    return MailboxResult::kOk;
  }
}

// Units that were computed in time.
std::uint32_t OffloadHelper::help(Job& job, std::uint64_t sequence) {
  // The job may be over by now, or be another one already: then nobody waits.
  if (sequence_of(job.claim.load(std::memory_order_acquire)) != sequence) return 0;
  const FieldWords fields = job.copied_fields();
  if (sequence_of(job.claim.load(std::memory_order_acquire)) != sequence) return 0;
  const auto head = fields_of<JobHead>(fields);
  Help* const help = help_with(head.kind);
  if (help == nullptr || !help->open(fields, job, board_.job_bytes())) {
    ++refused_;
    return 0;
  }
  std::uint32_t computed = 0;
  for (std::uint32_t unit; take_unit(job, {sequence, head.units}, unit);) {
    in_flight_ = 1;
    const bool is_done = compute(*help, job, sequence, unit);
    in_flight_ = 0;
    computed += is_done;
    if (head.kind == Kind::kScan) scans_ += is_done;
  }
  return computed;
}

Help* OffloadHelper::help_with(Kind kind) const {
  switch (kind) {
    case Kind::kAttend: return attend_.get();
    case Kind::kScan: return scan_.get();
  }
  return nullptr;
}

// A success says that the job is still the one whose fields were read.
bool OffloadHelper::take_unit(Job& job, Taken of, std::uint32_t& unit) const {
  std::uint64_t claim = job.claim.load(std::memory_order_acquire);
  while (sequence_of(claim) == of.sequence && next_of(claim) < of.units) {
    if (!job.claim.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
    unit = static_cast<std::uint32_t>(next_of(claim));
    std::uint64_t free = unit_word(of.sequence, 0, UnitState::kFree);
    if (job.word(unit).compare_exchange_strong(free, unit_word(of.sequence, helper_, UnitState::kClaimed))) return true;
    claim = job.claim.load(std::memory_order_acquire);
  }
  return false;
}

// Computes a unit in private memory, and hands it over unless it was taken away meanwhile.
bool OffloadHelper::compute(Help& help, Job& job, std::uint64_t sequence, std::uint32_t unit) {
  std::atomic<std::uint64_t>& word = job.word(unit);
  const std::uint64_t mine = unit_word(sequence, helper_, UnitState::kClaimed);
  const bool is_sound = help.read(job, unit, ranges_);
  if (is_sound) {
    const std::span<const float> result = help.compute();
    if (word.load(std::memory_order_acquire) == mine)
      std::copy(result.begin(), result.end(), reinterpret_cast<float*>(job.at(help.result_at(unit))));
  }
  std::uint64_t seen = mine;
  const UnitState end = is_sound ? UnitState::kDone : UnitState::kRefused;
  if (!word.compare_exchange_strong(seen, unit_word(sequence, helper_, end), std::memory_order_acq_rel)) {
    // From here on the caller may use the job for something else.
    word.store(unit_word(sequence, helper_, UnitState::kReleased), std::memory_order_release);
    ++late_;
    return false;
  }
  if (!is_sound) {
    ++refused_;
    return false;
  }
  ++units_;
  read_bytes_ += help.read_bytes();
  return true;
}

}  // namespace h3
