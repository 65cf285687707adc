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

void put(Job& job, std::size_t offset, const void* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(job.at(offset), source, bytes);
}

}  // namespace

struct OffloadCaller::Shared {
  explicit Shared(const AttendPlan& plan) : plan(plan) {}

  const AttendPlan& plan;
  std::uint32_t place = 0;
  std::uint64_t sequence = 0;
  std::size_t sums_at = 0, sums_each = 0;
  std::atomic<std::uint64_t>* words = nullptr;
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
  Fields fields;
  std::memcpy(&fields, job.fields, sizeof fields);
  if (!JobShape::is_sound(fields) || JobShape(fields).end > board_.job_bytes()) return;
  const JobShape shape(fields);
  for (std::uint32_t unit = 0; unit < fields.units; ++unit) {
    std::atomic<std::uint64_t>& word = shape.word(job, unit);
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
  return counts_;
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

// Looks which late helpers have let go. Helper 0 stands for all of earlier callers.
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

void OffloadCaller::attend(const AttendArgs& args, Trace trace) {
  const AttendPlan plan(args);
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) ++counts_.attentions;
  if (!lock.owns_lock() || !share(plan, trace))
    parallel(plan.units(), args.threads, plan.cut().blocks > 1 ? Share::kOne : Share::kGuided,
             [&](int begin, int end) { plan.compute(begin, end); });
  plan.finish();
}

bool OffloadCaller::is_shareable(const AttendPlan& plan, const Unit& unit) const {
  if (plan.is_continued(unit)) return false;
  const auto is_here = [this](std::uint64_t address) { return address >= shared_.begin && address < shared_.end; };
  for (const Page* page = unit.run.pages; page != unit.run.pages + unit.run.count; ++page)
    if (page->count != 0 && !is_here(page->values)) return false;
  return true;
}

// Whether all units were computed, with helpers or in spite of them.
bool OffloadCaller::share(const AttendPlan& plan, Trace trace) {
  if (!has_few_rows(plan.cut()) || plan.cut().parts == 1 || helpers_.empty()) return false;
  release_places();
  if (active() == 0) return false;
  own_.clear();
  offered_.clear();
  for (int i = 0; i < plan.units(); ++i)
    (is_shareable(plan, plan.unit(i)) ? offered_ : own_).push_back(static_cast<std::uint32_t>(i));
  Shared shared(plan);
  if (offered_.size() < 2 || !open_job(shared)) return false;
  ++counts_.shared;
  counts_.units += static_cast<std::uint64_t>(plan.units());
  post(shared, trace);
  work(shared);
  collect(shared);
  // Before the job changes again: who looks for a unit finds none.
  shared.job->claim.store(shared.sequence << 24 | kClosed, std::memory_order_release);
  for (const std::uint64_t ticket : tickets_) mailbox_.cancel(ticket);
  return true;
}

bool OffloadCaller::open_job(Shared& shared) {
  const AttendPlan& plan = shared.plan;
  const AttendArgs& a = plan.args();
  std::uint32_t pages = 0, positions = 0;
  for (const std::uint32_t index : offered_) {
    const Unit unit = plan.unit(static_cast<int>(index));
    pages += static_cast<std::uint32_t>(unit.run.count);
    for (int p = 0; p < unit.run.count; ++p) positions += unit.run.pages[p].positions != 0;
  }
  const auto free = std::find_if(places_.begin(), places_.end(), [](const Place& place) { return place.late.empty(); });
  const Fields fields{static_cast<std::uint32_t>(isa_current()),
                      static_cast<std::uint32_t>(a.q_dtype),
                      static_cast<std::uint32_t>(a.page_dtype),
                      static_cast<std::uint32_t>(a.encoding),
                      static_cast<std::uint32_t>(a.tokens),
                      static_cast<std::uint32_t>(a.heads),
                      static_cast<std::uint32_t>(a.kv_heads),
                      static_cast<std::uint32_t>(a.head_dim),
                      a.position,
                      a.scale,
                      static_cast<std::uint32_t>(offered_.size()),
                      pages,
                      positions};
  if (free == places_.end() || !JobShape::is_sound(fields) || JobShape(fields).end > board_.job_bytes()) {
    ++counts_.without_room;
    return false;
  }
  const JobShape shape(fields);
  shared.place = static_cast<std::uint32_t>(free - places_.begin());
  shared.sequence = free->sequence = (free->sequence + 1) & kSequenceMask;
  shared.job = &board_.job(shared.place);
  shared.words = &shape.word(*shared.job, 0);
  shared.sums_at = shape.sums;
  shared.sums_each = shape.sums_each;
  Job& job = *shared.job;
  job.claim.store(shared.sequence << 24 | kClosed, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::uint32_t words[kFieldWords];
  std::memcpy(words, &fields, sizeof fields);
  for (std::size_t i = 0; i < kFieldWords; ++i) job.fields[i].store(words[i], std::memory_order_relaxed);
  if (shape.is_parted) {
    const PartedView rows = plan.parted()->view();
    const std::size_t count = std::size_t{fields.kv_heads} * static_cast<std::size_t>(rows.rows);
    put(job, shape.rows_at, rows.parts, count * static_cast<std::size_t>(rows.parts_each) * fields.head_dim);
    put(job, shape.scales, rows.scales, count * sizeof(float));
    put(job, shape.row_sums, rows.sums, count * sizeof(float));
    put(job, shape.refined, rows.refined_from, count * sizeof(float));
    put(job, shape.row_positions, rows.positions, static_cast<std::size_t>(rows.rows) * sizeof(int));
  } else {
    put(job, shape.rows_at, a.q,
        std::size_t{fields.tokens} * fields.heads * fields.head_dim * static_cast<std::size_t>(size_bytes(a.q_dtype)));
  }
  auto* page = reinterpret_cast<Page*>(job.at(shape.pages));
  auto* position = reinterpret_cast<std::int32_t*>(job.at(shape.positions));
  auto* unit_at = reinterpret_cast<JobUnit*>(job.at(shape.units));
  std::uint32_t first = 0;
  for (std::uint32_t i = 0; i < fields.units; ++i) {
    const Unit unit = plan.unit(static_cast<int>(offered_[i]));
    unit_at[i] = {static_cast<std::uint32_t>(unit.head), first, static_cast<std::uint32_t>(unit.run.count), 0};
    first += unit_at[i].count;
    for (const Page* source = unit.run.pages; source != unit.run.pages + unit.run.count; ++source, ++page) {
      *page = *source;
      if (source->positions == 0) continue;
      std::copy_n(reinterpret_cast<const std::int32_t*>(source->positions), source->count, position);
      page->positions = reinterpret_cast<std::uint64_t>(position);
      position += kPageTokens;
    }
    shared.words[i].store(unit_word(shared.sequence, 0, UnitState::kFree), std::memory_order_relaxed);
  }
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
  const AttendPlan& plan = shared.plan;
  const int threads = std::max(plan.args().threads, 1);
  const std::uint64_t sharers = static_cast<std::uint64_t>(threads) + tickets_.size();
  const std::uint64_t offered = offered_.size();
  is_mine_.assign(offered, 0);
  std::atomic<std::uint64_t> done{0};
  const std::uint64_t start = mailbox::now_ns();
  parallel(threads, threads, Share::kOne, [&](int, int) {
    for (std::uint32_t i; (i = shared.next_own.fetch_add(1)) < own_.size(); ++done)
      plan.compute_one(static_cast<int>(own_[i]), static_cast<int>(own_[std::min<std::size_t>(i + 1, own_.size() - 1)]));
    std::uint64_t claim = shared.job->claim.load(std::memory_order_acquire);
    while (next_of(claim) < offered) {
      const std::uint64_t first = next_of(claim);
      const std::uint64_t taken = std::max<std::uint64_t>(1, (offered - first) / (2 * sharers));
      if (!shared.job->claim.compare_exchange_weak(claim, claim + taken, std::memory_order_acq_rel)) continue;
      for (std::uint64_t i = first; i < first + taken; ++i) {
        plan.compute_one(static_cast<int>(offered_[i]), static_cast<int>(offered_[std::min(i + 1, first + taken - 1)]));
        is_mine_[i] = 1;
      }
      done += taken;
      claim = shared.job->claim.load(std::memory_order_acquire);
    }
  });
  if (done > 0) unit_ns_ = (mailbox::now_ns() - start) * static_cast<std::uint64_t>(threads) / done;
}

// Fetches the sums of helpers. What they do not have ready after a bound is computed here.
void OffloadCaller::collect(Shared& shared) {
  const AttendPlan& plan = shared.plan;
  pending_.clear();
  for (std::uint32_t i = 0; i < offered_.size(); ++i)
    if (is_mine_[i] == 0) pending_.push_back(i);
  const std::uint64_t unit_ns = unit_ns_ == 0 ? kUnknownUnitNs : unit_ns_;
  const std::uint64_t deadline = mailbox::now_ns() + kPatienceNs + kPatienceUnits * unit_ns;
  for (int looks = 0; !pending_.empty(); ++looks) {
    const bool is_late = looks > kLooksBeforeYield && mailbox::now_ns() > deadline;
    std::erase_if(pending_, [&](std::uint32_t i) {
      const UnitState state = state_of(shared.words[i].load(std::memory_order_acquire));
      const Unit unit = plan.unit(static_cast<int>(offered_[i]));
      if (state == UnitState::kDone) {
        auto* const base = reinterpret_cast<float*>(shared.job->at(shared.sums_at + i * shared.sums_each));
        const Sums from = packed_sums(base, unit.rows, plan.args().head_dim);
        const Sums to = plan.sums(unit);
        std::copy_n(from.out, unit.rows * plan.args().head_dim, to.out);
        std::copy_n(from.maximum, unit.rows, to.maximum);
        std::copy_n(from.sum, unit.rows, to.sum);
        ++counts_.units_helped;
        return true;
      }
      if (state == UnitState::kRefused) ++counts_.units_refused;
      else if (is_late) revoke(shared, i);
      else return false;
      if (state_of(shared.words[i].load(std::memory_order_acquire)) == UnitState::kDone) return false;
      plan.compute_one(static_cast<int>(offered_[i]), static_cast<int>(offered_[i]));
      return true;
    });
    if (looks < kLooksBeforeYield) mailbox::pause();
    else std::this_thread::yield();
  }
}

// Takes a unit away from whoever has it, unless it was done just now.
void OffloadCaller::revoke(Shared& shared, std::uint32_t unit) {
  std::uint64_t seen = shared.words[unit].load(std::memory_order_acquire);
  while (state_of(seen) == UnitState::kFree || state_of(seen) == UnitState::kClaimed) {
    const std::uint32_t helper = helper_of(seen);
    const std::uint64_t revoked = unit_word(shared.sequence, helper, UnitState::kRevoked);
    if (!shared.words[unit].compare_exchange_weak(seen, revoked, std::memory_order_acq_rel)) continue;
    ++counts_.units_revoked;
    if (helper == 0) return;  // it had not begun, and finds the unit taken
    places_[shared.place].late.push_back(
        {&shared.words[unit], unit_word(shared.sequence, helper, UnitState::kReleased), helper});
    const auto found = helpers_.find(helper);
    if (found != helpers_.end()) ++found->second;
    return;
  }
}

}  // namespace h3
