// Attention and scans spread over helping threads, in memory of exactly its size: the numbers are those of one process,
// helpers come and go between two calls, and refuse what they have not mapped. The Python tests kill real processes.
#include "offload.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "h3/dispatch.hpp"
#include "h3/offload.hpp"
#include "h3/retrieve.hpp"
#include "offload_job.hpp"

namespace {

using h3::JobBoard;
using h3::Mailbox;
using h3::MailboxResult;
using h3::MappedRange;
using h3::Member;
using h3::offload::fields_of;
using h3::offload::Job;
using h3::offload::JobHead;
using h3::offload::next_of;
using h3::offload::sequence_of;
using h3::offload::unit_word;
using h3::offload::UnitState;

constexpr h3::MailboxGeometry kGeometry{16, 48, 8, 2, 4};
constexpr std::uint32_t kJobs = 2;
constexpr std::size_t kJobBytes = 256 << 10;
constexpr MappedRange kEverything{1, std::uint64_t{1} << 62};
constexpr int kKvHeads = 2, kGroup = 3, kHeadDim = 64, kPages = 40;
constexpr int kRoundsMax = 20'000;
constexpr char kUntraced[h3::kTraceBytes] = {};

using Memory = std::unique_ptr<char[], decltype(&std::free)>;

Memory room(std::size_t size) {
  Memory memory(static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64)), &std::free);
  std::memset(memory.get(), 0, size);
  return memory;
}

// A caller, and helpers on threads.
class Crew {
 public:
  Crew()
      : mailbox_room_(room(kGeometry.size_bytes())),
        board_room_(room(JobBoard::size_bytes(kJobs, kJobBytes))),
        mailbox_(Mailbox::create(mailbox_room_.get(), kGeometry.size_bytes(), kGeometry)),
        board_(JobBoard::open(board_room_.get(), JobBoard::size_bytes(kJobs, kJobBytes), kJobs, kJobBytes)) {
    mailbox_.register_caller(member_);
    caller_ = std::make_unique<h3::OffloadCaller>(board_, mailbox_, member_, kEverything);
  }
  ~Crew() { mailbox_.bury_caller(member_); }

  h3::OffloadCaller& caller() { return *caller_; }
  Job& job() const { return board_.job(0); }
  std::uint32_t next_helper() const { return board_.next_helper(); }

  void join(MappedRange range) {
    auto helper = std::make_unique<Helper>();
    mailbox_.register_worker(helper->member);
    helper->number = board_.next_helper();
    caller_->join(helper->number);
    helper->work = std::make_unique<h3::OffloadHelper>(board_, mailbox_, helper->member, helper->number,
                                                       std::vector<MappedRange>{range}, 50'000);
    helper->thread = std::thread([h = helper.get()] {
      h3::TracedHelp traced{};
      while (h->work->serve(~std::uint64_t{0} >> 1, traced) != MailboxResult::kBuried) {
      }
    });
    helpers_.push_back(std::move(helper));
  }

  // Nobody helps any more. Gives back what they did together.
  h3::HelperCounts leave() {
    h3::HelperCounts all{};
    for (const auto& helper : helpers_) {
      mailbox_.bury_worker(helper->member);
      helper->thread.join();
      caller_->bury(helper->number);
      const h3::HelperCounts counts = helper->work->counts();
      all.units += counts.units, all.scans += counts.scans, all.refused += counts.refused;
    }
    helpers_.clear();
    return all;
  }

 private:
  struct Helper {
    Member member{};
    std::uint32_t number = 0;
    std::unique_ptr<h3::OffloadHelper> work;
    std::thread thread;
  };

  Memory mailbox_room_, board_room_;
  Mailbox mailbox_;
  JobBoard board_;
  Member member_{};
  std::unique_ptr<h3::OffloadCaller> caller_;
  std::vector<std::unique_ptr<Helper>> helpers_;
};

// Raw pages and planes, and queries over them.
class Context {
 public:
  explicit Context(std::mt19937& generator) : generator_(generator), keys_(floats(kPages)), values_(floats(kPages)) {
    for (int i = 0; i < kKvHeads * kPages; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * h3::kPageTokens * kHeadDim;
      pages_.push_back({reinterpret_cast<std::uint64_t>(keys_.data() + at), reinterpret_cast<std::uint64_t>(values_.data() + at),
                        0, 0, 0, i % kPages * h3::kPageTokens, h3::kPageTokens});
    }
    const h3::SlabShape shape = slab();
    for (const int blocks : {16, 3, 16, 16, 16, 1, 16, 16, 0, 7}) {
      // The last head's planes end with its last block in use.
      const auto size = static_cast<std::size_t>(((kKvHeads - 1) * h3::kSegmentBlocks + blocks) * shape.plane_bytes());
      planes_.push_back(room(size));
      for (std::size_t i = 0; i < size; ++i) planes_.back()[i] = static_cast<char>(generator() & 0xbf);
      segments_.push_back({0, reinterpret_cast<std::uint64_t>(planes_.back().get()), 0, blocks, 0});
    }
  }

