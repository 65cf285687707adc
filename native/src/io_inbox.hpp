// Completions on their way from whoever carries requests out to the engine's thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "h3/io_kernel.hpp"

namespace h3::io {

// All functions may be called from any thread.
class Inbox {
 public:
  void add(const Completion& completion) {
    {
      const std::lock_guard lock(mutex_);
      completions_.push_back(completion);
    }
    changed_.notify_one();
  }

  // Ends the wait of `take`, the next one's when there is none now.
  void wake() {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
  }

  // As `Kernel::exchange`.
  std::size_t take(Completion* out, std::size_t capacity, std::uint64_t wait_ns) {
    std::unique_lock lock(mutex_);
    const auto has_news = [this] { return !completions_.empty() || woken_; };
    if (wait_ns == kForever) changed_.wait(lock, has_news);
    else if (wait_ns > 0) changed_.wait_for(lock, std::chrono::nanoseconds(std::min(wait_ns, kWaitNsMax)), has_news);
    woken_ = false;
    const std::size_t count = std::min(capacity, completions_.size());
    const auto end = completions_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(completions_.begin(), end, out);
    completions_.erase(completions_.begin(), end);
    return count;
  }

 private:
  static constexpr std::uint64_t kWaitNsMax = std::uint64_t{1} << 60;  // longer ones overflow the clock

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Completion> completions_;
  bool woken_ = false;
};

}  // namespace h3::io
