// Sharing of tensors between processes: by file descriptors for the library's memory, and by legacy driver calls for the memory of a
// pool's own allocator.
#pragma once

#include "history.h"
#include "status.h"
#include "symmalloc.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace symmalloc {

// The prefix of handles for memory that is shared by the legacy calls.
constexpr const char* kLegacyHandle = "cudaIpc ";

inline caching::ShareableHandle share(void* pointer) {
  char* text = nullptr;
  uint64_t offset = 0;
  if (symmalloc_torch_share(pointer, &text, &offset) == SYMMALLOC_OK) {
    caching::ShareableHandle handle{static_cast<ptrdiff_t>(offset), text};
    symmalloc_release_bytes(text);
    return handle;
  }
  const std::string why = symmalloc_error_message();
  // Memory of a pool's own allocator may come from `cudaMalloc`.
  void* base = symmalloc_torch_base_alloc(pointer, nullptr);
  cudaIpcMemHandle_t legacy;
  if (cudaIpcGetMemHandle(&legacy, base) != cudaSuccess) {
    (void)cudaGetLastError();
    TORCH_CHECK(false, "symmalloc: ", why);
  }
  return {
      static_cast<char*>(pointer) - static_cast<char*>(base),
      kLegacyHandle + std::string(reinterpret_cast<const char*>(&legacy), sizeof(legacy))};
}

inline std::shared_ptr<void> open_legacy(c10::DeviceIndex device, const std::string& handle) {
  static auto* mutex = new std::mutex;
  static auto* opened = new std::unordered_map<std::string, std::weak_ptr<void>>;
  cudaIpcMemHandle_t legacy;
  TORCH_CHECK(
      handle.size() == std::strlen(kLegacyHandle) + sizeof(legacy), "symmalloc: a handle of shared memory is truncated");
  std::memcpy(&legacy, handle.data() + std::strlen(kLegacyHandle), sizeof(legacy));
  std::lock_guard<std::mutex> lock(*mutex);
  if (auto known = (*opened)[handle].lock()) {
    return known;
  }
  void* base = nullptr;
  C10_CUDA_CHECK(cudaIpcOpenMemHandle(&base, legacy, cudaIpcMemLazyEnablePeerAccess));
  const std::shared_ptr<void> memory(base, [device, handle](void* base) {
    release("the end of shared memory", [&] {
      std::lock_guard<std::mutex> lock(*mutex);
      if (const auto known = opened->find(handle); known != opened->end() && known->second.expired()) {
        opened->erase(known);
      }
      c10::cuda::CUDAGuard guard(device);
      C10_CUDA_CHECK(cudaIpcCloseMemHandle(base));
    });
  });
  (*opened)[handle] = memory;
  return memory;
}

inline std::shared_ptr<void> open_shared(c10::DeviceIndex device, const std::string& handle) {
  if (handle.rfind(kLegacyHandle, 0) == 0) {
    return open_legacy(device, handle);
  }
  void* base = nullptr;
  const symmalloc_opened* opened = nullptr;
  check(symmalloc_torch_open(device, handle.c_str(), &base, &opened));
  return {base, [opened](void*) { symmalloc_torch_close(opened); }};
}

} // namespace symmalloc