  void renew() { q_ = floats_of(kKvHeads * kGroup * kHeadDim); }

  // Result and log-sum-exps.
  std::vector<float> attend(h3::OffloadCaller* caller) const {
    std::vector<float> out(q_.size() + kKvHeads * kGroup);
    const h3::AttendArgs args{q_.data(), out.data(), out.data() + q_.size(), pages_.data(), kPages, h3::DType::kFp32,
                              h3::DType::kFp32, h3::DType::kFp32, h3::Encoding::kRaw, 1, kKvHeads * kGroup, kKvHeads,
                              kHeadDim, kPages, kPages * h3::kPageTokens - 1, 0.125f, 2, 0, kPages, nullptr};
    if (caller == nullptr) h3::attend(args);
    else caller->attend(args, kUntraced);
    return out;
  }

  // Log-sum-exps of all clusters; then choices, as floats.
  std::vector<float> select(h3::Scanner* scanner) const {
    const auto rows = static_cast<std::size_t>(kKvHeads * kGroup);
    std::vector<float> lse(rows * segments_.size() * h3::kSegmentClusters), totals(rows), exact(rows, 1.0f);
    std::vector<std::int32_t> chosen(kKvHeads * kBudget);
    h3::RetrieveArgs args{q_.data(), segments_.data(), lse.data(), totals.data(), slab(), h3::DType::kFp32,
                          h3::DType::kFp32, 1, kKvHeads * kGroup, static_cast<int>(segments_.size()), 0.125f, 2};
    args.scanner = scanner;
    h3::select({args, exact.data(), chosen.data(), kBudget, 1 << 20});
    lse.insert(lse.end(), chosen.begin(), chosen.end());
    return lse;
  }

 private:
  static constexpr int kBudget = 20;

  static h3::SlabShape slab() { return {kKvHeads, kHeadDim, true, 8192}; }
  std::vector<float> floats(int pages) {
    return floats_of(static_cast<std::size_t>(kKvHeads * pages * h3::kPageTokens * kHeadDim));
  }
  std::vector<float> floats_of(std::size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> all(count);
    for (float& x : all) x = normal(generator_);
    return all;
  }

