// Memory of a pool that the program's own allocator provides.
#pragma once

#include "history.h"
#include "status.h"
#include "symmalloc.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace symmalloc {

// The functions of the allocator that a program passes for its pool.
struct ProgramSource {
  static symmalloc_source make(std::shared_ptr<caching::CUDAAllocator> allocator) {
    return {allocate, free, new std::shared_ptr<caching::CUDAAllocator>(std::move(allocator)), destroy};
  }

 private:
  static caching::CUDAAllocator& of(void* context) {
    return **static_cast<std::shared_ptr<caching::CUDAAllocator>*>(context);
  }
  // Exceptions must not unwind through the library. They count as a lack of memory.
  static void* allocate(void* context, size_t bytes) {
    try {
      return of(context).raw_alloc(bytes);
    } catch (const std::exception& error) {
      warn("the allocator of a pool failed for ", std::to_string(bytes), " bytes: ", error.what());
    } catch (...) {
      warn("the allocator of a pool failed for ", std::to_string(bytes), " bytes");
    }
    return nullptr;
  }
  static void free(void* context, void* pointer) {
    try {
      of(context).raw_delete(pointer);
    } catch (const std::exception& error) {
      warn("the allocator of a pool failed to free: ", error.what());
    } catch (...) {
      warn("the allocator of a pool failed to free");
    }
  }
  static void destroy(void* context) {
    delete static_cast<std::shared_ptr<caching::CUDAAllocator>*>(context);
  }
};

} // namespace symmalloc
