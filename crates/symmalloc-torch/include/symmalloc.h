/*
 * symmalloc: a deterministic caching allocator for CUDA devices. Equal programs get equal placements on every rank.
 *
 * Calls return a status, which is 0 on success. After any other status, symmalloc_error_message() returns the problem and
 * what to do. All functions are thread-safe. Streams are CUstream or cudaStream_t; NULL is the legacy default stream. A
 * stream gets its number at its first use: use streams in the same order on every rank.
 *
 * In a process that was forked after memory was allocated, calls that free, release or destroy something return 0 and have no
 * effect, because the parent owns all objects. Most other calls return SYMMALLOC_INVALID_STATE there.
 *
 * examples/loop.c is a complete program.
 */

#ifndef SYMMALLOC_H
#define SYMMALLOC_H

/* Made by cbindgen from the Rust sources; do not edit. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SYMMALLOC_VERSION "0.1.0"

/**
 * `contents` of a sleep: the contents of live allocations are copied to the pool's storage on the host, and restored on wake.
 */
#define SYMMALLOC_CONTENTS_KEEP 0

/**
 * `contents` of a sleep: the contents of live allocations are discarded, and are undefined after the wake.
 */
#define SYMMALLOC_CONTENTS_DROP 1

/**
 * `contents` of a sleep: the contents of live allocations are discarded, and are zero after the wake.
 */
#define SYMMALLOC_CONTENTS_ZERO 2

/**
 * The pool is awake: it has its memory.
 */
#define SYMMALLOC_PHASE_AWAKE 0

/**
 * The pool sleeps: it has no memory, but keeps its addresses.
 */
#define SYMMALLOC_PHASE_ASLEEP 1

/**
 * The pool sleeps, but the driver or a window still holds some memory. Another sleep tries again to release that memory. A wake reuses
 * that memory. A registered pool, however, must sleep again before it can wake.
 */
#define SYMMALLOC_PHASE_HELD 2

/**
 * `storage` of saved contents: pinned host memory.
 */
#define SYMMALLOC_STORAGE_PINNED 0

/**
 * `storage` of saved contents: pageable host memory, which returns to the system when the pool wakes.
 */
#define SYMMALLOC_STORAGE_PAGEABLE 1

/**
 * `storage` of saved contents: an unnamed file, which disappears with the process and is verified when it is read.
 */
#define SYMMALLOC_STORAGE_FOLDER 2

/**
 * `symmalloc_registrar_options.registration`: all ranks together create a symmetric window over each segment of a symmetric pool.
 */
#define SYMMALLOC_REGISTER_WINDOWS 0

/**
 * `symmalloc_registrar_options.registration`: each rank calls `ncclCommRegister` for each piece of its memory, independently of the other
 * ranks. Works for any pool, including pools whose segments grow.
 */
#define SYMMALLOC_REGISTER_BUFFERS 1

/**
 * `symmalloc_registrar_options.agree_every`: the ranks compare their histories only in `symmalloc_registrar_agree` and
 * `symmalloc_pool_agree`, and never in a sync.
 */
#define SYMMALLOC_AGREE_BY_HAND UINT32_MAX

/**
 * Option of `symmalloc_all_to_all_create`: rejects buffers that are not registered on the communicator. NCCL could move the data of such
 * buffers, too, through its internal buffers.
 */
#define SYMMALLOC_ALL_TO_ALL_REGISTERED 1

/**
 * Option of `symmalloc_all_to_all_create`: the ranks compare their splits before each call, and all return the same error if they
 * disagree. This is for debugging, because each call then blocks the host for an exchange.
 */
#define SYMMALLOC_ALL_TO_ALL_CHECKED 2

/**
 * The result of a call. After any status but `SYMMALLOC_OK`, `symmalloc_error_message` returns the problem and what to do.
 */
enum symmalloc_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Success.
   */
  SYMMALLOC_OK = 0,
  /**
   * An argument is missing or invalid, such as a null pointer, a text that is not UTF-8, or a negative device.
   */
  SYMMALLOC_INVALID_ARGUMENT = 1,
  /**
   * A configuration text is invalid. The message names the byte offset.
   */
  SYMMALLOC_INVALID_SETTINGS = 2,
  /**
   * The limits leave no memory, or the driver failed to provide it.
   */
  SYMMALLOC_OUT_OF_MEMORY = 3,
  /**
   * The pointer is not a live allocation of this allocator.
   */
  SYMMALLOC_UNKNOWN_POINTER = 4,
  /**
   * The pool does not exist, or was destroyed.
   */
  SYMMALLOC_UNKNOWN_POOL = 5,
  /**
   * libcuda cannot be loaded, a CUDA call failed, or the device does not exist.
   */
  SYMMALLOC_CUDA = 6,
  /**
   * The histories of the ranks differ. The message names the first difference.
   */
  SYMMALLOC_MISALIGNED = 7,
  /**
   * The ranks failed to communicate.
   */
  SYMMALLOC_TRANSPORT = 8,
  /**
   * libnccl cannot be loaded, or an NCCL call failed or timed out.
   */
  SYMMALLOC_NCCL = 9,
  /**
   * A file could not be read or written.
   */
  SYMMALLOC_IO = 10,
  /**
   * The call is invalid in the current state, such as scopes that do not nest or settings after the first allocation.
   */
  SYMMALLOC_INVALID_STATE = 11,
  /**
   * An assertion of this library failed. Please report it.
   */
  SYMMALLOC_INTERNAL = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum symmalloc_status symmalloc_status;
#else
typedef uint32_t symmalloc_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The allocator of one device.
 */
typedef struct symmalloc_allocator symmalloc_allocator;

/**
 * A dma-buf, and the memory that it holds.
 */
typedef struct symmalloc_dma_buf symmalloc_dma_buf;

/**
 * Memory of another process that this process opened.
 */
typedef struct symmalloc_opened symmalloc_opened;

/**
 * A checkpoint of a mempool's allocations.
 */
typedef struct symmalloc_checkpoint symmalloc_checkpoint;

/**
 * The registration of one pool on one communicator.
 */
typedef struct symmalloc_registrar symmalloc_registrar;

/**
 * All-to-all-v on one communicator.
 */
typedef struct symmalloc_all_to_all symmalloc_all_to_all;

/**
 * An announced collective that the program submits itself.
 */
typedef struct symmalloc_announcement symmalloc_announcement;

/**
 * The result of a sleep.
 */
typedef struct symmalloc_slept {
  /**
   * Bytes released to the device.
   */
  uint64_t released_bytes;
  /**
   * Bytes copied to the host.
   */
  uint64_t kept_bytes;
  /**
   * Windows and buffers that were deregistered.
   */
  uint64_t deregistrations;
  /**
   * Bytes that NCCL released because communicators were suspended.
   */
  uint64_t suspended_bytes;
} symmalloc_slept;

/**
 * The used memory of a device in bytes, by owner. The parts add up to `used_bytes`, unless memory is allocated or released during the
 * call.
 */
typedef struct symmalloc_memory {
  /**
   * Bytes in use by all processes, as the driver reports them.
   */
  uint64_t used_bytes;
  /**
   * Bytes of awake pools, including their free blocks, except for those in `graph_bytes`.
   */
  uint64_t awake_bytes;
  /**
   * Bytes of awake mempools: graphs' pools and PyTorch's `MemPool`s.
   */
  uint64_t graph_bytes;
  /**
   * Bytes that sleeping pools still hold, because the driver or a window did not release them.
   */
  uint64_t asleep_bytes;
  /**
   * Bytes of sleeping pools that other processes have mapped, or that a dma-buf holds.
   */
  uint64_t exported_bytes;
  /**
   * Bytes of idle chunks and of prefetched memory.
   */
  uint64_t idle_bytes;
  /**
   * Bytes that NCCL holds for the communicators of registrars. 0 if NCCL is older than 2.29.7.
   */
  uint64_t communicators_bytes;
  /**
   * All other bytes: contexts and their modules, other libraries, other allocators and other processes.
   */
  uint64_t other_bytes;
} symmalloc_memory;

