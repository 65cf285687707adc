#include "h3/attend_batch.hpp"

#include <algorithm>
#include <cstddef>

#include "attend_plan.hpp"
#include "h3/pool.hpp"
#include "h3/transform.hpp"

// Units of all sequences lie in one row, so that the threads share them whatever the lengths are:
//
//     sequence 0         | sequence 1 | sequence 2
//     u0 u1 u2 u3 u4 u5  | u6 u7 u8   | u9 ...
namespace h3 {
namespace {

thread_local std::vector<AttendArgs> calls_of_thread;
thread_local std::vector<float> lse_of_thread;

void append_row(const BatchArgs& a, int row) {
  const std::int64_t each = std::int64_t{a.kv_heads} * a.head_dim * size_bytes(a.dtype);
  const BatchRow& r = a.rows[row];
  append({static_cast<const char*>(a.k) + row * each, static_cast<const char*>(a.v) + row * each,
          reinterpret_cast<const Page*>(r.append_page), r.pages_stride, r.position % kPageTokens, 1, a.kv_heads, a.head_dim,
          a.dtype, a.encoding, 1});
}

AttendArgs attend_row(const BatchArgs& a, int row, float* lse) {
  const std::int64_t each = std::int64_t{a.heads} * a.head_dim * size_bytes(a.dtype);
  const BatchRow& r = a.rows[row];
  return {static_cast<const char*>(a.q) + row * each, static_cast<char*>(a.out) + row * each, lse + row * a.heads,
          reinterpret_cast<const Page*>(r.pages), r.pages_stride, a.dtype, a.dtype, a.dtype, a.encoding, 1, a.heads,
          a.kv_heads, a.head_dim, r.page_count, r.position, a.scale, a.threads, 0, r.page_count, nullptr};
}

// What the plans of a batch keep while their units are computed.
struct Scratch {
  std::vector<PartedRows> parted;
  std::vector<float> state;
  std::vector<AttendArgs> calls;
  std::vector<AttendPlan> plans;
  std::vector<int> first_units;  // of each plan, and behind the last one

  void prepare(const std::vector<AttendArgs>& given) {
    std::size_t floats = 0;
    for (const AttendArgs& call : given) floats += static_cast<std::size_t>(attend_state_floats(call));
    state.resize(std::max(state.size(), floats));
    parted.resize(std::max(parted.size(), given.size()));
    calls = given;
    plans.clear();
    plans.reserve(calls.size());
    first_units.assign(1, 0);
    float* at = state.data();
    for (std::size_t i = 0; i < calls.size(); ++i) {
      calls[i].state = at;
      at += attend_state_floats(calls[i]);
      plans.emplace_back(calls[i], &parted[i]);
      first_units.push_back(first_units.back() + plans.back().units());
    }
  }

  void compute(int begin, int end) const {
    auto plan = static_cast<std::size_t>(std::upper_bound(first_units.begin(), first_units.end(), begin) -
                                         first_units.begin() - 1);
    while (begin < end) {
      const int last = std::min(end, first_units[plan + 1]);
      plans[plan].compute(begin - first_units[plan], last - first_units[plan]);
      begin = last;
      ++plan;
    }
  }
};

}  // namespace

BatchCalls::BatchCalls(const BatchArgs& args) : calls_(calls_of_thread) {
  calls_.clear();
  lse_of_thread.resize(static_cast<std::size_t>(args.count * args.heads));
  for (int row = 0; row < args.count; ++row) {
    append_row(args, row);
    calls_.push_back(attend_row(args, row, lse_of_thread.data()));
  }
}

void attend_batch(const BatchArgs& args) {
  thread_local Scratch scratch_of_thread;
  Scratch& scratch = scratch_of_thread;  // the pool's threads have others
  scratch.prepare(BatchCalls(args).calls());
  parallel(scratch.first_units.back(), args.threads, Share::kGuided,
           [&](int begin, int end) { scratch.compute(begin, end); });
  for (const AttendPlan& plan : scratch.plans) plan.finish();
}

}  // namespace h3
