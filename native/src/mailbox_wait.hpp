// How members of a mailbox wait, and how its bytes are copied and checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "h3/mailbox.hpp"

namespace h3::mailbox {

std::uint64_t now_ns();  // monotonic, the same in every process of the machine

// Sleeps while the word is `seen`, until a wake or the deadline, but never longer than kSleepNsMax.
void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::uint64_t deadline_ns);
void futex_wake(std::atomic<std::uint32_t>& word, std::uint32_t count);

// A wake may have gone to a process that was stopped, or to one that died before it could wake the next.
constexpr std::uint64_t kSleepNsMax = 50'000'000;

// Messages are copied by words, so that one who was buried while he lived, and writes late, tears them without a data
// race. The checksum covers the tag, the length and the bytes: what is torn, or another's, is not delivered.
std::uint32_t store_message(char* shared, std::uint64_t tag, std::span<const char> bytes, MailboxBytes& scratch);
bool load_message(const char* shared, std::uint64_t tag, std::size_t size, std::uint32_t crc, MailboxBytes& message);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until a look gives true, or the time is over.
template <class Look>
bool spin(std::uint64_t spin_ns, std::uint64_t deadline_ns, const Look& look) {
  constexpr int kLooksPerClock = 16;
  const std::uint64_t start = now_ns();
  if (start >= deadline_ns) return false;
  const std::uint64_t span = deadline_ns - start < spin_ns ? deadline_ns - start : spin_ns;
  do {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (look()) return true;
      pause();
    }
  } while (now_ns() - start < span);
  return false;
}

}  // namespace h3::mailbox
