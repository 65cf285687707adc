// What lies in a mailbox. Everything shared is an atomic or is copied by atomic words; all places follow from a
// geometry that each process checked once and keeps for itself.
//
//   0        64     128       192           192 + 64 x callers     + 64 x workers          size_bytes
//   +--------+------+---------+-------------+----------------------+------------------------+
//   | header | tail | posted  | callers     | workers              | entries                |
//   +--------+------+---------+-------------+----------------------+------------------------+
//
//   entry    word, deadline, sizes, checksums: 64 bytes | request, rounded up to 64 | reply, rounded up to 64
//
//   word     63       20 19    14 13     10 9      4 3     0
//            +----------+--------+---------+--------+-------+
//            | sequence | caller | attempt | worker | state |
//            +----------+--------+---------+--------+-------+
//
// The sequence number of a request, modulo the number of entries, is its entry; an entry's number only grows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "h3/mailbox.hpp"

namespace h3::mailbox {

enum class State : std::uint32_t { kFree, kClaimed, kPosted, kTaken, kDone, kFailed, kAbandoned };
constexpr std::uint32_t kStates = 7;

class Word {
 public:
  static constexpr int kSequenceBits = 44;

  explicit constexpr Word(std::uint64_t bits) : bits_(bits) {}
  constexpr Word(State state, std::uint64_t sequence, std::uint32_t caller = 0, std::uint32_t worker = 0,
                 std::uint32_t attempt = 0)
      : bits_(sequence << 20 | std::uint64_t{caller} << 14 | std::uint64_t{attempt} << 10 | std::uint64_t{worker} << 4 |
              static_cast<std::uint64_t>(state)) {}

  constexpr std::uint64_t bits() const { return bits_; }
  constexpr State state() const { return static_cast<State>(bits_ & 15); }
  constexpr std::uint32_t worker() const { return bits_ >> 4 & 63; }
  constexpr std::uint32_t attempt() const { return bits_ >> 10 & 15; }
  constexpr std::uint32_t caller() const { return bits_ >> 14 & 63; }
  constexpr std::uint64_t sequence() const { return bits_ >> 20; }

  constexpr bool is(State state) const { return this->state() == state; }
  constexpr Word as(State state) const {
    return Word((bits_ & ~std::uint64_t{15}) | static_cast<std::uint64_t>(state));
  }
  constexpr Word free() const { return Word(State::kFree, sequence()); }
  constexpr Word taken_by(std::uint32_t worker) const {
    return {State::kTaken, sequence(), caller(), worker, attempt()};
  }
  // For the next worker, or for nobody after too many.
  constexpr Word again() const {
    return attempt() + 1 < kMailboxAttemptsMax ? Word(State::kPosted, sequence(), caller(), 0, attempt() + 1)
                                               : as(State::kFailed);
  }

 private:
  std::uint64_t bits_;
};

static_assert(kMailboxMembersMax <= 64 && kMailboxAttemptsMax <= 16, "the fields of a word");
static_assert((std::uint64_t{1} << Word::kSequenceBits) % kMailboxEntriesMax == 0, "entries stay in order on a wrap");

constexpr std::uint64_t kSequenceMask = (std::uint64_t{1} << Word::kSequenceBits) - 1;
// Sequence numbers go round: after half of all, an older one would look newer.
constexpr bool is_older(std::uint64_t a, std::uint64_t b) {
  return a != b && ((b - a) & kSequenceMask) < (std::uint64_t{1} << (Word::kSequenceBits - 1));
}

constexpr std::uint64_t kMagic = 0x584f424c49414d48;  // "HMAILBOX"
constexpr std::uint32_t kVersion = 1;

struct alignas(64) Header {
  // Never changed once the magic, written last, is there.
  std::atomic<std::uint64_t> magic;
  std::uint32_t version;
  MailboxGeometry geometry;
  std::uint64_t size_bytes;
  std::uint32_t crc;  // of version, geometry and size

  alignas(64) std::atomic<std::uint64_t> tail;  // the next sequence number

  alignas(64) std::atomic<std::uint32_t> signal;   // grows with each post: what workers sleep on
  std::atomic<std::uint64_t> idle;                 // bits of the workers that may sleep
};

enum class Presence : std::uint32_t { kFree, kLive, kBurying };

// Of a caller or worker.
struct alignas(64) MemberLine {
  std::atomic<std::uint64_t> presence;  // epoch << 32 | Presence
  std::atomic<std::uint64_t> sleepers;  // epoch << 32 | threads of a caller that may sleep
  std::atomic<std::uint32_t> signal;    // grows when a request ended: what they sleep on
};

struct alignas(64) Entry {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint64_t> deadline_ns;
  std::atomic<std::uint32_t> request_bytes, request_crc;
  std::atomic<std::uint32_t> reply_bytes, reply_crc;
};

static_assert(sizeof(Header) == 192 && sizeof(MemberLine) == 64 && sizeof(Entry) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

constexpr std::uint64_t presence(std::uint32_t epoch, Presence now) {
  return std::uint64_t{epoch} << 32 | static_cast<std::uint64_t>(now);
}
constexpr std::uint64_t live(Member member) { return presence(member.epoch, Presence::kLive); }

}  // namespace h3::mailbox
