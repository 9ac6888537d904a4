// Makes one planted memory error with plain CUDA calls, for `symmalloc run`: memory_errors_cuda ERROR [async|sync]. See `run` in this folder.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

__global__ void poke(float *to, int count) {
    if (threadIdx.x < count) to[threadIdx.x] = 7;
}

__global__ void delay(long long cycles) {
    for (long long begun = clock64(); clock64() - begun < cycles;) {}
}

__global__ void peek(const float *from, float *to) { *to = *from; }

static bool is_async = true;

static cudaError_t release(float *made) { return is_async ? cudaFreeAsync(made, 0) : cudaFree(made); }

static float *block(size_t count) {
    float *made = nullptr;
    if (is_async) cudaMallocAsync(&made, count * sizeof(float), 0);
    else cudaMalloc(&made, count * sizeof(float));
    for (size_t at = 0; at < count; at += 1024) poke<<<1, 1024>>>(made + at, 1024);
    return made;
}

// Freed memory is poisoned at its stream's next allocation. This one does not fit into what was freed.
static void allocate_next() {
    void *next = nullptr;
    if (is_async) cudaMallocAsync(&next, 64 << 20, 0);
    else cudaMalloc(&next, 64 << 20);
}

static int report(const char *what, cudaError_t code) {
    if (code != cudaSuccess) printf("%s %s\n", what, cudaGetErrorName(code));
    return code != cudaSuccess;
}

int main(int argc, char **argv) {
    const char *error = argc > 1 ? argv[1] : "";
    is_async = argc < 3 || strcmp(argv[2], "sync");
    float *word = nullptr;
    cudaMalloc(&word, sizeof(float));
    // Larger than a granule, so that `unmap` has an effect.
    bool is_after_free = strstr(error, "after_free");
    size_t count = is_after_free ? 2 << 20 : 1024;
    float *first = block(1024), *second = block(count), *third = block(1024);
    cudaDeviceSynchronize();
    bool reads = false;
    if (!strcmp(error, "overrun")) poke<<<1, 1>>>(first + 1024, 1);
    else if (!strcmp(error, "overrun_page")) poke<<<1, 1024>>>(first + 1024, 1024);
    else if (!strcmp(error, "underrun")) poke<<<1, 1>>>(second - 1, 1);
    else if (is_after_free) {
        release(second);
        allocate_next();
        reads = error[0] == 'r';
        // A comparison covers the start of a block.
        if (!reads) poke<<<1, 1>>>(second, 1), poke<<<1, 1>>>(second + count / 2, 1);
        else peek<<<1, 1>>>(second + count / 2, word);
        second = nullptr;
    } else if (!strcmp(error, "other_stream")) {
        // The use by the other stream is not ordered before the free.
        cudaStream_t other;
        cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
        delay<<<1, 1, 0, other>>>(300000000);
        peek<<<1, 1, 0, other>>>(second, word);
        release(second);
        allocate_next();
        second = nullptr;
        reads = true;
    } else if (!strcmp(error, "double_free")) {
        release(second);
        if (report("error", release(second))) return 0;
        second = nullptr;
    } else if (!strcmp(error, "inner_free")) {
        if (report("error", release(second + 4))) return 0;
    }
    if (report("fault", cudaDeviceSynchronize())) return 0;
    if (reads) {
        float value = 0;
        cudaMemcpy(&value, word, sizeof(float), cudaMemcpyDeviceToHost);
        printf(std::isnan(value) ? "NaN\n" : "silent, the value is %g\n", value);
    }
    for (float *left : {first, second, third}) {
        if (left) release(left);
    }
    if (report("fault", cudaDeviceSynchronize())) return 0;
    if (!reads) printf("silent\n");
    return 0;
}
