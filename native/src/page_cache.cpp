#include "h3/page_cache.hpp"

#include <algorithm>
#include <bit>

namespace h3 {
namespace {

constexpr std::uint32_t kNone = 0xffffffff;

bool same(const PageKey& a, const PageKey& b) {
  return a.segment == b.segment && a.unit == b.unit && a.layer == b.layer;
}

std::uint32_t ticket_of(std::uint64_t tag) { return static_cast<std::uint32_t>(tag >> 32); }
std::uint32_t first_of(std::uint64_t tag) { return static_cast<std::uint32_t>(tag & (kPageSlotsMax - 1)); }
std::uint32_t behind(std::uint64_t tag) {
  return first_of(tag) + static_cast<std::uint32_t>(tag >> 24 & kPageRunMax);
}

}  // namespace

PageCache::PageCache(const std::uint64_t* addresses, std::uint32_t slots, std::uint32_t unit_bytes,
                     std::uint32_t run_units)
    : slots_(slots),
      index_(std::bit_ceil(std::size_t{2} * slots + 2), kNone),
      mask_(index_.size() - 1),
      unit_bytes_(unit_bytes),
      run_units_(std::clamp(run_units, 1u, kPageRunMax)),
      first_(kNone),
      last_(kNone) {
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    slots_[slot].address = addresses[slot];
    list_last(slot);
  }
}

std::int64_t PageCache::take(const PageKey* keys, std::size_t count, std::uint32_t* slots, PageReads reads) {
  fetch_lines(keys, count);
  std::vector<std::uint32_t> missing;  // indices of keys, each unit once
  std::vector<std::uint32_t> present;
  for (std::size_t i = 0; i < count; ++i) {
    slots[i] = find(keys[i]);
    if (slots[i] != kNone) present.push_back(slots[i]);
    else if (missing.empty() || !same(keys[missing.back()], keys[i])) missing.push_back(static_cast<std::uint32_t>(i));
  }
  // What is there makes no room for what is not.
  std::size_t kept = 0;
  for (std::size_t i = 0; i < present.size(); ++i)
    kept += slots_[present[i]].is_listed && (i == 0 || present[i] != present[i - 1]);
  if (missing.size() > listed_ - kept) return -1;
  pin(present.data(), present.size());
  if (missing.empty()) return 0;
  counts_.misses += missing.size();
  const std::size_t started = load(keys, missing, false, reads);
  for (std::size_t i = 0; i < count; ++i) {
    if (slots[i] != kNone) continue;
    slots[i] = find(keys[i]);
    if (slots_[slots[i]].pins++ == 0) ++pinned_;
  }
  return static_cast<std::int64_t>(started);
}

bool PageCache::take_present(const WantedPage* wanted, std::size_t count, PagesOf of, PagesFound found) {
  name(wanted, count, of, found.keys);
  fetch_lines(found.keys, count);
  for (std::size_t i = 0; i < count; ++i) {
    found.slots[i] = find(found.keys[i]);
    if (found.slots[i] == kNone || slots_[found.slots[i]].state != PageState::kReady) return false;
    found.addresses[i] = slots_[found.slots[i]].address + offset(wanted[i], of) % unit_bytes_;
  }
  pin(found.slots, count);
  *found.pinned = count;
  return true;
}

PageTaking PageCache::take_pages(const WantedPage* wanted, std::size_t count, PagesOf of, PagesFound found,
                                 PageReads reads) {
  name(wanted, count, of, found.keys);
  const std::uint64_t missed = counts_.misses;
  const std::int64_t started = take(found.keys, count, found.slots, reads);
  if (started < 0) return {started, 0, 0};
  *found.pinned = count;
  std::size_t loading = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Slot& slot = slots_[found.slots[i]];
    found.addresses[i] = slot.address + offset(wanted[i], of) % unit_bytes_;
    loading += slot.state == PageState::kLoading;
  }
  return {started, static_cast<std::size_t>(counts_.misses - missed), loading};
}

// Of the page in its slab.
std::uint64_t PageCache::offset(const WantedPage& page, PagesOf of) const {
  return (std::uint64_t{page.kv_head} * kSegmentBlocks + page.block) * of.page_bytes;
}

