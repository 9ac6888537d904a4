// Allocation and free, with notifications to PyTorch's histories, trackers, observers and profilers.
//
// Without any of these, an allocation is one library call.
#pragma once

#include "counts.h"
#include "history.h"
#include "inherited_scopes.h"
#include "status.h"
#include "versions.h"
#include "symmalloc.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace symmalloc {

using c10::Device;
using c10::DeviceIndex;
using c10::MempoolId_t;
using caching::RecordContext;

constexpr MempoolId_t kDefaultPool{0, 0};
// The library's maximum.
constexpr size_t kDevicesMax = 128;

// State of a device that the library does not have.
struct DeviceState {
  explicit DeviceState(DeviceIndex device) : history(device) {}
  DeviceHistory history;
  std::atomic<double> fraction{1.0};
  caching::DeviceStats accumulated_before{};
  // Protected by the allocator's lock, like the fields above.
  int64_t segments_peak = 0;
  // Allocations that were rejected without a driver call.
  std::atomic<int64_t> rejections{0};
  // Calls that released free memory, which wait for the work of all streams.
  std::atomic<int64_t> releases{0};
};

// The allocations of a mempool before and after a restore.
struct Restored {
  std::vector<void*> freed;
  std::vector<std::pair<void*, uint64_t>> live;
};

class Memory {
 public:
  DeviceState& of(DeviceIndex device) {
    TORCH_CHECK(
        0 <= device && static_cast<size_t>(device) < kDevicesMax, "symmalloc: there is no device ", std::to_string(device));
    auto& state = states_[device];
    std::call_once(made_[device], [&] { state = std::make_unique<DeviceState>(device); });
    return *state;
  }

  void* allocate(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) {
      return nullptr;
    }
    last_device() = device;
    void* pointer = nullptr;
    if (C10_UNLIKELY(is_watched_.load(std::memory_order_relaxed))) {
      pointer = allocate_watched(device, bytes, stream);
    } else {
      const auto status = ask(device, bytes, stream, nullptr, &pointer);
      if (C10_UNLIKELY(status != SYMMALLOC_OK)) {
        pointer = refused(device, bytes, stream, status, nullptr, nullptr);
      }
    }
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
    }
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
      symmalloc_found found{};
      (void)symmalloc_torch_find(pointer, &found);
      report(device, pointer, static_cast<int64_t>(found.bytes));
    }
    return pointer;
  }

  // Allocates at exactly this address. Histories do not record the allocation.
  void* allocate_with_address(DeviceIndex device, size_t bytes, const void* address, cudaStream_t stream) {
    void* pointer = nullptr;
    const auto status = symmalloc_torch_allocate_with_address(device, stream, bytes, address, &pointer);
    TORCH_CHECK_NOT_IMPLEMENTED(
        status != SYMMALLOC_UNKNOWN_POOL, "symmalloc: allocateWithAddress: ", std::string(symmalloc_error_message()));
    check(status);
    last_device() = device;
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr && pointer != nullptr)) {
      (*trace)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
    }
    return pointer;
  }

  // Never throws, because destructors free memory. In a forked child, the library ignores the call.
  void free(void* pointer) noexcept {
    if (pointer == nullptr) {
      return;
    }
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      attempt("a trace of a free", [&] {
        (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
      });
    }
    // This is a hint, which is cheaper than a driver call. If it is wrong, the library searches the other devices.
    const DeviceIndex device = last_device();
    // A profiler needs the actual device.
    const auto owner = C10_UNLIKELY(c10::memoryProfilingEnabled()) ? symmalloc_torch_device_of(pointer) : -1;
    uint64_t bytes = 0;
    if (C10_UNLIKELY(is_watched_.load(std::memory_order_relaxed))) {
      free_watched(device, pointer, &bytes);
    } else {
      // The library reports pointers that it did not allocate.
      (void)symmalloc_torch_deallocate(device, pointer, &bytes);
    }
    if (C10_UNLIKELY(owner >= 0)) {
      attempt("a memory profiler", [&] {
        report(static_cast<DeviceIndex>(owner), pointer, -static_cast<int64_t>(bytes));
      });
    }
  }

  // Restores the allocations of a mempool at a checkpoint.
  Restored restore(DeviceIndex device, const symmalloc_checkpoint* checkpoint) {
    Restored restored;
    const auto collect = [](void* context, void* pointer, uint64_t bytes, uint32_t is_live) {
      auto& restored = *static_cast<Restored*>(context);
      if (is_live != 0) {
        restored.live.emplace_back(pointer, bytes);
      } else {
        restored.freed.push_back(pointer);
      }
    };
    auto& history = of(device).history;
    const auto context = history.gather(RecordContext::STATE);
    std::lock_guard<std::recursive_mutex> lock(history.order);
    check(symmalloc_torch_restore(device, checkpoint, collect, &restored));
    if (history.is_watched()) {
      for (void* pointer : restored.freed) {
        note_freed(history, pointer, nullptr);
      }
      for (const auto& [pointer, bytes] : restored.live) {
        note_allocated(history, pointer, bytes, context);
      }
    }
    return restored;
  }

  // Records memory of a device that was mapped or is about to be unmapped.
  void changed(DeviceIndex device, bool is_mapped, size_t address, size_t bytes) {
    if (is_mapped) {
      of(device).history.memory_came(address, bytes);
    } else {
      of(device).history.memory_goes(address, bytes);
    }
  }

  // Turns recording of all operations on or off.
  void watch(bool is_watched) {
    is_watched_ = is_watched;
  }

  void observe(caching::OutOfMemoryObserver observer) {
    std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }

