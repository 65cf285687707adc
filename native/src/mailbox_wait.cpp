#include "mailbox_wait.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "h3/crc32c.hpp"
#include "h3/mailbox.hpp"

namespace h3 {
namespace {

std::atomic<std::uint64_t> wakes{0}, sleeps{0};

}  // namespace

MailboxCalls mailbox_calls() { return {wakes.load(), sleeps.load()}; }

namespace mailbox {
namespace {

constexpr std::uint64_t kNsPerS = 1'000'000'000;

// Words of the shared part; its areas are padded to 64 bytes, the private copy is not.
std::uint64_t load_word(const char* shared) {
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(shared), __ATOMIC_RELAXED);
}

void store_word(char* shared, std::uint64_t word) {
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(shared), word, __ATOMIC_RELAXED);
}

// Where the message's bytes belong, behind its tag and length.
char* begin_message(MailboxBytes& message, std::uint64_t tag, std::uint64_t size) {
  static_assert(MailboxBytes::kTag == sizeof tag + sizeof size);
  message.copy.resize(MailboxBytes::kTag + size);
  std::memcpy(message.copy.data(), &tag, sizeof tag);
  std::memcpy(message.copy.data() + sizeof tag, &size, sizeof size);
  return message.copy.data() + MailboxBytes::kTag;
}

}  // namespace

std::uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * kNsPerS + static_cast<std::uint64_t>(now.tv_nsec);
}

void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::uint64_t deadline_ns) {
  const std::uint64_t until = std::min(deadline_ns, now_ns() + kSleepNsMax);
  const timespec at{static_cast<time_t>(until / kNsPerS), static_cast<long>(until % kNsPerS)};
  sleeps.fetch_add(1, std::memory_order_relaxed);
  // Whatever it returns (a wake, EAGAIN: the word had moved on, ETIMEDOUT, EINTR), the caller looks again.
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &at, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake(std::atomic<std::uint32_t>& word, std::uint32_t count) {
  wakes.fetch_add(1, std::memory_order_relaxed);
  syscall(SYS_futex, &word, FUTEX_WAKE, static_cast<int>(std::min<std::uint32_t>(count, INT_MAX)), nullptr, nullptr, 0);
}

std::uint32_t store_message(char* shared, std::uint64_t tag, std::span<const char> bytes, MailboxBytes& scratch) {
  char* const copy = begin_message(scratch, tag, bytes.size());
  if (!bytes.empty()) std::memcpy(copy, bytes.data(), bytes.size());
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, copy + at, std::min<std::size_t>(8, bytes.size() - at));
    store_word(shared + at, word);
  }
  return crc32c(scratch.copy.data(), scratch.copy.size());
}

bool load_message(const char* shared, std::uint64_t tag, std::size_t size, std::uint32_t crc, MailboxBytes& message) {
  char* const copy = begin_message(message, tag, size);
  for (std::size_t at = 0; at < size; at += 8) {
    const std::uint64_t word = load_word(shared + at);
    std::memcpy(copy + at, &word, std::min<std::size_t>(8, size - at));
  }
  return crc32c(message.copy.data(), message.copy.size()) == crc;
}

}  // namespace mailbox
}  // namespace h3
