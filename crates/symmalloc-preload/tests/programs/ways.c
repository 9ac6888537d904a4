/* Looks up cuMemAlloc and related calls in the way that argv[1] selects, and calls them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
extern CUresult cuInit(unsigned);
extern CUresult cuDevicePrimaryCtxRetain(void **, int);
extern CUresult cuCtxSetCurrent(void *);
#ifdef LINKED
extern CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
extern CUresult cuMemFree_v2(CUdeviceptr);
#endif
typedef CUresult (*Alloc)(CUdeviceptr *, size_t);
typedef CUresult (*Free)(CUdeviceptr);
typedef CUresult (*AllocAsync)(CUdeviceptr *, size_t, void *);
typedef CUresult (*GetProc)(const char *, void **, int, uint64_t);
typedef CUresult (*GetProc2)(const char *, void **, int, uint64_t, int *);
typedef uint64_t (*Calls)(const char *);

static void *must(void *p, const char *what) {
    if (!p) { fprintf(stderr, "%s: not found: %s\n", what, dlerror()); exit(2); }
    return p;
}

static void *library(void) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    return must(handle ? handle : dlopen("libcuda.so", RTLD_NOW), "libcuda");
}

static void is_ours(void *p, const char *what) {
    Dl_info info;
    if (!dladdr(p, &info) || !strstr(info.dli_fname, "symmalloc_preload")) {
        fprintf(stderr, "%s is not ours: %s\n", what, info.dli_fname);
        exit(3);
    }
}

/* The same check, for functions that must be the driver's. */
static void is_drivers(void *p, const char *what) {
    Dl_info info;
    if (!dladdr(p, &info) || !strstr(info.dli_fname, "libcuda")) {
        fprintf(stderr, "%s is not the driver's: %s\n", what, info.dli_fname);
        exit(3);
    }
}

static void use(Alloc alloc, Free release) {
    CUdeviceptr p = 0;
    is_ours((void *)alloc, "cuMemAlloc");
    is_ours((void *)release, "cuMemFree");
    for (int i = 0; i < 100; i++) {
        if (alloc(&p, 1 << 20) || !p || release(p)) { fprintf(stderr, "a pair failed\n"); exit(4); }
    }
}

int main(int argc, char **argv) {
    const char *way = argc > 1 ? argv[1] : "";
    void *context = NULL, *handle = library();
    Calls calls = (Calls)must(dlsym(handle, "stub_calls"), "stub_calls");
    CUresult (*init)(unsigned) = (CUresult(*)(unsigned))must(dlsym(handle, "cuInit"), "cuInit");
    CUresult (*retain)(void **, int) = (CUresult(*)(void **, int))must(dlsym(handle, "cuDevicePrimaryCtxRetain"), "retain");
    CUresult (*set)(void *) = (CUresult(*)(void *))must(dlsym(handle, "cuCtxSetCurrent"), "set");
    is_drivers((void *)init, "cuInit");
    if (init(0) || retain(&context, 0) || set(context)) return 5;
    if (!strcmp(way, "dlopen")) {
        use((Alloc)must(dlsym(handle, "cuMemAlloc_v2"), way), (Free)must(dlsym(handle, "cuMemFree_v2"), way));
    } else if (!strcmp(way, "default")) {
        dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);
        use((Alloc)must(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"), way), (Free)must(dlsym(RTLD_DEFAULT, "cuMemFree_v2"), way));
    } else if (!strcmp(way, "next")) {
        use((Alloc)must(dlsym(RTLD_NEXT, "cuMemAlloc_v2"), way), (Free)must(dlsym(RTLD_NEXT, "cuMemFree_v2"), way));
    } else if (!strcmp(way, "program")) {
        void *self = dlopen(NULL, RTLD_NOW);
        use((Alloc)must(dlsym(self, "cuMemAlloc_v2"), way), (Free)must(dlsym(self, "cuMemFree_v2"), way));
    } else if (!strcmp(way, "dlvsym")) {
        /* libcuda's symbols have no versions, so a versioned lookup fails, with or without this library. */
        if (dlvsym(handle, "cuMemAlloc_v2", "CUDA") || !strstr(dlerror(), "version CUDA")) return 20;
        use((Alloc)must(dlsym(handle, "cuMemAlloc_v2"), way), (Free)must(dlsym(handle, "cuMemFree_v2"), way));
        must(dlvsym(RTLD_NEXT, "dlsym", argv[2]), "the C library's own dlsym, by version");
        if (dlvsym(RTLD_NEXT, "malloc", "NO_SUCH_VERSION")) return 6;
    } else if (!strcmp(way, "proc")) {
        GetProc get = (GetProc)must(dlsym(handle, "cuGetProcAddress"), way);
        Alloc alloc; Free release;
        is_ours((void *)get, "cuGetProcAddress");
        for (uint64_t flags = 0; flags < 3; flags++) {
            if (get("cuMemAlloc", (void **)&alloc, 11030, flags) || get("cuMemFree", (void **)&release, 11030, flags)) return 7;
            use(alloc, release);
        }
        void *missing = &missing;
        if (get("cuNoSuchCall", &missing, 11030, 0) != 500 || missing) return 8;
    } else if (!strcmp(way, "proc_v2")) {
        GetProc2 get = (GetProc2)must(dlsym(handle, "cuGetProcAddress_v2"), way), again = NULL;
        Alloc alloc; Free release; AllocAsync on_default, on_own; void *first; int status = -1;
        is_ours((void *)get, "cuGetProcAddress_v2");
        /* cuGetProcAddress looks up itself. */
        if (get("cuGetProcAddress", (void **)&again, 12000, 0, &status) || status || again != get) return 9;
        for (uint64_t flags = 0; flags < 3; flags++) {
            if (again("cuMemAlloc", (void **)&alloc, 12000, flags, NULL) || again("cuMemFree", (void **)&release, 12000, flags, &status)) return 10;
            use(alloc, release);
        }
        /* Before CUDA 3.2 the name means a 32-bit call, which the driver serves. */
        if (get("cuMemAlloc", &first, 3000, 0, NULL)) return 11;
        is_drivers(first, "cuMemAlloc of CUDA 3.0");
        if (get("cuMemAllocAsync", (void **)&on_default, 12000, 1, NULL) || get("cuMemAllocAsync", (void **)&on_own, 12000, 2, NULL)) return 12;
        is_ours((void *)on_default, "cuMemAllocAsync");
        is_ours((void *)on_own, "cuMemAllocAsync of the thread's own default stream");
        if (on_default == on_own) return 13;
        if (get("cuMemAllocAsync", (void **)&on_own, 11000, 0, &status) != 500 || status != 2) return 14;
        CUdeviceptr p = 0;
        if (on_own != NULL || on_default(&p, 4096, NULL) || !p || release(p)) return 15;
#ifdef LINKED
    } else if (!strcmp(way, "linked")) {
        /* The linked address may be a PLT stub of the program, so the test checks the effect of the call. */
        CUdeviceptr p = 0;
        for (int i = 0; i < 100; i++) if (cuMemAlloc_v2(&p, 1 << 20) || cuMemFree_v2(p)) return 16;
#endif
    } else {
        fprintf(stderr, "unknown way: %s\n", way);
        return 17;
    }
    if (calls("cuMemAlloc_v2") || calls("cuMemFree_v2")) { fprintf(stderr, "the driver served the calls\n"); return 18; }
    if (!calls("cuMemCreate")) { fprintf(stderr, "no memory was created\n"); return 19; }
    puts(way);
    return 0;
}
