#pragma once

#include "io.hpp"

// For the instruction set in use.
void check_offload(const Expect& expect);
