// The subset of PyTorch 2.11 that an allocator uses, with the same names, members and virtual functions, and therefore the same
// symbols and tables. tests/cxx.rs builds libc10.so from c10.cc if there is no PyTorch.

#pragma once

#include <atomic>
#include <cstddef>
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

class OutOfMemoryError : public Error {
  using Error::Error;
};

using DeviceIndex = int8_t;

namespace cuda::CUDACachingAllocator {

// The order of its functions does not matter.
struct CUDAAllocator {
  virtual ~CUDAAllocator() = default;
  virtual std::string name() = 0;
  virtual void enablePeerAccess(DeviceIndex device, DeviceIndex owner) = 0;
  virtual void init(int devices) = 0;
  virtual void cacheInfo(DeviceIndex device, size_t *largest) = 0;
};

extern std::atomic<CUDAAllocator *> allocator;

} // namespace cuda::CUDACachingAllocator
} // namespace c10

namespace torch::cuda::CUDAPluggableAllocator {

struct CUDAPluggableAllocator : c10::cuda::CUDACachingAllocator::CUDAAllocator {
  int peers_enabled = 0;
  std::string name() override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) override;
  void init(int devices) override;
  void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
};

} // namespace torch::cuda::CUDAPluggableAllocator
