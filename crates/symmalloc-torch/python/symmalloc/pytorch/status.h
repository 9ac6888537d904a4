// What the library's calls return, as PyTorch's exceptions.
#pragma once

#include "symmalloc.h"

#include <c10/util/Exception.h>

#include <string>

namespace symmalloc {

[[noreturn]] inline void fail(symmalloc_status status) {
  const std::string message = symmalloc_error_message();
  TORCH_CHECK_WITH(
      OutOfMemoryError, status != SYMMALLOC_OUT_OF_MEMORY, "CUDA out of memory. symmalloc: ", message);
  TORCH_CHECK(false, "symmalloc: ", message);
}

// Where nothing can be thrown: what PyTorch's handler of warnings throws is lost.
template <typename... Words>
void warn(const Words&... words) noexcept {
  try {
    TORCH_WARN("symmalloc: ", words...);
  } catch (...) {
  }
}

inline void check(symmalloc_status status) {
  if (C10_UNLIKELY(status != SYMMALLOC_OK)) {
    fail(status);
  }
}

} // namespace symmalloc
