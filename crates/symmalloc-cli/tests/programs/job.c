/* A CUDA program for tests. argv[1] selects what it does besides allocating and freeing. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long Pointer;
extern int cuInit(unsigned);
extern int cuDevicePrimaryCtxRetain(void **, int);
extern int cuCtxSetCurrent(void *);
extern int cuMemAlloc_v2(Pointer *, size_t);
extern int cuMemFree_v2(Pointer);
extern int cuMemAllocAsync(Pointer *, size_t, void *);
extern int cuMemFreeAsync(Pointer, void *);
extern int cuStreamCreate(void **, unsigned);
extern uint64_t stub_calls(const char *);

static volatile sig_atomic_t got;

static void on_signal(int number) { got = number; }

static void must(int code) {
    if (code) { fprintf(stderr, "code %d\n", code); exit(90); }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "", *rank = getenv("RANK");
    void *context, *a, *b;
    Pointer p[8], kept, twice;
    must(cuInit(0)), must(cuDevicePrimaryCtxRetain(&context, 0)), must(cuCtxSetCurrent(context));
    must(cuStreamCreate(&a, 1)), must(cuStreamCreate(&b, 1));
    for (int step = 0; step < 10; step++) {
        for (int i = 0; i < 8; i++) {
            size_t size = (size_t)(i + 1) << 18;
            if (!strcmp(what, "differ") && rank && atoi(rank) == 1 && step == 3 && i == 5) size += 4096;
            must(cuMemAllocAsync(&p[i], size, i % 2 ? a : b));
        }
        for (int i = 0; i < 8; i++) must(cuMemFreeAsync(p[i], i % 4 == 3 ? a : b));
    }
    must(cuMemAlloc_v2(&kept, 3 << 20)), must(cuMemAlloc_v2(&twice, 1 << 20)), must(cuMemFree_v2(twice));
    if (!strcmp(what, "limit")) return cuMemAlloc_v2(&twice, (size_t)200 << 20);
    if (!strcmp(what, "exit")) return 7;
    if (!strcmp(what, "abort")) { sleep(2); abort(); }
    if (!strcmp(what, "wait")) {
        signal(SIGTERM, on_signal), signal(SIGUSR1, on_signal);
        puts("ready"), fflush(stdout);
        while (!got) usleep(1000);
        return got == SIGUSR1 ? 11 : 12;
    }
    printf("driver %d\n", (int)(stub_calls("cuMemAllocAsync") + stub_calls("cuMemAlloc_v2")));
    return 0;
}
