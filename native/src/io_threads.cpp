// Threads that carry requests out one by one, where io_uring is not to be had.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "h3/io_kernel.hpp"
#include "io_transfer.hpp"

namespace h3::io {
namespace {

class ThreadKernel final : public Kernel {
 public:
  explicit ThreadKernel(const Options& options) : files_(options.files) {
    for (std::uint32_t i = 0; i < std::max(1u, options.threads); ++i) threads_.emplace_back([this] { serve(); });
  }

  // The engine has no request left when it destroys us.
  ~ThreadKernel() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    requested_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool push(const Request& request) override {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    requested_.notify_one();
    return true;
  }

  // A request that a thread has begun cannot be stopped.
  bool cancel(std::uint64_t token) override {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(requests_.begin(), requests_.end(), [&](const Request& r) { return r.token == token; });
    if (found == requests_.end()) return true;
    requests_.erase(found);
    completions_.push_back({token, -ECANCELED});
    return true;
  }

  std::size_t exchange(Completion* out, std::size_t capacity, std::uint64_t wait_ns) override {
    std::unique_lock lock(mutex_);
    const auto has_news = [this] { return !completions_.empty() || woken_; };
    if (wait_ns == kForever) completed_.wait(lock, has_news);
    else if (wait_ns > 0) completed_.wait_for(lock, std::chrono::nanoseconds(wait_ns), has_news);
    woken_ = false;
    const std::size_t count = std::min(capacity, completions_.size());
    const auto end = completions_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(completions_.begin(), end, out);
    completions_.erase(completions_.begin(), end);
    return count;
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    completed_.notify_one();
  }

  std::uint64_t calls() const override { return calls_.load(std::memory_order_relaxed); }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      requested_.wait(lock, [this] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const Request request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const std::int64_t result = transfer(request, files_[request.file]);
      calls_.fetch_add(1, std::memory_order_relaxed);
      lock.lock();
      completions_.push_back({request.token, result});
      completed_.notify_one();
    }
  }

  const std::vector<int> files_;
  std::mutex mutex_;
  std::condition_variable requested_, completed_;
  std::deque<Request> requests_;
  std::deque<Completion> completions_;
  bool woken_ = false;
  bool closing_ = false;
  std::atomic<std::uint64_t> calls_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Kernel> open_threads(const Options& options) { return std::make_unique<ThreadKernel>(options); }

}  // namespace h3::io
