// The compiled class under a real libc10, used as by C++ extensions. It needs neither kernels nor Python: `../class.rs` provides the stub
// of libcuda and `cudart.c`.
//
//   class CASE class.so libsymmalloc_torch.so        a case; `speed` and `native_speed` print nanoseconds
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "symmalloc.h"
#include "versions.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

// libtorch_cuda uses this function to find the devices with a context. No header declares it.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

namespace caching = c10::cuda::CUDACachingAllocator;
using Action = caching::TraceEntry::Action;

#define ASSERT(condition)                                            \
  do {                                                               \
    if (!(condition)) {                                              \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);   \
      std::exit(1);                                                  \
    }                                                                \
  } while (0)

// A function of the library, which the program loads at run time.
#define CALL(name) reinterpret_cast<decltype(&name)>(dlsym(RTLD_DEFAULT, #name))

constexpr size_t kMib = size_t{1} << 20;
const c10::MempoolId_t kPool{0, 77};

static bool everything(cudaStream_t) {
  return true;
}

static void memory() {
  const auto side = c10::cuda::getStreamFromPool();
  void* reused = nullptr;
  {
    auto tensor = caching::get()->allocate(5 * kMib);
    ASSERT(tensor.get() == tensor.get_context() && tensor.device().is_cuda());
    ASSERT(tensor.get_deleter() == caching::get()->raw_deleter());
    caching::recordStream(tensor, side);
    const auto stats = caching::getDeviceStats(0);
    ASSERT(stats.allocated_bytes[0].current == 5 * kMib && stats.reserved_bytes[0].current == 6 * kMib);
    ASSERT(stats.num_device_alloc == 1);
    size_t bytes = 0;
    ASSERT(caching::getBaseAllocation(tensor.get(), &bytes) == tensor.get() && bytes == 6 * kMib);
    reused = tensor.get();
  }
  // Free immediately: the next user waits on the device.
  void* again = caching::raw_alloc(5 * kMib);
  ASSERT(again == reused);
  caching::raw_delete(again);
  ASSERT(caching::get()->allocate(0).get() == nullptr);
  caching::emptyCache();
  ASSERT(caching::getDeviceStats(0).reserved_bytes[0].current == 0);
  ASSERT(caching::getDeviceStats(0).num_device_free == 1);
  ASSERT(caching::getDeviceStats(0).segment[0].peak == 1);
  caching::resetPeakStats(0);
  ASSERT(caching::getDeviceStats(0).segment[0].peak == 0);
  caching::resetAccumulatedStats(0);
  ASSERT(caching::getDeviceStats(0).allocation[0].allocated == 0);
  size_t largest = 0;
  caching::cacheInfo(0, &largest);
  ASSERT(largest > 100 * kMib);
  ASSERT(c10::GetAllocator(c10::kCUDA) == caching::get() && caching::name() == "symmalloc");
}

static void trackers() {
  std::vector<std::pair<Action, size_t>> seen;
  caching::attachAllocatorTraceTracker([&](const auto& entry) { seen.emplace_back(entry.action_, entry.size_); });
  void* pointer = caching::raw_alloc(3 * kMib + 100);
  caching::raw_delete(pointer);
  caching::emptyCache();
  const std::vector<std::pair<Action, size_t>> expected{
      {Action::SEGMENT_MAP, 4 * kMib},
      {Action::ALLOC, 3 * kMib + 100},
      {Action::FREE_REQUESTED, 3 * kMib + 100},
      {Action::FREE_COMPLETED, 3 * kMib + 100},
      {Action::SEGMENT_UNMAP, 4 * kMib}};
  ASSERT(seen == expected);
  // A pool's segments have the pool's id.
  caching::createOrIncrefPool(0, kPool);
  caching::beginAllocateToPool(0, kPool, everything);
  pointer = caching::raw_alloc(kMib);
  caching::endAllocateToPool(0, kPool);
  ASSERT(seen[5].first == Action::SEGMENT_ALLOC && seen[5].second == 2 * kMib);
  const auto snapshot = caching::snapshot(kPool);
  ASSERT(snapshot.segments.size() == 1 && snapshot.segments[0].owner_private_pool_id == kPool);
  ASSERT(snapshot.segments[0].registration_counter == 0);
  ASSERT(snapshot.segments[0].blocks[0].allocated && caching::snapshot({5, 5}).segments.empty());
  caching::raw_delete(pointer);
  ASSERT(caching::get()->getPoolUseCount(0, kPool) == 2);
}

