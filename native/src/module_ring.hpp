#pragma once

#include <nanobind/nanobind.h>

void bind_ring(nanobind::module_& m);
