#pragma once

#include "io.hpp"

void check_pages(const Expect& expect);
