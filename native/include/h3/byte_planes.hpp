// Elements of two or four bytes, taken apart so that bytes of equal weight lie side by side, and put together again.
#pragma once

#include <cstddef>

namespace h3 {

// From [elements][bytes] to [bytes][elements]. The two must not overlap.
void split_planes(const void* source, std::size_t elements, std::size_t bytes, void* target);

// From [bytes][elements] to [elements][bytes]. The two must not overlap.
void join_planes(const void* source, std::size_t elements, std::size_t bytes, void* target);

}  // namespace h3
