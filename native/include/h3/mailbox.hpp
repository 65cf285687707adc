// Requests and replies of a fixed size between processes that share memory: many callers, many workers.
//
//            claim          post           take            reply          wait
//   FREE ----------> CLAIMED ----> POSTED ----> TAKEN(worker) ----> DONE ----> FREE
//                       |             |  ^         |   |              |
//                       |             |  | worker  |   | caller gave  | caller
//                       | caller dead |  | dead    |   | up or died   | gave up or died
//                       v             v  +---------+   v              v
//                     FREE          FREE            ABANDONED ----> FREE
//                                                        worker replied, or died
//
// No call ever holds anything that a dying process could keep: each arrow is one compare-exchange of the entry's word,
// which names state, owners, attempt and sequence number. Whoever learns that a process died buries its members, and
// may die while doing so: the next burial goes on where it was left.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace h3 {

namespace mailbox {
struct Entry;
struct Header;
struct MemberLine;
class Word;
}  // namespace mailbox

constexpr std::uint32_t kMailboxEntriesMax = 1024;    // a worker looks at each to find the oldest
constexpr std::uint32_t kMailboxMembersMax = 64;      // of a kind: workers that sleep are the bits of one word
constexpr std::uint32_t kMailboxBytesMax = 1u << 20;  // of a request or reply: bytes belong into slots, records here
constexpr std::uint32_t kMailboxAttemptsMax = 16;     // workers that may die over one request
constexpr std::uint64_t kMailboxSpinNs = 50'000;      // as long as the thread pool's workers look before they sleep

struct MailboxGeometry {
  std::uint32_t entries;  // a power of two
  std::uint32_t request_bytes, reply_bytes;  // room in each entry
  std::uint32_t callers, workers;            // registered at once

  bool is_valid() const;
  std::size_t size_bytes() const;  // precondition: is_valid()
};

// A place in the register. The epoch grows whenever the place becomes free, so that nobody is taken for his successor.
struct Member {
  std::uint32_t id;
  std::uint32_t epoch;
};

enum class MailboxResult : std::uint8_t {
  kOk,
  kTimeout,  // the deadline passed; nothing changed
  kFull,     // every entry is in use
  kGone,     // the request is not the caller's any more: delivered, cancelled
  kFailed,   // kMailboxAttemptsMax workers died over it, or its bytes were damaged
  kBuried,   // this member was buried: register again
};

// What a burial did with the entries of the dead.
struct Burial {
  std::uint32_t reposted;   // TAKEN by a dead worker, given to the next
  std::uint32_t failed;     // the same, too often
  std::uint32_t freed;
  std::uint32_t abandoned;  // a dead caller's, still in the hands of a worker
};

struct MailboxCensus {
  std::uint32_t free, claimed, posted, taken, done, failed, abandoned;
};

// The shared part, through this process's mapping of it. All functions may be called from any thread. The memory must
// stay mapped while this and handles made from it are used.
class Mailbox {
 public:
  // Makes a mailbox in memory that nobody uses yet, or takes over the one of this geometry that lies there, whose owners
  // are gone: it is empty then and its members are buried, but its numbers go on, so that nobody who was stopped over
  // the change is taken for a new member. Throws std::invalid_argument: a bad geometry, memory that is too small or not
  // at a multiple of 64 bytes.
  static Mailbox create(void* memory, std::size_t size_bytes, const MailboxGeometry& geometry);
  // Throws std::invalid_argument: no mailbox lies there, or one of another version or damaged.
  static Mailbox attach(void* memory, std::size_t size_bytes);

  const MailboxGeometry& geometry() const { return geometry_; }

  // False when all places are taken. Who registers for another process buries it too, should that never start.
  bool register_caller(Member& member);
  bool register_worker(Member& member);
  // Of members that died or leave. A second time, and for a place that has a successor, it does nothing.
  Burial bury_caller(Member member);
  Burial bury_worker(Member member);
  bool is_caller(Member member) const;
  bool is_worker(Member member) const;

  std::uint32_t depth() const;  // requests that no worker has taken yet
  MailboxCensus census() const;
  // Empty when every entry's word is one that this code writes, else what is wrong. Precondition: nobody is at work.
  std::string fault() const;