// The segments that PyTorch's NCCL backend registers with each new communicator: those of a snapshot, and those allocated since. It reads the
// setting `expandable_segments`, ignores SEGMENT_MAP and SEGMENT_UNMAP, and throws if a segment is allocated twice or freed twice.
struct Registry {
  const bool has_default_pool = !c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
  std::map<size_t, size_t> segments;

  Registry() {
    for (const auto& segment : caching::snapshot().segments) {
      if (has(segment.owner_private_pool_id)) segments[segment.address] = segment.total_size;
    }
    caching::attachAllocatorTraceTracker([this](const auto& entry) {
      if (!has(entry.mempool_)) return;
      if (entry.action_ == Action::SEGMENT_ALLOC) ASSERT(segments.emplace(entry.addr_, entry.size_).second);
      if (entry.action_ == Action::SEGMENT_FREE) ASSERT(segments.erase(entry.addr_) == 1);
    });
    // Memory that is about to be unmapped must not be registered any more.
    caching::attachAllocatorTraceTracker([this](const auto& entry) {
      if (entry.action_ != Action::SEGMENT_FREE && entry.action_ != Action::SEGMENT_UNMAP) return;
      for (const auto& [address, bytes] : segments) {
        ASSERT(address + bytes <= entry.addr_ || entry.addr_ + entry.size_ <= address);
      }
    });
  }

  bool has(c10::MempoolId_t pool) const {
    return has_default_pool || pool != c10::MempoolId_t{0, 0};
  }
};

// What a communicator registers is mapped, whatever was allocated and released before.
static void registrations() {
  symmalloc_allocator* allocator = nullptr;
  ASSERT(CALL(symmalloc_process_allocator)(0, &allocator) == SYMMALLOC_OK);
  uint32_t growing = 0;
  ASSERT(CALL(symmalloc_pool_create)(allocator, "segments:expandable", &growing) == SYMMALLOC_OK);
  caching::createOrIncrefPool(0, kPool);
  std::vector<void*> tensors, graphs, own;
  const auto allocate = [&](size_t bytes) {
    tensors.push_back(caching::raw_alloc(bytes));
    caching::beginAllocateToPool(0, kPool, everything);
    graphs.push_back(caching::raw_alloc(bytes));
    caching::endAllocateToPool(0, kPool);
    own.push_back(nullptr);
    ASSERT(CALL(symmalloc_allocate)(allocator, growing, nullptr, bytes, &own.back()) == SYMMALLOC_OK);
  };
  // Frees every second allocation, or all of them.
  const auto release = [&](size_t step) {
    for (size_t at = 0; at < tensors.size(); at += step) {
      caching::raw_delete(std::exchange(tensors[at], nullptr));
      caching::raw_delete(std::exchange(graphs[at], nullptr));
      if (own[at] != nullptr) ASSERT(CALL(symmalloc_free)(allocator, std::exchange(own[at], nullptr)) == SYMMALLOC_OK);
    }
    caching::emptyCache();
    ASSERT(CALL(symmalloc_trim)(allocator, nullptr) == SYMMALLOC_OK);
  };
  for (const size_t mib : {3, 40, 7}) allocate(mib * kMib);
  Registry registry;
  ASSERT(registry.segments.size() >= 2);
  for (int round = 0; round < 3; ++round) {
    for (const size_t mib : {1, 50, 20, 5}) allocate(mib * kMib);
    release(2);
  }
  release(1);
  ASSERT(caching::getDeviceStats(0).allocation[0].current == 0);
  while (caching::get()->getPoolUseCount(0, kPool) > 0) caching::releasePool(0, kPool);
  caching::emptyCache();
  ASSERT(registry.segments.empty());
}

