// Times and checks cudaMallocAsync, cudaMalloc and their frees. Run it alone, and under `symmalloc run`.
//
//   nvcc -O2 -std=c++17 -o pairs pairs.cu
//   ./pairs time && symmalloc run --stats -- ./pairs time
//   ./pairs check && symmalloc run -- ./pairs check            both print the same line
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define MUST(call)                                                                            \
    do {                                                                                      \
        cudaError_t code = (call);                                                            \
        if (code != cudaSuccess) {                                                            \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code));                \
            std::exit(1);                                                                     \
        }                                                                                     \
    } while (0)

static double now_ns() {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Dice {
    uint64_t state;
    uint64_t below(uint64_t bound) {
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return (z ^ (z >> 31)) % bound;
    }
};

static cudaMemPool_t pool() {
    cudaMemPool_t pool;
    MUST(cudaDeviceGetDefaultMemPool(&pool, 0));
    return pool;
}

// Makes the driver retain freed memory, as PyTorch and CuPy do.
static void keep_everything() {
    uint64_t all = UINT64_MAX;
    MUST(cudaMemPoolSetAttribute(pool(), cudaMemPoolAttrReleaseThreshold, &all));
}

static double pair_ns(size_t size, cudaStream_t stream, int pairs) {
    void *p;
    for (int i = 0; i < 1000; i++) {
        MUST(cudaMallocAsync(&p, size, stream));
        MUST(cudaFreeAsync(p, stream));
    }
    double begun = now_ns();
    for (int i = 0; i < pairs; i++) {
        cudaMallocAsync(&p, size, stream);
        cudaFreeAsync(p, stream);
    }
    double ns = (now_ns() - begun) / pairs;
    MUST(cudaStreamSynchronize(stream));
    return ns;
}

static double synchronous_pair_ns(size_t size, int pairs) {
    void *p;
    MUST(cudaMalloc(&p, size));
    MUST(cudaFree(p));
    double begun = now_ns();
    for (int i = 0; i < pairs; i++) {
        cudaMalloc(&p, size);
        cudaFree(p);
    }
    MUST(cudaGetLastError());
    return (now_ns() - begun) / pairs;
}

// Keeps a thousand live blocks and replaces random ones by blocks of different sizes.
static double replacement_ns(cudaStream_t stream, int pairs, uint64_t *live_peak) {
    std::vector<std::pair<void *, size_t>> live(1000);
    Dice dice{7};
    uint64_t bytes = 0, peak = 0;
    auto size = [&] { return dice.below(10) ? 512 + dice.below(1 << 20) : (1 + dice.below(32)) << 20; };
    for (auto &block : live) {
        block.second = size();
        bytes += block.second;
        MUST(cudaMallocAsync(&block.first, block.second, stream));
    }
    double ns = 0;
    for (int round = 0; round < 2; round++) {
        double begun = now_ns();
        for (int i = 0; i < pairs; i++) {
            auto &block = live[dice.below(live.size())];
            cudaFreeAsync(block.first, stream);
            bytes -= block.second;
            block.second = size();
            bytes += block.second;
            peak = std::max(peak, bytes);
            cudaMallocAsync(&block.first, block.second, stream);
        }
        ns = (now_ns() - begun) / pairs;
        MUST(cudaStreamSynchronize(stream));
    }
    for (auto &block : live) MUST(cudaFreeAsync(block.first, stream));
    MUST(cudaStreamSynchronize(stream));
    *live_peak = peak;
    return ns;
}

static void time_all() {
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    keep_everything();
    for (size_t size : {size_t(4) << 10, size_t(1) << 20, size_t(64) << 20}) {
        std::printf("async pair, %zu KiB: %.0f ns\n", size >> 10, pair_ns(size, stream, 200000));
    }
    uint64_t live = 0, reserved = 0;
    double ns = replacement_ns(stream, 100000, &live);
    MUST(cudaMemPoolGetAttribute(pool(), cudaMemPoolAttrReservedMemHigh, &reserved));
    std::printf("replacement of 1 in 1,000: %.0f ns, peak live %.1f MiB, peak reserved %.1f MiB\n", ns, live / 1048576.0,
                reserved / 1048576.0);
    for (int threads : {1, 4, 16}) {
        std::vector<std::thread> all;
        const int pairs = 50000;
        double begun = now_ns();
        for (int t = 0; t < threads; t++) {
            all.emplace_back([=] {
                cudaStream_t own;
                MUST(cudaSetDevice(0));
                MUST(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
                pair_ns(size_t(64 << 10), own, pairs);
                MUST(cudaStreamDestroy(own));
            });
        }
        for (auto &thread : all) thread.join();
        std::printf("%d threads with a stream each: %.2f million pairs/s\n", threads, threads * pairs * 1e3 / (now_ns() - begun));
    }
    for (size_t size : {size_t(4) << 10, size_t(64) << 20}) {
        std::printf("synchronous pair, %zu KiB: %.0f ns\n", size >> 10, synchronous_pair_ns(size, 2000));
    }
}

__global__ void fill(uint32_t *p, size_t words, uint32_t value) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x) p[i] = value + i;
}