void PageCache::name(const WantedPage* wanted, std::size_t count, PagesOf of, PageKey* keys) const {
  for (std::size_t i = 0; i < count; ++i)
    keys[i] = {wanted[i].segment, static_cast<std::uint32_t>(offset(wanted[i], of) / unit_bytes_), of.layer, 0};
}

// Somebody takes what these slots hold, or what is on its way into them.
void PageCache::pin(const std::uint32_t* slots, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Slot& slot = slots_[slots[i]];
    if (slot.is_listed) unlist(slots[i]);
    if (slot.pins++ == 0) ++pinned_;
    const bool is_late = slot.is_ahead && slot.state == PageState::kLoading;
    if (is_late) ++counts_.late;
    else ++counts_.hits;
    if (slot.is_ahead && !is_late) ++counts_.useful;
    slot.is_ahead = false;
  }
}

std::size_t PageCache::read_ahead(const PageKey* keys, std::size_t count, std::size_t room, PageReads reads,
                                  std::size_t* looked_at) {
  room = std::min(room, listed_);
  fetch_lines(keys, count);
  std::vector<std::uint32_t> missing;
  std::size_t i = 0;
  for (; i < count; ++i) {
    const bool is_repeated = !missing.empty() && same(keys[missing.back()], keys[i]);
    if (is_repeated || find(keys[i]) != kNone) continue;
    if (missing.size() == room) break;
    missing.push_back(static_cast<std::uint32_t>(i));
  }
  *looked_at = i;
  if (missing.empty()) return 0;
  counts_.read_ahead += missing.size();
  return load(keys, missing, true, reads);
}

std::size_t PageCache::end(const std::uint64_t* tags, std::size_t count, bool well, std::uint32_t ticket) {
  std::size_t own = 0;
  for (std::size_t r = 0; r < count; ++r) {
    own += ticket_of(tags[r]) == ticket;
    for (std::uint32_t number = first_of(tags[r]); number < behind(tags[r]); ++number) {
      Slot& slot = slots_[number];
      if (slot.state != PageState::kLoading || slot.ticket != ticket_of(tags[r])) continue;
      --in_flight_;
      slot.state = well ? PageState::kReady : PageState::kFailed;
      if (!well) {
        ++counts_.failed;
        waste(slot);
        if (slot.has_key) leave(number);
      }
      if (slot.pins == 0) rest(number);
    }
  }
  return own;
}

void PageCache::give_back(const std::uint32_t* slots, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Slot& slot = slots_[slots[i]];
    if (--slot.pins > 0) continue;
    --pinned_;
    if (slot.state != PageState::kLoading) rest(slots[i]);
  }
}

std::size_t PageCache::loading(const std::uint32_t* slots, std::size_t count) const {
  std::size_t loading = 0;
  for (std::size_t i = 0; i < count; ++i) loading += slots_[slots[i]].state == PageState::kLoading;
  return loading;
}

void PageCache::states(const std::uint32_t* slots, std::size_t count, std::uint8_t* states) const {
  for (std::size_t i = 0; i < count; ++i) states[i] = static_cast<std::uint8_t>(slots_[slots[i]].state);
}

void PageCache::forget(std::uint64_t segment) {
  for (std::uint32_t number = 0; number < slots_.size(); ++number) {
    Slot& slot = slots_[number];
    if (!slot.has_key || slot.key.segment != segment) continue;
    leave(number);
    waste(slot);
    if (!slot.is_listed) continue;
    unlist(number);
    rest(number);
  }
}

