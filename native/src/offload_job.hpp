// What lies in a job of any kind, and in the record that asks for help with it.
//
//   0       64         192             what the kind lays out                                    end
//   +-------+----------+---------------+---------------------------------+----------------------+
//   | claim | fields   | word of each  | what units are computed from    | results of units     |
//   |       |          | unit          |                                 |                      |
//   +-------+----------+---------------+---------------------------------+----------------------+
//
//   claim   sequence (40 bits) | next unit that nobody took (24)
//   word    sequence (40 bits) | helper (20) | state (4)
//
// Places follow from the fields alone. A helper copies the fields, checks them, and takes a unit by exchanging the whole of
// `claim`: that fails when the job was closed meanwhile, and a job is closed before its fields change. Its word, which the
// caller can take away, says whether the unit is its own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "h3/mailbox.hpp"
#include "h3/offload.hpp"
#include "mailbox_wait.hpp"

namespace h3::offload {

constexpr std::uint32_t kVersion = 2;
constexpr std::uint64_t kSequenceMask = (std::uint64_t{1} << 40) - 1;
constexpr std::uint64_t kClosed = (1u << 24) - 1;  // in place of a next unit
constexpr std::uint32_t kUnitsMax = 1u << 16;
constexpr std::uint32_t kHeadsMax = 1u << 10;

enum class Kind : std::uint32_t { kAttend = 1, kScan = 2 };

enum class UnitState : std::uint32_t { kNone, kFree, kClaimed, kDone, kRefused, kRevoked, kReleased };

constexpr std::uint64_t unit_word(std::uint64_t sequence, std::uint32_t helper, UnitState state) {
  return sequence << 24 | std::uint64_t{helper} << 4 | static_cast<std::uint64_t>(state);
}
constexpr UnitState state_of(std::uint64_t word) { return static_cast<UnitState>(word & 15); }
constexpr std::uint32_t helper_of(std::uint64_t word) { return word >> 4 & (kHelpersMax - 1); }
constexpr std::uint64_t sequence_of(std::uint64_t word) { return word >> 24; }
constexpr std::uint64_t next_of(std::uint64_t claim) { return claim & kClosed; }

// What the fields of every kind begin with. Every field is one word, so that a copy has no torn one.
struct JobHead {
  Kind kind;
  std::uint32_t isa;
  std::uint32_t units;

  bool is_sound() const { return units > 0 && units <= kUnitsMax; }
};

constexpr std::size_t kFieldWords = 32;
using FieldWords = std::array<std::uint32_t, kFieldWords>;

struct alignas(64) Job {
  std::atomic<std::uint64_t> claim;
  alignas(64) std::atomic<std::uint32_t> fields[kFieldWords];

  char* at(std::size_t offset) { return reinterpret_cast<char*>(this) + offset; }
  const char* at(std::size_t offset) const { return reinterpret_cast<const char*>(this) + offset; }

  std::atomic<std::uint64_t>& word(std::uint32_t unit) {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(at(sizeof(Job)))[unit];
  }

  // Who looks at `claim` next finds the job closed if a field was a later one's.
  FieldWords copied_fields() const {
    FieldWords words;
    for (std::size_t i = 0; i < kFieldWords; ++i) words[i] = fields[i].load(std::memory_order_acquire);
    return words;
  }
  // After the job was closed.
  template <class Fields>
  void put_fields(const Fields& source) {
    static_assert(sizeof source % 4 == 0 && sizeof source <= sizeof(FieldWords));
    FieldWords words{};
    std::memcpy(words.data(), &source, sizeof source);
    for (std::size_t i = 0; i < kFieldWords; ++i) fields[i].store(words[i], std::memory_order_release);
  }
  void put(std::size_t offset, const void* source, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at(offset), source, bytes);
  }
};
static_assert(sizeof(Job) == 192);

template <class Fields>
Fields fields_of(const FieldWords& words) {
  Fields fields;
  std::memcpy(&fields, words.data(), sizeof fields);
  return fields;
}

// Lays what a job holds one behind the other, each at a multiple of 64 bytes.
class JobLayout {
 public:
  explicit JobLayout(std::uint32_t units) { take(units * sizeof(std::uint64_t)); }

  std::size_t take(std::size_t bytes) {
    const std::size_t begin = end_;
    end_ = (end_ + bytes + 63) / 64 * 64;
    return begin;
  }
  std::size_t end() const { return end_; }

 private:
  std::size_t end_ = sizeof(Job);
};

// The caller's side of work of one kind, which is cut into units by shapes alone.
class Work {
 public:
  virtual ~Work() = default;
  virtual std::uint32_t units() const = 0;
  virtual int threads() const = 0;  // of this process
  // Whether helpers can read what a unit is computed from.
  virtual bool is_shareable(std::uint32_t unit, const MappedRange& shared) const = 0;
  // Lays out a job of these units, and gives back its size; 0: there is none.
  virtual std::size_t lay_out(std::span<const std::uint32_t> offered) = 0;
  // Writes what was laid out, and the fields.
  virtual void write(Job& job) const = 0;
  // Computes a unit here, with threads on others at once; `next` is the one that this thread will most likely come to next.
  virtual void compute(std::uint32_t unit, std::uint32_t next) const = 0;
  // Takes over what a helper left for one of the offered units, by its number among these.
  virtual void fetch(const Job& job, std::uint32_t place) const = 0;
};

// The helper's side of it: one unit at a time, in memory of its own.
class Help {
 public:
  virtual ~Help() = default;
  // Takes up a job, of at most so many bytes. False: its fields are not sound, or this process would get other numbers.
  virtual bool open(const FieldWords& words, const Job& job, std::size_t job_bytes) = 0;
  // Copies what a unit is computed from, so that what was checked is what is read. False: an address is not mapped here.
  virtual bool read(const Job& job, std::uint32_t unit, const MappedRanges& ranges) = 0;
  // Computes the unit that was read: numbers that stay until the next one is read.
  virtual std::span<const float> compute() = 0;
  // Where they belong in the job.
  virtual std::size_t result_at(std::uint32_t unit) const = 0;
  // What they were computed from.
  virtual std::uint64_t read_bytes() const = 0;
};

std::unique_ptr<Help> make_attend_help();
std::unique_ptr<Help> make_scan_help();

constexpr std::uint32_t kHelpMagic = 0x504c4548;  // "HELP"

// 48 bytes: what is asked of a helper.
struct HelpRecord {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t place;
  std::uint32_t zero;
  std::uint64_t sequence;
  char trace[kTraceBytes];
};
static_assert(sizeof(HelpRecord) == 48);

// 8 bytes: what a helper did.
struct HelpReply {
  std::uint32_t units;
  std::uint32_t is_refused;
};

}  // namespace h3::offload
