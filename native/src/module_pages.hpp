#pragma once

#include <nanobind/nanobind.h>

// Adds `PageCache` to the module.
void bind_pages(nanobind::module_& m);
