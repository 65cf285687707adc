#include "h3/lz4_decode.hpp"

#include <algorithm>
#include <cstring>

namespace h3 {
namespace {

constexpr std::size_t kMatchMin = 4;
constexpr std::size_t kNibbleMax = 15;

using Byte = unsigned char;

// A length of 15 goes on in bytes that are added up, the last one below 255. False: the source ends before.
bool extend(const Byte*& from, const Byte* end, std::size_t& length) {
  if (length != kNibbleMax) return true;
  for (;;) {
    if (from == end) return false;
    const Byte more = *from++;
    length += more;
    if (more != 255) return true;
  }
}

// A match may reach into what it is just writing: then its bytes repeat with the period `distance`, and so does every
// multiple of it, so that each pass may copy twice as much.
void copy_match(Byte* to, std::size_t distance, std::size_t length) {
  const Byte* const from = to - distance;
  while (length > distance) {
    std::memcpy(to, from, distance);
    to += distance;
    length -= distance;
    distance *= 2;
  }
  std::memcpy(to, from, length);
}

}  // namespace

bool lz4_decode(const void* source, std::size_t source_size, void* target, std::size_t target_size) {
  const Byte* from = static_cast<const Byte*>(source);
  const Byte* const from_end = from + source_size;
  Byte* const begin = static_cast<Byte*>(target);
  Byte* to = begin;
  Byte* const to_end = begin + target_size;
  while (from != from_end) {
    const Byte token = *from++;
    std::size_t literals = token >> 4;
    if (!extend(from, from_end, literals)) return false;
    if (literals > static_cast<std::size_t>(from_end - from) || literals > static_cast<std::size_t>(to_end - to))
      return false;
    if (literals != 0) std::memcpy(to, from, literals);
    from += literals;
    to += literals;
    // The last sequence has no match.
    if (from == from_end) return to == to_end;
    if (from_end - from < 2) return false;
    const std::size_t distance = from[0] | static_cast<std::size_t>(from[1]) << 8;
    from += 2;
    std::size_t length = token & kNibbleMax;
    if (!extend(from, from_end, length)) return false;
    length += kMatchMin;
    if (distance == 0 || distance > static_cast<std::size_t>(to - begin) || length > static_cast<std::size_t>(to_end - to))
      return false;
    copy_match(to, distance, length);
    to += length;
  }
  return false;
}

}  // namespace h3
