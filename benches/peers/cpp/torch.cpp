// PyTorch's CUDACachingAllocator, through the C++ calls that PyTorch's own raw allocations use. PYTORCH_CUDA_ALLOC_CONF
// in the environment selects the kind of segments.
//
// There is one allocator per process, and it cannot be recreated: a cold pass follows `emptyCache`, which releases all
// memory. The address ranges of expandable segments stay reserved, which favors PyTorch.
#include "cuda.hpp"
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

// Hooks that libtorch_cuda registers with c10 when it is loaded. No public header declares them. The allocator uses them
// to query events.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*has_primary_context)(DeviceIndex));
}

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

struct Torch : peers::OnCuda {
    static constexpr bool records_uses = true;

    static void streams(int count) {
        OnCuda::streams(count);
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        caching::init(1);
    }
    static void enter_thread() { c10::cuda::set_device(0); }

    Torch() {
        caching::emptyCache();
        caching::resetPeakStats(0);
    }
    ~Torch() {
        synchronize();
        caching::emptyCache();
    }
    void *allocate(size_t bytes, int stream) {
        return caching::raw_alloc_with_stream(bytes, peers::cuda_streams()[stream]);
    }
    void free(void *block, size_t, int) { caching::raw_delete(block); }

    void record_use(void *block, int stream) {
        static const auto deleter = caching::get()->raw_deleter();
        c10::DataPtr pointer(block, block, deleter, c10::Device(c10::DeviceType::CUDA, 0));
        caching::recordStream(pointer, c10::cuda::getStreamFromExternal(peers::cuda_streams()[stream], 0));
        pointer.release_context();
    }
    void report(peers::Report &report, const std::string &job) {
        const auto stats = caching::getDeviceStats(0);
        report.figure("reserved_peak_bytes", job, {double(stats.reserved_bytes[0].peak)});
        report.figure("segments", job, {double(caching::snapshot().segments.size())});
    }
};

} // namespace

int main(int count, char **words) {
    const auto options = peers::Options::parse(count, words);
    peers::Report report(options.peer);
    return peers::measure<Torch>(options, report);
}
