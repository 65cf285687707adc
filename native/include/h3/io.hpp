// Reads, writes and flushes of files, as the caller sees them. src/h3kv/tiers/io.py has the same records.
#pragma once

#include <chrono>
#include <cstdint>

namespace h3::io {

enum class Kind : std::uint32_t {
  kRead,
  kWrite,
  kFlush,  // fdatasync
};

struct Op {
  std::uint64_t tag;          // comes back with the result
  std::uint64_t offset;       // bytes in the file
  std::uint64_t address;
  std::uint64_t size;         // bytes
  std::uint64_t crcs;         // 0, or address of u32[size / page_bytes]: compared after a read, filled in before a write
  std::uint32_t page_bytes;
  Kind kind;
  std::uint32_t file;         // index in the engine's list
  std::uint32_t deadline_ms;  // 0: the engine's own
};
static_assert(sizeof(Op) == 56);

enum class Status : std::uint32_t {
  kOk,
  kError,      // the kernel's, in `error`
  kEndOfFile,  // the file ends before the op does
  kChecksum,   // `page` is the first that does not match
  kDeadline,
  kCancelled,
};

struct Result {
  std::uint64_t tag;
  Status status;
  std::uint32_t error;        // errno
  std::uint32_t page;
  std::uint32_t reserved;
  std::uint64_t duration_ns;  // from the moment that the kernel was given the op
};
static_assert(sizeof(Result) == 32);

// Totals since the engine was opened, but for the last two.
struct Statistics {
  std::uint64_t reads, writes, flushes;     // ended well
  std::uint64_t bytes_read, bytes_written;  // by these
  std::uint64_t failed;                     // ended otherwise
  std::uint64_t checksum_mismatches, deadlines, cancelled;  // among the failed
  std::uint64_t short_transfers;            // the kernel moved a part; the remainder was asked for
  std::uint64_t retries;                    // EINTR, EAGAIN
  std::uint64_t stale_completions;          // ignored
  std::uint64_t kernel_calls;
  std::uint64_t pending, in_flight;         // now
};

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace h3::io
