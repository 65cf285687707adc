// Which pages of NVMe lie in memory, and in which slot: the table of the page cache. It reads nothing itself: it says
// what has to be read where, and is told what came.
//
//   free -> loading -> ready -> free
//              \----> failed --/
//
// A slot that is pinned keeps its bytes. Of the ready slots that nobody pins, the one that was given back longest ago is
// handed out first. A slot whose page was forgotten, or did not come, has
// no key any more: it is free as soon as nothing is read into it and nobody pins it.
//
// All calls take whole batches and cost O(n), but for sorting the slots that are handed out. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "h3/index.hpp"

namespace h3 {

// Names one page, or the smallest row of pages that can be read: a unit. src/h3kv/engine/page_slots.py has the same
// records.
struct PageKey {
  std::uint64_t segment;
  std::uint32_t unit;  // counted from the slab's start
  std::uint16_t layer;
  std::uint16_t reserved;
};
static_assert(sizeof(PageKey) == 16);

// One page that a layer wants, as src/h3kv/attention/retriever.py has it.
struct WantedPage {
  std::uint64_t segment;
  std::uint16_t kv_head;
  std::uint16_t block;
  std::uint32_t reserved;
};
static_assert(sizeof(WantedPage) == 16);

// Neighbouring units that are read at once into neighbouring slots, as `core/ports.py` draws a read of a store. `slab` is
// left 0: the caller knows where the segment's slab lies.
struct PageRead {
  std::uint64_t tag;  // ticket << 32 | count << 24 | first slot. A slot with another ticket by now is left alone
  std::uint64_t target;
  std::uint32_t slab;
  std::uint32_t offset;
  std::uint32_t size;
  std::uint32_t is_ahead;
};
static_assert(sizeof(PageRead) == 32);

constexpr std::uint32_t kPageSlotsMax = 1u << 24;
constexpr std::uint32_t kPageRunMax = 255;

// What a call has the caller read: `reads[i]` is of `segments[i]`. Room for as many as there are keys.
struct PageReads {
  PageRead* reads;
  std::uint64_t* segments;
};

struct PagesOf {
  std::uint16_t layer;
  std::uint32_t page_bytes;
};

// Where a taking of pages is kept, one of each for every page. `pinned` counts them as soon as they are pinned, so that
// whoever is interrupted right then can give them back.
struct PagesFound {
  PageKey* keys;
  std::uint32_t* slots;
  std::uint64_t* addresses;
  std::uint64_t* pinned;
};

struct PageTaking {
  std::int64_t reads;   // to be started, or -1: there is no room, and nothing was changed
  std::size_t missing;  // units that they read
  std::size_t loading;  // pages that are not there yet
};

enum class PageState : std::uint8_t { kFree, kLoading, kReady, kFailed };

struct PageCounts {
  std::uint64_t hits;    // taken, and there
  std::uint64_t useful;  // among these: read ahead, and taken for the first time
  std::uint64_t late;    // taken while it was being read ahead
  std::uint64_t misses;  // taken, and not there
  std::uint64_t wasted;  // read ahead, and never taken
  std::uint64_t read_ahead;
  std::uint64_t evicted;
  std::uint64_t failed;
};

class PageCache {
 public:
  // addresses: one for each slot, kPageSlotsMax at most. unit_bytes: of a slot. run_units: longest row that is read at
  // once, kPageRunMax at most.
  PageCache(const std::uint64_t* addresses, std::uint32_t slots, std::uint32_t unit_bytes, std::uint32_t run_units);

  // Pins `count` keys, which may repeat one another where they are neighbours, and makes room for those that are not
  // there. slots[i]: of keys[i]. Returns how many reads the caller has to start, or -1: there is no room, and nothing
  // was changed.
  std::int64_t take(const PageKey* keys, std::size_t count, std::uint32_t* slots, PageReads reads);

  // The units that hold pages.
  void name(const WantedPage* wanted, std::size_t count, PagesOf of, PageKey* keys) const;

