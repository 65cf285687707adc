// Asynchronous file I/O with one thread of its own: callers hand ops in and fetch results.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "h3/io_flight.hpp"
#include "h3/record_ring.hpp"

namespace h3::io {

// All functions may be called from any thread. Memory of an op, checksums included, is the engine's from `submit` until
// its result was polled, or `close` has returned.
class Engine {
 public:
  // Throws std::runtime_error when a backend asked for by name cannot be had, std::system_error when no thread can be
  // started.
  explicit Engine(Options options);
  ~Engine() { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks. What exceeds the depth waits, in order. False after `close`: nothing was taken.
  bool submit(const Op* ops, std::size_t count);
  // Results so far, in the order in which the ops ended.
  std::size_t ready();
  std::size_t outstanding();  // submitted, without a result yet
  std::size_t poll(Result* out, std::size_t capacity);
  // Returns when `count` results can be polled, or all that are still to come, or the time is over.
  void wait(std::uint64_t timeout_ns, std::size_t count);
  // Rings whenever results were added, for a caller that waits for other things besides. It stays valid until `close`.
  void set_bell(Bell* bell);
  // Ends what can be ended. Each op still gets its result.
  void cancel_all();
  // Drops what the kernel was not given yet, waits for the rest, and gives back all that the kernel gave: threads, ring,
  // descriptors, its hold on the files. Results can still be polled.
  void close();
  Statistics statistics();

  const std::string& backend() const { return opened_.backend; }
  const std::string& reason() const { return opened_.reason; }
  const std::string& buffers_reason() const { return opened_.buffers_reason; }
  bool fixed_buffers() const { return fixed_buffers_; }

 private:
  struct Orders {
    std::vector<Op> ops;
    std::uint64_t submitted_ns = 0;  // of the oldest in `ops`
    bool cancel = false;
    bool close = false;
    bool any() const { return !ops.empty() || cancel || close; }
  };

  void serve();
  void run(Flight& flight);
  bool read_orders(Flight& flight);
  void publish(Flight& flight);
  void wake();

  Options options_;
  OpenedKernel opened_;  // its kernel is null again after `close`
  std::exception_ptr failure_;  // of opening
  bool fixed_buffers_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool opening_ = true;
  bool closed_ = false;
  Orders orders_;
  std::deque<Result> results_;
  std::size_t outstanding_ = 0;  // submitted, result not published yet
  std::size_t awaited_ = 0;      // results that the least demanding waiter wants; 0 without one
  int waiters_ = 0;
  Bell* bell_ = nullptr;
  Statistics statistics_{};

  // Set before the thread sleeps, and before it looks for orders a last time: whoever gives orders and finds it set wakes.
  std::atomic<bool> sleeping_{false};
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace h3::io
