#include <algorithm>
#include <thread>

#include "h3/pool.hpp"
#include "offload_job.hpp"

namespace h3 {

using namespace offload;

namespace {

// What is waited for a helper, in times that a unit takes here: it has one at most, so that it is ready sooner or not at
// work. Waiting longer would cost more than to compute the unit.
constexpr std::uint64_t kPatienceUnits = 4;
constexpr std::uint64_t kPatienceNs = 20'000;
constexpr std::uint64_t kUnknownUnitNs = 50'000;
constexpr int kLooksBeforeYield = 200;

}  // namespace

struct OffloadCaller::Shared {
  Shared(Work& work, Tally& tally) : work(work), tally(tally) {}

  Work& work;
  Tally& tally;
  std::uint32_t place = 0;
  std::uint64_t sequence = 0;
  Job* job = nullptr;
  std::atomic<std::uint32_t> next_own{0};
};

OffloadCaller::OffloadCaller(const JobBoard& board, const Mailbox& mailbox, Member member, MappedRange shared)
    : board_(board), mailbox_(mailbox, member), shared_(shared), places_(board.jobs()) {
  for (std::uint32_t place = 0; place < board.jobs(); ++place) hold_earlier(place);
}

// Takes units away from whoever helped an earlier caller.
void OffloadCaller::hold_earlier(std::uint32_t place) {
  Job& job = board_.job(place);
  places_[place].sequence = sequence_of(job.claim.load());
  if (places_[place].sequence == 0) return;
  job.claim.store(places_[place].sequence << 24 | kClosed);
  const auto head = fields_of<JobHead>(job.copied_fields());
  if (!head.is_sound() || JobLayout(head.units).end() > board_.job_bytes()) return;
  for (std::uint32_t unit = 0; unit < head.units; ++unit) {
    std::atomic<std::uint64_t>& word = job.word(unit);
    std::uint64_t seen = word.load();
    if (state_of(seen) == UnitState::kFree || state_of(seen) == UnitState::kClaimed)
      word.compare_exchange_strong(seen, unit_word(sequence_of(seen), helper_of(seen), UnitState::kRevoked));
    seen = word.load();
    if (state_of(seen) == UnitState::kRevoked && helper_of(seen) != 0)
      places_[place].late.push_back({&word, unit_word(sequence_of(seen), helper_of(seen), UnitState::kReleased), 0});
  }
}

void OffloadCaller::join(std::uint32_t helper) {
  const std::lock_guard<std::mutex> lock(mutex_);
  helpers_.emplace(helper, 0);
}

void OffloadCaller::bury(std::uint32_t helper) {
  const std::lock_guard<std::mutex> lock(mutex_);
  helpers_.erase(helper);
  release_places();
}

void OffloadCaller::bury_earlier() {
  const std::lock_guard<std::mutex> lock(mutex_);
  are_earlier_gone_ = true;
  release_places();
}

OffloadCounts OffloadCaller::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return attending_.counts;
}

OffloadCounts OffloadCaller::scan_counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return scanning_.counts;
}

std::uint32_t OffloadCaller::helpers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<std::uint32_t>(helpers_.size());
}

std::uint32_t OffloadCaller::quarantined() {
  const std::lock_guard<std::mutex> lock(mutex_);
  release_places();
  return static_cast<std::uint32_t>(
      std::count_if(places_.begin(), places_.end(), [](const Place& place) { return !place.late.empty(); }));
}

// Looks which late helpers have let go. Helper 0 stands for each of earlier callers.
void OffloadCaller::release_places() {
  for (Place& place : places_) {
    std::erase_if(place.late, [this](const Late& late) {
      const auto found = helpers_.find(late.helper);
      const bool is_gone = late.helper == 0 ? are_earlier_gone_ : found == helpers_.end();
      if (!is_gone && late.word->load(std::memory_order_acquire) != late.released) return false;
      if (found != helpers_.end()) --found->second;
      return true;
    });
  }
}

std::uint32_t OffloadCaller::active() const {
  return static_cast<std::uint32_t>(
      std::count_if(helpers_.begin(), helpers_.end(), [](const auto& helper) { return helper.second == 0; }));
}

// Whether all units were computed, with helpers or in spite of them.
bool OffloadCaller::share(Work& work, Tally& tally, Trace trace) {
  if (helpers_.empty()) return false;
  release_places();
  if (active() == 0) return false;
  own_.clear();
  offered_.clear();
  for (std::uint32_t i = 0; i < work.units(); ++i) (work.is_shareable(i, shared_) ? offered_ : own_).push_back(i);
  Shared shared(work, tally);
  if (offered_.size() < 2 || !open_job(shared)) return false;
  ++tally.counts.shared;
  tally.counts.units += work.units();
  post(shared, trace);
  this->work(shared);
  collect(shared);
  // Before the job changes again: who looks for a unit finds none.
  shared.job->claim.store(shared.sequence << 24 | kClosed, std::memory_order_release);
  for (const std::uint64_t ticket : tickets_) mailbox_.cancel(ticket);
  return true;
}

