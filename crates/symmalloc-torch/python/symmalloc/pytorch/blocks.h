// Conversion of the library's segments and blocks to PyTorch's types.
#pragma once

#include "history.h"
#include "status.h"
#include "symmalloc.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <unordered_set>
#include <vector>

namespace symmalloc {

// Calls `visit(segment)` and `visit(block)` for all segments and blocks of a device, or of one of its mempools.
template <typename Visitor>
void for_each_block(c10::DeviceIndex device, c10::MempoolId_t pool, Visitor& visitor) {
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
    // NCCL registers segments in this order, which is by pool, stream and creation, and therefore the same on every rank.
    segment.registration_counter = static_cast<int32_t>(segments.size() - 1);
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

  c10::DeviceIndex device;
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
  std::vector<caching::StreamSegmentSize> sizes;
};

} // namespace symmalloc
