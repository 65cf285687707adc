#include "h3/io_engine.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace h3::io {
namespace {

constexpr std::size_t kBatch = 256;  // completions taken from the kernel at a time

// Signals are for the threads that run Python.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Engine::Engine(Options options) : options_(std::move(options)) {
  const SignalsBlocked blocked;  // inherited by the thread and by those that it starts
  thread_ = std::thread([this] { serve(); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !opening_; });
  if (opened_.kernel != nullptr) return;
  lock.unlock();
  thread_.join();
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  throw std::runtime_error(opened_.reason);
}

// What fails while the engine opens is the constructor's to throw. Memory that runs out later ends the process: ops in
// the kernel then write where nobody can be told that they do.
void Engine::serve() {
  OpenedKernel opened;
  std::unique_ptr<Flight> flight;
  std::exception_ptr failure;
  try {
    opened = open_kernel(options_);
    if (opened.kernel != nullptr)
      flight = std::make_unique<Flight>(*opened.kernel, static_cast<std::uint32_t>(options_.files.size()), options_.depth);
  } catch (...) {
    failure = std::current_exception();
    opened.kernel.reset();
  }
  {
    const std::lock_guard lock(mutex_);
    opened_ = std::move(opened);
    fixed_buffers_ = opened_.kernel != nullptr && opened_.kernel->fixed_buffers();
    failure_ = failure;
    opening_ = false;
  }
  changed_.notify_all();
  if (flight != nullptr) run(*flight);
}

void Engine::run(Flight& flight) {
  Completion completions[kBatch];
  while (true) {
    const bool closing = read_orders(flight);
    std::uint64_t now = now_ns();
    flight.expire(now);
    bool is_busy = flight.start(now) || flight.verifying() || !flight.finished().empty();
    if (closing && flight.idle() && flight.finished().empty()) return;
    if (!is_busy) {
      sleeping_ = true;
      const std::lock_guard lock(mutex_);
      is_busy = orders_.any();
    }
    const std::uint64_t next = flight.next_ns();
    const std::uint64_t wait = is_busy ? 0 : next == kForever ? kForever : next > now ? next - now : 0;
    const std::size_t count = opened_.kernel->exchange(completions, kBatch, wait);
    sleeping_ = false;
    now = now_ns();
    // What ended before this visit is verified while the device works on what was started in it.
    flight.verify(now);
    for (std::size_t i = 0; i < count; ++i) flight.complete(completions[i], now);
    publish(flight);
  }
}

// Returns whether the engine is to end.
bool Engine::read_orders(Flight& flight) {
  Orders orders;
  bool closing;
  {
    const std::lock_guard lock(mutex_);
    std::swap(orders, orders_);
    closing = closed_;
  }
  for (const Op& op : orders.ops) {
    const std::uint64_t ms = op.deadline_ms != 0 ? op.deadline_ms : options_.deadline_ms;
    flight.add(op, orders.submitted_ns + ms * 1'000'000);
  }
  if (orders.cancel) flight.cancel_all();
  if (orders.close) flight.cancel_pending();
  return closing;
}

void Engine::publish(Flight& flight) {
  std::vector<Result>& finished = flight.finished();
  bool is_awaited;
  Bell* bell;
  {
    const std::lock_guard lock(mutex_);
    results_.insert(results_.end(), finished.begin(), finished.end());
    outstanding_ -= finished.size();
    statistics_ = flight.statistics();
    bell = finished.empty() ? nullptr : bell_;
    is_awaited = waiters_ > 0 && !finished.empty() && (results_.size() >= awaited_ || outstanding_ == 0);
  }
  finished.clear();
  if (is_awaited) changed_.notify_all();
  if (bell != nullptr) bell->ring();
}

void Engine::set_bell(Bell* bell) {
  const std::lock_guard lock(mutex_);
  bell_ = bell;
}

bool Engine::submit(const Op* ops, std::size_t count) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    if (orders_.ops.empty()) orders_.submitted_ns = now_ns();
    orders_.ops.insert(orders_.ops.end(), ops, ops + count);
    outstanding_ += count;
  }
  wake();
  return true;
}

void Engine::wake() {
  if (!sleeping_.exchange(false)) return;
  const std::lock_guard lock(mutex_);
  if (opened_.kernel != nullptr) opened_.kernel->wake();
}

std::size_t Engine::ready() {
  const std::lock_guard lock(mutex_);
  return results_.size();
}

std::size_t Engine::outstanding() {
  const std::lock_guard lock(mutex_);
  return outstanding_;
}

std::size_t Engine::poll(Result* out, std::size_t capacity) {
  const std::lock_guard lock(mutex_);
  const std::size_t count = std::min(capacity, results_.size());
  const auto end = results_.begin() + static_cast<std::ptrdiff_t>(count);
  std::copy(results_.begin(), end, out);
  results_.erase(results_.begin(), end);
  return count;
}

void Engine::wait(std::uint64_t timeout_ns, std::size_t count) {
  std::unique_lock lock(mutex_);
  awaited_ = waiters_++ == 0 ? count : std::min(awaited_, count);
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min(timeout_ns, std::uint64_t{1} << 60)),
                    [&] { return results_.size() >= count || outstanding_ == 0; });
  --waiters_;
}

void Engine::cancel_all() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    orders_.cancel = true;
  }
  wake();
}

void Engine::close() {
  const std::lock_guard closing(closing_);
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closed_ = orders_.close = true;
  }
  wake();
  thread_.join();
  std::unique_ptr<Kernel> kernel;  // ends without the lock
  const std::lock_guard lock(mutex_);
  kernel.swap(opened_.kernel);
}

Statistics Engine::statistics() {
  const std::lock_guard lock(mutex_);
  Statistics statistics = statistics_;
  statistics.pending += orders_.ops.size();
  return statistics;
}

}  // namespace h3::io
