// Conversion of the library's counters to PyTorch's statistics.
#pragma once

#include "history.h"
#include "symmalloc.h"
#include "versions.h"

#include <c10/cuda/CUDACachingAllocator.h>

namespace symmalloc {

inline caching::DeviceStats counted(const symmalloc_counts& counts) {
  caching::DeviceStats stats{};
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
  // A free block can be reused immediately, so active equals allocated. Only the total has an exact peak.
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

// Subtracts earlier values from all accumulated counters.
inline caching::DeviceStats since(caching::DeviceStats now, const caching::DeviceStats& then) {
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
  now.num_sync_all_streams -= then.num_sync_all_streams;
  now.num_device_alloc -= then.num_device_alloc;
  now.num_device_free -= then.num_device_free;
#if SYMMALLOC_TORCH(2, 12)
  now.num_oom_rejections -= then.num_oom_rejections;
#endif
#if SYMMALLOC_TORCH(2, 13)
  for (auto& [pool, reserved] : now.reserved_bytes_by_private_pools) {
    const auto before = then.reserved_bytes_by_private_pools.find(pool);
    if (before != then.reserved_bytes_by_private_pools.end()) {
      take(reserved, before->second);
    }
  }
#endif
  return now;
}

} // namespace symmalloc
