// Threads that carry requests out one by one, where io_uring is not to be had.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "h3/io_kernel.hpp"
#include "io_inbox.hpp"
#include "io_transfer.hpp"

namespace h3::io {
namespace {

class ThreadKernel final : public Kernel {
 public:
  explicit ThreadKernel(const Options& options) : files_(options.files) {
    try {
      for (std::uint32_t i = 0; i < std::max(1u, options.threads); ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {  // a limit on processes: the threads that did start end before their members do
      stop();
      throw;
    }
  }

  // The engine has no request left when it destroys us.
  ~ThreadKernel() override { stop(); }

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
    inbox_.add({token, -ECANCELED});
    return true;
  }

  std::size_t exchange(Completion* out, std::size_t capacity, std::uint64_t wait_ns) override {
    return inbox_.take(out, capacity, wait_ns);
  }

  void wake() override { inbox_.wake(); }
  std::uint64_t calls() const override { return calls_.load(std::memory_order_relaxed); }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    requested_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

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
      inbox_.add({request.token, result});
      lock.lock();
    }
  }

  const std::vector<int> files_;
  std::mutex mutex_;
  std::condition_variable requested_;
  std::deque<Request> requests_;
  Inbox inbox_;
  bool closing_ = false;
  std::atomic<std::uint64_t> calls_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Kernel> open_threads(const Options& options) { return std::make_unique<ThreadKernel>(options); }

}  // namespace h3::io
