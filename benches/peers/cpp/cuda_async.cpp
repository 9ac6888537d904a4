// cudaMallocAsync: the driver's own pool, which retains freed memory.
#include "cuda.hpp"

namespace {

struct CudaAsync : peers::OnCuda {
    static constexpr bool records_uses = false;
    cudaMemPool_t pool{};

    CudaAsync() {
        cudaMemPoolProps properties{};
        properties.allocType = cudaMemAllocationTypePinned;
        properties.location = {cudaMemLocationTypeDevice, 0};
        peers::check(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
        uint64_t all = ~uint64_t(0);
        peers::check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all), "cudaMemPoolSetAttribute");
    }
    ~CudaAsync() {
        synchronize();
        peers::check(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy");
    }
    void *allocate(size_t bytes, int stream) {
        void *block = nullptr;
        peers::check(cudaMallocFromPoolAsync(&block, bytes, pool, peers::cuda_streams()[stream]), "cudaMallocFromPoolAsync");
        return block;
    }
    void free(void *block, size_t, int stream) {
        peers::check(cudaFreeAsync(block, peers::cuda_streams()[stream]), "cudaFreeAsync");
    }
    void report(peers::Report &report, const std::string &job) { peers::report_pool(report, job, pool); }
};

} // namespace

int main(int count, char **words) {
    const auto options = peers::Options::parse(count, words);
    peers::Report report(options.peer);
    return peers::measure<CudaAsync>(options, report);
}