  std::mt19937& generator_;
  std::vector<float> keys_, values_, q_;
  std::vector<h3::Page> pages_;
  std::vector<Memory> planes_;
  std::vector<h3::Indexed> segments_;
};

void check_step(const Expect& expect, Context& context, Crew& crew) {
  h3::OffloadScanner scanner(crew.caller(), kUntraced);
  context.renew();
  expect(context.attend(&crew.caller()) == context.attend(nullptr), "spread attention has the numbers of one process");
  expect(context.select(&scanner) == context.select(nullptr), "a spread scan has the numbers of one process");
}

// Steps until helpers have done something of each kind.
void check_helped(const Expect& expect, Context& context, Crew& crew, int helpers) {
  for (int i = 0; i < helpers; ++i) crew.join(kEverything);
  const std::uint64_t attended = crew.caller().counts().units_helped, scanned = crew.caller().scan_counts().units_helped;
  const auto is_helped = [&] {
    return crew.caller().counts().units_helped > attended && crew.caller().scan_counts().units_helped > scanned;
  };
  int rounds = 0;
  for (; rounds < kRoundsMax && !is_helped(); ++rounds) check_step(expect, context, crew);
  expect(rounds < kRoundsMax, "helpers take units of both kinds");
  const h3::HelperCounts did = crew.leave();
  expect(did.scans > 0 && did.units > did.scans && did.refused == 0, "helpers count what they did");
  expect(crew.caller().quarantined() == 0, "nothing is held when all helpers are buried");
}

void check_refusal(const Expect& expect, Context& context, Crew& crew) {
  crew.join({64, 128});
  int rounds = 0;
  const auto is_refused = [&] {
    return crew.caller().counts().units_refused > 0 && crew.caller().scan_counts().units_refused > 0;
  };
  for (; rounds < kRoundsMax && !is_refused(); ++rounds) check_step(expect, context, crew);
  expect(rounds < kRoundsMax && crew.leave().units == 0, "what is not mapped is refused");
}

// A helper of an earlier caller: it takes a unit as soon as it can, and then stands still.
class Stranger {
 public:
  Stranger(Job& job, std::uint32_t number)
      : job_(job), number_(number), thread_([this] {
          while (!has_unit_ && !is_over_) take();
        }) {}
  ~Stranger() {
    is_over_ = true;
    thread_.join();
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  bool has_unit() const { return has_unit_; }
  void let_go() const { word().store(unit_word(sequence_, number_, UnitState::kReleased)); }
  bool is_left_alone() const { return word() == unit_word(sequence_, number_, UnitState::kRevoked); }

 private:
  std::atomic<std::uint64_t>& word() const { return job_.word(unit_); }
  void take() {
    std::uint64_t claim = job_.claim.load(std::memory_order_acquire);
    const std::uint64_t sequence = sequence_of(claim), unit = next_of(claim);
    if (sequence == 0 || unit >= fields_of<JobHead>(job_.copied_fields()).units) return;
    if (!job_.claim.compare_exchange_strong(claim, claim + 1, std::memory_order_acq_rel)) return;
    sequence_ = sequence, unit_ = static_cast<std::uint32_t>(unit);
    std::uint64_t free = unit_word(sequence, 0, UnitState::kFree);
    const std::uint64_t mine = unit_word(sequence, number_, UnitState::kClaimed);
    has_unit_ = word().compare_exchange_strong(free, mine);
  }

  Job& job_;
  std::uint32_t number_;
  std::uint64_t sequence_ = 0;
  std::uint32_t unit_ = 0;
  std::atomic<bool> has_unit_{false}, is_over_{false};
  std::thread thread_;
};

// What somebody holds who never joined is kept until he lets go, or until no helper of earlier callers lives.
void check_stranger(const Expect& expect, Context& context) {
  for (const bool is_alive : {true, false}) {
    Crew crew;
    Stranger stranger(crew.job(), crew.next_helper());
    crew.join(kEverything);
    int rounds = 0;
    for (; rounds < kRoundsMax && !stranger.has_unit(); ++rounds) check_step(expect, context, crew);
    expect(rounds < kRoundsMax, "a stranger takes a unit");
    for (int i = 0; i < 20; ++i) check_step(expect, context, crew);
    crew.leave();
    expect(crew.caller().quarantined() == 1 && stranger.is_left_alone(), "what a stranger holds is not used again");
    if (is_alive) stranger.let_go();
    else crew.caller().bury_earlier();
    expect(crew.caller().quarantined() == 0, "what a stranger held is free again");
  }
}

}  // namespace

void check_offload(const Expect& expect) {
  std::mt19937 generator(11);
  Context context(generator);
  Crew crew;
  check_step(expect, context, crew);
  for (const int helpers : {1, 3, 2}) check_helped(expect, context, crew, helpers);
  check_refusal(expect, context, crew);
  check_step(expect, context, crew);
  check_stranger(expect, context);
}
