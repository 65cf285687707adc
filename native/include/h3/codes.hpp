// Keys and values as codes: how pages of them are written, scored, summed and decoded. src/h3kv/core/layout.py draws the
// bytes. All numbers here are rotated.
//
// A page may begin inside a page, at a whole cluster: its addresses are moved on and its count is what is left at most.
// Nothing past the cluster of the last counted token is read.
#pragma once

#include "h3/types.hpp"

namespace h3 {

// Query rows of one KV head in parts of 7 bits:
//     q[r][d] = scale[r] * sum over p of 128^(part_count - 1 - p) * parts[r][p][d]
struct CodeRows {
  const std::int8_t* parts;  // [rows][part_count][D]
  const float* scale;        // [rows]; NaN where the row is not all numbers: so are its scores
  const float* sum;          // [rows]: q's sum over d, before `scale`
  int rows;
  int part_count;            // 1 to kPartsMax
  int head_dim;
};

constexpr int kPartsMax = 3;

// Weights of the tokens of one page for some rows, at least 0.
struct CodeWeights {
  const float* weights;  // [rows][64]; lanes past the page's count may hold anything
  int rows;
  int part_count;        // 1 to kPartsMax: how precisely a weight is kept, relative to its row's largest one
  int head_dim;
};

// Parts that keep the precision of pages of this type.
int query_parts(Encoding encoding, DType dtype);
int weight_parts(Encoding encoding, DType dtype);

// x [rows][D] becomes its rotation, in place: a Hadamard transform in Sylvester order of each run of as many dimensions as
// the largest power of two that divides D. Orthonormal, its own inverse.
void rotate_rows(float* x, int rows, int head_dim);

// Cuts rotated rows [rows][D] into what CodeRows points to.
void pack_code_rows(const float* rotated, int rows, int head_dim, int part_count, std::int8_t* parts, float* scale,
                    float* sum);

// Writes rotated tokens keys [count][D], values [count][D] into a page at places [place, place + count): codes, nibbles,
// scales. Other places keep theirs. What is not a finite number gives NaN for scale and offset.
void encode_rows(Encoding encoding, const float* keys, const float* values, int count, int head_dim, const Page& page,
                 int place);

// What each instruction set does its own way; entry [0], of raw pages, is null. Integers are summed, so that results are
// equal bit for bit on all of them.
struct CodeKernels {
  // scores[r][j] = q_r . k_j for tokens j < count, before the softmax scale; [rows][64], up to 15 more lanes are written.
  void (*score_page[kEncodings])(const CodeRows& rows, const Page& page, float* scores);
  // The same by the plane of 4 bits alone; int4: the same. Null for int8.
  void (*score_plane[kEncodings])(const CodeRows& rows, const Page& page, float* scores);
  // out[r][d] += sum over tokens j < count of weights[r][j] * v_j[d]; [rows][D].
  void (*sum_page[kEncodings])(const CodeWeights& weights, const Page& page, float* out);
  // Keys and values of the tokens below the page's count, [count][D] each.
  void (*decode_rows[kEncodings])(const Page& page, int head_dim, float* keys, float* values);
};

}  // namespace h3
