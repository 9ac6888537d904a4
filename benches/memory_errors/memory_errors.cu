// Makes one planted memory error with plain CUDA calls, for `symmalloc run`. See `run` in this folder.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>

__global__ void poke(float *to, int count) {
    if (threadIdx.x < count) to[threadIdx.x] = 7;
}

__global__ void peek(const float *from, float *to) { *to = *from; }

static float *block(size_t count) {
    float *made = nullptr;
    cudaMallocAsync(&made, count * sizeof(float), 0);
    for (size_t at = 0; at < count; at += 1024) poke<<<1, 1024>>>(made + at, 1024);
    return made;
}

static int report(const char *what, cudaError_t code) {
    if (code != cudaSuccess) printf("%s %s\n", what, cudaGetErrorName(code));
    return code != cudaSuccess;
}

int main(int argc, char **argv) {
    const char *error = argc > 1 ? argv[1] : "";
    float *word = nullptr;
    cudaMalloc(&word, sizeof(float));
    float *first = block(1024), *second = block(1024), *third = block(1024);
    cudaDeviceSynchronize();
    bool reads = false;
    if (!strcmp(error, "overrun")) poke<<<1, 1>>>(first + 1024, 1);
    else if (!strcmp(error, "overrun_page")) poke<<<1, 1024>>>(first + 1024, 1024);
    else if (!strcmp(error, "underrun")) poke<<<1, 1>>>(second - 1, 1);
    else if (!strcmp(error, "read_after_free") || !strcmp(error, "write_after_free")) {
        cudaFreeAsync(second, 0);
        reads = error[0] == 'r';
        if (reads) peek<<<1, 1>>>(second, word);
        else poke<<<1, 1>>>(second, 1);
        second = nullptr;
    } else if (!strcmp(error, "double_free")) {
        cudaFreeAsync(second, 0);
        if (report("error", cudaFreeAsync(second, 0))) return 0;
        second = nullptr;
    } else if (!strcmp(error, "inner_free")) {
        if (report("error", cudaFreeAsync(second + 4, 0))) return 0;
    }
    if (report("fault", cudaDeviceSynchronize())) return 0;
    if (reads) {
        float value = 0;
        cudaMemcpy(&value, word, sizeof(float), cudaMemcpyDeviceToHost);
        printf(std::isnan(value) ? "NaN\n" : "silent, the value is %g\n", value);
    }
    for (float *left : {first, second, third}) {
        if (left) cudaFreeAsync(left, 0);
    }
    if (report("fault", cudaDeviceSynchronize())) return 0;
    if (!reads) printf("silent\n");
    return 0;
}
