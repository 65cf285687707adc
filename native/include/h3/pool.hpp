// Threads for short parallel loops whose results must not depend on how many there are.
//
// A caller never waits for a thread that has not begun: it works through the loop itself, and whoever else is awake
// takes a share. On a machine whose cores are busy with something else a loop then takes as long as on one thread,
// where a barrier would wait for every thread to be scheduled. docs/adr/0002 has the measurements.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace h3 {

enum class Share {
  kOne,     // one unit at a time: units are long
  kGuided,  // half of a fair share of what is left: neighbouring units lie side by side in memory
};

class Pool {
 public:
  using Body = void (*)(void* context, int begin, int end);

  // The process has one. It is never destroyed: its threads sleep until the process ends. After a fork the child has no
  // threads but its own, and the caller does all the work.
  static Pool& instance();

  // Calls body(context, begin, end) over disjoint ranges that cover [0, units); returns when all calls have returned.
  // A second caller at the same time does its loop alone. `body` must not call `run`. It must not throw: scratch of some
  // hundred kilobytes that cannot be had ends the process.
  void run(int units, int threads, Share share, Body body, void* context);

 private:
  Pool() = default;

  // Takes a range of the loop that is published, if any is left.
  bool work(int worker);
  void start_workers(int count);
  void serve(int worker);

  // The published loop. `claim_` is (loop number << 32 | first unit that nobody has taken). It is closed under the new
  // loop's number before the other fields change, and opened after. A range is taken by exchanging the whole of `claim_`,
  // which fails once it was closed; so the fields that were read before are those of the loop that the range belongs to,
  // and they stay until its last range is done.
  std::atomic<std::uint64_t> claim_{0};
  std::atomic<int> units_{0};
  std::atomic<int> threads_{0};
  std::atomic<Share> share_{Share::kOne};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> done_{0};

  // Counts published loops; workers sleep on it.
  std::atomic<int> signal_{0};
  std::atomic<int> sleepers_{0};

  std::mutex caller_;
  int workers_ = 0;
};

// The same for a callable: body(begin, end).
template <class Callable>
void parallel(int units, int threads, Share share, Callable body) {
  Pool::instance().run(
      units, threads, share, [](void* context, int begin, int end) noexcept { (*static_cast<Callable*>(context))(begin, end); },
      &body);
}

}  // namespace h3
