// symmalloc.hpp on a device: one stream fills memory, another stream reads it late and frees it, and the first allocates it again.
//
//     nvcc -std=c++17 -O2 examples/resource.cu $(pkg-config --cflags --libs symmalloc) -o resource && ./resource

#include "symmalloc.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define CHECK(call) \
    do { \
        cudaError_t code = (call); \
        if (code != cudaSuccess) { std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code)); std::exit(1); } \
    } while (0)

#if defined(SYMMALLOC_HAS_CCCL) && CCCL_VERSION >= 3001000
static_assert(cuda::mr::resource_with<symmalloc::memory_resource, cuda::mr::device_accessible>);
#elif defined(SYMMALLOC_HAS_CCCL)
static_assert(cuda::mr::async_resource_with<symmalloc::memory_resource, cuda::mr::device_accessible>);
#endif

__global__ void fill(unsigned* to, unsigned value, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = value;
}

__global__ void delay(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}

__global__ void count_others(const unsigned* from, unsigned value, unsigned count, unsigned* wrong) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && from[i] != value) atomicAdd(wrong, 1u);
}

// Returns the nanoseconds for an allocation and its free.
template <class Allocate, class Free>
double time_of(Allocate allocate, Free free) {
    constexpr int rounds = 100000;
    free(allocate());
    auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; round++) free(allocate());
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / rounds;
}

int main() {
    constexpr unsigned count = 1 << 20;
    constexpr std::size_t bytes = count * sizeof(unsigned);
    cudaStream_t a, b;
    cudaEvent_t filled;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
    auto memory = symmalloc::memory_resource::of_device(0);

    auto* wrong = static_cast<unsigned*>(memory.allocate_sync(sizeof(unsigned)));
    CHECK(cudaMemset(wrong, 0, sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
    void* first = nullptr;
    unsigned again = 0;
    for (unsigned round = 0; round < 1000; round++) {
        auto* numbers = static_cast<unsigned*>(memory.allocate(a, bytes, 256));
        if (first == nullptr) first = numbers;
        again += numbers == first;
        fill<<<count / 256, 256, 0, a>>>(numbers, round, count);
        CHECK(cudaEventRecord(filled, a));
        CHECK(cudaStreamWaitEvent(b, filled, 0));
        delay<<<1, 1, 0, b>>>(200000);
        count_others<<<count / 256, 256, 0, b>>>(numbers, round, count, wrong);
        memory.deallocate(b, numbers, bytes, 256);  // the next round's fill waits for this reader, on the device
    }
    CHECK(cudaDeviceSynchronize());
    unsigned found = 0;
    CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    memory.deallocate_sync(wrong, sizeof(unsigned));
    std::printf("%u wrong elements; %u of 1000 buffers at the same address\n", found, again);

    double ours = time_of([&] { return memory.allocate(a, bytes); }, [&](void* p) { memory.deallocate(a, p, bytes); });
    double unordered =
        time_of([&] { return memory.allocate_sync(bytes); }, [&](void* p) { memory.deallocate_sync(p, bytes); });
    double async = time_of(
        [&] {
            void* pointer = nullptr;
            CHECK(cudaMallocAsync(&pointer, bytes, a));
            return pointer;
        },
        [&](void* p) { CHECK(cudaFreeAsync(p, a)); });
    std::printf("ns per allocation and free: on a stream %.0f, without a stream %.0f, cudaMallocAsync %.0f\n", ours, unordered, async);
    return found == 0 && again == 1000 ? 0 : 1;
}
