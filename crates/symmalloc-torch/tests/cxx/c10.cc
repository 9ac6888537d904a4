// What of libc10 an allocator throws with, as PyTorch 2.11 declares it: the same names, members and virtual functions, so the
// same symbols. tests/cxx.rs builds libc10.so of it where there is no PyTorch.

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace c10 {

struct SourceLocation {
  const char *function;
  const char *file;
  uint32_t line;
};

class __attribute__((visibility("default"))) Error : public std::exception {
  std::string msg_;
  std::vector<std::string> context_;
  std::shared_ptr<const void> backtrace_;
  std::string what_;
  std::string what_without_backtrace_;
  const void *caller_;

public:
  Error(SourceLocation location, std::string message);
  const char *what() const noexcept override;
  virtual const char *what_without_backtrace() const noexcept { return what_without_backtrace_.c_str(); }
};

Error::Error(SourceLocation location, std::string message)
    : msg_(std::move(message)), what_(msg_ + " (in " + location.function + ", " + location.file + ")"),
      what_without_backtrace_(msg_), caller_(nullptr) {}

const char *Error::what() const noexcept { return what_.c_str(); }

class OutOfMemoryError : public Error {
  using Error::Error;
};

namespace detail {

void torchCheckFail(const char *function, const char *file, uint32_t line, const char *message) {
  throw Error({function, file, line}, message);
}

} // namespace detail

// Emits what PyTorch's libraries have of it.
void throw_out_of_memory() { throw OutOfMemoryError({"", "", 0}, ""); }

} // namespace c10