  // Pins the pages of one layer, of which several may share a unit, if all of them are there and ready; otherwise changes
  // nothing.
  bool take_present(const WantedPage* wanted, std::size_t count, PagesOf of, PagesFound found);

  // The same as `take` for pages.
  PageTaking take_pages(const WantedPage* wanted, std::size_t count, PagesOf of, PagesFound found, PageReads reads);

  // Makes room for the first of these keys that are not there, `room` units at most, and no more than there is.
  // `looked_at`: how many of the keys are there or on their way afterwards. Returns how many reads are to be started.
  std::size_t read_ahead(const PageKey* keys, std::size_t count, std::size_t room, PageReads reads,
                         std::size_t* looked_at);

  // The reads with these tags have ended, all of them well or all of them not. Returns how many have this ticket.
  std::size_t end(const std::uint64_t* tags, std::size_t count, bool well, std::uint32_t ticket = 0);

  // Takes back one pin of each.
  void give_back(const std::uint32_t* slots, std::size_t count);

  // How many of these slots something is still read into.
  std::size_t loading(const std::uint32_t* slots, std::size_t count) const;
  void states(const std::uint32_t* slots, std::size_t count, std::uint8_t* states) const;

  // Pages of a segment are found no more.
  void forget(std::uint64_t segment);

  // What is wrong with the table; empty where nothing is.
  std::string fault() const;

  const PageCounts& counts() const { return counts_; }
  std::size_t slots() const { return slots_.size(); }
  std::size_t pinned() const { return pinned_; }
  std::size_t in_flight() const { return in_flight_; }
  std::size_t evictable() const { return listed_; }

 private:
  struct Slot {
    PageKey key{};
    std::uint64_t address = 0;
    std::uint32_t pins = 0;
    std::uint32_t ticket = 0;
    std::uint32_t before = 0;  // in the list
    std::uint32_t behind = 0;
    PageState state = PageState::kFree;
    bool has_key = false;
    bool is_listed = false;
    bool is_ahead = false;  // read ahead, and not taken yet
  };

  std::uint64_t offset(const WantedPage& page, PagesOf of) const;
  void pin(const std::uint32_t* slots, std::size_t count);
  void fetch_lines(const PageKey* keys, std::size_t count) const;
  std::size_t place(const PageKey& key) const;
  std::uint32_t find(const PageKey& key) const;
  void enter(std::uint32_t slot);
  void leave(std::uint32_t slot);
  void list_first(std::uint32_t slot);
  void list_last(std::uint32_t slot);
  void unlist(std::uint32_t slot);
  void rest(std::uint32_t slot);
  void waste(Slot& slot);
  std::vector<std::uint32_t> hand_out(std::size_t count);
  std::size_t load(const PageKey* keys, const std::vector<std::uint32_t>& wanted, bool is_ahead, PageReads reads);

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> index_;  // open addressing, linear; kNone where there is nothing
  std::size_t mask_;
  std::uint32_t unit_bytes_;
  std::uint32_t run_units_;
  std::uint32_t first_;  // of the list: free slots, then the others, the one given back longest ago first
  std::uint32_t last_;
  std::size_t listed_ = 0;
  std::size_t pinned_ = 0;
  std::size_t in_flight_ = 0;
  std::uint32_t ticket_ = 0;
  PageCounts counts_{};
};

// The clusters that a retrieval has chosen, `[T, K, budget]` as `SelectArgs` draws them.
struct Choice {
  const std::int32_t* chosen;
  int tokens;
  int kv_heads;
  int budget;
  const Indexed* segments;
  const std::uint64_t* ids;  // of the segments
};

// What `list_pages` says of a choice: there is room for one of each for every cluster.
struct ListedPages {
  WantedPage* pages;     // distinct; those that share a unit of the slab are neighbours
  std::uint8_t* is_cold; // whether a cluster's page is not in memory
  std::int64_t* page_of; // of each cluster where that is so: index in `pages`
};

struct ListedCounts {
  std::size_t pages;
  std::size_t clusters;  // in them
};

// The pages that hold chosen clusters and are not in memory.
ListedCounts list_pages(const Choice& choice, const ListedPages& listed);

}  // namespace h3