__global__ void check(const uint32_t *p, size_t words, uint32_t value, unsigned long long *wrong) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += size_t(gridDim.x) * blockDim.x)
        if (p[i] != value + i) atomicAdd(wrong, 1ull);
}

// Uses blocks on four streams. Each is checked before it is freed, on its own stream or, after an event, on another
// one.
static void check_all(int steps) {
    cudaStream_t streams[4];
    cudaEvent_t event;
    unsigned long long *wrong, found = 0, words_checked = 0;
    struct Block {
        uint32_t *p;
        size_t words;
        uint32_t value;
        int stream;
        bool is_plain;
    };
    std::vector<Block> live;
    Dice dice{11};
    for (auto &stream : streams) MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    MUST(cudaMalloc(&wrong, sizeof *wrong));
    MUST(cudaMemset(wrong, 0, sizeof *wrong));
    MUST(cudaDeviceSynchronize());
    for (int i = 0; i < steps || !live.empty(); i++) {
        if (i < steps && (live.size() < 20 || dice.below(2))) {
            Block block{nullptr, 256 + dice.below(1 << 20), uint32_t(dice.below(1u << 31)), int(dice.below(4)), dice.below(8) == 0};
            if (block.is_plain) MUST(cudaMalloc(&block.p, block.words * 4));
            else MUST(cudaMallocAsync(&block.p, block.words * 4, streams[block.stream]));
            fill<<<32, 256, 0, streams[block.stream]>>>(block.p, block.words, block.value);
            live.push_back(block);
        } else {
            size_t at = dice.below(live.size());
            Block block = live[at];
            live[at] = live.back();
            live.pop_back();
            int on = dice.below(3) ? block.stream : int(dice.below(4));
            if (on != block.stream) {
                MUST(cudaEventRecord(event, streams[block.stream]));
                MUST(cudaStreamWaitEvent(streams[on], event, 0));
            }
            check<<<32, 256, 0, streams[on]>>>(block.p, block.words, block.value, wrong);
            words_checked += block.words;
            // cudaFree waits only for work that uses memory of cudaMalloc.
            if (block.is_plain) MUST(cudaFree(block.p));
            else MUST(cudaFreeAsync(block.p, streams[on]));
        }
    }
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
    MUST(cudaFree(wrong));
    std::printf("%llu words checked, %llu wrong\n", words_checked, found);
    if (found) std::exit(1);
}

int main(int argc, char **argv) {
    MUST(cudaSetDevice(0));
    MUST(cudaFree(nullptr));
    if (argc > 1 && !std::strcmp(argv[1], "check")) check_all(argc > 2 ? std::atoi(argv[2]) : 20000);
    else time_all();
    return 0;
}
