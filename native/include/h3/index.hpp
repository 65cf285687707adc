// What one thread does on the index of a KV head: scores of clusters, their weights, and the clusters themselves.
#pragma once

#include "h3/codes.hpp"
#include "h3/slab.hpp"

namespace h3 {

// What the native core reads of an indexed segment of one layer. 32 bytes; equals INDEXED_DTYPE in
// attention/retrieval.py.
struct Indexed {
  std::uint64_t pages;     // address of its slab, or 0 where its pages are not in memory
  std::uint64_t planes;    // address of its planes [kv_head][kSegmentBlocks]
  std::uint64_t summary;   // address of its summaries [kv_head]
  std::int32_t blocks;     // in use, all of their tokens
  std::int32_t reserved;
};
static_assert(sizeof(Indexed) == 32);

// Log-sum-exp in base 2 of the scores of whole clusters by their nibbles. A cluster's number is kSegmentClusters *
// segment + its place in the segment.
struct ScanBlock {
  CodeRows query;                // of 1 or 2 parts; scales times the softmax scale and log2(e)
  const Indexed* segments;
  std::int64_t head_offset;      // of the KV head's first plane in a segment's planes
  const std::int32_t* clusters;  // ascending; null: first, first + 1, ...
  std::int32_t first;
  int count;
  bool split_keys;               // nibbles are high halves: the low ones count as their middle, 7.5
  float* lse;                    // [rows], lse_stride apart, indexed by cluster
  std::int64_t lse_stride;
  const char* next;              // planes that are read after these, to be fetched early; null: none. Not of lists

  std::int32_t cluster(int i) const { return clusters == nullptr ? first + i : clusters[i]; }
};

// How much clusters matter to the rows of a group: each cluster's share of a row's attention, summed over the rows.
struct RankBlock {
  const float* lse;              // [rows], lse_stride apart: [count] in base 2, a multiple of 16; -inf: no cluster
  std::int64_t lse_stride;
  std::int64_t count;
  const float* other;            // [rows]: log-sum-exp of everything else, in base 2
  int rows;
  float* weights;                // [count]: scratch
  float* importance;             // [count]: infinite what is not a number, so that it is read and seen; -1: no cluster
  float* largest;                // [count / 16]: of 16 importances
  float* totals;                 // [rows]: log-sum-exp of everything, in base 2
};

// Sums of some rows over the clusters of a run of segments by their mean values.
struct MeanBlock {
  const Indexed* segments;
  int first, last;               // of them, at most kMeanSegmentsMax
  std::int64_t head_offset;      // of the KV head's summary in a segment's summaries
  const float* lse;              // [rows], lse_stride apart, indexed by cluster
  std::int64_t lse_stride;
  const std::uint64_t* is_read;  // [segment]: a bit for each cluster that does not count
  const float* origin;           // [rows]: weights are 2^(lse - origin); -inf: there are none
  float negligible;              // segments may be left out all of whose clusters have lse - origin below it
  int rows;                      // any number
  int head_dim;
  float* out;                    // [rows][head_dim]: receives what it had and the sums
  float* sum;                    // [rows]: the same of weights
};

constexpr int kMeanSegmentsMax = 8;

// Cuts tokens into leaves of 16 that are alike, in an order in which neighbours are alike.
struct ClusterBlock {
  const float* keys;             // [16 leaves][head_dim]
  int leaves;
  int head_dim;
  std::int32_t* order;           // [16 leaves]: the token in each place; ascending inside a leaf
};

struct IndexKernels {
  void (*scan)(const ScanBlock& block);
  void (*rank)(const RankBlock& block);
  void (*sum_means)(const MeanBlock& block);
  void (*cluster)(const ClusterBlock& block);
};

extern const IndexKernels kPortableIndex;
#ifdef H3_X86
extern const IndexKernels kAvx2Index;
extern const IndexKernels kAvx512Index;
#endif

// Those of the instruction set in use (dispatch.hpp).
const IndexKernels& index_kernels();

}  // namespace h3