/**
 * The result of a wake.
 */
typedef struct symmalloc_woken {
  /**
   * Bytes that were mapped to memory again.
   */
  uint64_t remapped_bytes;
  /**
   * Windows and buffers that were registered again.
   */
  uint64_t registrations;
  /**
   * Windows whose handle changed on any rank. Recapture graphs that use them.
   */
  uint64_t changed;
  /**
   * Communicators that failed during the sleep. Register the pool on new communicators.
   */
  uint64_t lost;
  /**
   * Communicators that were resumed.
   */
  uint64_t resumed;
} symmalloc_woken;

/**
 * The result of a step.
 */
typedef struct symmalloc_step_report {
  /**
   * Allocations in the step.
   */
  uint64_t allocations;
  /**
   * The number of allocations that were placed by a plan.
   */
  uint64_t planned;
  /**
   * Bytes of memory reserved for the pool's plans.
   */
  uint64_t plan_bytes;
  /**
   * The number of the first allocation that differed from the plan; `UINT64_MAX` if none differed or if there was no plan.
   */
  uint64_t differs_at;
} symmalloc_step_report;

/**
 * The position of an allocation. Equal on all ranks that ran the same program.
 */
typedef struct symmalloc_placement {
  /**
   * The pool.
   */
  uint32_t pool;
  /**
   * The stream of the heap, numbered in order of first use. If the streams of a group share the heap, the number of the first of them
   * plus 65,536. If all streams of the pool share it, `UINT32_MAX`.
   */
  uint32_t stream;
  /**
   * The segment, by birth ordinal in its heap.
   */
  uint64_t segment;
  /**
   * The offset from the segment's first byte.
   */
  uint64_t offset_bytes;
  /**
   * Usable bytes: the requested size, rounded up.
   */
  uint64_t size_bytes;
  /**
   * Requested bytes.
   */
  uint64_t requested_bytes;
} symmalloc_placement;

/**
 * Options of a registration. If all are zero, they select windows, a comparison at every sync, and a deadline of five minutes. All ranks
 * pass the same values, except for `rank`.
 */
typedef struct symmalloc_registrar_options {
  /**
   * The timeout of every wait for other ranks, in milliseconds; 0 means five minutes.
   */
  uint32_t deadline_ms;
  /**
   * `SYMMALLOC_REGISTER_WINDOWS` or `SYMMALLOC_REGISTER_BUFFERS`.
   */
  uint32_t registration;
  /**
   * The number of syncs per comparison of the ranks' histories. With 0 or 1, every sync compares them; with `SYMMALLOC_AGREE_BY_HAND`,
   * none does. A sync that neither compares nor finds new segments returns immediately. If only some ranks find new segments in a sync
   * that does not compare, these ranks time out.
   */
  uint32_t agree_every;
  /**
   * The expected rank in the communicator. A mismatch with NCCL's value is an error.
   */
  uint32_t rank;
  /**
   * The expected number of ranks of the communicator. 0 disables the checks of this number and of `rank`.
   */
  uint32_t world;
  /**
   * "host:port": a free port on the machine of the communicator's rank 0. The ranks connect there and keep the connections, to detect
   * which rank died, is stopped or is missing. With NULL, errors do not identify that rank.
   */
  const char *rendezvous;
  /**
   * The communicator's name in errors and flight records; NULL means "borrowed". A pool on several communicators can sleep only if each
   * of them has a name that is equal on all of the communicator's ranks and unique in the job.
   */
  const char *name;
} symmalloc_registrar_options;

/**
 * Sends `len` bytes of this rank to all ranks, and writes the bytes of all ranks to `all` (world times `len` bytes), in rank order.
 * Returns 0 on success. The function must not throw.
 */
typedef int (*symmalloc_gather_fn)(void *context, const uint8_t *mine, size_t len, uint8_t *all);

/**
 * The properties of a live allocation.
 */
typedef struct symmalloc_found {
  /**
   * The device.
   */
  int32_t device;
  /**
   * `true` if the pool's segments grow.
   */
  bool is_expandable;
  /**
   * The stream of the allocation.
   */
  void *stream;
  /**
   * The size of the block in bytes.
   */
  uint64_t bytes;
  /**
   * Requested bytes.
   */
  uint64_t requested_bytes;
  /**
   * The first word of the pool's id in PyTorch: (0, 0) for the default pool and for pools that PyTorch did not create.
   */
  uint64_t id_first;
  /**
   * The second word of the id.
   */
  uint64_t id_second;
} symmalloc_found;

/**
 * Returns `true` if the scope covers allocations on a stream. May throw a C++ exception. Allocations call it, so calls of this
 * library inside it return an error, except for frees, which take effect later.
 */
typedef bool (*symmalloc_filter_fn)(void *context, void *stream);

/**
 * Destroys the context of a callback.
 */
typedef void (*symmalloc_destroy_fn)(void *context);

/**
 * Callbacks that provide a pool's memory. They run under locks, so calls of this library inside them return an error,
 * except for frees, which take effect later.
 */
typedef struct symmalloc_source {
  /**
   * Returns device memory; NULL if there is none.
   */
  void *(*allocate)(void *context, size_t bytes);
  /**
   * Frees memory of `allocate`.
   */
  void (*free)(void *context, void *pointer);
  /**
   * The first argument of both callbacks.
   */
  void *context;
  /**
   * Destroys the context after the pool and its memory were released.
   */
  symmalloc_destroy_fn destroy;
} symmalloc_source;

/**
 * Properties of the settings of all devices' allocators, for callers that would otherwise parse the settings' text.
 */
typedef struct symmalloc_properties {
  /**
   * `true` if the segments of the default pool grow.
   */
  bool is_expandable;
  /**
   * `true` if the default pool learns plans from repeated steps.
   */
  bool learns_plans;
} symmalloc_properties;

/**
 * A statistic over time.
 */
typedef struct symmalloc_stat {
  /**
   * The current value.
   */
  uint64_t current;
  /**
   * The maximum since peaks were reset.
   */
  uint64_t peak;
  /**
   * The sum of all increases.
   */
  uint64_t allocated;
  /**
   * The sum of all decreases.
   */
  uint64_t freed;
} symmalloc_stat;

/**
 * The counters of a device's allocators, including those over the program's memory. In arrays of three, the entries are the total,
 * small blocks and large blocks.
 */
typedef struct symmalloc_counts {
  /**
   * Number of allocations.
   */
  struct symmalloc_stat allocations[3];
  /**
   * Bytes of the allocated blocks.
   */
  struct symmalloc_stat allocated_bytes[3];
  /**
   * Requested bytes.
   */
  struct symmalloc_stat requested_bytes[3];
  /**
   * Bytes of reserved device memory.
   */
  struct symmalloc_stat reserved_bytes;
  /**
   * Live segments.
   */
  uint64_t segments;
  /**
   * Segments created so far.
   */
  uint64_t segments_born;
  /**
   * Free blocks.
   */
  uint64_t free_blocks;
  /**
   * Allocations that were retried.
   */
  uint64_t retries;
  /**
   * Allocations that failed.
   */
  uint64_t failures;
  /**
   * The limit over all pools in bytes; 0 if there is none.
   */
  uint64_t limit_bytes;
  /**
   * Bytes of memory on the device.
   */
  uint64_t total_bytes;
} symmalloc_counts;

/**
 * A contiguous part of a segment.
 */
