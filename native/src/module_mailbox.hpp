#pragma once

#include <nanobind/nanobind.h>

// Adds the mailbox and `probe_access` to the module.
void bind_mailbox(nanobind::module_& m);
