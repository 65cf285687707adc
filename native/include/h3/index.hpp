// What one thread does on the index of a KV head: scores of clusters, their weights, and the clusters themselves.
#pragma once

#include "h3/codes.hpp"
#include "h3/slab.hpp"

namespace h3 {

// What the native core reads of an indexed segment of one layer. 32 bytes; equals INDEXED_DTYPE in attention/retrieval.py.
struct Indexed {
  std::uint64_t pages;     // address of its slab, or 0 where its pages are not in memory
  std::uint64_t planes;    // address of its planes [kv_head][kSegmentBlocks]
  std::uint64_t summary;   // address of its summaries [kv_head]
  std::int32_t blocks;     // in use, all of their tokens
  std::int32_t reserved;
};
static_assert(sizeof(Indexed) == 32);

// Log-sum-exp in base 2 of the scores of whole clusters by their nibbles. A cluster's number is kSegmentClusters * segment
// + its place in the segment.
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

  std::int32_t cluster(int i) const { return clusters == nullptr ? first + i : clusters[i]; }
};

// One row of scores of clusters against the largest, for a softmax over all of them.
struct WeighRow {
  const float* lse;              // [count] in base 2, a multiple of 16
  float* weights;                // [count]: 2^(lse - maximum)
  std::int64_t count;
  float other;                   // one more score that the maximum and the sum include
};

struct Weighed {
  float maximum;
  float sum;
};

// The running softmax of some rows over clusters by their mean values, one segment and KV head at a time.
struct MeanBlock {
  const float* lse;              // [rows][kSegmentClusters] in base 2; -inf: that cluster does not count
  const char* values;            // codes of the mean values, as in an int8 page
  const char* scales;            // of the summary
  int clusters;                  // in use
  int rows;                      // any number
  int head_dim;
  float* out;                    // [rows][head_dim], relative to the maximum, as are the sums
  float* maximum;                // [rows], -inf before the first
  float* sum;                    // [rows]
};

// Cuts tokens into leaves of 16 that are alike, in an order in which neighbours are alike.
struct ClusterBlock {
  const float* keys;             // [16 leaves][head_dim]
  int leaves;
  int head_dim;
  std::int32_t* order;           // [16 leaves]: the token in each place; ascending inside a leaf
};

struct IndexKernels {
  void (*scan)(const ScanBlock& block);
  Weighed (*weigh)(const WeighRow& row);
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
