// PyTorch's allocator for CUDA tensors, over the library's C interface.
//
// Compiled against the PyTorch that is installed, by `build.py`, since its class has no stable binary form. What PyTorch's types need is
// here: exceptions, `DataPtr`, `std::function`, contexts of a history. Everything that decides is the library's.
//
//   torch ──► c10::cuda::CUDACachingAllocator::allocator ──► Allocator ──► symmalloc_torch_...
#include "history.h"
#include "inherited_scopes.h"
#include "symmalloc.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <unordered_set>

namespace symmalloc {
namespace {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::cuda::CUDAStream;
using caching::RecordContext;
using caching::StreamSegmentSize;

constexpr MempoolId_t kDefaultPool{0, 0};
// As many as the library looks for.
constexpr size_t kDevicesMax = 128;
// Begins the handle of memory that the driver's older calls share.
constexpr const char* kLegacyHandle = "cudaIpc ";

[[noreturn]] void fail(symmalloc_status status) {
  const std::string message = symmalloc_error_message();
  TORCH_CHECK_WITH(
      OutOfMemoryError, status != SYMMALLOC_OUT_OF_MEMORY, "CUDA out of memory. symmalloc: ", message);
  TORCH_CHECK(false, "symmalloc: ", message);
}

void check(symmalloc_status status) {
  if (C10_UNLIKELY(status != SYMMALLOC_OK)) {
    fail(status);
  }
}

void note_free(void* pointer);
void free_uncached(void* pointer);

// What the program wants without any cache, as PyTorch's own allocator understands it.
bool is_never_cached() {
  static const bool never = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr;
  return never;
}

// Calls `visit(segment)` and `visit(block)` for everything on a device, or in one of its private pools.
template <typename Visitor>
void for_each_block(DeviceIndex device, MempoolId_t pool, Visitor& visitor) {
  const auto visit = [](void* context, const symmalloc_segment* segment, const symmalloc_block* block) {
    auto& visitor = *static_cast<Visitor*>(context);
    segment != nullptr ? visitor.see(*segment) : visitor.see(*block);
  };
  check(symmalloc_torch_visit(device, pool.first, pool.second, visit, &visitor));
}

struct SegmentList {
  void see(const symmalloc_segment& seen) {
    segments.emplace_back();
    auto& segment = segments.back();
    segment.device = device;
    segment.address = seen.address;
    segment.total_size = seen.bytes;
    segment.stream = seen.stream;
    segment.is_large = seen.is_large;
    segment.is_expandable = seen.is_expandable;
    segment.owner_private_pool_id = {seen.id_first, seen.id_second};
    segment.context_when_allocated = history.segment_context(seen.address);
  }

  void see(const symmalloc_block& seen) {
    auto& segment = segments.back();
    segment.blocks.emplace_back();
    auto& block = segment.blocks.back();
    block.size = seen.bytes;
    block.requested_size = seen.requested_bytes;
    block.allocated = block.active = seen.is_allocated;
    if (seen.is_allocated) {
      segment.allocated_size += seen.bytes;
      segment.active_size += seen.bytes;
      segment.requested_size += seen.requested_bytes;
      if (const auto noted = history.find(reinterpret_cast<void*>(seen.address))) {
        block.context_when_allocated = noted->context;
      }
    }
  }

  DeviceIndex device;
  const DeviceHistory& history;
  std::vector<caching::SegmentInfo> segments;
};

struct LiveSet {
  void see(const symmalloc_segment&) {}
  void see(const symmalloc_block& seen) {
    if (seen.is_allocated) {
      pointers.insert(reinterpret_cast<void*>(seen.address));
    }
  }
  std::unordered_set<void*> pointers;
};

struct ExpandableSizes {
  void see(const symmalloc_segment& seen) {
    if (seen.is_expandable) {
      sizes.emplace_back(static_cast<cudaStream_t>(seen.stream), !seen.is_large, seen.bytes);
    }
  }
  void see(const symmalloc_block&) {}
  std::vector<StreamSegmentSize> sizes;
};

struct Checkpoint : caching::AllocatorState {
  explicit Checkpoint(symmalloc_checkpoint* of) : of(of) {}
  ~Checkpoint() override {
    symmalloc_torch_checkpoint_destroy(of);
  }
  symmalloc_checkpoint* const of;
};

// The functions of an allocator that a program gives to a pool of its own.
struct ProgramSource {
  static symmalloc_source make(std::shared_ptr<caching::CUDAAllocator> allocator) {
    return {allocate, free, new std::shared_ptr<caching::CUDAAllocator>(std::move(allocator)), destroy};
  }

