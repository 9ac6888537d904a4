// The history of a device: the entries for every allocation, free and segment in PyTorch's snapshots and trace trackers.
//
// Without a recorded history or an attached tracker, the cost for an allocation is one load.
//
//   allocate ──► context of the caller ──► library ──► segments mapped meanwhile ──► ALLOC
//   free     ──► FREE_REQUESTED ──► library ──► FREE_COMPLETED
//   memory   ──► SEGMENT_ALLOC, SEGMENT_MAP when the pool is known; SEGMENT_FREE, SEGMENT_UNMAP before the unmapping
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stack>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace symmalloc {

namespace caching = c10::cuda::CUDACachingAllocator;
using Action = caching::TraceEntry::Action;
using Context = std::shared_ptr<c10::GatheredContext>;

// A ring of the last entries, oldest first.
template <typename Entry>
class Ring {
 public:
  void set_size(size_t size) {
    size_ = std::max<size_t>(size, 1);
    clear();
  }

  void clear() {
    entries_.clear();
    next_ = 0;
  }

  void add(const Entry& entry) {
    if (entries_.size() < size_) {
      entries_.push_back(entry);
      return;
    }
    entries_[next_] = entry;
    next_ = (next_ + 1) % size_;
  }

  std::vector<Entry> list() const {
    std::vector<Entry> list(entries_.begin() + next_, entries_.end());
    list.insert(list.end(), entries_.begin(), entries_.begin() + next_);
    return list;
  }

 private:
  size_t size_ = 1;
  size_t next_ = 0;
  std::vector<Entry> entries_;
};

// Additional data in the entries of a thread.
struct ThreadNotes {
  std::stack<std::string> compile_contexts;
  std::string user_metadata;
  // The context of the running call that releases memory.
  std::shared_ptr<c10::GatheredContext> release_context;
};

inline ThreadNotes& thread_notes() {
  static thread_local ThreadNotes notes;
  return notes;
}

// Writes the name of the calling Python frame to a buffer of `bytes` bytes; an empty text without a frame.
using CallerFn = void (*)(char* buffer, size_t bytes);

inline std::atomic<CallerFn>& caller_fn() {
  static std::atomic<CallerFn> fn{nullptr};
  return fn;
}

// Returns the name for an allocation of this thread: the program's last name, or else the caller. May take the interpreter's lock.
inline std::string caller_name() {
  if (const auto& metadata = thread_notes().user_metadata; !metadata.empty()) {
    return metadata;
  }
  char name[512] = "";
  if (const auto caller = caller_fn().load()) {
    caller(name, sizeof(name));
  }
  return name;
}

// The properties of an allocation or of a part of a segment.
struct Noted {
  size_t bytes = 0;
  void* stream = nullptr;
  c10::MempoolId_t pool{0, 0};
  Context context;
  bool is_expandable = false;
};

// Parses the names of actions. Throws for an unknown name.
inline std::unordered_set<int> parsed_actions(const std::vector<std::string>& names) {
  std::unordered_set<int> actions;
  for (const auto& name : names) {
    actions.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
  }
  return actions;
}

class DeviceHistory {
 public:
  explicit DeviceHistory(c10::DeviceIndex device) : device_(device) {}

  bool is_watched() const {
    return is_watched_.load(std::memory_order_relaxed);
  }

  bool is_recorded() const {
    return is_recorded_.load(std::memory_order_relaxed);
  }

  // Starts or stops recording on the device. `segments` are the current ones by address.
  void record(
      bool enabled,
      caching::CreateContextFn gather,
      size_t entries_max,
      caching::RecordContext when,
      bool clears,
      const std::unordered_set<int>& skipped,
      const std::map<size_t, Noted>& segments) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    adopt(segments);
    when_ = enabled ? when : caching::RecordContext::NEVER;
    gather_ = gather;
    skipped_ = skipped;
    if (enabled || clears) {
      entries_max = std::max<size_t>(entries_max, 1);
      if (entries_max != entries_max_ || clears) {
        entries_max_ = entries_max;
        ring_.set_size(entries_max);
      }
    }
    if (!enabled) {
      ring_.clear();
      live_.clear();
    }
    is_recorded_ = enabled;
    is_watched_ = enabled || !trackers_.empty();
  }

  // Attaches a tracker. `segments` are the current ones by address.
  void attach(caching::AllocatorTraceTracker tracker, const std::map<size_t, Noted>& segments) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    adopt(segments);
    Tracker attached{std::move(tracker), {}};
    for (const auto& [address, segment] : segments) {
      if (segment.is_expandable && segment.pool != c10::MempoolId_t{0, 0}) {
        attached.listed.emplace(address, segment);
      }
    }
    trackers_.push_back(std::move(attached));
    is_watched_ = true;
  }

  // Returns the caller's context if this level requires it. Call it without the lock, because it may take the interpreter's.
  Context gather(caching::RecordContext level) const {
    const auto gather = gather_.load();
    return when_.load() < level || gather == nullptr ? nullptr : gather();
  }

  // Returns the properties of a live allocation, if it was recorded.
  std::optional<Noted> find(void* pointer) const {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto found = live_.find(pointer);
    return found == live_.end() ? std::nullopt : std::make_optional(found->second);
  }

  void allocated(void* pointer, const Noted& noted) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    entry(Action::ALLOC, reinterpret_cast<size_t>(pointer), noted);
    live_[pointer] = noted;
  }

  void forget(void* pointer) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    live_.erase(pointer);
  }

  // Records that memory was mapped. The library does not say for which pool.
  void memory_came(size_t address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    ++maps;
    parts_[address] = Part{{bytes, nullptr, {0, 0}, nullptr, true}, false};
  }

  // Assigns the memory of a new allocation to its pool. Memory that another caller of the library mapped stays unassigned, and is never
  // announced to trackers.
  void segments_came(size_t address, size_t bytes, const Noted& of) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (auto part = part_at(address); part != parts_.end() && part->first < address + bytes; ++part) {
      if (!part->second.is_assigned) {
        assign(part->second, of, of.context);
        entry(of.is_expandable ? Action::SEGMENT_MAP : Action::SEGMENT_ALLOC, part->first, part->second);
      }
    }
  }

  // Records that parts of the mapped memory are about to be unmapped.
  void memory_goes(size_t address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    ++unmaps;
    Part gone{{bytes, nullptr, {0, 0}, nullptr, true}, false};
    for (auto part = part_at(address); part != parts_.end() && part->first < address + bytes;) {
      const auto [start, was] = *part;
      part = parts_.erase(part);
      keep(start, address, was);
      keep(address + bytes, start + was.bytes, was);
      assign(gone, was, was.context);
    }
    if (const auto& context = thread_notes().release_context) {
      gone.context = context;
    }
    if (is_watched()) {
      free_listed(address, bytes);
      attempt("a memory tracker", [&] {
        entry(gone.is_expandable ? Action::SEGMENT_UNMAP : Action::SEGMENT_FREE, address, gone);
      });
    }
  }

  // Returns the context in which the memory at an address was reserved.
  Context segment_context(size_t address) const {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto part = parts_.upper_bound(address);
    return part == parts_.begin() ? nullptr : std::prev(part)->second.context;
  }

  // Records an entry and notifies the trackers. Uses the thread's metadata unless `metadata` is given.
  void entry(Action action, size_t address, const Noted& noted, const std::string* metadata = nullptr) {
    if (!is_watched()) {
      return;
    }
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto entry = make_entry(action, address, noted, metadata);
    for (const auto& tracker : trackers_) {
      tracker.notify(entry);
    }
    if (is_recorded() && skipped_.count(action) == 0) {
      ring_.add(entry);
    }
  }

  std::vector<caching::TraceEntry> list() const {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return ring_.list();
  }

  // Held around every recorded operation, including its library calls, so that entries are in order of execution. Listeners for memory
  // must not take it, because they run under a lock of the library.
  std::recursive_mutex order;
  // The number of mappings and unmappings.
  std::atomic<int64_t> maps{0};
  std::atomic<int64_t> unmaps{0};

 private:
  // Mapped memory. Until it is assigned, its stream, pool and context are unknown, and it counts as expandable: NCCL's backend ignores
  // such memory.
  struct Part : Noted {
    bool is_assigned = false;
  };

  struct Tracker {
    caching::AllocatorTraceTracker notify;
    // Expandable segments of pools other than the default, from the time of the attachment, of which no part was unmapped since.
    std::map<size_t, Noted> listed;
  };

  // Sends SEGMENT_FREE for each listed segment of which a part is about to be unmapped.
  //
  // The NCCL backend of PyTorch 2.15 takes one snapshot, attaches a tracker, and registers the segments of the snapshot with every communicator until
  // SEGMENT_FREE. It ignores SEGMENT_UNMAP. If unmapped memory stayed registered, the next process group could not be created. Expandable
  // segments of the default pool are never registered, see `announce_segments`.
  void free_listed(size_t address, size_t bytes) {
    for (auto& tracker : trackers_) {
      auto segment = tracker.listed.lower_bound(address);
      if (segment != tracker.listed.begin() && std::prev(segment)->first + std::prev(segment)->second.bytes > address) {
        --segment;
      }
      while (segment != tracker.listed.end() && segment->first < address + bytes) {
        const auto [start, noted] = *segment;
        segment = tracker.listed.erase(segment);
        attempt("a memory tracker", [&] { tracker.notify(make_entry(Action::SEGMENT_FREE, start, noted, nullptr)); });
      }
    }
  }

  caching::TraceEntry make_entry(Action action, size_t address, const Noted& noted, const std::string* metadata) const {
    const auto& notes = thread_notes();
    return caching::TraceEntry(
        action,
        device_,
        address,
        noted.bytes,
        noted.stream,
        noted.pool,
        c10::getApproximateTime(),
        when_.load() >= caching::RecordContext::ALLOC ? noted.context : nullptr,
        notes.compile_contexts.empty() ? "N/A" : notes.compile_contexts.top(),
        metadata != nullptr ? *metadata : notes.user_metadata);
  }

  // Returns the part with this address, or the next one.
  std::map<size_t, Part>::iterator part_at(size_t address) {
    auto part = parts_.upper_bound(address);
    return part != parts_.begin() && address < std::prev(part)->first + std::prev(part)->second.bytes ? std::prev(part) : part;
  }

  static void assign(Part& part, const Noted& of, const Context& context) {
    part = Part{{part.bytes, of.stream, of.pool, context, of.is_expandable}, true};
  }

  // Assigns the mapped memory to these segments.
  void adopt(const std::map<size_t, Noted>& segments) {
    for (const auto& [address, segment] : segments) {
      for (auto part = part_at(address); part != parts_.end() && part->first < address + segment.bytes; ++part) {
        assign(part->second, segment, part->second.context);
      }
    }
  }

  void keep(size_t from, size_t to, Part part) {
    if (from < to) {
      part.bytes = to - from;
      parts_[from] = part;
    }
  }

  const c10::DeviceIndex device_;
  // Protects the fields below. No library call is made under it.
  mutable std::recursive_mutex mutex_;
  std::atomic<bool> is_watched_{false};
  std::atomic<bool> is_recorded_{false};
  std::atomic<caching::CreateContextFn> gather_{nullptr};
  std::atomic<caching::RecordContext> when_{caching::RecordContext::NEVER};
  std::unordered_set<int> skipped_;
  size_t entries_max_ = 0;
  Ring<caching::TraceEntry> ring_;
  std::vector<Tracker> trackers_;
  std::unordered_map<void*, Noted> live_;
  // The mapped memory by address.
  std::map<size_t, Part> parts_;
};

} // namespace symmalloc
