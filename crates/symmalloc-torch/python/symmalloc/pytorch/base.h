// The base class of the allocator: PyTorch's interface, with an override for every function that this package does not know.
//
// A PyTorch newer than the package may have pure virtual functions that `allocator.cpp` lacks. `unknown_functions.py` finds them
// and defines `SYMMALLOC_UNKNOWN_FUNCTIONS` as an override of each, which throws:
//
//   CUDAAllocator (PyTorch) ──► AllocatorBase (overrides of unknown functions) ──► Allocator (allocator.cpp)
#pragma once

#include "symmalloc.h"
#include "versions.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>

#ifndef SYMMALLOC_UNKNOWN_FUNCTIONS
#define SYMMALLOC_UNKNOWN_FUNCTIONS
#endif

// The names of all unknown functions, separated by commas.
#ifndef SYMMALLOC_UNKNOWN_NAMES
#define SYMMALLOC_UNKNOWN_NAMES ""
#endif

// The overrides copy PyTorch's declarations, so this class is in the same namespace, where their types resolve equally.
namespace c10::cuda::CUDACachingAllocator {

class AllocatorBase : public CUDAAllocator {
 public:
  SYMMALLOC_UNKNOWN_FUNCTIONS

 protected:
  // Throws for a call of a function that the package does not implement.
  [[noreturn]] static void unsupported(const char* function) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        function,
        " is not supported by symmalloc " SYMMALLOC_VERSION " on PyTorch " TORCH_VERSION
        ": install a newer symmalloc, or use PyTorch's own allocator");
  }
};

} // namespace c10::cuda::CUDACachingAllocator
