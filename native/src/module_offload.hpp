#pragma once

#include <nanobind/nanobind.h>

void bind_offload(nanobind::module_& m);