static void histories() {
  struct Gathered : c10::GatheredContext {};
  const auto gather = []() -> std::shared_ptr<c10::GatheredContext> { return std::make_shared<Gathered>(); };
  void* before = caching::raw_alloc(512);
  // A rejected call changes nothing.
  for (const char* skipped : {"snapshot", "no such action"}) {
    try {
      const bool is_action = std::strcmp(skipped, "snapshot") == 0;
      caching::recordHistory(true, is_action ? nullptr : +gather, 6, caching::RecordContext::ALL, true, {skipped});
      ASSERT(false);
    } catch (const c10::Error&) {
      ASSERT(!caching::isHistoryEnabled());
    }
    caching::recordAnnotation({{"name", "unheard"}});
    ASSERT(caching::snapshot().external_annotations.empty());
  }
  caching::recordHistory(true, gather, 6, caching::RecordContext::ALL, true, {"snapshot"});
  void* pointer = caching::raw_alloc(512);
  auto snapshot = caching::snapshot();
  ASSERT(snapshot.device_traces[0].size() == 1 && snapshot.device_traces[0][0].context_);
  ASSERT(snapshot.segments[0].blocks[1].context_when_allocated && !snapshot.segments[0].blocks[0].context_when_allocated);
  caching::raw_delete(before);
  for (int number = 0; number < 3; ++number) {
    caching::raw_delete(pointer);
    pointer = caching::raw_alloc(512);
  }
  // The last six entries, oldest first.
  snapshot = caching::snapshot();
  const auto& entries = snapshot.device_traces[0];
  ASSERT(entries.size() == 6 && entries.back().action_ == Action::ALLOC && entries[2].action_ == Action::ALLOC);
  for (size_t at = 1; at < entries.size(); ++at) {
    ASSERT(entries[at - 1].time_.t_ <= entries[at].time_.t_);
  }
  ASSERT(caching::isHistoryEnabled());
  // The context of an unmapping is that of the call that releases the memory.
  caching::raw_delete(caching::raw_alloc(30 * kMib));
  caching::recordHistory(true, gather, 6, caching::RecordContext::ALL, true, {"snapshot"});
  caching::emptyCache();
  const auto released = caching::snapshot().device_traces[0];
  ASSERT(released.size() >= 1 && released[0].action_ == Action::SEGMENT_UNMAP && released[0].context_);
  caching::recordHistory(false, nullptr, 0, caching::RecordContext::NEVER, true, {});
  ASSERT(caching::snapshot().device_traces[0].empty() && !caching::isHistoryEnabled());
  caching::raw_delete(pointer);
}

static void refusals() {
  std::vector<size_t> asked;
  caching::attachOutOfMemoryObserver([&](int64_t, size_t bytes, size_t limit, size_t) {
    asked.push_back(bytes);
    ASSERT(limit == (size_t{1} << 30) / 4);
    // An observer may allocate.
    caching::raw_delete(caching::raw_alloc(512));
  });
  caching::setMemoryFraction(0.25, 0);
  ASSERT(caching::getMemoryFraction(0) == 0.25);
  try {
    caching::raw_alloc(300 * kMib);
    ASSERT(false);
  } catch (const c10::OutOfMemoryError& error) {
    ASSERT(std::strstr(error.what(), "CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 1024.00 MiB") != nullptr);
    ASSERT(std::strstr(error.what(), "256.00 MiB allowed; Of the allocated memory 0 bytes is allocated by PyTorch, and ") != nullptr);
    ASSERT(std::strstr(error.what(), " symmalloc: out of memory: ") != nullptr);
  }
  ASSERT(asked == std::vector<size_t>{300 * kMib} && caching::getDeviceStats(0).num_ooms == 1);
  try {
    caching::setMemoryFraction(2, 0);
    ASSERT(false);
  } catch (const c10::Error& error) {
    ASSERT(std::strstr(error.what(), "invalid memory fraction 2") != nullptr);
  }
  // Exceptions of a filter propagate, and leave no lock held.
  caching::beginAllocateToPool(0, kPool, [](cudaStream_t) -> bool {
    static int calls = 0;
    if (++calls > 1) TORCH_CHECK(false, "a filter");
    return false;
  });
  try {
    caching::raw_alloc(512);
    ASSERT(false);
  } catch (const c10::Error& error) {
    ASSERT(std::strstr(error.what(), "a filter") != nullptr);
  }
  caching::endAllocateToPool(0, kPool);
  caching::raw_delete(caching::raw_alloc(512));
  // Freeing an unknown pointer is reported without an exception, because destructors free tensors.
  caching::raw_delete(reinterpret_cast<void*>(64));
}

