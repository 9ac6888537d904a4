// An allocator for the interface in this folder, like `pytorch/allocator.cpp` for PyTorch's interface.
#include "base.h"

#include <cstring>

namespace caching = c10::cuda::CUDACachingAllocator;

class Allocator final : public caching::AllocatorBase {
 public:
  bool initialized() override {
    return true;
  }
  std::string name() override {
    return "symmalloc";
  }
};

static caching::CUDAAllocator& installed() {
  static caching::CUDAAllocator& allocator = *new Allocator;
  return allocator;
}

extern "C" __attribute__((visibility("default"))) int symmalloc_install_class(const char*) {
  return installed().initialized() && installed().known() == 1 ? 0 : 1;
}

extern "C" __attribute__((visibility("default"))) const char* symmalloc_unknown_functions() {
  return SYMMALLOC_UNKNOWN_NAMES;
}

extern "C" __attribute__((visibility("default"))) void symmalloc_name_callers(void*) {}

// Calls an unknown function, and writes the message of its exception.
extern "C" __attribute__((visibility("default"))) void call_unknown(int number, char* text, size_t bytes) {
  auto& allocator = installed();
  try {
    switch (number) {
      case 0: allocator.attachInventedObserver([](c10::DeviceIndex, size_t) {}); break;
      case 1: (void)allocator.inventedSizes(); break;
      case 2: (void)allocator.inventedPointer(text); break;
      case 3: (void)allocator.twoOnALine(); break;
      case 4: (void)allocator(1); break;
      case 5: allocator.moveTo(0, {1, 2}); break;
    }
  } catch (const c10::NotImplementedError& error) {
    std::strncpy(text, error.what(), bytes - 1);
  }
}