typedef struct symmalloc_segment {
  /**
   * The address of the first byte.
   */
  uint64_t address;
  /**
   * The size in bytes.
   */
  uint64_t bytes;
  /**
   * The stream of the heap. If streams share memory: the stream of the first allocation, or NULL.
   */
  void *stream;
  /**
   * The first word of the pool's id in PyTorch: (0, 0) for the default pool.
   */
  uint64_t id_first;
  /**
   * The second word of the id.
   */
  uint64_t id_second;
  /**
   * `true` if the segment can grow.
   */
  bool is_expandable;
  /**
   * `true` if the segment serves large requests, or all.
   */
  bool is_large;
} symmalloc_segment;

/**
 * A block of the segment that was visited before it.
 */
typedef struct symmalloc_block {
  /**
   * The address of the first byte.
   */
  uint64_t address;
  /**
   * The size in bytes.
   */
  uint64_t bytes;
  /**
   * Requested bytes; 0 for a free block.
   */
  uint64_t requested_bytes;
  /**
   * `true` for a live allocation.
   */
  bool is_allocated;
} symmalloc_block;

/**
 * Receives a segment (`block` is NULL), and then its blocks (`segment` is NULL). Calls of this library inside it return an error, except for frees, which take effect later.
 */
typedef void (*symmalloc_visit_fn)(void *context,
                                   const struct symmalloc_segment *segment,
                                   const struct symmalloc_block *block);

/**
 * Receives the allocations that were live before a restore (`is_live` 0), and then those that are live after it (1). Calls of this
 * library inside it return an error, except for frees, which take effect later.
 */
typedef void (*symmalloc_restored_fn)(void *context, void *pointer, uint64_t requested_bytes, uint32_t is_live);

/**
 * Called after memory is mapped (`is_mapped` 1), and before it is unmapped (0). Runs under a heap's lock, so calls of this
 * library inside it return an error, except for frees, which take effect later.
 */
typedef void (*symmalloc_memory_fn)(int32_t device, uint32_t is_mapped, uint64_t address, uint64_t bytes);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the message of the calling thread's last error; empty if there was none. It stays valid until this thread's next error.
 */
const char *symmalloc_error_message(void);

/**
 * Returns the version of the library and its package.
 */
const char *symmalloc_version(void);

/**
 * Creates an allocator for a device. `conf` has the syntax of SYMMALLOC_CONF. NULL selects the defaults,
 * which stitch large blocks.
 *
 * # Safety
 * `conf` is NULL or a C string; `out` is valid for writing.
 */
symmalloc_status symmalloc_create(int32_t device, const char *conf, struct symmalloc_allocator **out);

/**
 * Destroys an allocator of `symmalloc_create`, and releases all of its memory, including live allocations. NULL has no effect. Returns
 * `SYMMALLOC_INVALID_ARGUMENT` for any other pointer, such as an allocator of `symmalloc_process_allocator`, which the library owns.
 *
 * # Safety
 * No other thread uses the allocator, and it is not used after this; work on its memory has completed; it has no registrar.
 */
symmalloc_status symmalloc_destroy(struct symmalloc_allocator *allocator);

/**
 * Allocates from a pool for work on a stream. Writes a null pointer for zero bytes.
 *
 * # Safety
 * `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator; `out` is valid for
 * writing.
 */
symmalloc_status symmalloc_allocate(struct symmalloc_allocator *allocator,
                                    uint32_t pool,
                                    void *stream,
                                    size_t bytes,
                                    void **out);

/**
 * Allocates as `symmalloc_allocate`, with a name for snapshots and reports.
 *
 * # Safety
 * As `symmalloc_allocate`; `name` is NULL or a C string.
 */
symmalloc_status symmalloc_allocate_named(struct symmalloc_allocator *allocator,
                                          uint32_t pool,
                                          void *stream,
                                          size_t bytes,
                                          const char *name,
                                          void **out);

/**
 * Registers a stream in a new group. Without this call, a stream is registered at its first use: in the process's allocators, those of
 * the main thread and of autograd's threads form one group; in all other allocators, each stream forms a group. In pools with
 * `streams:grouped`, the streams of a group share memory. Returns `SYMMALLOC_INVALID_ARGUMENT` if the stream joined another group before.
 *
 * # Safety
 * `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator.
 */
symmalloc_status symmalloc_register_stream(struct symmalloc_allocator *allocator,
                                           void *stream);

/**
 * Registers a stream in the group of another one, which is registered first if necessary. Returns `SYMMALLOC_INVALID_ARGUMENT` if the stream
 * has another group already: call it before the stream's first use.
 *
 * # Safety
 * As `symmalloc_register_stream`, for both streams.
 */
symmalloc_status symmalloc_register_stream_in(struct symmalloc_allocator *allocator,
                                              void *stream,
                                              void *member);

/**
 * Frees an allocation without blocking. Its next user waits on the device for its recorded uses. NULL has no effect.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_free(struct symmalloc_allocator *allocator,
                                void *pointer);

/**
 * Records that work on another stream uses the allocation. After the free, the next user of the memory waits for that work on the
 * device.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_record_use(struct symmalloc_allocator *allocator,
                                      void *pointer,
                                      void *stream);

/**
 * Writes the process's allocator for a device, which PyTorch and other runtimes share. The first use creates it, configured by
 * `SYMMALLOC_CONF`. The library owns it: do not destroy it.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_process_allocator(int32_t device,
                                             struct symmalloc_allocator **out);

/**
 * Allocates memory for work on any stream, now or later, for callers that do not know a stream. It comes from a separate pool. Free
 * it with `symmalloc_free_unordered`. Writes a null pointer for zero bytes.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_allocate_unordered(struct symmalloc_allocator *allocator,
                                              size_t bytes,
                                              void **out);

/**
 * Blocks until all work submitted to the device so far has completed, as cuMemFree does, and frees an allocation. NULL has no effect.
 * Fails during a stream capture, and the allocation stays live.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_free_unordered(struct symmalloc_allocator *allocator,
                                          void *pointer);

/**
 * Frees an allocation after the work submitted to this stream so far, regardless of the stream of its allocation, for callers that
 * free on a stream. Memory of `symmalloc_allocate_unordered` is freed by `symmalloc_free_unordered`. NULL has no effect.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_free_on(struct symmalloc_allocator *allocator,
                                   void *pointer,
                                   void *stream);

/**
 * Declares that sessions of ONNX Runtime on this device use only this stream, their `user_compute_stream`. Their later allocations are
 * ordered by the stream, and `symmalloc_ort_free` does not block. Otherwise, memory comes from `symmalloc_allocate_unordered`.
 *
 * # Safety
 * The stream is one of the device's primary context and lives as long as the process.
 */
symmalloc_status symmalloc_ort_use_stream(int32_t device,
                                          void *stream);

/**
 * Allocates on the device of the current context, from the allocator of PyTorch's entry points: ONNX Runtime's `gpu_external_alloc`.
 * Returns NULL if there is no memory, which ONNX Runtime reports as an error. Standard error shows the first failure, and the
 * statistics count all.
 */
void *symmalloc_ort_alloc(size_t bytes);

/**
 * Frees memory: ONNX Runtime's `gpu_external_free`. Blocks until the device is idle, unless the memory was allocated for a stream of
 * `symmalloc_ort_use_stream`. Standard error shows the first failure, and the statistics count all.
 *
 * # Safety
 * The pointer is NULL, or came from `symmalloc_ort_alloc` and is not used by work that is submitted after this.
 */
void symmalloc_ort_free(void *pointer);

/**
 * Releases free memory of all devices, and waits for streams that used it: ONNX Runtime's `gpu_external_empty_cache`.
 */
void symmalloc_ort_empty_cache(void);

/**
 * Creates a pool. `conf` has the pool keys of SYMMALLOC_CONF; NULL selects the default pool's settings, but private, without groups of
 * streams and without a base. Create pools in the same order on every rank.
 *
 * # Safety
 * `allocator` is live; `conf` is NULL or a C string; `out` is valid for writing.
 */
