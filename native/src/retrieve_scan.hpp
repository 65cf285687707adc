// Log-sum-exps of the clusters of indexed segments: by their mean keys, or by the 4-bit plane of all their keys.
#pragma once

#include "retrieve_queries.hpp"
#include "retrieve_shape.hpp"

namespace h3 {

// Every cluster's log-sum-exp as if all its keys were their mean.
void scan_means(const RetrieveArgs& args, const RetrieveShape& shape, const Queries& queries);

// Every cluster's by its plane.
void scan_all(const RetrieveArgs& args, const RetrieveShape& shape, const Queries& queries);

// The same of some (segment, KV head) as numbers segment * KV heads + head, by this thread.
void scan_units(const RetrieveArgs& args, const RetrieveShape& shape, const Queries& queries, int first, int last);

// The same of the clusters listed for each (token, KV head): `count` each, -1 at the end where there are fewer.
void scan_listed(const RetrieveArgs& args, const RetrieveShape& shape, const Queries& queries,
                 const std::int32_t* lists, int count);

}  // namespace h3
