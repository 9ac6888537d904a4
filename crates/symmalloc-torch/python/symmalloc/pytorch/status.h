// Conversion of the library's statuses to PyTorch's exceptions.
#pragma once

#include "symmalloc.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

namespace symmalloc {

// Returns a size in the format of PyTorch's messages: "2.00 GiB".
//
// A stream formats numbers by a facet of its locale. Some compilers link a second C++ library into the class. The facet then belongs to
// the other library, and the process crashes. Numbers are therefore converted to strings before they reach a stream.
inline std::string size_text(uint64_t bytes) {
  if (bytes <= 1024) {
    return std::to_string(bytes) + " bytes";
  }
  const char* const units[] = {" KiB", " MiB", " GiB"};
  double size = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (size > 1024 && unit < 2) {
    size /= 1024;
    ++unit;
  }
  char text[40];
  std::snprintf(text, sizeof(text), "%.2f", size);
  return std::string(text) + units[unit];
}

[[noreturn]] inline void fail(symmalloc_status status) {
  const std::string message = symmalloc_error_message();
  TORCH_CHECK_WITH(
      OutOfMemoryError, status != SYMMALLOC_OUT_OF_MEMORY, "CUDA out of memory. symmalloc: ", message);
  TORCH_CHECK(false, "symmalloc: ", message);
}

// Warns in a context that cannot throw. Exceptions of PyTorch's warning handler are dropped.
template <typename... Words>
void warn(const Words&... words) noexcept {
  try {
    TORCH_WARN("symmalloc: ", words...);
  } catch (...) {
  }
}

// Runs a part of a call that PyTorch makes in destructors, where an exception would end the process. Exceptions become warnings.
template <typename Act>
void attempt(const char* what, const Act& act) noexcept {
  try {
    act();
  } catch (const std::exception& error) {
    warn(what, " failed: ", error.what());
  } catch (...) {
    warn(what, " failed");
  }
}

// Runs a call that releases something. PyTorch makes these in destructors, so it never throws. In a forked child it has no effect: the
// parent owns the memory, and threads that the child does not have may hold the locks of this class.
template <typename Act>
void release(const char* what, const Act& act) noexcept {
  if (C10_LIKELY(!symmalloc_torch_is_forked())) {
    attempt(what, act);
  }
}

inline void check(symmalloc_status status) {
  if (C10_UNLIKELY(status != SYMMALLOC_OK)) {
    fail(status);
  }
}

} // namespace symmalloc
