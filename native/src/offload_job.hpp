// What lies in a job, and in the record that asks for help with it.
//
//   0       64         192      units           words        rows                pages      positions   sums      end
//   +-------+----------+--------+---------------+------------+-------------------+----------+-----------+---------+
//   | claim | fields   | unit   | word of each  | query rows | page entries      | of pages | of each   |
//   |       |          | table  | unit          |            | of all units      | in the   | unit      |
//   |       |          |        |               |            |                   | lead     |           |
//   +-------+----------+--------+---------------+------------+-------------------+----------+-----------+---------+
//
//   claim   sequence (40 bits) | next unit that nobody took (24)
//   word    sequence (40 bits) | helper (20) | state (4)
//
// Places follow from the fields alone. A helper copies the fields, checks them, and takes a unit by exchanging the whole of
// `claim`: that fails when the job was closed meanwhile, and a job is closed before its fields change. Its word, which the
// caller can take away, says whether the unit is its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attend_plan.hpp"
#include "h3/mailbox.hpp"
#include "h3/offload.hpp"
#include "mailbox_wait.hpp"

namespace h3::offload {

constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kSequenceMask = (std::uint64_t{1} << 40) - 1;
constexpr std::uint64_t kClosed = (1u << 24) - 1;  // in place of a next unit
constexpr std::uint32_t kUnitsMax = 1u << 16;
constexpr std::uint32_t kPagesMax = 1u << 20;
constexpr std::uint32_t kHeadsMax = 1u << 10;

enum class UnitState : std::uint32_t { kNone, kFree, kClaimed, kDone, kRefused, kRevoked, kReleased };

constexpr std::uint64_t unit_word(std::uint64_t sequence, std::uint32_t helper, UnitState state) {
  return sequence << 24 | std::uint64_t{helper} << 4 | static_cast<std::uint64_t>(state);
}
constexpr UnitState state_of(std::uint64_t word) { return static_cast<UnitState>(word & 15); }
constexpr std::uint32_t helper_of(std::uint64_t word) { return word >> 4 & (kHelpersMax - 1); }
constexpr std::uint64_t sequence_of(std::uint64_t word) { return word >> 24; }
constexpr std::uint64_t next_of(std::uint64_t claim) { return claim & kClosed; }

// What a helper must know to compute. Every field is one word, so that a copy has no torn one.
struct Fields {
  std::uint32_t isa;
  std::uint32_t q_dtype, page_dtype, encoding;
  std::uint32_t tokens, heads, kv_heads, head_dim;
  std::int32_t position;
  float scale;
  std::uint32_t units;
  std::uint32_t pages;      // entries, of all units
  std::uint32_t positions;  // entries of which have positions in the job
};
constexpr std::size_t kFieldWords = sizeof(Fields) / 4;

struct JobUnit {
  std::uint32_t head;
  std::uint32_t first;  // of its pages, among the job's
  std::uint32_t count;
  std::uint32_t zero;
};

struct alignas(64) Job {
  std::atomic<std::uint64_t> claim;
  alignas(64) std::atomic<std::uint32_t> fields[32];

  char* at(std::size_t offset) { return reinterpret_cast<char*>(this) + offset; }
  const char* at(std::size_t offset) const { return reinterpret_cast<const char*>(this) + offset; }
};
static_assert(sizeof(Job) == 192 && kFieldWords <= 32);
static_assert(sizeof(JobUnit) == 16);

// Where everything lies. Precondition: `is_sound`.
struct JobShape {
  bool is_parted;  // query rows lie there in parts; else as queries
  int rows, parts_each;
  std::size_t units, words, rows_at, scales, row_sums, refined, row_positions, pages, positions, sums, sums_each, end;

  static bool is_sound(const Fields& f) {
    const bool has_types = f.q_dtype <= 2 && f.page_dtype <= 2 && f.encoding < static_cast<std::uint32_t>(kEncodings);
    const bool has_heads = f.kv_heads > 0 && f.heads <= kHeadsMax && f.heads > 0 && f.heads % f.kv_heads == 0;
    const bool has_dims = f.head_dim > 0 && f.head_dim <= static_cast<std::uint32_t>(kHeadDimMax) && f.head_dim % kLanes == 0;
    const bool has_rows = f.tokens > 0 && f.tokens <= static_cast<std::uint32_t>(kBlockRows) && has_heads &&
                          f.tokens * (f.heads / f.kv_heads) <= static_cast<std::uint32_t>(kBlockRows);
    return has_types && has_dims && has_rows && f.units > 0 && f.units <= kUnitsMax && f.pages <= kPagesMax &&
           f.positions <= f.pages && f.position >= 0 && f.scale > 0.0f && f.scale < 1e30f;
  }