#if SYMMALLOC_TORCH(2, 12)
  void observe_rejections(caching::OomRejectionObserver observer) {
    std::lock_guard<std::mutex> lock(mutex_);
    rejection_observers_.push_back(std::move(observer));
  }

  // Returns the context of a live allocation, if it was recorded.
  Context context_of(const void* pointer) {
    auto* const start = const_cast<void*>(pointer);
    const auto device = symmalloc_torch_device_of(start);
    const auto noted = device < 0 ? std::nullopt : of(static_cast<DeviceIndex>(device)).history.find(start);
    return noted ? noted->context : nullptr;
  }
#endif

#if SYMMALLOC_TORCH(2, 14)
  // Attaches metadata of the program to a live allocation.
  void annotate(const void* pointer, const std::string& metadata) {
    symmalloc_found found{};
    if (symmalloc_torch_find(const_cast<void*>(pointer), &found) != SYMMALLOC_OK) {
      return;
    }
    auto& history = of(static_cast<DeviceIndex>(found.device)).history;
    const auto context = history.gather(RecordContext::ALLOC);
    std::lock_guard<std::recursive_mutex> lock(history.order);
    const Noted noted{
        found.requested_bytes, found.stream, {found.id_first, found.id_second}, context, found.is_expandable};
    history.entry(Action::ANNOTATE, reinterpret_cast<size_t>(pointer), noted, &metadata);
  }
