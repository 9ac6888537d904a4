// PyTorch's allocator for CUDA tensors, over the library's C interface.
//
// PyTorch's class has no stable ABI, so `pytorch_class.py` compiles this file against the installed PyTorch. It contains only code that
// needs PyTorch's types: exceptions, `DataPtr`, `std::function`, contexts of a history. The library makes every decision.
//
//   torch ──► c10::cuda::CUDACachingAllocator::allocator ──► Allocator ──► symmalloc_torch_...
#include "base.h"
#include "blocks.h"
#include "history.h"
#include "memory.h"
#include "program_source.h"
#include "sharing.h"
#include "status.h"
#include "symmalloc.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdlib>
#include <limits>
#include <map>

namespace symmalloc {
namespace {

using c10::DataPtr;
using c10::cuda::CUDAStream;
using caching::StreamSegmentSize;

void free_cached(void* pointer) noexcept;
void free_uncached(void* pointer) noexcept;

// Returns true if the program disables caching, by the same variable as for PyTorch's own allocator.
bool is_never_cached() {
  static const bool never = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr;
  return never;
}

struct Checkpoint : caching::AllocatorState {
  explicit Checkpoint(symmalloc_checkpoint* of) : of(of) {}
  ~Checkpoint() override {
    symmalloc_torch_checkpoint_destroy(of);
  }
  symmalloc_checkpoint* const of;
};

// Pointers that `raw_alloc` returned while caching was off. `raw_delete` gets no deleter, so this set identifies them.
class UncachedSet {
 public:
  void add(void* pointer) {
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      pointers_.insert(pointer);
      count_ = pointers_.size();
    }
  }

  // Returns true if the pointer was there.
  bool remove(void* pointer) {
    if (C10_LIKELY(count_.load(std::memory_order_relaxed) == 0)) {
      return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_there = pointers_.erase(pointer) > 0;
    count_ = pointers_.size();
    return is_there;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<void*> pointers_;
  std::atomic<size_t> count_{0};
};

using Filter = std::function<bool(cudaStream_t)>;

// Returns true if the filter accepts all allocations of this thread, rather than those of one stream. A capture's filter accepts no
// stream before the capture has begun. Only a filter that accepts this thread's current stream is called with a nonexistent stream.
bool takes_this_thread(const Filter& filter, DeviceIndex device) {
  const auto nowhere = reinterpret_cast<cudaStream_t>(~uintptr_t{0});
  return !filter || (filter(c10::cuda::getCurrentCUDAStream(device).stream()) && filter(nowhere));
}

class Allocator final : public caching::AllocatorBase {
 public:
  // ---- Memory

  DataPtr allocate(size_t bytes) override {
    constexpr size_t kExbibyte = size_t{1} << 60;
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes < kExbibyte, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    const Device place(c10::DeviceType::CUDA, device);
    if (C10_UNLIKELY(is_uncached())) {
      void* pointer = allocate_uncached(bytes);
      return {pointer, pointer, &free_uncached, place};
    }
    void* pointer = memory_.allocate(device, bytes, c10::cuda::getCurrentCUDAStream(device).stream());
    return {pointer, pointer, &free_cached, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return is_uncached() ? &free_uncached : &free_cached;
  }

  void* raw_alloc(size_t bytes) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(device).stream());
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    if (C10_UNLIKELY(is_uncached())) {
      void* pointer = allocate_uncached(bytes);
      uncached_.add(pointer);
      return pointer;
    }
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return memory_.allocate(device, bytes, stream);
  }

  // Never throws, because destructors call it.
  void raw_delete(void* pointer) override {
    if (C10_UNLIKELY(symmalloc_torch_is_forked())) {
      return;
    }
    if (C10_UNLIKELY(uncached_.remove(pointer))) {
      free_uncached(pointer);
    } else {
      memory_.free(pointer);
    }
  }

#if SYMMALLOC_TORCH(2, 13)
  // Only a pool with a base has addresses that a program can know (docs/fixed-addresses.md).
  DataPtr allocateWithAddress(size_t bytes, void* address) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    const auto stream = c10::cuda::getCurrentCUDAStream(device).stream();
    void* pointer = memory_.allocate_with_address(device, bytes, address, stream);
    return {pointer, pointer, &free_cached, Device(c10::DeviceType::CUDA, device)};
  }
#endif

