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
  const Byte* const from = static_cast<const Byte*>(source);
  Byte* const to = static_cast<Byte*>(target);
  if (bytes == 2) return split<2>(from, elements, to);
  if (bytes == 4) return split<4>(from, elements, to);
  for (std::size_t element = 0; element < elements; ++element)
    for (std::size_t byte = 0; byte < bytes; ++byte) to[byte * elements + element] = from[element * bytes + byte];
}

void join_planes(const void* source, std::size_t elements, std::size_t bytes, void* target) {
  const Byte* const from = static_cast<const Byte*>(source);
  Byte* const to = static_cast<Byte*>(target);
  if (bytes == 2) return join<2>(from, elements, to);
  if (bytes == 4) return join<4>(from, elements, to);
  for (std::size_t element = 0; element < elements; ++element)
    for (std::size_t byte = 0; byte < bytes; ++byte) to[element * bytes + byte] = from[byte * elements + element];
}

}  // namespace h3
