#pragma once

#include "io.hpp"

void check_mailbox(const Expect& expect);