// Without the cache, allocations and frees are not counted.
static void uncached() {
  const auto requested = [] { return caching::getDeviceStats(0).requested_bytes[0].allocated; };
  void* cached = caching::raw_alloc(512);
  const auto before = requested();
  caching::enable(false);
  void* pointer = caching::raw_alloc(1000);
  ASSERT(pointer != nullptr && requested() == before);
  caching::raw_delete(cached);
  caching::enable(true);
  caching::raw_delete(pointer);
  ASSERT(caching::getDeviceStats(0).allocation[0].current == 0);
  caching::raw_delete(caching::raw_alloc(1000));
  ASSERT(requested() == before + 1000);
}

static void additions() {
#if SYMMALLOC_TORCH(2, 12)
  // PyTorch rejects allocations beyond the limit only with this option.
  std::vector<size_t> rejected;
  caching::attachOomRejectionObserver([&](int64_t, size_t bytes, size_t, size_t) { rejected.push_back(bytes); });
  caching::setMemoryFraction(0.25, 0);
  const auto message = [] {
    try {
      caching::raw_alloc(300 * kMib);
    } catch (const c10::OutOfMemoryError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  ASSERT(message().find("Tried to allocate") != std::string::npos && rejected.empty());
  caching::CUDAAllocatorConfig::instance();
  c10::CachingAllocator::setAllocatorSettings("throw_on_cudamalloc_oom:True");
  ASSERT(message().find("preemptively rejected because it would exceed per_process_memory_fraction") != std::string::npos);
  ASSERT(rejected == std::vector<size_t>{300 * kMib} && caching::getDeviceStats(0).num_oom_rejections == 1);
#endif
#if SYMMALLOC_TORCH(2, 13)
  try {
    caching::allocateWithAddress(512, nullptr);
    ASSERT(false);
  } catch (const c10::NotImplementedError& error) {
    ASSERT(std::strstr(error.what(), "belongs to no pool with a base") != nullptr);
  }
#endif
#if SYMMALLOC_TORCH(2, 14)
  struct Gathered : c10::GatheredContext {};
  const auto gather = []() -> std::shared_ptr<c10::GatheredContext> { return std::make_shared<Gathered>(); };
  ASSERT(caching::supportsUserMetadata());
  void* pointer = caching::raw_alloc(512);
  caching::annotateMemory(pointer, "unheard");
  caching::recordHistory(true, gather, 10, caching::RecordContext::ALL, true, {});
  void* other = caching::raw_alloc(512);
  ASSERT(caching::getContextForPointer(pointer) == nullptr && caching::getContextForPointer(other) != nullptr);
  caching::setUserMetadata("of the thread");
  caching::annotateMemory(other, "of the allocation");
  const auto entries = caching::snapshot().device_traces[0];
  const auto& entry = entries.back();
  ASSERT(entry.action_ == Action::ANNOTATE && entry.user_metadata_ == "of the allocation" && entry.context_);
  ASSERT(entry.addr_ == reinterpret_cast<size_t>(other) && entry.size_ == 512);
  caching::raw_delete(other);
  caching::raw_delete(pointer);
#endif
}

static void checkpoints() {
  caching::beginAllocateToPool(0, kPool, everything);
  void* stem = caching::raw_alloc(3 * kMib);
  const auto state = caching::getCheckpointState(0, kPool);
  void* branch = caching::raw_alloc(60 * kMib);
  caching::endAllocateToPool(0, kPool);
  ASSERT(caching::checkPoolLiveAllocations(0, kPool, {stem, branch}));
  const auto reserved = caching::getDeviceStats(0).reserved_bytes[0].current;
  {
    auto delta = caching::setCheckpointPoolState(0, state);
    ASSERT((delta.ptrs_freed == std::vector<void*>{stem, branch}));
    ASSERT(delta.dataptrs_allocd.size() == 1 && delta.dataptrs_allocd[0].get() == stem);
    ASSERT(caching::checkPoolLiveAllocations(0, kPool, {stem}));
  }
  // The owner of the memory freed it.
  ASSERT(caching::checkPoolLiveAllocations(0, kPool, {}));
  ASSERT(caching::getDeviceStats(0).reserved_bytes[0].current == reserved);
}

static void threads() {
  // The scope covers the thread that begins it, and threads that work for it with its debug information.
  caching::createOrIncrefPool(0, kPool);
  const auto self = std::this_thread::get_id();
  caching::beginAllocateToPool(0, kPool, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
  const auto info = c10::ThreadLocalDebugInfo::current();
  void* pointers[3] = {caching::raw_alloc(512), nullptr, nullptr};
  std::thread([&] {
    pointers[1] = caching::raw_alloc(512);
    c10::DebugInfoGuard guard(info);
    pointers[2] = caching::raw_alloc(512);
  }).join();
  caching::endAllocateToPool(0, kPool);
  ASSERT(c10::ThreadLocalDebugInfo::current() == nullptr);
  std::thread([&] {
    c10::DebugInfoGuard guard(info);
    void* late = caching::raw_alloc(512);
    ASSERT(caching::checkPoolLiveAllocations(0, kPool, {pointers[0], pointers[2]}));
    caching::raw_delete(late);
  }).join();
  for (void* pointer : pointers) {
    caching::raw_delete(pointer);
  }
}

// Bytes by device, as reported to a profiler.
struct Profiler : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
    reports.emplace_back(device.index(), bytes);
  }
  bool memoryProfilingEnabled() const override {
    return true;
  }
  std::vector<std::pair<int, int64_t>> reports;
};

static void devices() {
  ASSERT(c10::cuda::device_count() == 2);
  void* second = nullptr;
  {
    c10::cuda::CUDAGuard guard(1);
    second = caching::raw_alloc(kMib);
  }
  // A rank on the second device takes a snapshot, as NCCL's process group does. This must not create a context on the first one.
  const auto snapshot = caching::snapshot();
  ASSERT(snapshot.segments.size() == 1 && snapshot.segments[0].device == 1);
  ASSERT(snapshot.config_metadata.expandable_segments);
  ASSERT(snapshot.config_metadata.last_allocator_settings.find("segments:expandable") != std::string::npos);
  symmalloc_counts counts{};
  const auto count = CALL(symmalloc_torch_counts);
  ASSERT(count(0, &counts) == SYMMALLOC_OK && counts.total_bytes == 0);
  ASSERT(count(1, &counts) == SYMMALLOC_OK && counts.total_bytes > 0);
  // This thread allocated on the first device last, and frees on the second.
  const auto profiler = std::make_shared<Profiler>();
  {
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profiler);
    void* first = caching::raw_alloc(kMib);
    caching::raw_delete(second);
    caching::raw_delete(first);
  }
  const auto bytes = static_cast<int64_t>(kMib);
  ASSERT((profiler->reports == std::vector<std::pair<int, int64_t>>{{0, bytes}, {1, -bytes}, {0, -bytes}}));
}

