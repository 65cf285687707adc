#include "h3/byte_planes.hpp"

namespace h3 {
namespace {

using Byte = unsigned char;

// The bytes of an element as a constant: so that compilers make vectors of it.
template <std::size_t kBytes>
void split(const Byte* __restrict from, std::size_t elements, Byte* __restrict to) {
  for (std::size_t element = 0; element < elements; ++element)
    for (std::size_t byte = 0; byte < kBytes; ++byte) to[byte * elements + element] = from[element * kBytes + byte];
}

template <std::size_t kBytes>
void join(const Byte* __restrict from, std::size_t elements, Byte* __restrict to) {
  for (std::size_t element = 0; element < elements; ++element)
    for (std::size_t byte = 0; byte < kBytes; ++byte) to[element * kBytes + byte] = from[byte * elements + element];
}

}  // namespace

void split_planes(const void* source, std::size_t elements, std::size_t bytes, void* target) {
  const auto split_all = bytes == 2 ? split<2> : split<4>;
  split_all(static_cast<const Byte*>(source), elements, static_cast<Byte*>(target));
}

void join_planes(const void* source, std::size_t elements, std::size_t bytes, void* target) {
  const auto join_all = bytes == 2 ? join<2> : join<4>;
  join_all(static_cast<const Byte*>(source), elements, static_cast<Byte*>(target));
}

}  // namespace h3
