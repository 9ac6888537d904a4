// A program that leaves memory management to NVIDIA's libraries: cuBLAS, which allocates its own workspaces, and a
// kernel that nvrtc compiles and the driver API launches. Prints one line, the same with and without `symmalloc run`.
//
//     nvcc -O2 -std=c++17 -o libraries benches/preload/libraries.cu -lcublas -lnvrtc -lcuda
//     for under in "" "symmalloc run --stats --"; do $under ./libraries; done

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <nvrtc.h>
#include <vector>

#define CHECK(call) \
    do { \
        if (auto code = (call)) { std::fprintf(stderr, "%s: %d\n", #call, int(code)); std::exit(1); } \
    } while (0)

static const char* SOURCE = "extern \"C\" __global__ void numbers(float* to, unsigned count, unsigned seed) {"
                            "    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;"
                            "    if (i < count) to[i] = float((i * 2654435761u + seed) % 5u) - 2.0f;"
                            "}";

int main() {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    nvrtcProgram program;
    CHECK(nvrtcCreateProgram(&program, SOURCE, "numbers.cu", 0, nullptr, nullptr));
    CHECK(nvrtcCompileProgram(program, 0, nullptr));
    size_t bytes;
    CHECK(nvrtcGetPTXSize(program, &bytes));
    std::vector<char> ptx(bytes);
    CHECK(nvrtcGetPTX(program, ptx.data()));
    CUmodule module;
    CUfunction numbers;
    CHECK(cuModuleLoadData(&module, ptx.data()));
    CHECK(cuModuleGetFunction(&numbers, module, "numbers"));

    cudaStream_t streams[2];
    cublasHandle_t handles[2];
    for (int s = 0; s < 2; s++) {
        CHECK(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
        CHECK(cublasCreate(&handles[s]));
        CHECK(cublasSetStream(handles[s], streams[s]));
    }
    // Small integers make every sum exact, so results can be compared bit by bit and checked against sums of rows and
    // columns.
    uint64_t digest = 14695981039346656037u;
    long wrong = 0;
    for (int round = 0; round < 60; round++) {
        const int n = 128 + 32 * (round % 9);
        const unsigned count = unsigned(n) * n;
        cudaStream_t stream = streams[round % 2];
        float *a, *b, *c;
        CHECK(cudaMallocAsync(&a, count * 4, stream));
        CHECK(cudaMallocAsync(&b, count * 4, stream));
        CHECK(cudaMalloc(&c, count * 4));
        unsigned seed = round;
        for (float* to : {a, b}) {
            unsigned total = count;
            void* arguments[] = {&to, &total, &seed};
            CHECK(cuLaunchKernel(numbers, (count + 255) / 256, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr));
            seed += 17;
        }
        const float one = 1, zero = 0;
        CHECK(cublasSgemm(handles[round % 2], CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, a, n, b, n, &zero, c, n));
        std::vector<float> got(count);
        CHECK(cudaMemcpyAsync(got.data(), c, count * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(a, stream));
        CHECK(cudaFreeAsync(b, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaFree(c));
        auto number = [](unsigned i, unsigned seed) { return float((i * 2654435761u + seed) % 5u) - 2.0f; };
        for (int at = 0; at < 64; at++) {
            const int row = (at * 37) % n, column = (at * 91) % n;
            float sum = 0;
            for (int k = 0; k < n; k++) sum += number(unsigned(k) * n + row, round) * number(unsigned(column) * n + k, round + 17);
            wrong += sum != got[size_t(column) * n + row];
        }
        for (float value : got) digest = (digest ^ uint64_t(int64_t(value))) * 1099511628211u;
    }
    for (int s = 0; s < 2; s++) CHECK(cublasDestroy(handles[s]));
    std::printf("60 products, %ld of 3840 checked sums wrong, digest %016llx\n", wrong, static_cast<unsigned long long>(digest));
    return wrong != 0;
}
