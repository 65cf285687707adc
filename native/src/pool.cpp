#include "h3/pool.hpp"

#include <algorithm>
#include <system_error>
#include <thread>

namespace h3 {
namespace {

// Some 50 microseconds: as long as the Python between two operators of a decode step.
constexpr int kSpins = 8000;
// While a loop's last range is computed elsewhere: then the core may be needed for just that.
constexpr int kSpinsBeforeYield = 200;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// In place of a first unit: nothing can be taken.
constexpr std::uint64_t kClosed = 0x7fffffff;

std::uint32_t loop_of(std::uint64_t claim) { return static_cast<std::uint32_t>(claim >> 32); }
int unit_of(std::uint64_t claim) { return static_cast<int>(claim & 0xffffffff); }

}  // namespace

Pool& Pool::instance() {
  static Pool* const pool = new Pool;
  return *pool;
}

void Pool::run(int units, int threads, Share share, Body body, void* context) {
  if (units <= 0) return;
  const std::unique_lock<std::mutex> only_caller(caller_, std::try_to_lock);
  if (threads <= 1 || units == 1 || !only_caller.owns_lock()) return body(context, 0, units);
  start_workers(threads - 1);
  const std::uint64_t loop = loop_of(claim_.load(std::memory_order_relaxed)) + 1u;
  claim_.store(loop << 32 | kClosed, std::memory_order_relaxed);
  units_.store(units, std::memory_order_release);
  threads_.store(threads, std::memory_order_release);
  share_.store(share, std::memory_order_release);
  body_.store(body, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  claim_.store(loop << 32, std::memory_order_release);
  // A worker that counts itself as a sleeper after this look sees the new signal and does not sleep.
  signal_.fetch_add(1);
  if (sleepers_.load() > 0) signal_.notify_all();
  while (work(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != units; ++spins) {
    if (spins < kSpinsBeforeYield) pause();
    else std::this_thread::yield();
  }
}

bool Pool::work(int worker) {
  std::uint64_t claim = claim_.load(std::memory_order_acquire);
  for (;;) {
    const int units = units_.load(std::memory_order_acquire);
    const int threads = threads_.load(std::memory_order_acquire);
    const Share share = share_.load(std::memory_order_acquire);
    const Body body = body_.load(std::memory_order_acquire);
    void* const context = context_.load(std::memory_order_acquire);
    const int begin = unit_of(claim);
    const int left = units - begin;
    if (left <= 0 || worker >= threads) return false;
    const int taken = share == Share::kOne ? 1 : std::max(1, left / (2 * threads));
    if (!claim_.compare_exchange_weak(claim, claim + static_cast<std::uint64_t>(taken), std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      continue;
    body(context, begin, begin + taken);
    done_.fetch_add(taken, std::memory_order_release);
    return true;
  }
}

void Pool::start_workers(int count) {
  try {
    for (; workers_ < count; ++workers_) std::thread(&Pool::serve, this, workers_ + 1).detach();
  } catch (const std::system_error&) {
    // The system allows no more threads: those that there are share the work.
  }
}

void Pool::serve(int worker) {
  for (;;) {
    const int signal = signal_.load();
    while (work(worker)) {
    }
    for (int spins = 0; spins < kSpins && signal_.load(std::memory_order_relaxed) == signal; ++spins) pause();
    if (signal_.load() != signal) continue;
    sleepers_.fetch_add(1);
    signal_.wait(signal);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace h3