 private:
  friend class MailboxCaller;
  friend class MailboxWorker;

  Mailbox(void* memory, const MailboxGeometry& geometry);
  bool is_there() const;
  void lay_out() const;
  void renew() const;
  mailbox::Header& header() const;
  mailbox::MemberLine& caller_line(std::uint32_t id) const;
  mailbox::MemberLine& worker_line(std::uint32_t id) const;
  mailbox::Entry& entry(std::uint64_t sequence) const;
  char* request_of(std::uint64_t sequence) const;
  char* reply_of(std::uint64_t sequence) const;
  bool move(mailbox::Entry& entry, mailbox::Word from, mailbox::Word to) const;
  void announce_posted(std::uint32_t count) const;
  void announce_ended(std::uint32_t caller) const;
  template <class Act>
  void sweep(mailbox::MemberLine& line, Member member, const Act& act) const;

  char* memory_;
  MailboxGeometry geometry_;
  std::size_t workers_offset_, entries_offset_, entry_bytes_, reply_offset_;
};

// System calls that this process made.
struct MailboxCalls {
  std::uint64_t wakes, sleeps;
};
MailboxCalls mailbox_calls();

// A private copy of what lay in an entry, which nobody changes any more. It keeps its room for the next one.
class MailboxBytes {
 public:
  std::span<const char> view() const {
    return std::span<const char>(copy).subspan(copy.size() < kTag ? copy.size() : kTag);
  }

  static constexpr std::size_t kTag = 16;  // what the checksum covers besides: whose bytes they are, and how many
  std::vector<char> copy;
};

// One caller's side. All functions may be called from any thread. Deadlines are nanoseconds of the monotonic clock.
class MailboxCaller {
 public:
  // Throws std::invalid_argument: the mailbox has no such place.
  MailboxCaller(const Mailbox& mailbox, Member member, std::uint64_t spin_ns = kMailboxSpinNs);

  // Posts requests in order with one wake, as many as find an entry, and appends their tickets. kOk: all of them.
  // Precondition: none is longer than the geometry's.
  MailboxResult post(std::span<const std::span<const char>> requests, std::uint64_t deadline_ns,
                     std::vector<std::uint64_t>& tickets);
  // Fetches the reply once. A deadline that has passed makes this a look. Work goes on after kTimeout: wait again, or
  // cancel. Two threads that wait for one ticket: one gets the reply, the other kGone.
  MailboxResult wait(std::uint64_t ticket, std::uint64_t deadline_ns, MailboxBytes& reply);
  // True when no reply to it will come, and none had been fetched.
  bool cancel(std::uint64_t ticket);

 private:
  MailboxResult claim(std::uint64_t& sequence) const;
  void write_request(std::uint64_t sequence, std::span<const char> request, std::uint64_t deadline_ns);
  MailboxResult look(std::uint64_t ticket, MailboxBytes& reply) const;
  bool receive(mailbox::Word done, MailboxBytes& reply) const;

  Mailbox mailbox_;
  Member member_;
  std::uint64_t spin_ns_;
};

// A request in a worker's hands.
struct MailboxRequest {
  std::uint64_t ticket;
  std::uint64_t deadline_ns;  // the caller's; the work is in vain after it
  std::uint64_t word;         // of the entry while it was taken
  MailboxBytes bytes;
};

// One worker's side, of one thread. It may hold several requests.
class MailboxWorker {
 public:
  // Throws std::invalid_argument: the mailbox has no such place.
  MailboxWorker(const Mailbox& mailbox, Member member, std::uint64_t spin_ns = kMailboxSpinNs);

  // Takes the oldest request.
  MailboxResult take(MailboxRequest& request, std::uint64_t deadline_ns);
  // kGone: the caller gave up or died, or the request was given to another worker meanwhile. Precondition: no longer
  // than the geometry's.
  MailboxResult reply(const MailboxRequest& request, std::span<const char> bytes);

 private:
  MailboxResult take_oldest(MailboxRequest& request);
  MailboxResult read_request(mailbox::Word taken, MailboxRequest& request) const;
  void sleep(std::uint32_t signal, std::uint64_t deadline_ns) const;

  Mailbox mailbox_;
  Member member_;
  std::uint64_t spin_ns_;
  MailboxBytes scratch_;
};

}  // namespace h3
