/* Allocates after it may no longer write to files. Handles no signal. */
#include <stdio.h>
#include <sys/resource.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
extern CUresult cuInit(unsigned);
extern CUresult cuDevicePrimaryCtxRetain(void **, int);
extern CUresult cuCtxSetCurrent(void *);
extern CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
extern CUresult cuMemFree_v2(CUdeviceptr);

int main(void) {
    void *context;
    CUdeviceptr p;
    struct rlimit none = {0, 0};
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 2;
    /* The stub keeps the device's memory in a file, so it is obtained before the limit. */
    if (cuMemAlloc_v2(&p, 1 << 20) || cuMemFree_v2(p)) return 3;
    if (setrlimit(RLIMIT_FSIZE, &none)) return 4;
    for (int i = 0; i < 20000; i++) {
        if (cuMemAlloc_v2(&p, 1 << 20) || cuMemFree_v2(p)) return 5;
    }
    puts("done");
    return 0;
}