symmalloc_status symmalloc_pool_create(struct symmalloc_allocator *allocator,
                                       const char *conf,
                                       uint32_t *out);

/**
 * Creates a pool like `symmalloc_pool_create`, whose number is the key that the program chose: from 1 to 65535, and used once. The
 * number then does not depend on the timing of threads that create pools. Other pools get the number after the highest one so far.
 * Returns `SYMMALLOC_INVALID_ARGUMENT` if the key is out of range or was used before.
 *
 * # Safety
 * As `symmalloc_pool_create`.
 */
symmalloc_status symmalloc_pool_create_with_key(struct symmalloc_allocator *allocator,
                                                uint32_t key,
                                                const char *conf);

/**
 * Frees all allocations of a pool at once, and keeps its memory for later ones. Makes no driver call, unless the pool has a release
 * threshold. Later work on the memory waits on the device for the work so far. Writes the number of freed allocations; `freed` may be NULL.
 * No pointer of these allocations may be used or freed afterwards.
 *
 * # Safety
 * `allocator` is live; `freed` is NULL or valid for writing. Nothing uses the pool's allocations later, such as a tensor or a buffer of
 * another library.
 */
symmalloc_status symmalloc_pool_reset(struct symmalloc_allocator *allocator,
                                      uint32_t pool,
                                      uint64_t *freed);

/**
 * Destroys a pool. Further allocations in it fail. The first trim after its last allocation was freed releases its memory. So
 * does an allocation that the limit over all pools would refuse, unless the pool is symmetric.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_pool_destroy(struct symmalloc_allocator *allocator,
                                        uint32_t pool);

/**
 * Grows a stream's device memory in a pool to at least `bytes`, for later allocations.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_reserve(struct symmalloc_allocator *allocator,
                                   uint32_t pool,
                                   void *stream,
                                   size_t bytes);

/**
 * Releases the free memory of all pools to the device, except that of mempools that a graph uses. Waits for streams that used
 * it. `released_bytes` may be NULL.
 *
 * This is an op of symmetric pools that are awake: call it at the same point on every rank. One rank alone calls `symmalloc_trim_private`.
 *
 * # Safety
 * `allocator` is live; `released_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_trim(struct symmalloc_allocator *allocator,
                                uint64_t *released_bytes);

/**
 * Releases the free memory of pools that are neither symmetric nor a graph's, as an allocation does before it fails. Memory of a quota, and
 * memory that the driver does not take back, stays. It is an op of no symmetric pool, so one rank alone may call it. Waits for streams that
 * used the memory. `released_bytes` may be NULL.
 *
 * # Safety
 * `allocator` is live; `released_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_trim_private(struct symmalloc_allocator *allocator,
                                        uint64_t *released_bytes);

/**
 * Grants another device read and write access to the allocator's present and future memory.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_grant_access(struct symmalloc_allocator *allocator, int32_t peer);

/**
 * Puts a pool to sleep: releases its memory to the device, and keeps its addresses, allocations and graphs for use after the wake.
 * Blocks until the device is idle. `contents` is one of `SYMMALLOC_CONTENTS_...`. Until the pool wakes, no work may use its memory, and
 * no graph that uses it may be launched. Allocating from the pool is an error; freeing is allowed.
 *
 * A pool with registrars sleeps on all ranks together: call this at the same point on every rank, when no collective in its windows is
 * running. The call first deregisters the windows. The ranks communicate over the pool's communicator with the most ranks, which must
 * include the ranks of all its other communicators. If several communicators have the most ranks, the one that was registered last is
 * used. `out` may be NULL.
 *
 * # Safety
 * `allocator` is live; `out` is NULL or valid for writing.
 */
symmalloc_status symmalloc_sleep(struct symmalloc_allocator *allocator,
                                 uint32_t pool,
                                 uint32_t contents,
                                 struct symmalloc_slept *out);

/**
 * Puts a pool to sleep like `symmalloc_sleep`, and then suspends the communicators of its registrars: NCCL releases the communicators'
 * memory until the next sleep or wake of the pool, which resumes them. Until then, neither this library nor the program may use the
 * communicators, and no graph with their collectives may be launched. Returns `SYMMALLOC_INVALID_STATE`, and leaves the pool awake, if
 * NCCL is older than 2.29.7 or if an awake pool is registered on one of the communicators. To suspend communicators of several pools, call
 * `symmalloc_suspend` once all of these pools sleep.
 *
 * If the pool has no registrars, the call only puts it to sleep. Wake the pool before its registrars or communicators are destroyed. `out`
 * may be NULL.
 *
 * # Safety
 * Same as for `symmalloc_sleep`.
 */
symmalloc_status symmalloc_sleep_and_suspend(struct symmalloc_allocator *allocator,
                                             uint32_t pool,
                                             uint32_t contents,
                                             struct symmalloc_slept *out);

/**
 * Suspends the communicators of all registered pools that sleep, like `symmalloc_sleep_and_suspend`. If a sleeping pool shares a
 * communicator with an awake pool, none of the sleeping pool's communicators are suspended. Communicators that are already suspended stay
 * so. All ranks call this function at the same point. Returns `SYMMALLOC_INVALID_STATE` if NCCL is older than 2.29.7. `suspended_bytes`
 * may be NULL.
 *
 * # Safety
 * `allocator` is live; `suspended_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_suspend(struct symmalloc_allocator *allocator,
                                   uint64_t *suspended_bytes);

/**
 * Writes the used memory of the device by owner, for example to see what remains on the device while pools sleep. Waits for NCCL calls of
 * other threads.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_device_memory(struct symmalloc_allocator *allocator,
                                         struct symmalloc_memory *out);

/**
 * Wakes a pool at its previous addresses, and restores the kept contents. Returns `SYMMALLOC_OUT_OF_MEMORY` if the device lacks memory.
 * The pool then stays asleep and keeps its contents, and the wake can be retried. A pool with registrars wakes on all ranks or on none,
 * and its windows are registered again. `out` may be NULL.
 *
 * # Safety
 * Same as for `symmalloc_sleep`.
 */
symmalloc_status symmalloc_wake(struct symmalloc_allocator *allocator,
                                uint32_t pool,
                                struct symmalloc_woken *out);

/**
 * Puts the pools whose configuration has the tag (such as `tag:weights`) to sleep, like `symmalloc_sleep`, in the order of their ids. If a
 * pool fails, the pools before it stay asleep, and another call continues with the rest. Returns `SYMMALLOC_UNKNOWN_POOL` if no pool has
 * the tag.
 *
 * # Safety
 * Same as for `symmalloc_sleep`; `tag` is a C string.
 */
symmalloc_status symmalloc_sleep_tagged(struct symmalloc_allocator *allocator,
                                        const char *tag,
                                        uint32_t contents,
                                        struct symmalloc_slept *out);

/**
 * Wakes the pools whose configuration has the tag, like `symmalloc_wake`, in the order of their ids. If a pool fails, the pools before it
 * stay awake, and another call continues with the rest. Returns `SYMMALLOC_UNKNOWN_POOL` if no pool has the tag.
 *
 * # Safety
 * Same as for `symmalloc_sleep`; `tag` is a C string.
 */
symmalloc_status symmalloc_wake_tagged(struct symmalloc_allocator *allocator,
                                       const char *tag,
                                       struct symmalloc_woken *out);

