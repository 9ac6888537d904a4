// An allocator interface like PyTorch's, with functions that no PyTorch has. Their declarations vary like those of real functions:
// several lines, default arguments, types of all surrounding namespaces, attributes and comments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c10 {

using DeviceIndex = int8_t;
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;

struct DeviceAllocator {
  virtual ~DeviceAllocator() = default;
  virtual bool initialized() = 0;
  // A function of a base, and a reference to a type of this namespace.
  virtual void
  moveTo(DeviceIndex /*device; not virtual = 0;*/, const MempoolId_t& pool) noexcept(false) = 0;
};

namespace cuda::CUDACachingAllocator {

using InventedObserver = std::function<void(DeviceIndex device, size_t bytes)>;

enum class Invented { kOne, kTwo };

class CUDAAllocator : public DeviceAllocator {
 public:
  virtual std::string name() = 0;
  virtual void attachInventedObserver(InventedObserver observer) = 0; // virtual and pure
  virtual std::map<std::string, std::vector<size_t>>
      /* the bytes */ inventedSizes(
          MempoolId_t pool = {0, 0},
          Invented which = Invented::kOne) const = 0;
  [[nodiscard]] virtual auto inventedPointer(void* start) -> std::shared_ptr<void> = 0; virtual int twoOnALine() = 0;
  virtual bool operator()(int number) = 0;
  virtual int known() {
    return 1;
  }
};

} // namespace cuda::CUDACachingAllocator
} // namespace c10