 private:
  static caching::CUDAAllocator& of(void* context) {
    return **static_cast<std::shared_ptr<caching::CUDAAllocator>*>(context);
  }
  // What is thrown cannot pass through the library: it means that there is no memory.
  static void* allocate(void* context, size_t bytes) {
    try {
      return of(context).raw_alloc(bytes);
    } catch (const std::exception& error) {
      TORCH_WARN("symmalloc: the allocator of a pool failed for ", bytes, " bytes: ", error.what());
      return nullptr;
    }
  }
  static void free(void* context, void* pointer) {
    try {
      of(context).raw_delete(pointer);
    } catch (const std::exception& error) {
      TORCH_WARN("symmalloc: the allocator of a pool failed to free: ", error.what());
    }
  }
  static void destroy(void* context) {
    delete static_cast<std::shared_ptr<caching::CUDAAllocator>*>(context);
  }
};

using Filter = std::function<bool(cudaStream_t)>;

// Whether the filter takes whatever this thread allocates, and not a stream's work. That of a capture takes no stream before the
// capture has begun, and only one that takes this thread's current stream is asked about a stream that does not exist.
bool takes_this_thread(const Filter& filter, DeviceIndex device) {
  const auto nowhere = reinterpret_cast<cudaStream_t>(~uintptr_t{0});
  return !filter || (filter(c10::cuda::getCurrentCUDAStream(device).stream()) && filter(nowhere));
}

class Allocator final : public caching::CUDAAllocator {
 public:
  // ---- Memory

  DataPtr allocate(size_t bytes) override {
    constexpr size_t kExbibyte = size_t{1} << 60;
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes < kExbibyte, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    const Device place(c10::DeviceType::CUDA, device);
    if (C10_UNLIKELY(is_never_cached() || !isEnabled())) {
      void* pointer = nullptr;
      if (bytes != 0) {
        C10_CUDA_CHECK(cudaMalloc(&pointer, bytes));
      }
      return {pointer, pointer, &free_uncached, place};
    }
    void* pointer = allocate_on(device, bytes, c10::cuda::getCurrentCUDAStream(device).stream());
    return {pointer, pointer, &note_free, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return is_never_cached() || !isEnabled() ? &free_uncached : &note_free;
  }

  void* raw_alloc(size_t bytes) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return allocate_on(device, bytes, c10::cuda::getCurrentCUDAStream(device).stream());
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return allocate_on(device, bytes, stream);
  }

  void raw_delete(void* pointer) override {
    free(pointer);
  }

  void free(void* pointer) {
    if (pointer == nullptr) {
      return;
    }
    const auto* trace = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(trace != nullptr)) {
      (*trace)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(pointer));
    }
    DeviceIndex device = 0;
    // A process that ends has no current device, and frees all the same.
    (void)c10::cuda::GetDevice(&device);
    uint64_t bytes = 0;
    if (C10_UNLIKELY(is_watched_.load(std::memory_order_relaxed))) {
      free_watched(device, pointer, &bytes);
    } else {
      // The library complains of what is not its own.
      (void)symmalloc_torch_deallocate(device, pointer, &bytes);
    }
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
      report(device, pointer, -static_cast<int64_t>(bytes));
    }
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  void recordStream(const DataPtr& data, CUDAStream stream) override {
    // What came from another process, or from a pool of another allocator, is not ours to keep.
    if (data.get() != nullptr && data.get_deleter() == &note_free) {
      check(symmalloc_torch_record_use(data.get(), stream.stream()));
    }
  }