  void copy_data(void* to, const void* from, size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  void recordStream(const DataPtr& data, CUDAStream stream) override {
    // Ignores memory of other processes, and of pools with another allocator.
    if (data.get() != nullptr && data.get_deleter() == &free_cached) {
      check(symmalloc_torch_record_use(data.get(), stream.stream()));
    }
  }

  // A program empties all pools, and gets the errors. The destructor of a pool empties that pool, which never throws.
  void emptyCache(MempoolId_t pool) override {
    if (pool != kDefaultPool) {
      release("releasing the memory of a pool", [&] { empty(pool); });
    } else if (!symmalloc_torch_is_forked()) {
      empty(pool);
    }
  }

  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    return symmalloc_torch_base_alloc(pointer, bytes);
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    check(symmalloc_torch_largest_block(device, largest));
  }

  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t bytes,
      cudaStream_t stream,
      bool has_peer_access) override {
    // Without peer access, copies between the two devices go through the host.
    if (has_peer_access || to_device == from_device) {
      return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  void enablePeerAccess(DeviceIndex device, DeviceIndex owner) override {
    c10::cuda::CUDAGuard guard(device);
    const auto status = cudaDeviceEnablePeerAccess(owner, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      C10_CUDA_CHECK(status);
    }
    check(symmalloc_torch_enable_peer(device, owner));
  }

  Memory& memory() {
    return memory_;
  }

  // ---- The process

  void init(int device_count) override {
    check(symmalloc_torch_check());
    device_count_ = std::min<int>(device_count, kDevicesMax);
  }

  bool initialized() override {
    return device_count_ > 0;
  }

  void enable(bool value) override {
    is_enabled_ = value;
  }

  bool isEnabled() const override {
    return is_enabled_;
  }

  std::string name() override {
    return "symmalloc";
  }

  double getMemoryFraction(DeviceIndex device) override {
    return memory_.of(device).fraction;
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    check(symmalloc_torch_set_fraction(device, fraction));
    memory_.of(device).fraction = fraction;
  }

  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    memory_.observe(std::move(observer));
  }

#if SYMMALLOC_TORCH(2, 12)
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    memory_.observe_rejections(std::move(observer));
  }
#endif

  // ---- Statistics and snapshots

  caching::DeviceStats getDeviceStats(DeviceIndex device) override {
    auto& state = memory_.of(device);
    std::lock_guard<std::mutex> lock(mutex_);
    return since(memory_.count(device), state.accumulated_before);
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    auto& state = memory_.of(device);
    std::lock_guard<std::mutex> lock(mutex_);
    state.accumulated_before = memory_.count(device);
  }

