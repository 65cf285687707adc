// The table of the page cache under random calls: what it hands out is used once, and what is pinned stays.
// tests/property compares it with a model.
#include "pages.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "h3/page_cache.hpp"

namespace {

using h3::PageCache;
using h3::PageKey;
using h3::PageRead;
using h3::PageState;

constexpr std::uint32_t kSlots = 37, kUnit = 4096, kRun = 4;

struct Taken {
  std::vector<PageKey> keys;
  std::vector<std::uint32_t> slots;
};

class Driver {
 public:
  explicit Driver(const Expect& expect)
      : expect_(expect), addresses_(addresses()), cache_(addresses_.data(), kSlots, kUnit, kRun) {}

  void step() {
    switch (number(8)) {
      case 0:
      case 1: return take();
      case 2: return read_ahead();
      case 3:
      case 4: return end();
      case 5: return cache_.forget(number(5));
      default: return give_back();
    }
  }

  void check() {
    expect_(cache_.fault().empty(), "the page cache's table is whole");
    for (const Taken& taken : taken_) {
      std::vector<std::uint8_t> states(taken.slots.size());
      cache_.states(taken.slots.data(), taken.slots.size(), states.data());
      for (const std::uint8_t state : states)
        expect_(state != static_cast<std::uint8_t>(PageState::kFree), "a pinned slot is not free");
    }
  }

  void finish() {
    while (!taken_.empty()) give_back();
    while (!open_.empty()) end();
    for (std::uint64_t segment = 0; segment < 5; ++segment) cache_.forget(segment);
    expect_(cache_.fault().empty() && cache_.evictable() == kSlots && cache_.pinned() == 0,
            "every slot comes back in the end");
  }

 private:
  // The slots lie in three pieces of memory.
  static std::vector<std::uint64_t> addresses() {
    std::vector<std::uint64_t> all(kSlots);
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) all[slot] = kUnit * (slot + 1 + 10 * (slot / 15));
    return all;
  }

  std::uint32_t number(std::uint32_t below) { return static_cast<std::uint32_t>(generator_() % below); }

  std::vector<PageKey> keys() {
    std::vector<PageKey> wanted(1 + number(kSlots / 2));
    for (PageKey& key : wanted) key = {number(5), number(24), static_cast<std::uint16_t>(number(2)), 0};
    std::sort(wanted.begin(), wanted.end(), [](const PageKey& a, const PageKey& b) {
      if (a.segment != b.segment) return a.segment < b.segment;
      return a.layer != b.layer ? a.layer < b.layer : a.unit < b.unit;
    });
    return wanted;
  }

  // Room for exactly as many reads as there are keys.
  void start(const std::vector<PageRead>& reads, std::size_t started) {
    for (std::size_t i = 0; i < started; ++i) {
      expect_(reads[i].size % kUnit == 0 && reads[i].size <= kRun * kUnit, "a read is a row of units");
      open_.push_back(reads[i].tag);
    }
  }

  void take() {
    Taken taken{keys(), {}};
    taken.slots.resize(taken.keys.size());
    std::vector<PageRead> reads(taken.keys.size());
    std::vector<std::uint64_t> segments(taken.keys.size());
    const std::int64_t started =
        cache_.take(taken.keys.data(), taken.keys.size(), taken.slots.data(), {reads.data(), segments.data()});
    if (started < 0) return;
    start(reads, static_cast<std::size_t>(started));
    taken_.push_back(std::move(taken));
  }

  void read_ahead() {
    const std::vector<PageKey> wanted = keys();
    std::vector<PageRead> reads(wanted.size());
    std::vector<std::uint64_t> segments(wanted.size());
    std::size_t looked_at = 0;
    start(reads, cache_.read_ahead(wanted.data(), wanted.size(), number(kSlots), {reads.data(), segments.data()},
                                   &looked_at));
    expect_(looked_at <= wanted.size(), "no more keys are looked at than there are");
  }

  void end() {
    if (open_.empty()) return;
    const std::size_t at = number(static_cast<std::uint32_t>(open_.size()));
    cache_.end(&open_[at], 1, number(4) != 0);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void give_back() {
    if (taken_.empty()) return;
    const std::size_t at = number(static_cast<std::uint32_t>(taken_.size()));
    cache_.give_back(taken_[at].slots.data(), taken_[at].slots.size());
    taken_.erase(taken_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  const Expect& expect_;
  std::mt19937 generator_{11};
  std::vector<std::uint64_t> addresses_;
  PageCache cache_;
  std::vector<Taken> taken_;
  std::vector<std::uint64_t> open_;
};

}  // namespace

void check_pages(const Expect& expect) {
  Driver driver(expect);
  for (int i = 0; i < 20000; ++i) {
    driver.step();
    driver.check();
  }
  driver.finish();
}