// The calls that PyTorch makes in destructors: of tensors, pools, graphs, states and shared memory.
struct Releases {
  void* pointer;
  void* uncached;
  c10::MempoolId_t pool;
  std::shared_ptr<caching::AllocatorState> state;

  // Runs all calls. Returns the name of the first one that throws; null if none does.
  const char* run() {
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"a deleter", [&] { caching::get()->raw_deleter()(pointer); }},
        {"raw_delete", [&] { caching::raw_delete(pointer); }},
        {"raw_delete without the cache", [&] { caching::raw_delete(uncached); }},
        {"setUseOnOOM", [&] { caching::setUseOnOOM(0, pool, false); }},
        {"releasePool", [&] { caching::releasePool(0, pool); }},
        {"emptyCache of a pool", [&] { caching::emptyCache(pool); }},
        {"a state", [&] { state.reset(); }},
    };
    for (const auto& [name, call] : calls) {
      try {
        call();
      } catch (...) {
        return name;
      }
    }
    return nullptr;
  }
};

static std::atomic<int> blocked{0};

static void destructors() {
  Releases releases{caching::raw_alloc(512), nullptr, kPool, nullptr};
  caching::enable(false);
  releases.uncached = caching::raw_alloc(512);
  caching::enable(true);
  caching::createOrIncrefPool(0, kPool);
  caching::setUseOnOOM(0, kPool, true);
  caching::beginAllocateToPool(0, kPool, everything);
  void* inside = caching::raw_alloc(kMib);
  releases.state = caching::getCheckpointState(0, kPool);
  // Another thread waits in a tracker, which holds the locks of the history.
  caching::attachAllocatorTraceTracker([&](const auto& entry) {
    if (entry.action_ == Action::ALLOC && entry.size_ == 3 * kMib) {
      for (blocked = 1; blocked == 1;) {
        std::this_thread::yield();
      }
    }
    TORCH_CHECK(entry.action_ != Action::FREE_REQUESTED, "a tracker");
  });
  std::thread thread([] { caching::raw_delete(caching::raw_alloc(3 * kMib)); });
  while (blocked == 0) {
    std::this_thread::yield();
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const char* thrown = releases.run();
    if (thrown != nullptr) std::fprintf(stderr, "%s throws in a forked child\n", thrown);
    caching::endAllocateToPool(0, kPool);
    caching::emptyCache();
    try {
      caching::raw_alloc(512);
    } catch (const c10::Error& error) {
      _exit(thrown == nullptr && std::strstr(error.what(), "fork") != nullptr ? 0 : 1);
    }
    _exit(2);
  }
  int status = -1;
  ASSERT(waitpid(child, &status, 0) == child);
  ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  blocked = 2;
  thread.join();
  caching::endAllocateToPool(0, kPool);
  // A tracker that throws does not prevent a free.
  caching::raw_delete(inside);
  ASSERT(caching::checkPoolLiveAllocations(0, kPool, {}));
  // In the parent, the same calls release everything. A second time, and for a pool that does not exist, they fail without an exception.
  for (int time = 0; time < 3; ++time) {
    const char* thrown = releases.run();
    if (thrown != nullptr) std::fprintf(stderr, "%s throws\n", thrown);
    ASSERT(thrown == nullptr);
    releases.uncached = nullptr;
  }
  releases.pool = {9, 9};
  ASSERT(releases.run() == nullptr);
  ASSERT(caching::getDeviceStats(0).allocation[0].current == 0 && caching::get()->getPoolUseCount(0, kPool) == 0);
}

