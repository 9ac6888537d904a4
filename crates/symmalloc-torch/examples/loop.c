/* A C program that allocates the memory of a training step repeatedly, with equal placements in every step.
 *
 *   crates/symmalloc-torch/install --prefix "$PWD/symmalloc"
 *   export PKG_CONFIG_PATH="$PWD/symmalloc/lib/pkgconfig"
 *   cc crates/symmalloc-torch/examples/loop.c $(pkg-config --cflags --libs symmalloc) -o loop
 *   LD_LIBRARY_PATH="$PWD/symmalloc/lib" ./loop
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "symmalloc.h"

#define STEPS 100
#define BUFFERS 8

static void check(symmalloc_status status, const char *call) {
  if (status != SYMMALLOC_OK) {
    fprintf(stderr, "%s: %s\n", call, symmalloc_error_message());
    exit(1);
  }
}

int main(void) {
  symmalloc_allocator *allocator = NULL;
  check(symmalloc_create(0, "total_limit_mb:512", &allocator), "symmalloc_create");

  /* A segment that is reserved now and never released. A collective library would register it once. */
  uint32_t symmetric = 0;
  void *stream = NULL; /* the default stream; any cudaStream_t or CUstream will do */
  check(symmalloc_pool_create(allocator, "symmetric:true,segments:reserved,segment_mb:64", &symmetric), "pool_create");
  check(symmalloc_reserve(allocator, symmetric, stream, 64 << 20), "symmalloc_reserve");

  symmalloc_placement first[BUFFERS], now;
  for (int step = 0; step < STEPS; ++step) {
    void *buffers[BUFFERS];
    for (int i = 0; i < BUFFERS; ++i) {
      const uint32_t pool = i % 2 ? symmetric : 0;
      check(symmalloc_allocate_named(allocator, pool, stream, (size_t)(i + 1) << 20, "activation", &buffers[i]),
            "symmalloc_allocate_named");
      check(symmalloc_placement_of(allocator, buffers[i], &now), "symmalloc_placement_of");
      if (step == 0)
        first[i] = now;
      if (memcmp(&now, &first[i], sizeof now) != 0) {
        fprintf(stderr, "step %d, buffer %d: the placement differs from that of the first step\n", step, i);
        return 1;
      }
    }
    for (int i = 0; i < BUFFERS; ++i)
      check(symmalloc_free(allocator, buffers[i]), "symmalloc_free");
  }

  uint64_t digest = 0, released = 0;
  check(symmalloc_digest(allocator, symmetric, &digest), "symmalloc_digest");
  check(symmalloc_trim(allocator, &released), "symmalloc_trim");
  printf("%d steps with equal placements; digest %016llx; %llu bytes released\n", STEPS, (unsigned long long)digest,
         (unsigned long long)released);

  void *none = NULL;
  if (symmalloc_allocate(allocator, 0, stream, (size_t)1 << 30, &none) != SYMMALLOC_OUT_OF_MEMORY)
    return 1;
  printf("expected error: %s\n", symmalloc_error_message());

  check(symmalloc_destroy(allocator), "symmalloc_destroy");
  return 0;
}
