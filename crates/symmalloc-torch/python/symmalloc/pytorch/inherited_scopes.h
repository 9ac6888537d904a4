// Inheritance of a thread's scopes by the threads that work for it, such as those of a backward pass inside `use_mem_pool`.
//
// PyTorch passes a thread's debug information to the threads that run its backward pass, and removes it afterwards. A scope that covers
// a thread's allocations is stored there, by its number in the library.
//
//   use_mem_pool(A) { use_mem_pool(B) { loss.backward() } }        info of the thread: B ──► A ──► earlier information
#pragma once

#include "versions.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace symmalloc {

class InheritedScopes {
 public:
  // Begins a scope of this thread.
  void push(c10::DeviceIndex device, c10::MempoolId_t pool, uint64_t number) {
    auto scope = std::make_shared<Scope>(device, pool, number, current());
    c10::ThreadLocalDebugInfo::_push(kKind, scope);
    std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back(std::move(scope));
    count_.store(open_.size(), std::memory_order_relaxed);
  }

  // Ends the last scope of a pool, on any thread.
  void pop(c10::DeviceIndex device, c10::MempoolId_t pool) {
    if (count_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto scope = open_.rbegin(); scope != open_.rend(); ++scope) {
        if ((*scope)->device == device && (*scope)->pool == pool) {
          (*scope)->is_open.store(false, std::memory_order_relaxed);
          open_.erase(std::next(scope).base());
          break;
        }
      }
      count_.store(open_.size(), std::memory_order_relaxed);
    }
    drop_closed();
  }

  // Returns the number of this thread's innermost scope on a device; 0: none.
  uint64_t number(c10::DeviceIndex device) const {
    if (count_.load(std::memory_order_relaxed) == 0) {
      return 0;
    }
    for (auto scope = current(); scope != nullptr; scope = scope->outer) {
      if (scope->device == device && scope->is_open.load(std::memory_order_relaxed)) {
        return scope->number;
      }
    }
    return 0;
  }

 private:
#if SYMMALLOC_TORCH(2, 13)
  // The address of the name identifies a kind.
  static constexpr std::string_view kName = "SYMMALLOC_SCOPES";
  static constexpr c10::DebugInfoKind kKind{&kName};
#else
  // Kinds are an enumeration. Only PyTorch's own tests use this one.
  static constexpr auto kKind = c10::DebugInfoKind::TEST_INFO_2;
#endif

  struct Scope : c10::DebugInfoBase, std::enable_shared_from_this<Scope> {
    Scope(c10::DeviceIndex device, c10::MempoolId_t pool, uint64_t number, std::shared_ptr<Scope> outer)
        : device(device), pool(pool), number(number), outer(std::move(outer)) {}

    const c10::DeviceIndex device;
    const c10::MempoolId_t pool;
    const uint64_t number;
    const std::shared_ptr<Scope> outer;
    std::atomic<bool> is_open{true};
  };

  static std::shared_ptr<Scope> current() {
    auto* scope = dynamic_cast<Scope*>(c10::ThreadLocalDebugInfo::get(kKind));
    return scope == nullptr ? nullptr : scope->shared_from_this();
  }

  // Removes this thread's ended scopes from its debug information, unless other information was added on top of them.
  static void drop_closed() {
    for (auto scope = current(); scope != nullptr && !scope->is_open.load(); scope = current()) {
      try {
        c10::ThreadLocalDebugInfo::_peek(kKind);
      } catch (const std::exception&) {
        return;
      }
      c10::ThreadLocalDebugInfo::_pop(kKind);
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Scope>> open_;
  std::atomic<size_t> count_{0};
};

} // namespace symmalloc