/**
 * Writes the sleep state of a pool, which is one of `SYMMALLOC_PHASE_...`.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_phase(struct symmalloc_allocator *allocator, uint32_t pool, uint32_t *out);

/**
 * Sets the memory of a pool with a quota to `bytes`, rounded up to granules. The size is fixed until the next call. A pool created with
 * `growth_mb:0,streams:shared` has a quota; `range_mb` is its maximum. Such a pool starts empty. Live allocations stay in place. If they
 * need more memory than `bytes`, the call returns `SYMMALLOC_INVALID_STATE` and leaves the pool unchanged. When a pool shrinks, the call
 * waits for the streams that used the pool's free memory. `reserved_bytes` may be NULL.
 *
 * # Safety
 * Same as for `symmalloc_allocate`; `reserved_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_resize(struct symmalloc_allocator *allocator,
                                  uint32_t pool,
                                  void *stream,
                                  size_t bytes,
                                  uint64_t *reserved_bytes);

/**
 * Reserves pinned host memory for the kept contents of sleeping pools, so that the first sleep does not have to reserve it. Reserving
 * takes much longer than copying.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_reserve_host_memory(struct symmalloc_allocator *allocator,
                                               size_t bytes);

/**
 * Releases pinned host memory that contains no saved contents. `released_bytes` may be NULL.
 *
 * # Safety
 * `allocator` is live; `released_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_release_host_memory(struct symmalloc_allocator *allocator,
                                               uint64_t *released_bytes);

/**
 * Sets the storage for a pool's saved contents, from its next sleep on. `storage` is one of `SYMMALLOC_STORAGE_...`; `folder` is the
 * folder of the file, and must be NULL for all other kinds of storage. A sleep returns `SYMMALLOC_IO` if the folder does not exist or its
 * disk is full, and leaves the pool awake. A wake returns `SYMMALLOC_IO` if the file was modified, and leaves the pool asleep.
 *
 * # Safety
 * `allocator` is live; `folder` is NULL or a C string.
 */
symmalloc_status symmalloc_save_in(struct symmalloc_allocator *allocator,
                                   uint32_t pool,
                                   uint32_t storage,
                                   const char *folder);

/**
 * Sets whether a pool's saved contents stay in host memory after its next wake. With 0, the wake releases them. Retained contents remain
 * readable, and the next sleep reuses their memory. Files are never retained.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_retain_saved(struct symmalloc_allocator *allocator,
                                        uint32_t pool,
                                        uint32_t retain);

/**
 * Writes the host address of the saved contents of the `bytes` bytes at `pointer`, or NULL if there are none. Saved contents exist while a
 * pool sleeps and, if they are retained, after it wakes. The address is valid until the pool sleeps, wakes or is destroyed. Returns
 * `SYMMALLOC_INVALID_STATE` if the contents are in a file or not contiguous: copy them with `symmalloc_saved_copy`.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_saved_pointer(struct symmalloc_allocator *allocator,
                                         const void *pointer,
                                         size_t bytes,
                                         const void **out);

/**
 * Copies the saved contents of the `bytes` bytes at `pointer` to host memory. Writes 1 to `found`, or 0 if there are no saved contents.
 * Returns `SYMMALLOC_IO` if the contents are in a file that cannot be read or was modified.
 *
 * # Safety
 * `allocator` is live; `to` is valid for writing `bytes` bytes; `found` is valid for writing.
 */
symmalloc_status symmalloc_saved_copy(struct symmalloc_allocator *allocator,
                                      const void *pointer,
                                      size_t bytes,
                                      void *to,
                                      uint32_t *found);

/**
 * Creates a dma-buf of the `size_bytes` bytes of device memory that begin at `pointer`, for `ibv_reg_dmabuf_mr` and similar calls. The
 * range may be an allocation of any pool, a part of an allocation, or any part of one segment. Writes the file descriptor and the offset
 * of `pointer` in the dma-buf. The offset may be greater than 0, because a dma-buf consists of whole host pages.
 *
 * Until `symmalloc_dma_buf_close`, the memory does not return to the device, even if its pool is trimmed, sleeps or is destroyed. The
 * memory of a destroyed allocator stays until its last dma-buf is closed. Do not close the descriptor yourself. Deregister the memory
 * before it is freed, because the allocator reuses freed memory immediately.
 *
 * Fails with `SYMMALLOC_INVALID_STATE` if the device does not support dma-bufs, or if the driver refuses a range of several physical
 * chunks. In the latter case, use a pool with `segments:reserved` or `segments:fixed`. Fails with `SYMMALLOC_UNKNOWN_POINTER` if an
 * address in the range has no memory.
 *
 * # Safety
 * `allocator` is live; `fd`, `offset_bytes` and `out` are valid for writing.
 */
symmalloc_status symmalloc_dma_buf_open(struct symmalloc_allocator *allocator,
                                        const void *pointer,
                                        size_t size_bytes,
                                        int32_t *fd,
                                        uint64_t *offset_bytes,
                                        struct symmalloc_dma_buf **out);

/**
 * Writes 1 if the pool still uses the memory of a dma-buf, and 0 once the pool has released it, by a trim, a sleep or its destruction. The
 * addresses may then map to different memory: deregister the old memory, close the dma-buf, and create a new one. This call does not
 * detect frees.
 *
 * # Safety
 * The dma-buf is live; `is_current` is valid for writing.
 */
symmalloc_status symmalloc_dma_buf_is_current(const struct symmalloc_dma_buf *dma_buf,
                                              uint32_t *is_current);

/**
 * Closes the descriptor of a dma-buf. Memory that its pool no longer uses returns to the device. NULL has no effect.
 *
 * # Safety
 * The dma-buf came from `symmalloc_dma_buf_open` and is not used after this.
 */
symmalloc_status symmalloc_dma_buf_close(struct symmalloc_dma_buf *dma_buf);

/**
 * Begins a step of a pool: a repeated part of the program, such as a training step. A pool with `plan:learn` plans a step after two equal
 * runs, at the end of the second run. Later runs follow the plan. `key` identifies the step: pass equal keys for steps that make the same
 * allocations, and 0 if all steps do. Call it at the same point on every rank, while no other thread uses the pool and no stream is
 * captured.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_step_begin(struct symmalloc_allocator *allocator,
                                      uint32_t pool,
                                      uint64_t key);

/**
 * Ends the open step of a pool. `out` may be NULL.
 *
 * # Safety
 * `allocator` is live; `out` is NULL or valid for writing.
 */
symmalloc_status symmalloc_step_end(struct symmalloc_allocator *allocator,
                                    uint32_t pool,
                                    struct symmalloc_step_report *out);

/**
 * Loads the plans for a pool from a file that `symmalloc plan -o FILE` wrote, plain or compressed. Later steps follow the plan that has
 * their key. Plans refer to streams by number, and streams are numbered in the order of their first use, so use each stream once before
 * this call. Writes the number of plans to `count`, which may be NULL.
 *
 * # Safety
 * `allocator` is live; `path` is a C string; `count` is NULL or valid for writing.
 */
symmalloc_status symmalloc_plans_adopt(struct symmalloc_allocator *allocator,
                                       uint32_t pool,
                                       const char *path,
                                       uint32_t *count);

/**
 * Drops the plans of a pool. Live allocations that the plans placed stay in place.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_plans_drop(struct symmalloc_allocator *allocator, uint32_t pool);

/**
 * Writes the position of a live allocation.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_placement_of(struct symmalloc_allocator *allocator,
                                        const void *pointer,
                                        struct symmalloc_placement *out);

/**
 * Writes all counters as JSON. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `json` is valid for writing.
 */
symmalloc_status symmalloc_stats_json(struct symmalloc_allocator *allocator, char **json);

/**
 * Resets all peaks to the current values.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_reset_peaks(struct symmalloc_allocator *allocator);

/**
 * Writes the digest of a pool's history, which is equal on two ranks exactly when their ops and placements in the pool are equal.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_digest(struct symmalloc_allocator *allocator,
                                  uint32_t pool,
                                  uint64_t *out);

/**
 * Writes a pickle of the allocator's memory in the format of PyTorch's memory snapshots. Free the bytes with
 * `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `bytes` and `len` are valid for writing.
 */
