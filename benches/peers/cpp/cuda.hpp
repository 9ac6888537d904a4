// Common parts of the peers on CUDA: numbered streams, and initialization of the driver.
#pragma once

#include "cases.hpp"
#include <cuda_runtime.h>

namespace peers {

inline void check(cudaError_t status, const char *call) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(status));
    std::exit(1);
}

/// The streams of the process by number, created before any measurement.
inline std::vector<cudaStream_t> &cuda_streams() {
    static std::vector<cudaStream_t> streams;
    return streams;
}

struct OnCuda {
    static void streams(int count) {
        check(cudaSetDevice(0), "cudaSetDevice");
        check(cudaFree(nullptr), "cudaFree");
        while (int(cuda_streams().size()) < count) {
            cudaStream_t stream;
            check(cudaStreamCreate(&stream), "cudaStreamCreate");
            cuda_streams().push_back(stream);
        }
    }
    static void enter_thread() { check(cudaSetDevice(0), "cudaSetDevice"); }
    void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
};

/// The memory of the driver's own pool, which does not count segments.
inline void report_pool(Report &report, const std::string &job, cudaMemPool_t pool) {
    uint64_t bytes = 0;
    check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &bytes), "cudaMemPoolGetAttribute");
    report.figure("reserved_peak_bytes", job, {double(bytes)});
}

} // namespace peers
