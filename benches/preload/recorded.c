// Measures the cost of recording: pairs of cuMemAllocAsync and cuMemFreeAsync on a libcuda that does nothing.
//
//   cc -O2 -shared -fPIC -DDRIVER -Wl,-soname,libcuda.so.1 -o libcuda.so.1 recorded.c
//   cc -O2 -o recorded recorded.c -ldl -lpthread
//   LD_LIBRARY_PATH=. ./recorded [THREADS [PAIRS]]
//   LD_LIBRARY_PATH=. symmalloc run --record job.trace.zst -- ./recorded [THREADS [PAIRS]]
//
// Prints the elapsed time of a pair, the CPU time of the program's own threads, and the CPU time of all threads.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>

typedef uint64_t Pointer;
typedef void *Stream;

#ifdef DRIVER
// Returns the most recently freed address, like a driver with a cache.
static __thread Pointer next, freed[4096];
static __thread int count;
static int threads;

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)64; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)64; return 0; }
int cuStreamGetCtx(Stream stream, void **context) { (void)stream; *context = (void *)64; return 0; }
int cuStreamIsCapturing(Stream stream, int *status) { (void)stream; *status = 0; return 0; }
int cuMemAllocAsync(Pointer *pointer, size_t size, Stream stream) {
    (void)size, (void)stream;
    if (!next) next = (Pointer)__atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED) << 36;
    *pointer = count ? freed[--count] : (next += 2 << 20);
    return 0;
}
int cuMemFreeAsync(Pointer pointer, Stream stream) {
    (void)stream;
    if (count < 4096) freed[count++] = pointer;
    return 0;
}
#else
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>

enum { LIVE = 1000 };

static int pairs = 1000000;
static _Atomic long own_ns;
static int (*allocate)(Pointer *, size_t, Stream);
static int (*release)(Pointer, Stream);

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// Keeps a thousand live blocks and replaces random ones by blocks of different sizes.
static void *work(void *stream) {
    Pointer *live = calloc(LIVE, sizeof *live);
    uint64_t dice = (uintptr_t)stream;
    for (int i = 0; i < LIVE + pairs; i++) {
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        Pointer *block = i < LIVE ? live + i : live + (dice >> 33) % LIVE;
        if (*block) release(*block, stream);
        if (allocate(block, 512 * (1 + (dice >> 50)), stream)) abort();
    }
    for (int i = 0; i < LIVE; i++) release(live[i], stream);
    free(live);
    own_ns += (long)(seconds(CLOCK_THREAD_CPUTIME_ID) * 1e9);
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    if (argc > 2) pairs = atoi(argv[2]);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    allocate = dlsym(library, "cuMemAllocAsync");
    release = dlsym(library, "cuMemFreeAsync");
    pthread_t all[64];
    double begun = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < threads; i++) pthread_create(all + i, NULL, work, (void *)(uintptr_t)(4096 + i * 64));
    for (int i = 0; i < threads; i++) pthread_join(all[i], NULL);
    double all_pairs = (double)threads * pairs;
    printf("%d threads: %.0f ns a pair, %.0f ns of CPUs on these threads, %.0f ns of all CPUs\n", threads,
           (seconds(CLOCK_MONOTONIC) - begun) / all_pairs * 1e9, own_ns / all_pairs,
           (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / all_pairs * 1e9);
    return 0;
}
#endif