static void speed() {
  const auto stream = c10::cuda::getCurrentCUDAStream(0).stream();
  auto* allocator = caching::get();
  for (const size_t bytes : {size_t{1024}, 4 * kMib}) {
    double best = 1e9;
    for (int round = 0; round < 20; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int number = 0; number < 20000; ++number) {
        allocator->raw_delete(allocator->raw_alloc_with_stream(bytes, stream));
      }
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
      best = std::min(best, took.count() / 20000);
    }
    std::printf("%s %zu bytes: %.0f ns\n", allocator->name().c_str(), bytes, best);
  }
}

int main(int count, char** words) {
  ASSERT(count == 4);
  const std::string name = words[1];
  if (name != "native_speed") {
    ASSERT(dlopen(words[3], RTLD_NOW | RTLD_GLOBAL) != nullptr);
    void* library = dlopen(words[2], RTLD_NOW);
    if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    ASSERT(library != nullptr);
    const auto install = reinterpret_cast<int (*)(const char*)>(dlsym(library, "symmalloc_install_class"));
    ASSERT(install(nullptr) == 0);
  }
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  caching::init(c10::cuda::device_count());
  if (name == "memory") memory();
  if (name == "trackers") trackers();
  if (name == "registrations" || name == "fixed registrations") registrations();
  if (name == "histories") histories();
  if (name == "refusals") refusals();
  if (name == "uncached") uncached();
  if (name == "additions") additions();
  if (name == "checkpoints") checkpoints();
  if (name == "threads") threads();
  if (name == "devices") devices();
  if (name == "destructors") destructors();
  if (name == "speed" || name == "native_speed") speed();
  std::puts("passed");
}
