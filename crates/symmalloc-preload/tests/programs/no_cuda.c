/* A program without CUDA that looks up symbols as such programs do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    void *self = dlopen(NULL, RTLD_NOW), *found;
    const char *error;
    /* A check for CUDA. It must fail even though the preloaded library exports the name. */
    if (dlsym(RTLD_DEFAULT, "cuMemAlloc_v2")) return 1;
    error = dlerror();
    if (!error || !strstr(error, "undefined symbol")) return 2;
    if (dlsym(self, "cuMemAlloc_v2") || dlsym(RTLD_NEXT, "cuMemAlloc_v2")) return 3;
    dlerror();
    if (dlsym(self, "cuNothing") || !strstr(dlerror(), "cuNothing")) return 4;
    /* The next definition after this program, with this program as the caller. */
    found = dlsym(RTLD_NEXT, "main");
    if (found == (void *)main) return 5;
    if (!dlsym(RTLD_NEXT, "malloc") || !dlsym(RTLD_DEFAULT, "puts") || !dlsym(self, "strlen")) return 6;
    if (dlsym(RTLD_DEFAULT, "dlsym") == NULL) return 7;
    puts("without CUDA");
    return 0;
}
