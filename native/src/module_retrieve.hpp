#pragma once

#include <nanobind/nanobind.h>

// Adds `seal`, `select` and `attend_chosen` to the module.
void bind_retrieve(nanobind::module_& m);
