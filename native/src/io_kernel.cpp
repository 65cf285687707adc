#include "h3/io_kernel.hpp"

namespace h3::io {

OpenedKernel open_kernel(const Options& options) {
  if (options.backend == "script") return {open_script(options), "script", "a script was asked for", ""};
  OpenedKernel opened;
  if (options.backend == "threads") {
    opened.reason = "threads were asked for";
  } else {
    opened = open_ring(options);
    if (opened.kernel != nullptr || options.backend == "io_uring") return opened;
  }
  opened.kernel = open_threads(options);
  opened.backend = "threads";
  if (!options.buffers.empty()) opened.buffers_reason = "threads need no registered buffers";
  return opened;
}

}  // namespace h3::io
