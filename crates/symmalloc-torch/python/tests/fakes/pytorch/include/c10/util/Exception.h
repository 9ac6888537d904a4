// The PyTorch exceptions that `base.h` needs.
#pragma once

#include <sstream>
#include <stdexcept>

namespace c10 {

struct NotImplementedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Words>
[[noreturn]] void fail(const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  throw NotImplementedError(text.str());
}

} // namespace c10

#define TORCH_CHECK_NOT_IMPLEMENTED(condition, ...) \
  do {                                              \
    if (!(condition)) ::c10::fail(__VA_ARGS__);     \
  } while (0)