  explicit JobShape(const Fields& f) {
    const auto encoding = static_cast<Encoding>(f.encoding);
    const std::size_t heads = f.kv_heads, dims = f.head_dim;
    rows = static_cast<int>(f.tokens * (f.heads / f.kv_heads));
    is_parted = encoding != Encoding::kRaw && rows <= kCodeRowsMax;
    parts_each = is_parted ? query_parts(encoding, static_cast<DType>(f.page_dtype)) : 0;
    const std::size_t row_count = heads * static_cast<std::size_t>(rows);
    std::size_t at = sizeof(Job);
    const auto take = [&at](std::size_t bytes) {
      const std::size_t begin = at;
      at = (at + bytes + 63) / 64 * 64;
      return begin;
    };
    units = take(f.units * sizeof(JobUnit));
    words = take(f.units * sizeof(std::uint64_t));
    rows_at = take(is_parted ? row_count * static_cast<std::size_t>(parts_each) * dims
                             : f.tokens * f.heads * dims * static_cast<std::size_t>(size_bytes(static_cast<DType>(f.q_dtype))));
    const std::size_t each = is_parted ? row_count * sizeof(float) : 0;
    scales = take(each);
    row_sums = take(each);
    refined = take(each);
    row_positions = take(is_parted ? static_cast<std::size_t>(rows) * sizeof(int) : 0);
    pages = take(f.pages * sizeof(Page));
    positions = take(f.positions * kPageTokens * sizeof(std::int32_t));
    sums_each = (static_cast<std::size_t>(rows) * (dims + 2) * sizeof(float) + 63) / 64 * 64;
    sums = take(f.units * sums_each);
    end = at;
  }

  std::atomic<std::uint64_t>& word(Job& job, std::uint32_t unit) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(job.at(words))[unit];
  }
  float* sums_of(Job& job, std::uint32_t unit) const { return reinterpret_cast<float*>(job.at(sums + unit * sums_each)); }
};

// Sums of one unit that lie together: out [rows][D], maximum [rows], sum [rows].
inline Sums packed_sums(float* base, int rows, int head_dim) {
  float* const maximum = base + static_cast<std::int64_t>(rows) * head_dim;
  return {base, maximum, maximum + rows};
}

// Bytes that the kernels read of one page, by address.
struct PageBytes {
  std::uint64_t keys, values, nibbles, scales, residues;

  PageBytes(Encoding encoding, DType dtype, int head_dim) : keys(0), values(0), nibbles(0), scales(0), residues(0) {
    const std::uint64_t elements = std::uint64_t{kPageTokens} * static_cast<std::uint64_t>(head_dim);
    const std::uint64_t raw = elements * static_cast<std::uint64_t>(size_bytes(dtype));
    switch (encoding) {
      case Encoding::kRaw: keys = values = raw; return;
      case Encoding::kInt8: keys = values = elements; break;
      case Encoding::kK8V4: keys = values = nibbles = residues = elements / 2; break;
      case Encoding::kInt4: values = nibbles = elements / 2; break;
    }
    scales = 4 * 2 * kPageTokens;
  }

  std::uint64_t read(const Page& page) const {
    return page.count == 0 ? 0 : keys + values + nibbles + scales;
  }
};

constexpr std::uint32_t kHelpMagic = 0x504c4548;  // "HELP"

// 48 bytes: what is asked of a helper.
struct HelpRecord {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t place;
  std::uint32_t zero;
  std::uint64_t sequence;
  char trace[kTraceBytes];
};
static_assert(sizeof(HelpRecord) == 48);

// 8 bytes: what a helper did.
struct HelpReply {
  std::uint32_t units;
  std::uint32_t is_refused;
};

}  // namespace h3::offload