symmalloc_status symmalloc_snapshot(struct symmalloc_allocator *allocator, uint8_t **bytes, size_t *len);

/**
 * Checks the memory of pools with the debugging options `canary` and `poison`, and writes the number of checked guards. Waits for the
 * streams of their allocations. Without these options, checks nothing. See `docs/memory-errors.md`.
 *
 * Returns `SYMMALLOC_INVALID_STATE` if memory was damaged; the error names the allocation. Each damage is returned once.
 *
 * # Safety
 * `allocator` is live; `checked` is valid for writing.
 */
symmalloc_status symmalloc_check_memory(struct symmalloc_allocator *allocator,
                                        uint64_t *checked);

/**
 * Writes what the allocator knows about a device address: the allocation that contains it, its neighbors, and, in pools with debugging
 * options, freed allocations that contained it. The address need not be valid. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `text` is valid for writing.
 */
symmalloc_status symmalloc_explain_address(struct symmalloc_allocator *allocator,
                                           uint64_t address,
                                           char **text);

/**
 * Writes the live allocations, and those that were freed in pools with debugging options, as a JSON array: the key `memory` of a flight
 * record, for `symmalloc address`. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `json` is valid for writing.
 */
symmalloc_status symmalloc_memory_record(struct symmalloc_allocator *allocator,
                                         char **json);

/**
 * Writes a readable list of the live allocations, largest first. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `text` is valid for writing.
 */
symmalloc_status symmalloc_leak_report(struct symmalloc_allocator *allocator,
                                       char **text);

/**
 * Writes the canonical text of the settings, including defaults. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `text` is valid for writing.
 */
symmalloc_status symmalloc_config(struct symmalloc_allocator *allocator,
                                  char **text);

/**
 * Frees a text or bytes that another call wrote. NULL has no effect.
 *
 * # Safety
 * The pointer came from this library, and is not used after this.
 */
void symmalloc_release_bytes(void *bytes);

/**
 * Records every later op to a file for `symmalloc replay`: as text, or compressed if its name ends in `.zst` or `.gz`. Call it before
 * the first allocation, while no other thread uses the allocator. Recording slows ops down.
 *
 * # Safety
 * `allocator` is live; `path` is a C string.
 */
symmalloc_status symmalloc_trace_start(struct symmalloc_allocator *allocator,
                                       const char *path);

/**
 * Ends the recording and writes the rest of it to disk. Destroying the allocator does the same.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_trace_stop(struct symmalloc_allocator *allocator);

/**
 * Attaches a symmetric pool to a communicator that other code owns. The first sync registers the pool's segments. Every rank of the
 * communicator calls this function. Every wait for other ranks times out after `deadline_ms` milliseconds; 0 means five minutes.
 * `rendezvous` is as in `symmalloc_registrar_options`.
 *
 * # Safety
 * `rendezvous` is a C string or NULL; `allocator` is live; `nccl_comm` is a live and ready `ncclComm_t` of this process's NCCL library, on
 * the allocator's device; it lives until the registrar is destroyed, and no other thread uses it during a call of this library; `out` is
 * valid for writing.
 */
symmalloc_status symmalloc_registrar_create(struct symmalloc_allocator *allocator,
                                            uint32_t pool,
                                            void *nccl_comm,
                                            uint32_t deadline_ms,
                                            const char *rendezvous,
                                            struct symmalloc_registrar **out);

/**
 * Attaches a pool like `symmalloc_registrar_create`. The options select the kind of registration, the rate of comparisons, and the name.
 *
 * # Safety
 * Same as for `symmalloc_registrar_create`; `options` is valid for reading, and its texts are C strings or NULL.
 */
symmalloc_status symmalloc_registrar_create_with(struct symmalloc_allocator *allocator,
                                                 uint32_t pool,
                                                 void *nccl_comm,
                                                 const struct symmalloc_registrar_options *options,
                                                 struct symmalloc_registrar **out);

/**
 * Compares the histories of all ranks of the communicator, then registers the pool's new segments and deregisters those that it has
 * released. The call is collective. `registered` and `deregistered` may be NULL.
 *
 * # Safety
 * The registrar is live; the counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_registrar_sync(struct symmalloc_registrar *registrar,
                                          uint64_t *registered,
                                          uint64_t *deregistered);

/**
 * Syncs like `symmalloc_registrar_sync`, but compares the ranks' histories regardless of `agree_every`.
 *
 * # Safety
 * Same as for `symmalloc_registrar_sync`.
 */
symmalloc_status symmalloc_registrar_agree(struct symmalloc_registrar *registrar,
                                           uint64_t *registered,
                                           uint64_t *deregistered);

/**
 * Writes this rank and the number of ranks of the registrar's communicator, as NCCL reports them.
 *
 * # Safety
 * The registrar is live; `rank` and `world` are valid for writing.
 */
symmalloc_status symmalloc_registrar_rank(struct symmalloc_registrar *registrar,
                                          uint32_t *rank,
                                          uint32_t *world);

/**
 * Writes the window that contains all of the `bytes` bytes at `pointer`, and the offset of `pointer` in the window. The window is an
 * `ncclWindow_t` of the registrar's communicator, and the offset is equal on every rank. Returns `SYMMALLOC_INVALID_STATE` if no window
 * contains these bytes.
 *
 * # Safety
 * The registrar is live; `window` and `offset_bytes` are valid for writing.
 */
symmalloc_status symmalloc_registrar_window(struct symmalloc_registrar *registrar,
                                            const void *pointer,
                                            size_t bytes,
                                            void **window,
                                            uint64_t *offset_bytes);

/**
 * Deregisters all segments on every rank of the communicator, and destroys the registrar. The registrar is destroyed even if the call
 * returns an error. NULL has no effect.
 *
 * # Safety
 * The registrar is live and not used after this.
 */
symmalloc_status symmalloc_registrar_destroy(struct symmalloc_registrar *registrar);

/**
 * Syncs all registrars of a pool in the order of their creation, which must be the same on every rank. If one registrar fails, the call
 * still syncs the others, because their ranks wait for this rank, and then returns the first error. `registered` and `deregistered` may be
 * NULL.
 *
 * # Safety
 * `allocator` is live; the counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_pool_sync(struct symmalloc_allocator *allocator,
                                     uint32_t pool,
                                     uint64_t *registered,
                                     uint64_t *deregistered);

/**
 * Syncs like `symmalloc_pool_sync`, but compares the ranks' histories regardless of `agree_every`.
 *
 * # Safety
 * Same as for `symmalloc_pool_sync`.
 */
symmalloc_status symmalloc_pool_agree(struct symmalloc_allocator *allocator,
                                      uint32_t pool,
                                      uint64_t *registered,
                                      uint64_t *deregistered);

/**
 * Directs the allocations that this thread makes on the device through PyTorch's entry points to the pool, until `symmalloc_scope_end`, as
 * `symmalloc_torch_push_pool` does.
 */
symmalloc_status symmalloc_scope_begin(int32_t device,
                                       uint32_t pool);