std::string PageCache::fault() const {
  std::size_t keys = 0, listed = 0, pinned = 0, loading = 0;
  for (std::uint32_t number = 0; number < slots_.size(); ++number) {
    const Slot& slot = slots_[number];
    const bool is_at_rest = slot.pins == 0 && slot.state != PageState::kLoading;
    if (slot.has_key && find(slot.key) != number) return "a key is not found where it is";
    if (slot.is_listed != is_at_rest) return "a slot is listed though it is in use, or the other way round";
    if (slot.has_key && (slot.state == PageState::kFree || slot.state == PageState::kFailed))
      return "a slot without a page has a key";
    keys += slot.has_key;
    pinned += slot.pins > 0;
    loading += slot.state == PageState::kLoading;
  }
  std::uint32_t before = kNone;
  for (std::uint32_t number = first_; number != kNone; number = slots_[number].behind) {
    if (!slots_[number].is_listed || slots_[number].before != before || ++listed > slots_.size())
      return "the list is broken";
    before = number;
  }
  const auto entered = index_.size() - static_cast<std::size_t>(std::count(index_.begin(), index_.end(), kNone));
  if (last_ != before || listed != listed_) return "the list is broken";
  if (entered != keys) return "the index has entries without a slot";
  if (pinned != pinned_ || loading != in_flight_) return "a count is wrong";
  return "";
}

// What a layer wants was last looked at a step ago, and attention has read more since than any cache holds: all lines
// are asked for before the first is needed.
void PageCache::fetch_lines(const PageKey* keys, std::size_t count) const {
  for (std::size_t i = 0; i < count; ++i) __builtin_prefetch(&index_[place(keys[i])]);
  for (std::size_t i = 0; i < count; ++i)
    if (const std::uint32_t number = index_[place(keys[i])]; number != kNone) __builtin_prefetch(&slots_[number], 1);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t number = index_[place(keys[i])];
    if (number == kNone || !slots_[number].is_listed) continue;
    if (slots_[number].before != kNone) __builtin_prefetch(&slots_[slots_[number].before], 1);
    if (slots_[number].behind != kNone) __builtin_prefetch(&slots_[slots_[number].behind], 1);
  }
}

std::size_t PageCache::place(const PageKey& key) const {
  std::uint64_t h = key.segment * 0x9e3779b97f4a7c15u;
  h ^= (std::uint64_t{key.layer} << 32 | key.unit) * 0xc2b2ae3d27d4eb4fu;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93u;
  return static_cast<std::size_t>(h ^ h >> 32) & mask_;
}

std::uint32_t PageCache::find(const PageKey& key) const {
  for (std::size_t at = place(key); index_[at] != kNone; at = (at + 1) & mask_)
    if (same(slots_[index_[at]].key, key)) return index_[at];
  return kNone;
}

void PageCache::enter(std::uint32_t slot) {
  std::size_t at = place(slots_[slot].key);
  while (index_[at] != kNone) at = (at + 1) & mask_;
  index_[at] = slot;
  slots_[slot].has_key = true;
}

// Takes a slot out of the index, and moves entries behind it up, so that each stays reachable from its place.
void PageCache::leave(std::uint32_t slot) {
  std::size_t hole = place(slots_[slot].key);
  while (index_[hole] != slot) hole = (hole + 1) & mask_;
  for (std::size_t at = (hole + 1) & mask_; index_[at] != kNone; at = (at + 1) & mask_) {
    const std::size_t home = place(slots_[index_[at]].key);
    if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
    index_[hole] = index_[at];
    hole = at;
  }
  index_[hole] = kNone;
  slots_[slot].has_key = false;
}

void PageCache::list_first(std::uint32_t slot) {
  slots_[slot].before = kNone;
  slots_[slot].behind = first_;
  (first_ == kNone ? last_ : slots_[first_].before) = slot;
  first_ = slot;
  slots_[slot].is_listed = true;
  ++listed_;
}

void PageCache::list_last(std::uint32_t slot) {
  slots_[slot].behind = kNone;
  slots_[slot].before = last_;
  (last_ == kNone ? first_ : slots_[last_].behind) = slot;
  last_ = slot;
  slots_[slot].is_listed = true;
  ++listed_;
}

void PageCache::unlist(std::uint32_t number) {
  Slot& slot = slots_[number];
  (slot.before == kNone ? first_ : slots_[slot.before].behind) = slot.behind;
  (slot.behind == kNone ? last_ : slots_[slot.behind].before) = slot.before;
  slot.is_listed = false;
  --listed_;
}

// Nothing is read into the slot, nobody pins it, and it is not listed.
void PageCache::rest(std::uint32_t number) {
  Slot& slot = slots_[number];
  if (slot.has_key) return list_last(number);
  slot.state = PageState::kFree;
  list_first(number);
}

