#include "h3/record_ring.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#include "h3/crc32c.hpp"
#include "mailbox_wait.hpp"

namespace h3 {
namespace {

constexpr std::size_t kTailOffset = 64;
constexpr std::size_t kTagBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

std::size_t whole(std::size_t size) { return (size + kRecordHeaderBytes + 7) / 8 * 8; }

}  // namespace

void Bell::ring() {
  signal.fetch_add(1);
  // A waiter counts itself, then the kernel compares the signal: one of the two sees the other.
  if (sleepers.load() != 0) mailbox::futex_wake(signal, INT_MAX);
}

void Bell::wait(std::uint32_t seen, std::uint64_t timeout_ns, std::uint64_t spin_ns) {
  const std::uint64_t deadline = mailbox::now_ns() + timeout_ns;
  const auto has_rung = [&] { return signal.load() != seen; };
  if (has_rung() || mailbox::spin(spin_ns, deadline, has_rung)) return;
  sleepers.fetch_add(1);
  while (!has_rung() && mailbox::now_ns() < deadline) mailbox::futex_sleep(signal, seen, deadline);
  sleepers.fetch_sub(1);
}

RecordRing::RecordRing(void* memory, std::size_t capacity, std::uint32_t record_bytes_max)
    : memory_(static_cast<char*>(memory)), capacity_(capacity), record_bytes_max_(record_bytes_max) {}

void RecordRing::clear(void* memory) {
  reinterpret_cast<std::atomic<std::uint64_t>*>(memory)->store(0);
  reinterpret_cast<std::atomic<std::uint64_t>*>(static_cast<char*>(memory) + kTailOffset)->store(0);
}

std::atomic<std::uint64_t>& RecordRing::head() const { return *reinterpret_cast<std::atomic<std::uint64_t>*>(memory_); }

std::atomic<std::uint64_t>& RecordRing::tail() const {
  return *reinterpret_cast<std::atomic<std::uint64_t>*>(memory_ + kTailOffset);
}

void RecordRing::copy_in(std::uint64_t position, const char* bytes, std::size_t size) const {
  const std::size_t at = position % capacity_;
  const std::size_t first = std::min(size, capacity_ - at);
  char* const data = memory_ + kRingHeaderBytes;
  std::memcpy(data + at, bytes, first);
  std::memcpy(data, bytes + first, size - first);
}

void RecordRing::copy_out(std::uint64_t position, char* bytes, std::size_t size) const {
  const std::size_t at = position % capacity_;
  const std::size_t first = std::min(size, capacity_ - at);
  const char* const data = memory_ + kRingHeaderBytes;
  std::memcpy(bytes, data + at, first);
  std::memcpy(bytes + first, data, size - first);
}

std::size_t RecordRing::free_bytes() const {
  const std::uint64_t used = position_ - head().load(std::memory_order_acquire);
  return used > capacity_ ? 0 : capacity_ - used;
}

std::size_t RecordRing::room() const {
  const std::size_t free = free_bytes();
  return free <= kRecordHeaderBytes ? 0 : std::min<std::size_t>(free - kRecordHeaderBytes, record_bytes_max_);
}

RingResult RecordRing::push(std::span<const char> payload) {
  if (position_ - head().load(std::memory_order_acquire) > capacity_) return RingResult::kDamaged;
  const std::size_t size = whole(payload.size());
  if (payload.size() > record_bytes_max_ || size > free_bytes()) return RingResult::kNone;
  const auto bytes = static_cast<std::uint32_t>(payload.size());
  scratch_.assign(kTagBytes + payload.size(), 0);
  std::memcpy(scratch_.data(), &position_, sizeof position_);
  std::memcpy(scratch_.data() + sizeof position_, &bytes, sizeof bytes);
  if (!payload.empty()) std::memcpy(scratch_.data() + kTagBytes, payload.data(), payload.size());
  const std::uint32_t header[2] = {bytes, crc32c(scratch_.data(), scratch_.size())};
  copy_in(position_, reinterpret_cast<const char*>(header), sizeof header);
  copy_in(position_ + sizeof header, payload.data(), payload.size());
  position_ += size;
  tail().store(position_, std::memory_order_release);
  return RingResult::kOk;
}

RingResult RecordRing::pop(std::vector<char>& payload) {
  const std::uint64_t available = tail().load(std::memory_order_acquire) - position_;
  if (available == 0) return RingResult::kNone;
  if (available > capacity_ || available < kRecordHeaderBytes) return RingResult::kDamaged;
  std::uint32_t header[2];
  copy_out(position_, reinterpret_cast<char*>(header), sizeof header);
  const std::uint32_t bytes = header[0], crc = header[1];
  if (bytes > record_bytes_max_ || whole(bytes) > available) return RingResult::kDamaged;
  // Checked and used is the copy: nobody can change it any more.
  scratch_.resize(kTagBytes + bytes);
  std::memcpy(scratch_.data(), &position_, sizeof position_);
  std::memcpy(scratch_.data() + sizeof position_, &bytes, sizeof bytes);
  copy_out(position_ + sizeof header, scratch_.data() + kTagBytes, bytes);
  if (crc32c(scratch_.data(), scratch_.size()) != crc) return RingResult::kDamaged;
  payload.assign(scratch_.begin() + kTagBytes, scratch_.end());
  position_ += whole(bytes);
  head().store(position_, std::memory_order_release);
  return RingResult::kOk;
}

}  // namespace h3