  void resetPeakStats(DeviceIndex device) override {
    auto& state = memory_.of(device);
    std::lock_guard<std::mutex> lock(mutex_);
    check(symmalloc_torch_reset_peaks(device));
    state.segments_peak = 0;
  }

  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    ExpandableSizes sizes;
    for_each_block(device, kDefaultPool, sizes);
    return std::move(sizes.sizes);
  }

  caching::SnapshotInfo snapshot(MempoolId_t pool, bool has_traces) override {
    const auto to_nanoseconds = clock_.makeConverter();
    const auto to_microseconds = [&](auto& time) { time.t_ = to_nanoseconds(time.approx_t_) / 1000; };
    caching::SnapshotInfo snapshot;
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      auto& history = memory_.of(device).history;
      std::lock_guard<std::recursive_mutex> lock(history.order);
      SegmentList list{device, history, {}};
      for_each_block(device, pool, list);
      size_t active_bytes = 0;
      for (const auto& segment : list.segments) {
        active_bytes += segment.active_size;
      }
      std::sort(list.segments.begin(), list.segments.end(), [](const auto& one, const auto& other) {
        return one.address < other.address;
      });
      snapshot.device_traces.emplace_back();
      if (has_traces) {
        snapshot.device_traces.back() = history.list();
        for (auto& entry : snapshot.device_traces.back()) {
          to_microseconds(entry.time_);
        }
      }
      // The next snapshot contains this entry.
      history.entry(Action::SNAPSHOT, 0, Noted{active_bytes, nullptr, kDefaultPool, nullptr, false});
      snapshot.segments.insert(snapshot.segments.end(), list.segments.begin(), list.segments.end());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    snapshot.external_annotations = annotations_.list();
    for (auto& annotation : snapshot.external_annotations) {
      to_microseconds(annotation.time_);
    }
    auto& config = snapshot.config_metadata;
    config = {};
    config.max_split_size = std::numeric_limits<size_t>::max();
    config.expandable_segments = is_expandable();
    config.last_allocator_settings = settings();
#if SYMMALLOC_TORCH(2, 13)
    // These settings belong to PyTorch's host allocator, which is not replaced.
    config.max_round_threshold = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold();
    config.max_cached_size = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_cached_size();
#endif
    return snapshot;
  }

  // Returns `true` if the segments of the default pool grow.
  bool is_expandable() const {
    symmalloc_properties properties{};
    return symmalloc_torch_properties(&properties) == SYMMALLOC_OK && properties.is_expandable;
  }

  // ---- Histories

  bool isHistoryEnabled() override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return memory_.of(device).history.is_recorded();
  }

  void recordHistory(
      bool enabled,
      caching::CreateContextFn gather,
      size_t entries_max,
      RecordContext when,
      bool clears,
      const std::vector<std::string>& skipped) override {
    // All checks precede the first change.
    TORCH_CHECK(when == RecordContext::NEVER || gather, "symmalloc: recording contexts requires a function that gathers them");
    const auto skipped_actions = parsed_actions(skipped);
    for_each_device([&](DeviceHistory& history, const auto& segments) {
      history.record(enabled, gather, entries_max, when, clears, skipped_actions, segments);
    });
    std::lock_guard<std::mutex> lock(mutex_);
    is_recorded_ = enabled;
    if (!enabled || clears) {
      annotations_.set_size(entries_max);
    }
    memory_.watch(enabled || has_trackers_);
  }

  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    for_each_device([&](DeviceHistory& history, const auto& segments) { history.attach(tracker, segments); });
    std::lock_guard<std::mutex> lock(mutex_);
    has_trackers_ = true;
    memory_.watch(true);
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& words) override {
    if (!is_recorded_) {
      return;
    }
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    c10::CachingDeviceAllocator::AnnotationEntry entry(device, c10::getApproximateTime());
    for (const auto& [name, value] : words) {
      entry.recordUserMetadata(name, value);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    annotations_.add(entry);
  }

  void pushCompileContext(std::string& context) override {
    if (is_recorded_) {
      thread_notes().compile_contexts.push(context);
    }
  }

  void popCompileContext() override {
    if (auto& contexts = thread_notes().compile_contexts; is_recorded_ && !contexts.empty()) {
      contexts.pop();
    }
  }

  void setUserMetadata(const std::string& metadata) override {
    thread_notes().user_metadata = metadata;
  }

  std::string getUserMetadata() override {
    return thread_notes().user_metadata;
  }

#if SYMMALLOC_TORCH(2, 12)
  // Returns the context of a live allocation, if a history was recorded at its allocation.
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return memory_.context_of(pointer);
  }
#endif

#if SYMMALLOC_TORCH(2, 14)
  bool supportsUserMetadata() override {
    return true;
  }

  void annotateMemory(const void* pointer, const std::string& metadata) override {
    if (is_recorded_) {
      memory_.annotate(pointer, metadata);
    }
  }
