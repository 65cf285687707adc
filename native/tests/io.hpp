#pragma once

#include <functional>

using Expect = std::function<void(bool condition, const char* what)>;

void check_io(const Expect& expect);