  void emptyCache(MempoolId_t pool) override {
    check(symmalloc_torch_trim(pool.first, pool.second));
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
    // Without access only the copy between two devices goes by the host.
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
    return of(device).fraction;
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    check(symmalloc_torch_set_fraction(device, fraction));
    of(device).fraction = fraction;
  }

  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }

  // ---- Statistics and snapshots

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    auto& state = of(device);
    std::lock_guard<std::mutex> lock(mutex_);
    return since(count(device), state.accumulated_before);
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    auto& state = of(device);
    std::lock_guard<std::mutex> lock(mutex_);
    state.accumulated_before = count(device);
  }

  void resetPeakStats(DeviceIndex device) override {
    check(symmalloc_torch_reset_peaks(device));
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
      auto& history = of(device).history;
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
      history.entry(Action::SNAPSHOT, 0, Noted{active_bytes, nullptr, kDefaultPool, nullptr, false});
      snapshot.device_traces.emplace_back();
      if (has_traces) {
        snapshot.device_traces.back() = history.list();
        for (auto& entry : snapshot.device_traces.back()) {
          to_microseconds(entry.time_);
        }
      }
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
    return snapshot;
  }

  // ---- Histories

  bool isHistoryEnabled() override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return of(device).history.is_recorded();
  }

  void recordHistory(
      bool enabled,
      caching::CreateContextFn gather,
      size_t entries_max,
      RecordContext when,
      bool clears,
      const std::vector<std::string>& skipped) override {
    std::lock_guard<std::mutex> lock(mutex_);
    is_recorded_ = enabled;
    if (!enabled || clears) {
      annotations_.set_size(entries_max);
    }
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      of(device).history.record(enabled, gather, entries_max, when, clears, skipped);
    }
    is_watched_ = enabled || has_trackers_;
  }

  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (DeviceIndex device = 0; device < device_count_; ++device) {
      of(device).history.attach(tracker);
    }
    has_trackers_ = true;
    is_watched_ = true;
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

  // ---- Private pools

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
      scopes_.push(device, pool, number);
    }
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    scopes_.pop(device, pool);
    check(symmalloc_torch_end_scope(device, pool.first, pool.second));
  }

  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    check(symmalloc_torch_release_use(device, pool.first, pool.second));
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

  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override {
    check(symmalloc_torch_pool_helps_out(device, pool.first, pool.second, use_on_oom));
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
    TORCH_CHECK(checkpoint, "symmalloc: the state of a pool is another allocator's");
    struct Told {
      std::vector<void*> freed;
      std::vector<std::pair<void*, uint64_t>> live;
    } told;
    const auto tell = [](void* context, void* pointer, uint64_t bytes, uint32_t is_live) {
      auto& told = *static_cast<Told*>(context);
      if (is_live != 0) {
        told.live.emplace_back(pointer, bytes);
      } else {
        told.freed.push_back(pointer);
      }
    };
    auto& history = of(device).history;
    const auto context = history.gather(RecordContext::STATE);
    std::lock_guard<std::recursive_mutex> lock(history.order);
    check(symmalloc_torch_restore(device, checkpoint->of, tell, &told));
    if (history.is_watched()) {
      for (void* pointer : told.freed) {
        note_freed(history, pointer, nullptr);
      }
      for (const auto& [pointer, bytes] : told.live) {
        note_allocated(history, pointer, bytes, context);
      }
    }
    caching::CheckpointDelta delta;
    delta.ptrs_freed = std::move(told.freed);
    for (const auto& [pointer, bytes] : told.live) {
      delta.dataptrs_allocd.emplace_back(pointer, pointer, &note_free, Device(c10::DeviceType::CUDA, device));
    }
    return delta;
  }

  // ---- Other processes

  caching::ShareableHandle shareIpcHandle(void* pointer) override {
    char* text = nullptr;
    uint64_t offset = 0;
    if (symmalloc_torch_share(pointer, &text, &offset) == SYMMALLOC_OK) {
      caching::ShareableHandle handle{static_cast<ptrdiff_t>(offset), text};
      symmalloc_release_bytes(text);
      return handle;
    }
    const std::string why = symmalloc_error_message();
    // Memory of a pool's own allocator may be `cudaMalloc`'s.
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

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    if (handle.rfind(kLegacyHandle, 0) == 0) {
      return open_legacy(device, handle);
    }
    void* base = nullptr;
    const symmalloc_opened* opened = nullptr;
    check(symmalloc_torch_open(device, handle.c_str(), &base, &opened));
    return {base, [opened](void*) { symmalloc_torch_close(opened); }};
  }

  // Memory of a device was mapped, or is about to go.
  void memory_changed(DeviceIndex device, bool is_mapped, size_t address, size_t bytes) {
    if (is_mapped) {
      of(device).history.memory_came(address, bytes);
    } else {
      of(device).history.memory_goes(address, bytes);
    }
  }

 private:
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

  struct State {
    explicit State(DeviceIndex device) : history(device) {}
    DeviceHistory history;
    double fraction = 1.0;
    DeviceStats accumulated_before{};
    int64_t segments_peak = 0;
  };

  State& of(DeviceIndex device) {
    TORCH_CHECK(
        0 <= device && static_cast<size_t>(device) < kDevicesMax, "symmalloc: there is no device ", int{device});
    auto& state = states_[device];
    std::call_once(made_[device], [&] { state = std::make_unique<State>(device); });
    return *state;
  }

  void* allocate_on(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) {
      return nullptr;
    }
    void* pointer = nullptr;
    if (C10_UNLIKELY(is_watched_.load(std::memory_order_relaxed))) {
      pointer = allocate_watched(device, bytes, stream);
    } else {
      const auto status = symmalloc_torch_allocate(device, bytes, stream, scopes_.number(device), &pointer);
      if (C10_UNLIKELY(status != SYMMALLOC_OK)) {
        pointer = refused(device, bytes, stream, status, nullptr);
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

  void* allocate_watched(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    auto& history = of(device).history;
    const auto context = history.gather(RecordContext::STATE);
    std::unique_lock<std::recursive_mutex> lock(history.order);
    void* pointer = nullptr;
    const auto status = symmalloc_torch_allocate(device, bytes, stream, scopes_.number(device), &pointer);
    if (status != SYMMALLOC_OK) {
      const std::string message = symmalloc_error_message();
      lock.unlock();
      pointer = refused(device, bytes, stream, status, context);
      lock.lock();
    }
    note_allocated(history, pointer, bytes, context);
    return pointer;
  }

  static void note_allocated(DeviceHistory& history, void* pointer, size_t bytes, const Context& context) {
    symmalloc_found found{};
    check(symmalloc_torch_find(pointer, &found));
    const Noted noted{bytes, found.stream, {found.id_first, found.id_second}, context, found.is_expandable};
    history.segments_came(noted, context);
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

  void free_watched(DeviceIndex device, void* pointer, uint64_t* bytes) {
    symmalloc_found found{};
    if (symmalloc_torch_find(pointer, &found) != SYMMALLOC_OK) {
      (void)symmalloc_torch_deallocate(device, pointer, bytes);
      return;
    }
    auto& history = of(static_cast<DeviceIndex>(found.device)).history;
    const auto context = history.gather(RecordContext::ALL);
    std::lock_guard<std::recursive_mutex> lock(history.order);
    const auto noted = history.find(pointer);
    const Noted said{
        found.requested_bytes,
        found.stream,
        {found.id_first, found.id_second},
        context || !noted ? context : noted->context,
        found.is_expandable};
    history.entry(Action::FREE_REQUESTED, reinterpret_cast<size_t>(pointer), said);
    history.forget(pointer);
    const auto status = symmalloc_torch_deallocate(found.device, pointer, bytes);
    if (status == SYMMALLOC_OK) {
      history.entry(Action::FREE_COMPLETED, reinterpret_cast<size_t>(pointer), said);
    }
  }

  // What other parts of PyTorch hold may be given up: then once more. Otherwise everybody is told.
  void* refused(DeviceIndex device, size_t bytes, cudaStream_t stream, symmalloc_status status, const Context& context) {
    if (status != SYMMALLOC_OUT_OF_MEMORY) {
      fail(status);
    }
    // The callbacks may fail calls of their own.
    std::string message = symmalloc_error_message();
    bool has_freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      has_freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    if (has_freed) {
      void* pointer = nullptr;
      status = symmalloc_torch_allocate(device, bytes, stream, scopes_.number(device), &pointer);
      if (status == SYMMALLOC_OK) {
        return pointer;
      }
      message = symmalloc_error_message();
    }
    symmalloc_counts counts{};
    (void)symmalloc_torch_counts(device, &counts);
    const uint64_t limit = counts.limit_bytes != 0 ? counts.limit_bytes : counts.total_bytes;
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
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. symmalloc: ", message);
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

  static caching::DeviceStats counted(const symmalloc_counts& counts) {
    DeviceStats stats{};
    const auto fill = [](auto& of, const symmalloc_stat (&from)[3]) {
      for (size_t at = 0; at < 3; ++at) {
        of[at].current = static_cast<int64_t>(from[at].current);
        of[at].peak = static_cast<int64_t>(from[at].peak);
        of[at].allocated = static_cast<int64_t>(from[at].allocated);
        of[at].freed = static_cast<int64_t>(from[at].freed);
      }
    };
    fill(stats.allocation, counts.allocations);
    fill(stats.active, counts.allocations);
    fill(stats.allocated_bytes, counts.allocated_bytes);
    fill(stats.active_bytes, counts.allocated_bytes);
    fill(stats.requested_bytes, counts.requested_bytes);
    // A block that is free can be taken at once: active is allocated. Its peak is counted exactly in all alone.
    const symmalloc_stat reserved[3] = {counts.reserved_bytes, {}, {}};
    fill(stats.reserved_bytes, reserved);
    stats.segment[0].current = stats.segment[0].peak = static_cast<int64_t>(counts.segments);
    stats.segment[0].allocated = static_cast<int64_t>(counts.segments_born);
    stats.segment[0].freed = static_cast<int64_t>(counts.segments_born - counts.segments);
    stats.inactive_split[0].current = stats.inactive_split[0].peak = static_cast<int64_t>(counts.free_blocks);
    stats.inactive_split_bytes[0].current = stats.inactive_split_bytes[0].peak =
        static_cast<int64_t>(counts.reserved_bytes.current - counts.allocated_bytes[0].current);
    stats.num_alloc_retries = static_cast<int64_t>(counts.retries);
    stats.num_ooms = static_cast<int64_t>(counts.failures);
    stats.max_split_size = -1;
    return stats;
  }

  DeviceStats count(DeviceIndex device) {
    symmalloc_counts counts{};
    check(symmalloc_torch_counts(device, &counts));
    auto stats = counted(counts);
    auto& state = of(device);
    state.segments_peak = std::max(state.segments_peak, stats.segment[0].current);
    stats.segment[0].peak = state.segments_peak;
    stats.num_device_alloc = state.history.maps;
    stats.num_device_free = state.history.unmaps;
    return stats;
  }

  // Takes what had accumulated before from everything that accumulates.
  static DeviceStats since(DeviceStats now, const DeviceStats& then) {
    const auto take = [](auto& now, const auto& then) {
      for (size_t at = 0; at < now.size(); ++at) {
        now[at].allocated -= then[at].allocated;
        now[at].freed -= then[at].freed;
      }
    };
    take(now.allocation, then.allocation);
    take(now.segment, then.segment);
    take(now.active, then.active);
    take(now.allocated_bytes, then.allocated_bytes);
    take(now.reserved_bytes, then.reserved_bytes);
    take(now.active_bytes, then.active_bytes);
    take(now.requested_bytes, then.requested_bytes);
    now.num_alloc_retries -= then.num_alloc_retries;
    now.num_ooms -= then.num_ooms;
    now.num_device_alloc -= then.num_device_alloc;
    now.num_device_free -= then.num_device_free;
    return now;
  }

  std::string settings() const {
    symmalloc_allocator* allocator = nullptr;
    char* text = nullptr;
    if (device_count_ == 0 || symmalloc_torch_allocator(0, &allocator) != SYMMALLOC_OK ||
        symmalloc_config(allocator, &text) != SYMMALLOC_OK) {
      return "";
    }
    std::string settings = text;
    symmalloc_release_bytes(text);
    return settings;
  }

  bool is_expandable() const {
    return settings().find("segments:expandable") != std::string::npos;
  }

  static std::shared_ptr<void> open_legacy(DeviceIndex device, const std::string& handle) {
    static auto* mutex = new std::mutex;
    static auto* opened = new std::unordered_map<std::string, std::weak_ptr<void>>;
    cudaIpcMemHandle_t legacy;
    TORCH_CHECK(
        handle.size() == std::strlen(kLegacyHandle) + sizeof(legacy), "symmalloc: a handle of shared memory is cut");
    std::memcpy(&legacy, handle.data() + std::strlen(kLegacyHandle), sizeof(legacy));
    std::lock_guard<std::mutex> lock(*mutex);
    if (auto known = (*opened)[handle].lock()) {
      return known;
    }
    void* base = nullptr;
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&base, legacy, cudaIpcMemLazyEnablePeerAccess));
    const std::shared_ptr<void> memory(base, [device, handle](void* base) {
      std::lock_guard<std::mutex> lock(*mutex);
      c10::cuda::CUDAGuard guard(device);
      C10_CUDA_CHECK_WARN(cudaIpcCloseMemHandle(base));
      if (const auto known = opened->find(handle); known != opened->end() && known->second.expired()) {
        opened->erase(known);
      }
    });
    (*opened)[handle] = memory;
    return memory;
  }

  // Of what follows, but for atomics and the states.
  std::mutex mutex_;
  std::array<std::once_flag, kDevicesMax> made_;
  std::array<std::unique_ptr<State>, kDevicesMax> states_;
  std::atomic<int> device_count_{0};
  std::atomic<bool> is_enabled_{true};
  std::atomic<bool> is_watched_{false};
  std::atomic<bool> is_recorded_{false};
  bool has_trackers_ = false;
  std::vector<caching::OutOfMemoryObserver> observers_;
  Ring<c10::CachingDeviceAllocator::AnnotationEntry> annotations_;
  InheritedScopes scopes_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

// It is freed to while the process ends, so it is never destroyed.
Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void note_free(void* pointer) {
  allocator().free(pointer);
}

void free_uncached(void* pointer) {
  C10_CUDA_CHECK_WARN(cudaFree(pointer));
}

void memory_changed(int32_t device, uint32_t is_mapped, uint64_t address, uint64_t bytes) {
  allocator().memory_changed(static_cast<DeviceIndex>(device), is_mapped != 0, address, bytes);
}

} // namespace
} // namespace symmalloc

// Makes the allocator PyTorch's. Returns 0; 1 when PyTorch has used CUDA already.
extern "C" __attribute__((visibility("default"))) int symmalloc_install_class() {
  auto* current = symmalloc::caching::allocator.load();
  if (current != nullptr && current->initialized()) {
    return 1;
  }
  auto& allocator = symmalloc::allocator();
  symmalloc_torch_on_memory(symmalloc::memory_changed);
  symmalloc::caching::allocator.store(&allocator);
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator);
  return 0;
}