#endif

  // ---- Mempools

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, Filter filter) override {
    const bool is_inherited = takes_this_thread(filter, device);
    const auto accepts = [](void* context, void* stream) {
      const auto& filter = *static_cast<Filter*>(context);
      return !filter || filter(static_cast<cudaStream_t>(stream));
    };
    const auto destroy = [](void* context) { delete static_cast<Filter*>(context); };
    uint64_t number = 0;
    check(symmalloc_torch_begin_scope(
        device, pool.first, pool.second, accepts, new Filter(std::move(filter)), destroy, &number));
    if (is_inherited) {
      memory_.scopes().push(device, pool, number);
    }
  }

  // Throws without such a scope, as PyTorch's own allocator does. In a forked child it has no effect.
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    if (C10_UNLIKELY(symmalloc_torch_is_forked())) {
      return;
    }
    memory_.scopes().pop(device, pool);
    check(symmalloc_torch_end_scope(device, pool.first, pool.second));
  }

  // The destructors of pools and graphs call it. The library reports failures.
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    (void)symmalloc_torch_release_use(device, pool.first, pool.second);
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return static_cast<int>(symmalloc_torch_pool_uses(device, pool.first, pool.second));
  }

  void createOrIncrefPool(
      DeviceIndex device,
      MempoolId_t pool,
      std::shared_ptr<caching::CUDAAllocator> allocator) override {
    if (allocator == nullptr || allocator.get() == this) {
      check(symmalloc_torch_retain_pool(device, pool.first, pool.second, nullptr));
      return;
    }
    const auto source = ProgramSource::make(std::move(allocator));
    check(symmalloc_torch_retain_pool(device, pool.first, pool.second, &source));
  }

  // The destructors of pools call it with `false`, which never throws.
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override {
    const auto set = [&] { check(symmalloc_torch_pool_helps_out(device, pool.first, pool.second, use_on_oom)); };
    if (use_on_oom) {
      set();
    } else {
      release("the end of a pool", set);
    }
  }

  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    check(symmalloc_torch_pool_unsplit(device, pool.first, pool.second));
  }

  bool checkPoolLiveAllocations(
      DeviceIndex device,
      MempoolId_t pool,
      const std::unordered_set<void*>& expected) override {
    LiveSet live;
    for_each_block(device, pool, live);
    return live.pointers == expected;
  }

  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    symmalloc_checkpoint* checkpoint = nullptr;
    check(symmalloc_torch_checkpoint(device, pool.first, pool.second, &checkpoint));
    return std::make_shared<Checkpoint>(checkpoint);
  }

  caching::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device,
      std::shared_ptr<caching::AllocatorState> state) override {
    const auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    TORCH_CHECK(checkpoint, "symmalloc: the pool's state came from another allocator");
    auto restored = memory_.restore(device, checkpoint->of);
    caching::CheckpointDelta delta;
    delta.ptrs_freed = std::move(restored.freed);
    for (const auto& [pointer, bytes] : restored.live) {
      delta.dataptrs_allocd.emplace_back(pointer, pointer, &free_cached, Device(c10::DeviceType::CUDA, device));
    }
    return delta;
  }

  // ---- Other processes

  caching::ShareableHandle shareIpcHandle(void* pointer) override {
    return share(pointer);
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return open_shared(device, handle);
  }

 private:
  void empty(MempoolId_t pool) {
    auto& context = thread_notes().release_context;
    // All devices have the same function and level.
    context = is_recorded_ ? memory_.of(0).history.gather(RecordContext::ALL) : nullptr;
    const auto status = symmalloc_torch_trim(pool.first, pool.second);
    context = nullptr;
    check(status);
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      ++memory_.of(device).releases;
    }
  }

  bool is_uncached() const {
    return is_never_cached() || !isEnabled();
  }

  static void* allocate_uncached(size_t bytes) {
    void* pointer = nullptr;
    if (bytes != 0) {
      C10_CUDA_CHECK(cudaMalloc(&pointer, bytes));
    }
    return pointer;
  }

  std::string settings() const {
    // This names no device, because querying a device's allocator would create it and a context.
    char* text = nullptr;
    if (symmalloc_torch_settings(&text) != SYMMALLOC_OK) {
      return "";
    }
    std::string settings = text;
    symmalloc_release_bytes(text);
    return settings;
  }

  // Calls a function for the history and the segments of each device, which stay unchanged meanwhile. All queries, which may throw, precede
  // the first call.
  template <typename Act>
  void for_each_device(const Act& act) {
    std::vector<std::unique_lock<std::recursive_mutex>> locks;
    std::vector<std::map<size_t, Noted>> found;
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      locks.emplace_back(memory_.of(device).history.order);
      found.push_back(segments(device));
    }
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      act(memory_.of(device).history, found[device]);
    }
  }

  // Returns the segments of a device by address.
  std::map<size_t, Noted> segments(DeviceIndex device) {
    SegmentList list{device, memory_.of(device).history, {}};
    for_each_block(device, kDefaultPool, list);
    std::map<size_t, Noted> segments;
    for (const auto& segment : list.segments) {
      segments[segment.address] =
          Noted{segment.total_size, segment.stream, segment.owner_private_pool_id, nullptr, segment.is_expandable};
    }
    return segments;
  }

  Memory memory_;
  UncachedSet uncached_;
  std::atomic<int> device_count_{0};
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_recorded_{false};
  // Protects the fields below.
  std::mutex mutex_;
  bool has_trackers_ = false;
  Ring<c10::CachingDeviceAllocator::AnnotationEntry> annotations_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

