#include <algorithm>
#include <cstring>

#include "offload_job.hpp"

namespace h3 {

using namespace offload;

// What was copied from a job, and where sums are computed.
struct OffloadHelper::Taken {
  Fields fields;
  AttendArgs args;
  PartedView parted;
  std::vector<Page> pages;
  std::vector<float> sums;
  int head;
};

OffloadHelper::OffloadHelper(const JobBoard& board, const Mailbox& mailbox, Member member, std::uint32_t helper,
                             std::vector<MappedRange> ranges, std::uint64_t spin_ns)
    : board_(board),
      mailbox_(mailbox, member, spin_ns),
      helper_(helper),
      ranges_(std::move(ranges)),
      taken_(std::make_unique<Taken>()) {
  std::sort(ranges_.begin(), ranges_.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
}

OffloadHelper::~OffloadHelper() = default;

HelperCounts OffloadHelper::counts() const {
  return {jobs_, units_, refused_, late_, read_bytes_, busy_ns_, in_flight_};
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
  const bool is_sound = read_fields(job);
  if (sequence_of(job.claim.load(std::memory_order_acquire)) != sequence) return 0;
  if (!is_sound) {
    ++refused_;
    return 0;
  }
  std::uint32_t computed = 0;
  for (std::uint32_t unit; take_unit(job, sequence, unit);) {
    in_flight_ = 1;
    computed += compute(job, sequence, unit);
    in_flight_ = 0;
  }
  return computed;
}

bool OffloadHelper::read_fields(Job& job) {
  std::uint32_t words[kFieldWords];
  for (std::size_t i = 0; i < kFieldWords; ++i) words[i] = job.fields[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  Fields& f = taken_->fields;
  std::memcpy(&f, words, sizeof f);
  if (!JobShape::is_sound(f) || f.isa != static_cast<std::uint32_t>(isa_current())) return false;
  const JobShape shape(f);
  if (shape.end > board_.job_bytes()) return false;
  AttendArgs& a = taken_->args;
  a = AttendArgs{};
  a.q = shape.is_parted ? nullptr : job.at(shape.rows_at);
  a.q_dtype = static_cast<DType>(f.q_dtype);
  a.page_dtype = static_cast<DType>(f.page_dtype);
  a.encoding = static_cast<Encoding>(f.encoding);
  a.tokens = static_cast<int>(f.tokens);
  a.heads = static_cast<int>(f.heads);
  a.kv_heads = static_cast<int>(f.kv_heads);
  a.head_dim = static_cast<int>(f.head_dim);
  a.position = f.position;
  a.scale = f.scale;
  taken_->parted = {reinterpret_cast<const std::int8_t*>(job.at(shape.rows_at)),
                    reinterpret_cast<const float*>(job.at(shape.scales)),
                    reinterpret_cast<const float*>(job.at(shape.row_sums)),
                    reinterpret_cast<const float*>(job.at(shape.refined)),
                    reinterpret_cast<const int*>(job.at(shape.row_positions)),
                    shape.rows,
                    shape.parts_each};
  return true;
}

// A success says that the job is still the one whose fields were read.
bool OffloadHelper::take_unit(Job& job, std::uint64_t sequence, std::uint32_t& unit) const {
  const JobShape shape(taken_->fields);
  std::uint64_t claim = job.claim.load(std::memory_order_acquire);
  while (sequence_of(claim) == sequence && next_of(claim) < taken_->fields.units) {
    if (!job.claim.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
    unit = static_cast<std::uint32_t>(next_of(claim));
    std::uint64_t free = unit_word(sequence, 0, UnitState::kFree);
    if (shape.word(job, unit).compare_exchange_strong(free, unit_word(sequence, helper_, UnitState::kClaimed))) return true;
    claim = job.claim.load(std::memory_order_acquire);
  }
  return false;
}

bool OffloadHelper::is_mapped(std::uint64_t address, std::uint64_t size) const {
  const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                      [](std::uint64_t at, const MappedRange& range) { return at < range.begin; });
  if (after == ranges_.begin()) return false;
  const MappedRange& range = *std::prev(after);
  return address < range.end && size <= range.end - address;
}

bool OffloadHelper::is_page_sound(const Page& page) const {
  if (page.count < 0 || page.count > kPageTokens || page.first < 0) return false;
  if (page.count == 0) return true;
  const AttendArgs& a = taken_->args;
  const PageBytes bytes(a.encoding, a.page_dtype, a.head_dim);
  const auto is_there = [this](std::uint64_t address, std::uint64_t size) {
    return size == 0 || (address % 4 == 0 && is_mapped(address, size));
  };
  const bool has_residues = page.residues == 0 || is_there(page.residues, bytes.residues);
  const bool has_positions = page.positions == 0 || is_there(page.positions, 4u * static_cast<unsigned>(page.count));
  return is_there(page.keys, bytes.keys) && is_there(page.values, bytes.values) && is_there(page.nibbles, bytes.nibbles) &&
         is_there(page.scales, bytes.scales) && has_residues && has_positions;
}

// Copies a unit's page entries, so that what was checked is what is read.
bool OffloadHelper::read_pages(const Job& job, std::uint32_t unit) {
  const JobShape shape(taken_->fields);
  JobUnit found;
  std::memcpy(&found, job.at(shape.units + unit * sizeof found), sizeof found);
  if (found.head >= taken_->fields.kv_heads || found.count > taken_->fields.pages ||
      found.first > taken_->fields.pages - found.count)
    return false;
  taken_->head = static_cast<int>(found.head);
  taken_->pages.resize(found.count);
  std::memcpy(taken_->pages.data(), job.at(shape.pages + found.first * sizeof(Page)), found.count * sizeof(Page));
  return std::all_of(taken_->pages.begin(), taken_->pages.end(), [this](const Page& page) { return is_page_sound(page); });
}

// Computes a unit in private memory, and hands it over unless it was taken away meanwhile.
bool OffloadHelper::compute(Job& job, std::uint64_t sequence, std::uint32_t unit) {
  const JobShape shape(taken_->fields);
  const AttendArgs& a = taken_->args;
  std::atomic<std::uint64_t>& word = shape.word(job, unit);
  const std::uint64_t mine = unit_word(sequence, helper_, UnitState::kClaimed);
  const bool is_sound = read_pages(job, unit);
  if (is_sound) {
    taken_->sums.resize(static_cast<std::size_t>(shape.rows) * static_cast<std::size_t>(a.head_dim + 2));
    const Sums sums = packed_sums(taken_->sums.data(), shape.rows, a.head_dim);
    sums.clear(shape.rows, a.head_dim);
    const Unit whole{0, taken_->head, 0, shape.rows, {taken_->pages.data(), static_cast<int>(taken_->pages.size()), nullptr}};
    attend_unit(a, shape.is_parted ? &taken_->parted : nullptr, whole, sums);
    if (word.load(std::memory_order_acquire) == mine)
      std::copy(taken_->sums.begin(), taken_->sums.end(), shape.sums_of(job, unit));
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
  const PageBytes bytes(a.encoding, a.page_dtype, a.head_dim);
  for (const Page& page : taken_->pages) read_bytes_ += bytes.read(page);
  return true;
}

}  // namespace h3
