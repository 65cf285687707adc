// One request as a plain system call.
#pragma once

#include <unistd.h>

#include <cerrno>

#include "h3/io_kernel.hpp"

namespace h3::io {

inline std::int64_t transfer(const Request& request, int file) {
  void* const data = reinterpret_cast<void*>(request.address);
  const auto offset = static_cast<off_t>(request.offset);
  ssize_t result = -1;
  switch (request.kind) {
    case Kind::kRead: result = ::pread(file, data, request.size, offset); break;
    case Kind::kWrite: result = ::pwrite(file, data, request.size, offset); break;
    case Kind::kFlush: result = ::fdatasync(file); break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace h3::io
