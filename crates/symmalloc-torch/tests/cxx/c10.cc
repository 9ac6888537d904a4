// The definitions of c10.h.

#include "c10.h"

namespace c10 {

Error::Error(SourceLocation location, std::string message)
    : msg_(std::move(message)), what_(msg_ + " (in " + location.function + ", " + location.file + ")"),
      what_without_backtrace_(msg_), caller_(nullptr) {}

const char *Error::what() const noexcept { return what_.c_str(); }

namespace detail {

void torchCheckFail(const char *function, const char *file, uint32_t line, const char *message) {
  throw Error({function, file, line}, message);
}

} // namespace detail

// Emits the symbols that PyTorch's libraries export.
void throw_out_of_memory() { throw OutOfMemoryError({"", "", 0}, ""); }

std::atomic<cuda::CUDACachingAllocator::CUDAAllocator *> cuda::CUDACachingAllocator::allocator;

} // namespace c10

namespace torch::cuda::CUDAPluggableAllocator {

std::string CUDAPluggableAllocator::name() { return "pluggable"; }

void CUDAPluggableAllocator::enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) { ++peers_enabled; }

void CUDAPluggableAllocator::init(int) {}

void CUDAPluggableAllocator::cacheInfo(c10::DeviceIndex, size_t *) {
  throw c10::Error({"cacheInfo", "", 0}, "does not yet support cacheInfo");
}

// The effect of change_current_allocator.
CUDAPluggableAllocator *make_current() {
  static CUDAPluggableAllocator current;
  c10::cuda::CUDACachingAllocator::allocator = &current;
  return &current;
}

} // namespace torch::cuda::CUDAPluggableAllocator
