// How the arguments of an attention come from Python: as a tuple of addresses and numbers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "h3/attend.hpp"
#include "h3/attend_batch.hpp"

// q, k, v, out, rows; count, heads, kv_heads, head_dim; types of tensors, encoding; scale; threads.
using BatchTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, int, int, int, int,
                              int, int, float, int>;

inline h3::BatchArgs batch_args(const BatchTuple& tuple) {
  const auto [q, k, v, out, rows, count, heads, kv_heads, head_dim, dtype, encoding, scale, threads] = tuple;
  return {reinterpret_cast<const void*>(q), reinterpret_cast<const void*>(k), reinterpret_cast<const void*>(v),
          reinterpret_cast<void*>(out), reinterpret_cast<const h3::BatchRow*>(rows), count, heads, kv_heads, head_dim,
          static_cast<h3::DType>(dtype), static_cast<h3::Encoding>(encoding), scale, threads};
}

// q, out, lse, pages, pages_stride; types of q, out and pages, encoding; tokens, heads, kv_heads, head_dim, page_count,
// position; scale; threads, page_first, page_last; state.
using AttendTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::int64_t, int, int, int, int,
                               int, int, int, int, int, int, float, int, int, int, std::uint64_t>;

inline h3::AttendArgs attend_args(const AttendTuple& tuple) {
  const auto [q, out, lse, pages, stride, q_dtype, out_dtype, page_dtype, encoding, tokens, heads, kv_heads, head_dim,
              page_count, position, scale, threads, page_first, page_last, state] = tuple;
  return {reinterpret_cast<const void*>(q), reinterpret_cast<void*>(out), reinterpret_cast<float*>(lse),
          reinterpret_cast<const h3::Page*>(pages), stride, static_cast<h3::DType>(q_dtype),
          static_cast<h3::DType>(out_dtype), static_cast<h3::DType>(page_dtype), static_cast<h3::Encoding>(encoding),
          tokens, heads, kv_heads, head_dim, page_count, position, scale, threads, page_first, page_last,
          reinterpret_cast<float*>(state)};
}
