#include "h3/io_flight.hpp"

#include <algorithm>
#include <cerrno>

#include "h3/crc32c.hpp"

namespace h3::io {
namespace {

constexpr std::uint64_t kPauseNs = 500'000;  // before EINTR, EAGAIN and a refusal are tried again
// Checksums between two visits to the kernel: at 20 GB/s and more, 50 us in which no request is added.
constexpr std::uint64_t kSliceBytes = 1 << 20;

std::uint32_t* crcs_of(const Op& op) { return reinterpret_cast<std::uint32_t*>(op.crcs); }

const unsigned char* page_of(const Op& op, std::uint64_t page) {
  return reinterpret_cast<const unsigned char*>(op.address) + page * op.page_bytes;
}

bool is_sound(const Op& op, std::uint32_t files) {
  if (op.file >= files) return false;
  if (op.kind == Kind::kFlush) return true;
  const bool has_pages = op.crcs == 0 || (op.page_bytes != 0 && op.size % op.page_bytes == 0);
  return op.kind <= Kind::kWrite && op.address != 0 && op.size != 0 && has_pages && op.offset + op.size > op.offset;
}

// Direct I/O begins at multiples of the device's block. A remainder does, too, when the op itself did; it then repeats
// bytes that were moved before.
std::uint64_t aligned_remainder(const Op& op, std::uint64_t done) {
  const std::uint64_t bits = op.offset | op.address | op.size | 4096;
  const std::uint64_t alignment = bits & (~bits + 1);
  return alignment < 512 ? done : done / alignment * alignment;
}

}  // namespace

Flight::Flight(Kernel& kernel, std::uint32_t files, std::uint32_t depth) : kernel_(kernel), files_(files), slots_(depth) {
  for (std::uint32_t index = depth; index > 0; --index) free_.push_back(index - 1);
}

void Flight::add(const Op& op, std::uint64_t deadline_ns) {
  expire_ns_ = std::min(expire_ns_, deadline_ns);
  pending_.push_back({op, deadline_ns});
}

bool Flight::start(std::uint64_t now_ns) {
  while (!cancels_.empty() && kernel_.cancel(cancels_.back())) cancels_.pop_back();
  refused_ns_ = cancels_.empty() ? kForever : now_ns + kPauseNs;
  if (now_ns >= later_ns_) {
    again_.insert(again_.end(), later_.begin(), later_.end());
    later_.clear();
    later_ns_ = kForever;
  }
  filled_bytes_ = 0;
  while (true) {
    if (again_.empty()) {
      if (filled_bytes_ >= kSliceBytes) return !pending_.empty() && !free_.empty();
      if (pending_.empty() || free_.empty()) return false;
      take(now_ns);
      continue;
    }
    if (!push(again_.front())) {
      refused_ns_ = now_ns + kPauseNs;
      return false;
    }
    again_.pop_front();
  }
}

// The oldest pending op gets a slot.
void Flight::take(std::uint64_t now_ns) {
  const Waiting waiting = pending_.front();
  pending_.pop_front();
  if (!is_sound(waiting.op, files_)) return finish(waiting.op, {waiting.op.tag, Status::kError, EINVAL, 0, 0, 0});
  if (waiting.op.kind == Kind::kWrite && waiting.op.crcs != 0) fill_checksums(waiting.op);
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index];
  slot = {.op = waiting.op, .deadline_ns = waiting.deadline_ns, .started_ns = now_ns, .generation = slot.generation,
          .is_taken = true};
  again_.push_back(index);
}

void Flight::fill_checksums(const Op& op) {
  for (std::uint64_t page = 0; page < op.size / op.page_bytes; ++page)
    crcs_of(op)[page] = crc32c(page_of(op, page), op.page_bytes);
  filled_bytes_ += op.size;
}

bool Flight::push(std::uint32_t index) {
  Slot& slot = slots_[index];
  const Op& op = slot.op;
  const std::uint64_t left = op.kind == Kind::kFlush ? 0 : op.size - slot.base;
  slot.requested = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kTransferBytesMax));
  const Token token{slot.generation + 1, Token::kOp, index};
  if (!kernel_.push({token.packed(), op.kind, op.file, op.offset + slot.base, op.address + slot.base, slot.requested}))
    return false;
  slot.generation = token.generation;
  slot.in_kernel = true;
  return true;
}

void Flight::complete(const Completion& completion, std::uint64_t now_ns) {
  const Token token = Token::unpacked(completion.token);
  if (token.use == Token::kCancel) return;  // what it did shows in the completion of its target
  if (token.use != Token::kOp || token.index >= slots_.size() || !slots_[token.index].in_kernel ||
      slots_[token.index].generation != token.generation) {
    ++statistics_.stale_completions;
    return;
  }
  Slot& slot = slots_[token.index];
  slot.in_kernel = false;
  if (completion.result >= 0) return moved(token.index, static_cast<std::uint64_t>(completion.result), now_ns);
  const auto error = static_cast<std::uint32_t>(-completion.result);
  // A cancelled request ends with ECANCELED, or with EINTR when a kernel thread was carrying it out.
  const bool is_passing = error == EINTR || error == EAGAIN;
  if (slot.stop != Status::kOk && (is_passing || error == ECANCELED)) return release(token.index, slot.stop, 0, now_ns);
  if (!is_passing) return release(token.index, Status::kError, error, now_ns);
  ++statistics_.retries;
  later_.push_back(token.index);
  later_ns_ = std::min(later_ns_, now_ns + kPauseNs);
}