/**
 * Ends this thread's innermost scope on the device, and registers the pool's new segments: syncs all registrars of the pool like
 * `symmalloc_pool_sync`. The call is collective. During a graph capture, ranks can neither register segments nor communicate. The scope
 * then ends without a sync if there are no new segments. If there are, the call returns an error: reserve and sync before the capture.
 * `registered` and `deregistered` may be NULL.
 *
 * # Safety
 * The counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_scope_end(int32_t device,
                                     uint32_t pool,
                                     uint64_t *registered,
                                     uint64_t *deregistered);

/**
 * Creates an all-to-all-v on the registrar's communicator. This call does not communicate. `options` is a sum of
 * `SYMMALLOC_ALL_TO_ALL_...` and must be equal on every rank; 0 accepts any memory and checks nothing. Destroy the all-to-all-v before the
 * registrar.
 *
 * # Safety
 * The registrar is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_all_to_all_create(struct symmalloc_registrar *registrar,
                                             uint32_t options,
                                             struct symmalloc_all_to_all **out);

/**
 * Exchanges splits: sends the number of rows for each rank (`sent`), and writes the number of rows from each rank (`received`). All ranks
 * call this function after the splits of any rank have changed, and at no other time. Blocks the host until the exchange is done. If this
 * rank has no valid splits, pass NULL as `sent`. All ranks then return an error instead of waiting for this rank.
 *
 * # Safety
 * `all_to_all` is live; `sent` is NULL or valid for reading as many numbers as the communicator has ranks, and `received` is valid for
 * writing them.
 */
symmalloc_status symmalloc_all_to_all_exchange(struct symmalloc_all_to_all *all_to_all,
                                               const uint64_t *sent,
                                               uint64_t *received);

/**
 * Sends rows of the input to all ranks, and receives their rows in the output, in rank order. A row has `row_bytes` bytes. `sent` and
 * `received` are the numbers of rows to and from each rank. If both are NULL, each buffer is split equally among the ranks. This call does
 * not exchange splits, so every rank must already know both `sent` and `received`. A buffer may be longer than its rows. Returns after
 * submitting the work to the stream. A graph can capture the work.
 *
 * # Safety
 * `all_to_all` is live; `stream` belongs to its device and lives as long as the communicator; the buffers are memory of the device until
 * the stream has executed the call, and until then no other work writes to the buffers or reads the output; `sent` and `received` are NULL
 * or valid for reading as many numbers as the communicator has ranks.
 */
symmalloc_status symmalloc_all_to_all_run(struct symmalloc_all_to_all *all_to_all,
                                          void *stream,
                                          const void *input,
                                          size_t input_bytes,
                                          void *output,
                                          size_t output_bytes,
                                          size_t row_bytes,
                                          const uint64_t *sent,
                                          const uint64_t *received);

/**
 * Destroys an all-to-all-v. Work that was already submitted still runs. NULL has no effect.
 *
 * # Safety
 * The all-to-all-v is live and not used after this.
 */
symmalloc_status symmalloc_all_to_all_destroy(struct symmalloc_all_to_all *all_to_all);

/**
 * Compares this rank's history in symmetric pools with the histories of all other ranks. Every rank calls this function at the same point
 * of the program.
 *
 * Returns `SYMMALLOC_MISALIGNED` on every rank if histories differ. The message names the first op that differs.
 *
 * # Safety
 * `allocator` is live; `gather` meets the contract of its type with `context`.
 */
symmalloc_status symmalloc_agree(struct symmalloc_allocator *allocator,
                                 uint32_t rank,
                                 uint32_t world,
                                 symmalloc_gather_fn gather,
                                 void *context);

/**
 * Compares symmetric pools like `symmalloc_agree`, and then the heaps of all other pools. The other pools keep no history, so for them the
 * message names only the heaps that differ, not the op.
 *
 * # Safety
 * Same as for `symmalloc_agree`.
 */
symmalloc_status symmalloc_agree_all(struct symmalloc_allocator *allocator,
                                     uint32_t rank,
                                     uint32_t world,
                                     symmalloc_gather_fn gather,
                                     void *context);

/**
 * Announces to the watchdog a collective that the program itself submits on all ranks of the registrar's communicator. The program submits
 * the collective to the stream after this call and before `symmalloc_announce_end`, in the same order on every rank. In flight records, it
 * counts as one of the communicator's collectives, and it has the communicator's deadline. If a rank misses the deadline, a message on
 * standard error, a flight record and the error of the next sync name that rank.
 *
 * `kind` and `elements` are the collective's name and size in flight records. Both must be equal on every rank. If the size may differ
 * between ranks, pass 0 as `elements`.
 *
 * # Safety
 * The registrar is live; `kind` is a C string; `stream` belongs to its device and lives as long as the registrar; `out` is valid for
 * writing.
 */
symmalloc_status symmalloc_announce_begin(struct symmalloc_registrar *registrar,
                                          const char *kind,
                                          uint64_t elements,
                                          void *stream,
                                          struct symmalloc_announcement **out);

/**
 * Ends an announcement. Call it after the program has submitted the collective, or has failed to submit it. NULL has no effect.
 *
 * # Safety
 * The announcement is live and not used after this.
 */
symmalloc_status symmalloc_announce_end(struct symmalloc_announcement *announcement);

/**
 * Writes a flight record as JSON: the last collectives of each communicator, their progress, and the state of other ranks. The command
 * `symmalloc diff` compares the records of all ranks. The watchdog also writes such a record if a communicator fails, and on the signal
 * that `SYMMALLOC_FLIGHT_SIGNAL` names. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `reason` is a C string; `json` is valid for writing.
 */
symmalloc_status symmalloc_flight_record(const char *reason,
                                         char **json);

/**
 * Allocates for work on a stream, from the pool of the innermost scope. Writes a null pointer for zero bytes.
 *
 * `inherited` is the number of a scope of the thread on whose behalf this thread works, as in a backward pass, or 0. `name` is for traces,
 * snapshots and reports, or NULL. A name that the thread pushed takes precedence. Invalid UTF-8 in the name is replaced. Exceptions of the
 * filters of open scopes propagate.
 *
 * # Safety
 * The stream is one of the device's primary context and lives as long as the process; `name` is NULL or a C string; `out` is valid for
 * writing.
 */
symmalloc_status symmalloc_torch_allocate(int32_t device,
                                          void *stream,
                                          size_t bytes,
                                          uint64_t inherited,
                                          const char *name,
                                          void **out);

/**
 * Returns `true` in a process that was forked from one that used CUDA memory. There, calls that release something have no effect, and most
 * others fail.
 */
bool symmalloc_torch_is_forked(void);

/**
 * Frees an allocation. `device` is a hint. Writes the size of the block to `block_bytes`, which may be NULL. Failures are counted,
 * and standard error shows the first one, because PyTorch frees in destructors. Inside a callback, the free takes effect before the next
 * call of this thread outside of callbacks, and writes no size.
 *
 * # Safety
 * `block_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_torch_deallocate(int32_t device,
                                            void *pointer,
                                            uint64_t *block_bytes);

/**
 * Writes the properties of a live allocation on any device.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_find(const void *pointer, struct symmalloc_found *out);

/**
 * Returns the device of a live allocation; -1 if there is none.
 */
int32_t symmalloc_torch_device_of(const void *pointer);

/**
 * Returns the first byte of the segment that contains a pointer, and writes its size if `size` is not null. Returns the pointer itself if
 * no segment contains it.
 *
 * # Safety
 * `size` is null or valid for writing.
 */
void *symmalloc_torch_base_alloc(void *pointer,
                                 size_t *size);

/**
 * Records that work on another stream uses the allocation. Ignores pointers of other allocators.
 *
 * # Safety
 * The stream is one of the primary context of the pointer's device and lives as long as the process.
 */
symmalloc_status symmalloc_torch_record_use(void *pointer, void *stream);

/**
 * Releases free memory. The id (0, 0) selects all memory of all devices, except mempools in use. Any other id selects that
 * pool, if the program has released it.
 */
symmalloc_status symmalloc_torch_trim(uint64_t id_first,
                                      uint64_t id_second);

/**
 * Raises `largest` to the size of the largest block that could be allocated now. The value depends on the program's ops and the device's
 * size, and never on the memory that other processes leave free (rule D4).
 *
 * # Safety
 * `largest` is valid for reading and writing.
 */
