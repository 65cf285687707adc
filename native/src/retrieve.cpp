#include "h3/retrieve.hpp"

#include <algorithm>

#include "retrieve_best.hpp"
#include "retrieve_queries.hpp"
#include "retrieve_scan.hpp"
#include "retrieve_shape.hpp"

namespace h3 {

std::int64_t used_clusters(const Indexed* segments, int count) {
  std::int64_t used = 0;
  for (int i = 0; i < count; ++i) used += used_clusters(segments[i]);
  return used;
}

bool all_in_memory(const Indexed* segments, int count) {
  return std::all_of(segments, segments + count, [](const Indexed& segment) { return segment.pages != 0; });
}

void select(const SelectArgs& args) {
  const RetrieveArgs& a = args.of;
  const RetrieveShape s(a);
  // Keys of 4 bits are the coarser side by far: seven bits of a query do, but where fp32 is asked for.
  Queries queries(a, a.page_dtype == DType::kFp32 ? 2 : 1);
  queries.to_base2(a.scale);
  if (args.shortlist < s.used) {
    scan_means(a, s, queries);
    thread_local std::vector<std::int32_t> room;
    std::int32_t* const lists = grown(room, std::int64_t{s.lists} * args.shortlist);
    choose(a, s, args.exact_lse, {lists, args.shortlist}, {nullptr, 0});
    scan_listed(a, s, queries, lists, args.shortlist);
  } else if (a.scanner == nullptr || !a.scanner->scan(a, queries)) {
    scan_all(a, s, queries);
  }
  choose(a, s, args.exact_lse, {args.chosen, args.budget}, {args.runners, args.runner_count});
}

ChosenReads retrieve(const StepArgs& args) {
  thread_local std::vector<float> lse, totals;
  thread_local std::vector<std::int32_t> chosen;
  RetrieveArgs a = args.of;
  const RetrieveShape s(a);
  const auto rows = std::int64_t{a.tokens} * a.heads;
  a.lse = grown(lse, rows * s.clusters);
  a.totals = grown(totals, rows);
  std::int32_t* const lists = grown(chosen, std::int64_t{s.lists} * args.budget);
  select({a, args.exact_lse, lists, args.budget, args.shortlist});
  return attend_chosen({a, lists, nullptr, args.exact_out, args.exact_lse, args.out, args.out_lse, args.read_lse,
                        args.budget, true});
}

}  // namespace h3