void Flight::moved(std::uint32_t index, std::uint64_t bytes, std::uint64_t now_ns) {
  Slot& slot = slots_[index];
  // What ended whole counts, though it ended late or was to be cancelled.
  if (slot.op.kind == Kind::kFlush) return release(index, Status::kOk, 0, now_ns);
  if (bytes > slot.requested) return release(index, Status::kError, EIO, now_ns);
  const std::uint64_t end = slot.base + bytes;
  if (end == slot.op.size) {
    if (slot.op.kind == Kind::kWrite || slot.op.crcs == 0) return release(index, Status::kOk, 0, now_ns);
    unverified_.push_back({slot.op, slot.started_ns});
    return vacate(index);
  }
  if (end <= slot.done) {  // a request that brings nothing new: the file ends here, or the device takes no more
    if (slot.op.kind == Kind::kRead) return release(index, Status::kEndOfFile, 0, now_ns);
    return release(index, Status::kError, EIO, now_ns);
  }
  slot.done = end;
  if (slot.stop != Status::kOk) return release(index, slot.stop, 0, now_ns);
  if (bytes < slot.requested) ++statistics_.short_transfers;
  slot.base = aligned_remainder(slot.op, end);
  again_.push_back(index);
}

bool Flight::verify(std::uint64_t now_ns) {
  for (std::uint64_t bytes = 0; bytes < kSliceBytes && !unverified_.empty();) {
    const auto [op, started_ns] = unverified_.front();
    unverified_.pop_front();
    const std::uint64_t pages = op.size / op.page_bytes;
    std::uint64_t page = 0;
    while (page < pages && crc32c(page_of(op, page), op.page_bytes) == crcs_of(op)[page]) ++page;
    const bool matches = page == pages;
    finish(op, {op.tag, matches ? Status::kOk : Status::kChecksum, 0, matches ? 0 : static_cast<std::uint32_t>(page), 0,
                now_ns - started_ns});
    bytes += op.size;
  }
  return !unverified_.empty();
}

void Flight::expire(std::uint64_t now_ns) {
  if (now_ns < expire_ns_) return;
  expire_ns_ = kForever;
  for (std::uint32_t index = 0; index < slots_.size(); ++index) {
    const Slot& slot = slots_[index];
    if (!slot.is_taken || slot.stop != Status::kOk) continue;
    if (slot.deadline_ns <= now_ns) stop(index, Status::kDeadline);
    else expire_ns_ = std::min(expire_ns_, slot.deadline_ns);
  }
  std::erase_if(pending_, [&](const Waiting& waiting) {
    if (waiting.deadline_ns <= now_ns) {
      finish(waiting.op, {waiting.op.tag, Status::kDeadline, 0, 0, 0, 0});
      return true;
    }
    expire_ns_ = std::min(expire_ns_, waiting.deadline_ns);
    return false;
  });
}

void Flight::cancel_pending() {
  for (const Waiting& waiting : pending_) finish(waiting.op, {waiting.op.tag, Status::kCancelled, 0, 0, 0, 0});
  pending_.clear();
}

void Flight::cancel_all() {
  cancel_pending();
  for (std::uint32_t index = 0; index < slots_.size(); ++index)
    if (slots_[index].is_taken && slots_[index].stop == Status::kOk) stop(index, Status::kCancelled);
}

// An op in the kernel keeps its memory until the kernel says that it ended; any other ends now.
void Flight::stop(std::uint32_t index, Status why) {
  Slot& slot = slots_[index];
  slot.stop = why;
  if (slot.in_kernel) {
    cancels_.push_back(Token{slot.generation, Token::kOp, index}.packed());
    return;
  }
  std::erase(again_, index);
  std::erase(later_, index);
  if (later_.empty()) later_ns_ = kForever;
  release(index, why, 0, now_ns());
}

void Flight::release(std::uint32_t index, Status status, std::uint32_t error, std::uint64_t now_ns) {
  Slot& slot = slots_[index];
  finish(slot.op, {slot.op.tag, status, error, 0, 0, now_ns - slot.started_ns});
  vacate(index);
}

void Flight::vacate(std::uint32_t index) {
  slots_[index].is_taken = false;
  free_.push_back(index);
}

void Flight::finish(const Op& op, const Result& result) {
  finished_.push_back(result);
  if (result.status == Status::kOk) {
    ++(op.kind == Kind::kRead ? statistics_.reads : op.kind == Kind::kWrite ? statistics_.writes : statistics_.flushes);
    if (op.kind == Kind::kRead) statistics_.bytes_read += op.size;
    if (op.kind == Kind::kWrite) statistics_.bytes_written += op.size;
    return;
  }
  ++statistics_.failed;
  if (result.status == Status::kChecksum) ++statistics_.checksum_mismatches;
  if (result.status == Status::kDeadline) ++statistics_.deadlines;
  if (result.status == Status::kCancelled) ++statistics_.cancelled;
}

std::uint64_t Flight::next_ns() const { return std::min({later_ns_, refused_ns_, expire_ns_}); }

const Statistics& Flight::statistics() {
  statistics_.pending = pending_.size();
  statistics_.in_flight = slots_.size() - free_.size() + unverified_.size();
  statistics_.kernel_calls = kernel_.calls();
  return statistics_;
}

}  // namespace h3::io
