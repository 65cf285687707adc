// Retrieval of a decode step in one layer: which clusters of the indexed segments are read exactly, and attention over
// them with an estimate of all others.
//
// Two calls, so that pages can be fetched in between. Every query row and KV head is for itself; a cluster's number is
// kSegmentClusters * segment + its place in the segment.
#pragma once

#include "h3/index.hpp"

namespace h3 {

class Queries;
struct RetrieveArgs;

// Somebody else who may look at the planes of all clusters.
class Scanner {
 public:
  virtual ~Scanner() = default;
  // Leaves the log-sum-exps that this process would find, bit for bit; or does nothing: false.
  virtual bool scan(const RetrieveArgs& args, const Queries& queries) = 0;
};

struct RetrieveArgs {
  const void* q;             // [T, H, D] of q_dtype, contiguous, not rotated
  const Indexed* segments;   // [S]
  float* lse;                // [T, H, kSegmentClusters * S], log-sum-exp of each cluster in base 2: what select()
                             // leaves for attend_chosen(); -inf where there is no cluster
  float* totals;             // [T, H], the same of all clusters and of what is read exactly anyway: left as well
  SlabShape shape;
  DType q_dtype;
  DType page_dtype;          // decides how precisely rows and weights are coded
  int tokens;                // T
  int heads;                 // H, a multiple of kv_heads
  int segment_count;         // S
  float scale;               // of the scores, above 0
  int threads;               // at most; results do not depend on it
  Scanner* scanner = nullptr;  // asked first when all clusters are scanned; null: nobody
};

struct SelectArgs {
  RetrieveArgs of;
  const float* exact_lse;    // [T, H]: natural log-sum-exp of what is read exactly anyway
  std::int32_t* chosen;      // [T, K, budget], ascending, then -1 where there are fewer clusters
  int budget;                // clusters
  int shortlist;             // clusters whose keys are scanned, the best ones by their mean keys; all or more: no
                             // ranking
  std::int32_t* runners = nullptr;  // [T, K, runner_count]: the best of the others, as `chosen`; they decide nothing
  int runner_count = 0;
};

void select(const SelectArgs& args);

struct ChosenArgs {
  RetrieveArgs of;
  const std::int32_t* chosen;      // [T, K, budget]
  const std::uint64_t* addresses;  // [T, K, budget]: of the page that holds the cluster; 0: in its segment's slab;
                                   // kMissing: nowhere, the cluster is estimated. Null: all in their slabs
  const float* exact_out;          // [T, H, D]: attention over other tokens, which the result includes; null: none
  const float* exact_lse;          // [T, H], natural, of them
  float* out;                      // [T, H, D] fp32
  float* out_lse;                  // [T, H], natural, of all that `out` has
  float* read_lse;                 // [T, H], natural, of the clusters that were read and of the other tokens
  int budget;
  bool estimate;                   // whether the clusters that are not read count, by their mean values
};

constexpr std::uint64_t kMissing = 1;

struct ChosenReads {
  std::int64_t clusters;
  std::int64_t pages;  // that hold one of them, counted for each row and KV head
};

// `exact_lse` is the one that select() got, or there is none: mean values that are nothing beside it may be left out.
ChosenReads attend_chosen(const ChosenArgs& args);

// Both at once, for segments that all lie in memory.
struct StepArgs {
  RetrieveArgs of;           // its `lse` and `totals` are not used
  const float* exact_out;    // as in ChosenArgs
  const float* exact_lse;
  float* out;
  float* out_lse;
  float* read_lse;
  int budget;                // as in SelectArgs
  int shortlist;
};

ChosenReads retrieve(const StepArgs& args);

constexpr int used_clusters(const Indexed& segment) { return segment.blocks * kPageClusters; }
std::int64_t used_clusters(const Indexed* segments, int count);
bool all_in_memory(const Indexed* segments, int count);

}  // namespace h3
