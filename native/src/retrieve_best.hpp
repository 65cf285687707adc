// The best clusters of each (token, KV head), by how much its rows attend to them.
#pragma once

#include "retrieve_shape.hpp"

namespace h3 {

// Numbers of clusters for each (token, KV head), `count` each: ascending, then -1.
struct ClusterLists {
  std::int32_t* clusters;
  int count;
};

// The best ones, and the best ones of the others. Ties: lower numbers first. Rows' totals are left in `args.totals`.
void choose(const RetrieveArgs& args, const RetrieveShape& shape, const float* exact_lse, ClusterLists chosen,
            ClusterLists runners);

}  // namespace h3