// Never destroyed, because other destructors may still free memory while the process exits.
Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void free_cached(void* pointer) noexcept {
  allocator().memory().free(pointer);
}

void free_uncached(void* pointer) noexcept {
  release("freeing memory", [&] { C10_CUDA_CHECK(cudaFree(pointer)); });
}

// Sets PyTorch's `expandable_segments` to the policy of the default pool. PyTorch's NCCL backend reads it: unless it is set, the backend
// registers the segments of the default pool, and expects that each keeps its size until it is freed as a whole.
void announce_segments(bool is_expandable) {
  using namespace c10::CachingAllocator;
  if (AcceleratorAllocatorConfig::use_expandable_segments() == is_expandable) {
    return;
  }
  const auto before = getAllocatorSettings();
  const std::string setting = is_expandable ? "expandable_segments:True" : "expandable_segments:False";
  setAllocatorSettings(before.empty() ? setting : before + "," + setting);
}

// Exceptions thrown by trackers must not unwind through the library, which calls this.
void memory_changed(int32_t device, uint32_t is_mapped, uint64_t address, uint64_t bytes) {
  try {
    allocator().memory().changed(static_cast<DeviceIndex>(device), is_mapped != 0, address, bytes);
  } catch (const std::exception& error) {
    warn("a memory tracker failed: ", error.what());
  } catch (...) {
    warn("a memory tracker failed");
  }
}

} // namespace
} // namespace symmalloc

// Installs the allocator in PyTorch with this configuration, or that of the environment. Returns 0 on success, a status of the library if it
// rejects the configuration, and -1 if PyTorch has used CUDA already. A call that fails changes nothing.
extern "C" __attribute__((visibility("default"))) int symmalloc_install_class(const char* conf) {
  auto* current = symmalloc::caching::allocator.load();
  if (current != nullptr && current->initialized()) {
    return -1;
  }
  const auto status = conf != nullptr ? symmalloc_torch_configure(conf) : symmalloc_torch_check();
  if (status != SYMMALLOC_OK) {
    return static_cast<int>(status);
  }
  auto& allocator = symmalloc::allocator();
  symmalloc::attempt("setting expandable_segments", [&] { symmalloc::announce_segments(allocator.is_expandable()); });
  symmalloc_torch_on_memory(symmalloc::memory_changed);
  symmalloc::caching::allocator.store(&allocator);
  // PyTorch 2.15 registers its own allocator with a priority above the default.
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, std::numeric_limits<uint8_t>::max());
  return 0;
}

// Sets the function that names allocations after their callers while a history is recorded; a null pointer removes it.
extern "C" __attribute__((visibility("default"))) void symmalloc_name_callers(symmalloc::CallerFn caller) {
  symmalloc::caller_fn().store(caller);
}

// Returns the names of the functions that throw because this package does not know them, separated by commas; empty if there are none.
extern "C" __attribute__((visibility("default"))) const char* symmalloc_unknown_functions() {
  return SYMMALLOC_UNKNOWN_NAMES;
}