symmalloc_status symmalloc_torch_largest_block(int32_t device,
                                               size_t *largest);

/**
 * Limits the device's memory to a fraction of its total.
 */
symmalloc_status symmalloc_torch_set_fraction(int32_t device, double fraction);

/**
 * Grants a device read and write access to the memory of `owner`.
 */
symmalloc_status symmalloc_torch_enable_peer(int32_t device, int32_t owner);

/**
 * Allocates at exactly this address, in the pool whose base the address belongs to. Writes a null pointer for zero bytes. Returns
 * `SYMMALLOC_UNKNOWN_POOL` if the address belongs to no pool with a base, and `SYMMALLOC_INVALID_STATE` if the memory there is in use, or
 * belongs to another stream.
 *
 * # Safety
 * As `symmalloc_torch_allocate`.
 */
symmalloc_status symmalloc_torch_allocate_with_address(int32_t device,
                                                       void *stream,
                                                       size_t bytes,
                                                       const void *address,
                                                       void **out);

/**
 * Directs later allocations on the streams that the filter accepts to the mempool with this id, and creates the pool if necessary.
 * Writes the number of the scope, which is above 0. `destroy` runs when the scope ends, or if the call fails.
 *
 * # Safety
 * The filter may be called with its context on any thread until `destroy` runs; `number` is valid for writing.
 */
symmalloc_status symmalloc_torch_begin_scope(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second,
                                             symmalloc_filter_fn filter,
                                             void *context,
                                             symmalloc_destroy_fn destroy,
                                             uint64_t *number);

/**
 * Returns `true` if PyTorch may have captured a graph in this process: if a scope began whose filter accepted no known stream.
 */
bool symmalloc_torch_has_captured(void);

/**
 * Ends the last scope of the mempool with this id.
 */
symmalloc_status symmalloc_torch_end_scope(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Adds a use to the mempool with this id, as PyTorch's `MemPool` does. A new pool takes its memory from the source, if there is one.
 *
 * # Safety
 * `source` is NULL or valid for reading, and its functions may be called with its context on any thread until `destroy` runs.
 */
symmalloc_status symmalloc_torch_retain_pool(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second,
                                             const struct symmalloc_source *source);

/**
 * Releases one use of the mempool with this id. After the last one, the next trim releases its memory, or an allocation that would fail
 * otherwise. Failures are counted, and standard error shows the first one, because PyTorch calls it in destructors.
 */
symmalloc_status symmalloc_torch_release_use(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second);

/**
 * Returns the number of uses of the mempool with this id, or 0 inside a callback.
 */
uint32_t symmalloc_torch_pool_uses(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Sets whether allocations outside of the mempool with this id may use its free memory before they fail. PyTorch calls it with `false`
 * in destructors.
 */
symmalloc_status symmalloc_torch_pool_helps_out(int32_t device,
                                                uint64_t id_first,
                                                uint64_t id_second,
                                                bool helps_out);

/**
 * Gives every allocation in the mempool with this id a separate segment. Call it before the first allocation.
 */
symmalloc_status symmalloc_torch_pool_unsplit(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Until `symmalloc_torch_pop_pool`, directs the allocations that this thread makes on the device without an explicit pool to this pool.
 * Calls nest. As with PyTorch's own allocator, the innermost scope applies: a pool pushed within a capture takes precedence over the
 * capture's pool, and a capture within a pushed pool's scope uses the capture's pool.
 */
symmalloc_status symmalloc_torch_push_pool(int32_t device,
                                           uint32_t pool);

/**
 * Pops the pool that this thread pushed last on the device.
 */
symmalloc_status symmalloc_torch_pop_pool(int32_t device);

/**
 * Names this thread's allocations on the device through PyTorch, for snapshots, traces and reports, until `symmalloc_torch_pop_name`.
 * Calls nest: the innermost name applies. Names do not affect placements or digests.
 *
 * # Safety
 * `name` is a C string.
 */
symmalloc_status symmalloc_torch_push_name(int32_t device,
                                           const char *name);

/**
 * Pops the name that this thread pushed last on the device.
 */
symmalloc_status symmalloc_torch_pop_name(int32_t device);

/**
 * Configures the process's allocators, instead of `SYMMALLOC_CONF`. Call it before the first use of CUDA memory.
 *
 * # Safety
 * `conf` is a C string.
 */
symmalloc_status symmalloc_torch_configure(const char *conf);

/**
 * Checks the current settings, to report their errors early.
 */
symmalloc_status symmalloc_torch_check(void);

/**
 * Writes the settings of all devices' allocators, including future ones. Release the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `text` is valid for writing.
 */
symmalloc_status symmalloc_torch_settings(char **text);

/**
 * Writes properties of the settings.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_properties(struct symmalloc_properties *out);

/**
 * Writes the counters of a device. Creates no allocator: the counters of an unused device are 0.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_counts(int32_t device, struct symmalloc_counts *out);

/**
 * Resets all peaks of a device to the current values.
 */
symmalloc_status symmalloc_torch_reset_peaks(int32_t device);

/**
 * Visits every segment and block of a device, pool by pool. With an id other than (0, 0), visits only those of one mempool.
 *
 * # Safety
 * `visit` may be called with `context` until the call returns.
 */
symmalloc_status symmalloc_torch_visit(int32_t device,
                                       uint64_t id_first,
                                       uint64_t id_second,
                                       symmalloc_visit_fn visit,
                                       void *context);

/**
 * Writes a checkpoint of the mempool with this id. Destroy it with `symmalloc_torch_checkpoint_destroy`.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_checkpoint(int32_t device,
                                            uint64_t id_first,
                                            uint64_t id_second,
                                            struct symmalloc_checkpoint **out);

/**
 * Destroys a checkpoint. NULL has no effect. Never fails, because PyTorch calls it in destructors.
 *
 * # Safety
 * The checkpoint came from `symmalloc_torch_checkpoint` and is not used after this.
 */
void symmalloc_torch_checkpoint_destroy(struct symmalloc_checkpoint *checkpoint);

/**
 * Restores exactly the allocations that the mempool had at the checkpoint. The pool keeps memory that it reserved since. Reports
 * every allocation that was live before, and then every allocation that is live after the call.
 *
 * # Safety
 * The checkpoint is live, and no other thread uses the pool; `callback` may be called with `context` until the call returns, and frees none
 * of the pool's pointers.
 */
symmalloc_status symmalloc_torch_restore(int32_t device,
                                         const struct symmalloc_checkpoint *checkpoint,
                                         symmalloc_restored_fn callback,
                                         void *context);

/**
 * Reports later mappings of memory to a listener; NULL removes it.
 *
 * # Safety
 * The function may be called on any thread for the rest of the process.
 */
void symmalloc_torch_on_memory(symmalloc_memory_fn listener);

/**
 * Exports the memory of a live allocation: writes a text with which another process can open the memory, and the allocation's offset in
 * that memory. Release the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `text` and `offset` are valid for writing.
 */
symmalloc_status symmalloc_torch_share(void *pointer,
                                       char **text,
                                       uint64_t *offset);

/**
 * Opens memory by the text that `symmalloc_torch_share` wrote in another process. Close it with `symmalloc_torch_close`.
 *
 * # Safety
 * `text` is a C string; `base` and `out` are valid for writing.
 */
symmalloc_status symmalloc_torch_open(int32_t device,
                                      const char *text,
                                      void **base,
                                      const struct symmalloc_opened **out);

/**
 * Releases one use of opened memory. After the last release, the memory is unmapped once all work of the device has completed. Never
 * fails, because PyTorch calls it in destructors.
 *
 * # Safety
 * The opened memory came from `symmalloc_torch_open` and is not used after this.
 */
void symmalloc_torch_close(const struct symmalloc_opened *opened);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SYMMALLOC_H */
