#pragma once

#include <nanobind/nanobind.h>

// Adds `crc32c`, `crc32c_methods` and `IoEngine` to the module.
void bind_io(nanobind::module_& m);