void PageCache::waste(Slot& slot) {
  counts_.wasted += slot.is_ahead;
  slot.is_ahead = false;
}

// The first slots of the list, empty, in the order of their numbers: so neighbours stay neighbours.
std::vector<std::uint32_t> PageCache::hand_out(std::size_t count) {
  std::vector<std::uint32_t> given(count);
  for (std::uint32_t& number : given) {
    number = first_;
    Slot& slot = slots_[number];
    unlist(number);
    if (slot.has_key) {
      ++counts_.evicted;
      waste(slot);
      leave(number);
    }
  }
  std::sort(given.begin(), given.end());
  return given;
}

// Gives each wanted key a slot that is loading. What follows one another on the disk is one read where the slots do.
std::size_t PageCache::load(const PageKey* keys, const std::vector<std::uint32_t>& wanted, bool is_ahead,
                            PageReads reads) {
  const std::vector<std::uint32_t> given = hand_out(wanted.size());
  const std::uint32_t ticket = ++ticket_;
  std::size_t started = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const PageKey& key = keys[wanted[i]];
    Slot& slot = slots_[given[i]];
    slot.key = key;
    slot.ticket = ticket;
    slot.state = PageState::kLoading;
    slot.is_ahead = is_ahead;
    enter(given[i]);
    const PageKey* const before = i == 0 ? nullptr : &keys[wanted[i - 1]];
    const bool follows = before != nullptr && before->segment == key.segment && before->layer == key.layer &&
                         before->unit + 1 == key.unit && given[i - 1] + 1 == given[i] &&
                         slots_[given[i - 1]].address + unit_bytes_ == slot.address &&
                         reads.reads[started - 1].size < run_units_ * unit_bytes_;
    if (follows) {
      reads.reads[started - 1].tag += 1u << 24;
      reads.reads[started - 1].size += unit_bytes_;
      continue;
    }
    const std::uint64_t tag = std::uint64_t{ticket} << 32 | 1u << 24 | given[i];
    reads.segments[started] = key.segment;
    reads.reads[started++] = {tag, slot.address, 0, key.unit * unit_bytes_, unit_bytes_, is_ahead};
  }
  in_flight_ += wanted.size();
  return started;
}

ListedCounts list_pages(const Choice& choice, const ListedPages& listed) {
  const int lists = choice.tokens * choice.kv_heads;
  std::vector<std::uint64_t> numbers;  // of pages: block, above it segment and KV head
  ListedCounts counts{};
  for (int list = 0; list < lists; ++list) {
    const std::uint64_t head = static_cast<std::uint64_t>(list % choice.kv_heads) << 48;
    for (std::int64_t at = std::int64_t{list} * choice.budget; at < std::int64_t{list + 1} * choice.budget; ++at) {
      const std::int32_t cluster = choice.chosen[at];
      listed.is_cold[at] = cluster >= 0 && choice.segments[cluster / kSegmentClusters].pages == 0;
      if (!listed.is_cold[at]) continue;
      const std::uint64_t number = head | static_cast<std::uint64_t>(cluster / kPageClusters);
      if (numbers.empty() || numbers.back() != number) numbers.push_back(number);
      listed.page_of[counts.clusters++] = static_cast<std::int64_t>(numbers.size()) - 1;
    }
  }
  if (choice.tokens > 1) {
    // The clusters of one row are in order; several rows may have chosen the same pages.
    std::vector<std::uint64_t> distinct = numbers;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    for (std::size_t i = 0; i < counts.clusters; ++i)
      listed.page_of[i] = std::lower_bound(distinct.begin(), distinct.end(),
                                           numbers[static_cast<std::size_t>(listed.page_of[i])]) - distinct.begin();
    numbers.swap(distinct);
  }
  for (const std::uint64_t number : numbers) {
    const auto place = static_cast<std::uint32_t>(number);
    listed.pages[counts.pages++] = {choice.ids[place / kSegmentBlocks], static_cast<std::uint16_t>(number >> 48),
                                    static_cast<std::uint16_t>(place % kSegmentBlocks), 0};
  }
  return counts;
}

}  // namespace h3
