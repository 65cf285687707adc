// The life of ops between the caller and a kernel. One thread owns it.
//
//   add -> pending -> [again] -> in the kernel -> finished, or to be verified -> finished
//                        ^             |
//                        +-------------+  the remainder of a short transfer at once, EINTR and EAGAIN after a pause
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "h3/io_kernel.hpp"

namespace h3::io {

class Flight {
 public:
  Flight(Kernel& kernel, std::uint32_t files, std::uint32_t depth);

  void add(const Op& op, std::uint64_t deadline_ns);
  // Gives the kernel what it takes, in order, `depth` requests at most at a time. Returns whether it stopped early,
  // because checksums of writes took long and the kernel should start what it has.
  bool start(std::uint64_t now_ns);
  void complete(const Completion& completion, std::uint64_t now_ns);
  // Compares checksums of ops that were read, some of them; returns whether more are left.
  bool verify(std::uint64_t now_ns);
  // Stops what is over its deadline.
  void expire(std::uint64_t now_ns);
  void cancel_pending();
  void cancel_all();

  // When `start` or `expire` has something to do again; kForever when only a completion can bring it.
  std::uint64_t next_ns() const;
  bool idle() const { return pending_.empty() && free_.size() == slots_.size() && unverified_.empty(); }
  bool verifying() const { return !unverified_.empty(); }
  std::vector<Result>& finished() { return finished_; }
  const Statistics& statistics();

 private:
  struct Waiting {
    Op op;
    std::uint64_t deadline_ns;
  };
  struct Slot {
    Op op{};
    std::uint64_t deadline_ns = 0;
    std::uint64_t started_ns = 0;
    std::uint64_t done = 0;       // bytes [0, done) of the op have been moved
    std::uint64_t base = 0;       // where the current request begins; at most `done`
    std::uint32_t requested = 0;  // its bytes
    std::uint32_t generation = 0;
    Status stop = Status::kOk;    // otherwise: why no more requests are made
    bool is_taken = false;
    bool in_kernel = false;
  };
  struct Unverified {
    Op op;
    std::uint64_t started_ns;
  };

  void take(std::uint64_t now_ns);
  void fill_checksums(const Op& op);
  bool push(std::uint32_t index);
  void moved(std::uint32_t index, std::uint64_t bytes, std::uint64_t now_ns);
  void stop(std::uint32_t index, Status why);
  void release(std::uint32_t index, Status status, std::uint32_t error, std::uint64_t now_ns);
  void vacate(std::uint32_t index);
  void finish(const Op& op, const Result& result);

  Kernel& kernel_;
  std::uint32_t files_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::deque<Waiting> pending_;
  std::deque<std::uint32_t> again_;     // slots to be pushed as soon as the kernel takes them
  std::vector<std::uint32_t> later_;    // slots to be pushed from `later_ns_` on
  std::vector<std::uint64_t> cancels_;  // tokens to be cancelled as soon as the kernel takes them
  std::deque<Unverified> unverified_;
  std::vector<Result> finished_;
  std::uint64_t later_ns_ = kForever;
  std::uint64_t refused_ns_ = kForever;  // when to ask again a kernel that took no more
  std::uint64_t expire_ns_ = kForever;  // no deadline is earlier
  std::uint64_t filled_bytes_ = 0;      // checksums of writes since the kernel was called
  Statistics statistics_{};
};

}  // namespace h3::io