#endif

  InheritedScopes& scopes() {
    return scopes_;
  }

  caching::DeviceStats count(DeviceIndex device) {
    symmalloc_counts counts{};
    check(symmalloc_torch_counts(device, &counts));
    auto stats = counted(counts);
    auto& state = of(device);
    state.segments_peak = std::max(state.segments_peak, stats.segment[0].current);
    stats.segment[0].peak = state.segments_peak;
    stats.num_device_alloc = state.history.maps;
    stats.num_device_free = state.history.unmaps;
    stats.num_sync_all_streams = state.releases;
#if SYMMALLOC_TORCH(2, 12)
    stats.num_oom_rejections = state.rejections;
#endif
    return stats;
  }

 private:
  // The device of this thread's last allocation.
  static DeviceIndex& last_device() {
    static thread_local DeviceIndex device = 0;
    return device;
  }

  void* allocate_watched(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    if (C10_UNLIKELY(symmalloc_torch_is_forked())) {
      // The locks below may be held by a thread that this child does not have.
      void* nothing = nullptr;
      check(symmalloc_torch_allocate(device, stream, bytes, 0, nullptr, &nothing));
    }
    auto& history = of(device).history;
    const auto context = history.gather(RecordContext::STATE);
    // Traces and reports show the name, which is only computed while a history is recorded.
    const auto caller = context ? caller_name() : std::string();
    const char* name = caller.empty() ? nullptr : caller.c_str();
    std::unique_lock<std::recursive_mutex> lock(history.order);
    void* pointer = nullptr;
    const auto status = ask(device, bytes, stream, name, &pointer);
    if (status != SYMMALLOC_OK) {
      // The message is thread-local, so unlocking preserves it.
      lock.unlock();
      pointer = refused(device, bytes, stream, status, context, name);
      lock.lock();
    }
    note_allocated(history, pointer, bytes, context);
    return pointer;
  }

  static void note_allocated(DeviceHistory& history, void* pointer, size_t bytes, const Context& context) {
    symmalloc_found found{};
    check(symmalloc_torch_find(pointer, &found));
    const Noted noted{bytes, found.stream, {found.id_first, found.id_second}, context, found.is_expandable};
    history.segments_came(reinterpret_cast<size_t>(pointer), found.bytes, noted);
    history.allocated(pointer, noted);
  }

  static void note_freed(DeviceHistory& history, void* pointer, const Context& context) {
    const auto noted = history.find(pointer);
    auto said = noted.value_or(Noted{});
    said.context = context ? context : said.context;
    history.entry(Action::FREE_REQUESTED, reinterpret_cast<size_t>(pointer), said);
    history.entry(Action::FREE_COMPLETED, reinterpret_cast<size_t>(pointer), said);
    history.forget(pointer);
  }

  // A tracker that throws does not prevent the free.
  void free_watched(DeviceIndex device, void* pointer, uint64_t* bytes) noexcept {
    symmalloc_found found{};
    if (symmalloc_torch_find(pointer, &found) != SYMMALLOC_OK) {
      (void)symmalloc_torch_deallocate(device, pointer, bytes);
      return;
    }
    auto& history = of(static_cast<DeviceIndex>(found.device)).history;
    Context context;
    attempt("the context of a free", [&] { context = history.gather(RecordContext::ALL); });
    std::lock_guard<std::recursive_mutex> lock(history.order);
    const auto noted = history.find(pointer);
    const Noted said{
        found.requested_bytes,
        found.stream,
        {found.id_first, found.id_second},
        context || !noted ? context : noted->context,
        found.is_expandable};
    const auto record = [&](Action action) {
      attempt("a memory tracker", [&] { history.entry(action, reinterpret_cast<size_t>(pointer), said); });
    };
    record(Action::FREE_REQUESTED);
    history.forget(pointer);
    const auto status = symmalloc_torch_deallocate(found.device, pointer, bytes);
    if (status == SYMMALLOC_OK) {
      record(Action::FREE_COMPLETED);
    }
  }

  symmalloc_status ask(DeviceIndex device, size_t bytes, cudaStream_t stream, const char* name, void** pointer) {
    return symmalloc_torch_allocate(device, stream, bytes, scopes_.number(device), name, pointer);
  }

  // Asks other parts of PyTorch to free memory and retries the allocation if they did. Otherwise notifies the observers.
  void* refused(
      DeviceIndex device,
      size_t bytes,
      cudaStream_t stream,
      symmalloc_status status,
      const Context& context,
      const char* name) {
    if (status != SYMMALLOC_OUT_OF_MEMORY) {
      fail(status);
    }
    // Failed library calls in the callbacks would overwrite the message.
    std::string message = symmalloc_error_message();
    bool has_freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      has_freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    if (has_freed) {
      void* pointer = nullptr;
      status = ask(device, bytes, stream, name, &pointer);
      if (status == SYMMALLOC_OK) {
        return pointer;
      }
      message = symmalloc_error_message();
    }
    symmalloc_counts counts{};
    (void)symmalloc_torch_counts(device, &counts);
    const uint64_t limit = counts.limit_bytes != 0 ? counts.limit_bytes : counts.total_bytes;
    reject(device, bytes, counts, message);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
      (void)cudaGetLastError();
    }
    of(device).history.entry(Action::OOM, free_bytes, Noted{bytes, stream, kDefaultPool, context, false});
    c10::reportOutOfMemoryToProfiler(
        static_cast<int64_t>(bytes),
        counts.allocated_bytes[0].current,
        counts.reserved_bytes.current,
        Device(c10::DeviceType::CUDA, device));
    std::vector<caching::OutOfMemoryObserver> observers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) {
      observer(device, bytes, limit, free_bytes);
    }
    // Users and tools search for PyTorch's wording.
    const auto allocated = static_cast<uint64_t>(counts.allocated_bytes[0].current);
    const auto reserved = static_cast<uint64_t>(counts.reserved_bytes.current);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "CUDA out of memory. Tried to allocate ",
        size_text(bytes),
        ". GPU ",
        std::to_string(device),
        " has a total capacity of ",
        size_text(total_bytes),
        " of which ",
        size_text(free_bytes),
        " is free. ",
        counts.limit_bytes != 0 ? size_text(counts.limit_bytes) + " allowed; " : "",
        "Of the allocated memory ",
        size_text(allocated),
        " is allocated by PyTorch, and ",
        size_text(reserved - std::min(allocated, reserved)),
        " is reserved by PyTorch but unallocated. symmalloc: ",
        message);
  }

  // Throws if PyTorch's `throw_on_cudamalloc_oom` forbids an attempt beyond the limit, after notifying the observers.
  void reject(
      [[maybe_unused]] DeviceIndex device,
      [[maybe_unused]] size_t bytes,
      [[maybe_unused]] const symmalloc_counts& counts,
      [[maybe_unused]] const std::string& message) {
#if SYMMALLOC_TORCH(2, 12)
    const auto reserved = static_cast<uint64_t>(counts.reserved_bytes.current);
    const bool is_beyond = counts.limit_bytes != 0 && bytes > counts.limit_bytes - std::min(counts.limit_bytes, reserved);
    if (!is_beyond || !caching::CUDAAllocatorConfig::throw_on_cudamalloc_oom()) {
      return;
    }
    ++of(device).rejections;
    std::vector<caching::OomRejectionObserver> observers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      observers = rejection_observers_;
    }
    for (const auto& observer : observers) {
      // Exceptions of observers must not hide the rejection.
      try {
        observer(device, bytes, counts.allocated_bytes[0].current, counts.total_bytes);
      } catch (const std::exception& error) {
        warn("an observer of rejections failed: ", error.what());
      } catch (...) {
        warn("an observer of rejections failed");
      }
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. "
        "Requested size: ",
        size_text(bytes),
        ". symmalloc: ",
        message);
#endif
  }

  static void report(DeviceIndex device, void* pointer, int64_t bytes) {
    symmalloc_counts counts{};
    (void)symmalloc_torch_counts(device, &counts);
    c10::reportMemoryUsageToProfiler(
        pointer,
        bytes,
        counts.allocated_bytes[0].current,
        counts.reserved_bytes.current,
        Device(c10::DeviceType::CUDA, device));
  }

  std::array<std::once_flag, kDevicesMax> made_;
  std::array<std::unique_ptr<DeviceState>, kDevicesMax> states_;
  std::atomic<bool> is_watched_{false};
  // Protects the observers.
  std::mutex mutex_;
  std::vector<caching::OutOfMemoryObserver> observers_;
#if SYMMALLOC_TORCH(2, 12)
  std::vector<caching::OomRejectionObserver> rejection_observers_;
#endif
  InheritedScopes scopes_;
};

} // namespace symmalloc
