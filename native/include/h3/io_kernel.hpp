// What carries requests out: io_uring, threads, or a script in tests. Promises nothing but that each request taken gets
// its completion: completions may be late, short, repeated or of requests long forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "h3/io.hpp"

namespace h3::io {

// What a kernel carries from a request to its completion. A generation is never used twice for an index.
//   63          32 31  24 23      0
//   [ generation ][ use ][ index  ]
struct Token {
  enum Use : std::uint8_t { kOp, kCancel, kWake };
  std::uint32_t generation;
  Use use;
  std::uint32_t index;

  static constexpr std::uint32_t kIndexMax = (1u << 24) - 1;
  std::uint64_t packed() const {
    return std::uint64_t{generation} << 32 | std::uint64_t{use} << 24 | index;
  }
  static Token unpacked(std::uint64_t bits) {
    return {static_cast<std::uint32_t>(bits >> 32), static_cast<Use>(bits >> 24 & 255),
            static_cast<std::uint32_t>(bits & kIndexMax)};
  }
};

// One transfer of at most kTransferBytesMax, or a flush.
struct Request {
  std::uint64_t token;
  Kind kind;
  std::uint32_t file;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t size;
};

constexpr std::uint32_t kTransferBytesMax = 1u << 30;  // the kernel itself cuts at 2 GiB less a page

struct Completion {
  std::uint64_t token;
  std::int64_t result;  // bytes moved, or a negative errno
};

constexpr std::uint64_t kForever = ~std::uint64_t{0};

class Kernel {
 public:
  virtual ~Kernel() = default;
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // False when there is no room now; nothing was taken.
  virtual bool push(const Request& request) = 0;
  // Asks for an early end of a request: its completion comes in any case. False as above.
  virtual bool cancel(std::uint64_t token) = 0;
  // Starts what was pushed and gives completions, waiting up to `wait_ns` for the first one or for `wake`.
  virtual std::size_t exchange(Completion* out, std::size_t capacity, std::uint64_t wait_ns) = 0;
  // From any thread: ends the wait of `exchange`, the next one's when there is none now.
  virtual void wake() = 0;
  virtual bool fixed_buffers() const { return false; }
  virtual std::uint64_t calls() const { return 0; }
};

// What a script does to the requests [first, first + count), counted from 0 as they are taken.
struct Fault {
  enum Effect : std::uint32_t {
    kFull,    // the request is refused `value` times before it is taken
    kShort,   // at most `value` bytes are moved; 0 looks like the end of the file. Writes: as aligned as the file asks
    kError,   // nothing is moved; completes with errno `value`
    kTorn,    // half of the bytes are moved; completes with errno `value`
    kRepeat,  // completes twice
    kStale,   // a completion of an older generation comes first
    kHold,    // completes only when cancelled
    kLate,    // as kHold, but the cancel comes too late: all bytes are moved after it
    kFlip,    // byte `value` of what was read, or of what lies in the file after a write, is inverted
  };
  Effect effect;
  std::uint64_t first, count, value;
};

struct Options {
  std::vector<int> files;
  std::uint32_t depth = 1;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> buffers;  // address, bytes
  std::string backend = "auto";  // or "io_uring", "threads", "script"
  std::uint32_t threads = 4;
  std::uint64_t deadline_ms = 30'000;
  std::vector<Fault> faults;
};

struct OpenedKernel {
  std::unique_ptr<Kernel> kernel;  // null when what was asked for cannot be had
  std::string backend;
  std::string reason;          // why it is not io_uring; empty otherwise
  std::string buffers_reason;  // why buffers that were given are not registered; empty otherwise
};

// Called on the thread that will call everything but `wake`: io_uring then knows its single issuer.
OpenedKernel open_kernel(const Options& options);

OpenedKernel open_ring(const Options& options);
std::unique_ptr<Kernel> open_threads(const Options& options);
std::unique_ptr<Kernel> open_script(const Options& options);

}  // namespace h3::io