bool OffloadCaller::open_job(Shared& shared) {
  const auto free = std::find_if(places_.begin(), places_.end(), [](const Place& place) { return place.late.empty(); });
  const std::size_t size = free == places_.end() ? 0 : shared.work.lay_out(offered_);
  if (size == 0 || size > board_.job_bytes()) {
    ++shared.tally.counts.without_room;
    return false;
  }
  shared.place = static_cast<std::uint32_t>(free - places_.begin());
  shared.sequence = free->sequence = (free->sequence + 1) & kSequenceMask;
  shared.job = &board_.job(shared.place);
  Job& job = *shared.job;
  job.claim.store(shared.sequence << 24 | kClosed, std::memory_order_relaxed);
  shared.work.write(job);
  for (std::uint32_t i = 0; i < offered_.size(); ++i)
    job.word(i).store(unit_word(shared.sequence, 0, UnitState::kFree), std::memory_order_relaxed);
  job.claim.store(shared.sequence << 24, std::memory_order_release);
  return true;
}

// One record for each helper, as far as there are units for it. Without an entry left for them, all is done here.
void OffloadCaller::post(const Shared& shared, Trace trace) {
  HelpRecord record{kHelpMagic, kVersion, shared.place, 0, shared.sequence, {}};
  std::copy(trace.begin(), trace.end(), record.trace);
  const std::span<const char> bytes(reinterpret_cast<const char*>(&record), sizeof record);
  const std::vector<std::span<const char>> records(std::min<std::size_t>(active(), offered_.size() - 1), bytes);
  tickets_.clear();
  mailbox_.post(records, ~std::uint64_t{0} >> 1, tickets_);
}

// Units that no helper can reach first, then what helpers have left.
void OffloadCaller::work(Shared& shared) {
  const Work& work = shared.work;
  const int threads = std::max(work.threads(), 1);
  const std::uint64_t sharers = static_cast<std::uint64_t>(threads) + tickets_.size();
  const std::uint64_t offered = offered_.size();
  is_mine_.assign(offered, 0);
  std::atomic<std::uint64_t> done{0};
  const std::uint64_t start = mailbox::now_ns();
  parallel(threads, threads, Share::kOne, [&](int, int) {
    for (std::uint32_t i; (i = shared.next_own.fetch_add(1)) < own_.size(); ++done)
      work.compute(own_[i], own_[std::min<std::size_t>(i + 1, own_.size() - 1)]);
    std::uint64_t claim = shared.job->claim.load(std::memory_order_acquire);
    while (next_of(claim) < offered) {
      const std::uint64_t first = next_of(claim);
      const std::uint64_t taken = std::max<std::uint64_t>(1, (offered - first) / (2 * sharers));
      if (!shared.job->claim.compare_exchange_weak(claim, claim + taken, std::memory_order_acq_rel)) continue;
      for (std::uint64_t i = first; i < first + taken; ++i) {
        work.compute(offered_[i], offered_[std::min(i + 1, first + taken - 1)]);
        is_mine_[i] = 1;
      }
      done += taken;
      claim = shared.job->claim.load(std::memory_order_acquire);
    }
  });
  if (done > 0) shared.tally.unit_ns = (mailbox::now_ns() - start) * static_cast<std::uint64_t>(threads) / done;
}

// Fetches the results of helpers. What they do not have ready after a bound is computed here.
void OffloadCaller::collect(Shared& shared) {
  OffloadCounts& counts = shared.tally.counts;
  pending_.clear();
  for (std::uint32_t i = 0; i < offered_.size(); ++i)
    if (is_mine_[i] == 0) pending_.push_back(i);
  const std::uint64_t unit_ns = shared.tally.unit_ns == 0 ? kUnknownUnitNs : shared.tally.unit_ns;
  const std::uint64_t deadline = mailbox::now_ns() + kPatienceNs + kPatienceUnits * unit_ns;
  for (int looks = 0; !pending_.empty(); ++looks) {
    const bool is_late = looks > kLooksBeforeYield && mailbox::now_ns() > deadline;
    std::erase_if(pending_, [&](std::uint32_t i) {
      const UnitState state = state_of(shared.job->word(i).load(std::memory_order_acquire));
      if (state == UnitState::kDone) {
        shared.work.fetch(*shared.job, i);
        ++counts.units_helped;
        return true;
      }
      if (state == UnitState::kRefused) ++counts.units_refused;
      else if (is_late) revoke(shared, i);
      else return false;
      if (state_of(shared.job->word(i).load(std::memory_order_acquire)) == UnitState::kDone) return false;
      shared.work.compute(offered_[i], offered_[i]);
      return true;
    });
    if (looks < kLooksBeforeYield) mailbox::pause();
    else std::this_thread::yield();
  }
}

// Takes a unit away from whoever has it, unless it was done just now.
void OffloadCaller::revoke(Shared& shared, std::uint32_t unit) {
  std::atomic<std::uint64_t>& word = shared.job->word(unit);
  std::uint64_t seen = word.load(std::memory_order_acquire);
  while (state_of(seen) == UnitState::kFree || state_of(seen) == UnitState::kClaimed) {
    const std::uint32_t helper = helper_of(seen);
    const std::uint64_t revoked = unit_word(shared.sequence, helper, UnitState::kRevoked);
    if (!word.compare_exchange_weak(seen, revoked, std::memory_order_acq_rel)) continue;
    ++shared.tally.counts.units_revoked;
    if (helper == 0) return;  // it had not begun, and finds the unit taken
    const auto found = helpers_.find(helper);
    const bool is_ours = found != helpers_.end();
    if (is_ours) ++found->second;
    // One that never joined here helped an earlier caller, and may live on: nobody but its lock tells.
    const std::uint64_t released = unit_word(shared.sequence, helper, UnitState::kReleased);
    places_[shared.place].late.push_back({&word, released, is_ours ? helper : 0});
    return;
  }
}

}  // namespace h3
