/* Writes one byte past the end of memory of cuMemAlloc (argument "sync") or cuMemAllocAsync ("async"), and exits, or resets
 * the device before ("reset"). The device is a stub, so a copy of one byte does for a kernel. */
#include <stdio.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
extern CUresult cuInit(unsigned);
extern CUresult cuDevicePrimaryCtxRetain(void **, int);
extern CUresult cuDevicePrimaryCtxReset_v2(int);
extern CUresult cuCtxSetCurrent(void *);
extern CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
extern CUresult cuMemAllocAsync(CUdeviceptr *, size_t, void *);
extern CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, void *);

int main(int count, char **arguments) {
    void *context;
    CUdeviceptr p;
    const char *how = count > 1 ? arguments[1] : "";
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 2;
    if (!strcmp(how, "async") ? cuMemAllocAsync(&p, 4000, 0) : cuMemAlloc_v2(&p, 4000)) return 3;
    if (strcmp(how, "intact") && cuMemsetD8Async(p + 4000, 7, 1, 0)) return 4;
    if (!strcmp(how, "reset") && cuDevicePrimaryCtxReset_v2(0)) return 5;
    puts("done");
    return 0;
}
