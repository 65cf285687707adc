// The shared part: geometry, the register of members, and burials.
#include "h3/mailbox.hpp"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>

#include "h3/crc32c.hpp"
#include "mailbox_layout.hpp"
#include "mailbox_wait.hpp"

namespace h3 {

using namespace mailbox;

namespace {

std::size_t whole_lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// What the header's checksum covers, without padding.
std::uint32_t header_crc(std::uint32_t version, const MailboxGeometry& geometry, std::uint64_t size_bytes) {
  const std::uint64_t fields[] = {version, geometry.entries, geometry.request_bytes, geometry.reply_bytes,
                                  geometry.callers, geometry.workers, size_bytes};
  return crc32c(fields, sizeof fields);
}

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

bool register_in(MemberLine& line, std::uint32_t id, Member& member) {
  std::uint64_t seen = line.presence.load();
  if (static_cast<Presence>(seen & 0xffffffff) != Presence::kFree) return false;
  const Member candidate{id, static_cast<std::uint32_t>(seen >> 32)};
  if (!line.presence.compare_exchange_strong(seen, live(candidate))) return false;
  line.sleepers.store(std::uint64_t{candidate.epoch} << 32);
  member = candidate;
  return true;
}

}  // namespace

bool MailboxGeometry::is_valid() const {
  const auto is_room = [](std::uint32_t bytes) { return bytes >= 1 && bytes <= kMailboxBytesMax; };
  const auto is_group = [](std::uint32_t members) { return members >= 1 && members <= kMailboxMembersMax; };
  return std::has_single_bit(entries) && entries <= kMailboxEntriesMax && is_room(request_bytes) &&
         is_room(reply_bytes) && is_group(callers) && is_group(workers);
}

std::size_t MailboxGeometry::size_bytes() const {
  const std::size_t entry = sizeof(Entry) + whole_lines(request_bytes) + whole_lines(reply_bytes);
  return sizeof(Header) + (std::size_t{callers} + workers) * sizeof(MemberLine) + entries * entry;
}

Mailbox::Mailbox(void* memory, const MailboxGeometry& geometry)
    : memory_(static_cast<char*>(memory)),
      geometry_(geometry),
      workers_offset_(sizeof(Header) + geometry.callers * sizeof(MemberLine)),
      entries_offset_(workers_offset_ + geometry.workers * sizeof(MemberLine)),
      entry_bytes_(sizeof(Entry) + whole_lines(geometry.request_bytes) + whole_lines(geometry.reply_bytes)),
      reply_offset_(sizeof(Entry) + whole_lines(geometry.request_bytes)) {}

Mailbox Mailbox::create(void* memory, std::size_t size_bytes, const MailboxGeometry& geometry) {
  require(geometry.is_valid(), "entries must be a power of two, and each number within its bound");
  require(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0, "the memory must begin at a multiple of 64 bytes");
  require(size_bytes >= geometry.size_bytes(), "the memory is too small for this geometry");
  Mailbox made(memory, geometry);
  if (made.is_there()) made.renew();
  else made.lay_out();
  return made;
}

// Whether a mailbox of this version and geometry lies there.
bool Mailbox::is_there() const {
  const Header& header = this->header();
  return header.magic.load(std::memory_order_acquire) == kMagic && header.version == kVersion &&
         header.crc == header_crc(kVersion, geometry_, geometry_.size_bytes());
}

void Mailbox::lay_out() const {
  auto* header = new (memory_) Header{};
  header->version = kVersion;
  header->geometry = geometry_;
  header->size_bytes = geometry_.size_bytes();
  header->crc = header_crc(kVersion, geometry_, header->size_bytes);
  header->tail.store(geometry_.entries);
  for (std::uint32_t id = 0; id < geometry_.callers; ++id) new (&caller_line(id)) MemberLine{};
  for (std::uint32_t id = 0; id < geometry_.workers; ++id) new (&worker_line(id)) MemberLine{};
  for (std::uint32_t i = 0; i < geometry_.entries; ++i)
    (new (&entry(i)) Entry{})->word.store(Word(State::kFree, i).bits());
  header->magic.store(kMagic, std::memory_order_release);
}

// Members first: whoever takes a request after that finds itself buried, and whoever took one before loses it here. An
// entry's number stays, or grows to the largest of its own before the tail: the next one is new to everybody.
void Mailbox::renew() const {
  const auto end = [](MemberLine& line) {
    const auto epoch = static_cast<std::uint32_t>(line.presence.load() >> 32);
    line.presence.store(presence(epoch + 1, Presence::kFree));
  };
  for (std::uint32_t id = 0; id < geometry_.callers; ++id) end(caller_line(id));
  for (std::uint32_t id = 0; id < geometry_.workers; ++id) end(worker_line(id));
  Header& header = this->header();
  const std::uint64_t first = header.tail.load() - geometry_.entries;
  for (std::uint32_t i = 0; i < geometry_.entries; ++i)
    entry(first + i).word.store(Word(State::kFree, (first + i) & kSequenceMask).bits());
  header.idle.store(0);
  header.signal.fetch_add(1);
  futex_wake(header.signal, INT_MAX);  // workers that sleep find out
}

Mailbox Mailbox::attach(void* memory, std::size_t size_bytes) {
  require(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0, "the memory must begin at a multiple of 64 bytes");
  require(size_bytes >= sizeof(Header), "the memory is too small for a mailbox");
  const auto* header = static_cast<const Header*>(memory);
  require(header->magic.load(std::memory_order_acquire) == kMagic, "no mailbox lies there");
  require(header->version == kVersion, "the mailbox is of another version");
  const MailboxGeometry geometry = header->geometry;
  require(geometry.is_valid() && header->size_bytes == geometry.size_bytes() &&
              header->crc == header_crc(kVersion, geometry, geometry.size_bytes()),
          "the header of the mailbox is damaged");
  require(size_bytes >= geometry.size_bytes(), "the mailbox is cut off");
  return Mailbox(memory, geometry);
}

Header& Mailbox::header() const { return *reinterpret_cast<Header*>(memory_); }

MemberLine& Mailbox::caller_line(std::uint32_t id) const {
  return reinterpret_cast<MemberLine*>(memory_ + sizeof(Header))[id];
}

MemberLine& Mailbox::worker_line(std::uint32_t id) const {
  return reinterpret_cast<MemberLine*>(memory_ + workers_offset_)[id];
}

Entry& Mailbox::entry(std::uint64_t sequence) const {
  return *reinterpret_cast<Entry*>(memory_ + entries_offset_ + sequence % geometry_.entries * entry_bytes_);
}

char* Mailbox::request_of(std::uint64_t sequence) const {
  return reinterpret_cast<char*>(&entry(sequence)) + sizeof(Entry);
}

char* Mailbox::reply_of(std::uint64_t sequence) const {
  return reinterpret_cast<char*>(&entry(sequence)) + reply_offset_;
}

bool Mailbox::move(Entry& entry, Word from, Word to) const {
  std::uint64_t expected = from.bits();
  return entry.word.compare_exchange_strong(expected, to.bits());
}

// The word was changed before: a worker either sees it in its last look, or is seen here, or finds the signal changed
// when it goes to sleep.
void Mailbox::announce_posted(std::uint32_t count) const {
  Header& header = this->header();
  header.signal.fetch_add(1);
  const auto idle = static_cast<std::uint32_t>(std::popcount(header.idle.load()));
  if (idle > 0) futex_wake(header.signal, std::min(count, idle));
}

void Mailbox::announce_ended(std::uint32_t caller) const {
  if (caller >= geometry_.callers) return;
  MemberLine& line = caller_line(caller);
  line.signal.fetch_add(1);
  if ((line.sleepers.load() & 0xffffffff) != 0) futex_wake(line.signal, INT_MAX);
}

bool Mailbox::register_caller(Member& member) {
  for (std::uint32_t id = 0; id < geometry_.callers; ++id)
    if (register_in(caller_line(id), id, member)) return true;
  return false;
}

bool Mailbox::register_worker(Member& member) {
  for (std::uint32_t id = 0; id < geometry_.workers; ++id)
    if (register_in(worker_line(id), id, member)) return true;
  return false;
}

bool Mailbox::is_caller(Member member) const {
  return member.id < geometry_.callers && caller_line(member.id).presence.load() == live(member);
}

bool Mailbox::is_worker(Member member) const {
  return member.id < geometry_.workers && worker_line(member.id).presence.load() == live(member);
}

// Calls `act(entry, word)` on each entry until it has nothing more to change there. The place is still the dead
// member's when its presence is read after the word: so a word that `act` exchanges is never a successor's.
template <class Act>
void Mailbox::sweep(MemberLine& line, Member member, const Act& act) const {
  std::uint64_t seen = live(member);
  const std::uint64_t burying = presence(member.epoch, Presence::kBurying);
  if (!line.presence.compare_exchange_strong(seen, burying) && seen != burying) return;
  for (std::uint32_t i = 0; i < geometry_.entries; ++i) {
    Entry& entry = this->entry(i);
    for (;;) {
      const Word word(entry.word.load());
      if (line.presence.load() != burying) return;
      if (!act(entry, word)) break;
    }
  }
  line.signal.fetch_add(1);
  futex_wake(line.signal, INT_MAX);  // threads of a member that lives find out
  seen = burying;
  line.presence.compare_exchange_strong(seen, presence(member.epoch + 1, Presence::kFree));
}

Burial Mailbox::bury_caller(Member member) {
  Burial burial{};
  if (member.id >= geometry_.callers) return burial;
  sweep(caller_line(member.id), member, [&](Entry& entry, Word word) {
    if (word.is(State::kFree) || word.is(State::kAbandoned) || word.caller() != member.id) return false;
    const bool is_taken = word.is(State::kTaken);
    if (move(entry, word, is_taken ? word.as(State::kAbandoned) : word.free()))
      ++(is_taken ? burial.abandoned : burial.freed);
    return true;
  });
  return burial;
}

Burial Mailbox::bury_worker(Member member) {
  Burial burial{};
  if (member.id >= geometry_.workers) return burial;
  MemberLine& line = worker_line(member.id);
  if (line.presence.load() >> 32 == member.epoch) header().idle.fetch_and(~(std::uint64_t{1} << member.id));
  sweep(line, member, [&](Entry& entry, Word word) {
    const bool is_taken = word.is(State::kTaken);
    if ((!is_taken && !word.is(State::kAbandoned)) || word.worker() != member.id) return false;
    const Word after = is_taken ? word.again() : word.free();
    if (!move(entry, word, after)) return true;
    ++(after.is(State::kPosted) ? burial.reposted : after.is(State::kFailed) ? burial.failed : burial.freed);
    if (after.is(State::kFailed)) announce_ended(after.caller());
    return true;
  });
  // Also when nothing was taken: it may have died with a wake, or between a reply and the wake of the caller.
  header().signal.fetch_add(1);
  futex_wake(header().signal, INT_MAX);
  for (std::uint32_t id = 0; id < geometry_.callers; ++id) announce_ended(id);
  return burial;
}

MailboxCensus Mailbox::census() const {
  std::uint32_t counts[16] = {};
  for (std::uint32_t i = 0; i < geometry_.entries; ++i)
    ++counts[static_cast<std::uint32_t>(Word(entry(i).word.load(std::memory_order_relaxed)).state())];
  return {counts[0], counts[1], counts[2], counts[3], counts[4], counts[5], counts[6]};
}

std::uint32_t Mailbox::depth() const { return census().posted; }

std::string Mailbox::fault() const {
  for (std::uint32_t i = 0; i < geometry_.entries; ++i) {
    const Word word(entry(i).word.load());
    const std::string name = "entry " + std::to_string(i);
    const bool has_caller = !word.is(State::kFree) && !word.is(State::kAbandoned);
    const bool has_worker = word.is(State::kTaken) || word.is(State::kAbandoned);
    const auto is_live = [](const MemberLine& line) {
      return static_cast<Presence>(line.presence.load() & 0xffffffff) == Presence::kLive;
    };
    if (static_cast<std::uint32_t>(word.state()) >= kStates) return name + " has no state";
    if (word.sequence() % geometry_.entries != i) return name + " has another entry's sequence number";
    if (has_caller && (word.caller() >= geometry_.callers || !is_live(caller_line(word.caller()))))
      return name + " belongs to no caller";
    if (has_worker && (word.worker() >= geometry_.workers || !is_live(worker_line(word.worker()))))
      return name + " is in the hands of no worker";
  }
  return {};
}

}  // namespace h3
