// Records of any length from one process to one other, through memory that both map; and a bell for who waits.
//
//   ring     0        64       128                        128 + capacity
//            +--------+--------+--------------------------+
//            | head   | tail   | records, round and round |
//            | u64    | u64    |                          |
//            +--------+--------+--------------------------+
//
//   record   0       4       8                 rounded up to 8
//            +-------+-------+-----------+------+
//            | bytes | crc   | payload   | zero |        crc32c of position (u64), bytes, payload
//            +-------+-------+-----------+------+
//
// Positions count bytes and never go back; modulo the capacity they are offsets. Each side keeps its own position for
// itself: what lies in the memory is another's word, and is compared with what is possible before it is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace h3 {

constexpr std::size_t kRingHeaderBytes = 128;
constexpr std::size_t kRecordHeaderBytes = 8;

// Two words at a multiple of 8 bytes. Any number of processes may ring, any number may wait.
struct Bell {
  std::atomic<std::uint32_t> signal;    // grows with each ring: what waiters sleep on
  std::atomic<std::uint32_t> sleepers;  // may be too high, where one was killed: rings then cost a system call

  void ring();
  // Returns when the signal is no longer `seen`, or the time is over.
  void wait(std::uint32_t seen, std::uint64_t timeout_ns, std::uint64_t spin_ns);
};
static_assert(sizeof(Bell) == 8);

enum class RingResult : std::uint8_t {
  kOk,
  kNone,     // pop: there is no record; push: there is no room
  kDamaged,  // the other side wrote what cannot be
};

// One side of a ring: a writer pushes, a reader pops. One thread at a time.
class RecordRing {
 public:
  // Begins at the ring's beginning: both sides are made after `clear`. Precondition: the capacity is a power of two.
  RecordRing(void* memory, std::size_t capacity, std::uint32_t record_bytes_max);
  static void clear(void* memory);

  std::size_t room() const;  // bytes of the longest payload that can be pushed now; 0 where the reader's word is no good
  RingResult push(std::span<const char> payload);
  RingResult pop(std::vector<char>& payload);

 private:
  std::atomic<std::uint64_t>& head() const;
  std::atomic<std::uint64_t>& tail() const;
  void copy_in(std::uint64_t position, const char* bytes, std::size_t size) const;
  void copy_out(std::uint64_t position, char* bytes, std::size_t size) const;
  std::size_t free_bytes() const;

  char* memory_;
  std::size_t capacity_;
  std::uint32_t record_bytes_max_;
  std::uint64_t position_ = 0;
  std::vector<char> scratch_;
};

}  // namespace h3
