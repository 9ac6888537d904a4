/*
 * symmalloc: a deterministic caching allocator for CUDA devices. Equal programs get equal places on every rank.
 *
 * Every call returns a status, 0 when it did what it says; after anything else, symmalloc_error_message() says what
 * happened and what to do. All functions are thread-safe. Streams are CUstream or cudaStream_t; NULL is the legacy
 * default stream. A stream gets its number at its first use: use streams in the same order on every rank.
 *
 * examples/loop.c is a whole program.
 */

#ifndef SYMMALLOC_H
#define SYMMALLOC_H

/* Made by cbindgen from the Rust sources; do not edit. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SYMMALLOC_VERSION "0.1.0"

/**
 * What becomes of the bytes in live allocations: they are copied to pinned host memory, and back.
 */
#define SYMMALLOC_CONTENTS_KEEP 0

/**
 * What becomes of the bytes in live allocations: they are gone, and undefined after waking.
 */
#define SYMMALLOC_CONTENTS_DROP 1

/**
 * What becomes of the bytes in live allocations: they are zero after waking.
 */
#define SYMMALLOC_CONTENTS_ZERO 2

/**
 * The pool has its memory.
 */
#define SYMMALLOC_PHASE_AWAKE 0

/**
 * The pool sleeps: it has no memory, and all of its addresses.
 */
#define SYMMALLOC_PHASE_ASLEEP 1

/**
 * The pool sleeps, but the driver or a window holds some of its memory: another sleep tries to give that back, a wake uses it.
 */
#define SYMMALLOC_PHASE_FAILED 2

/**
 * `symmalloc_registrar_options.registration`: a symmetric window over each segment of a symmetric pool, made by all ranks together.
 */
#define SYMMALLOC_REGISTER_WINDOWS 0

/**
 * `symmalloc_registrar_options.registration`: `ncclCommRegister` for each piece of memory, which is this rank's own matter. For any
 * pool, also one whose segments grow.
 */
#define SYMMALLOC_REGISTER_BUFFERS 1

/**
 * `symmalloc_registrar_options.agree_every`: the ranks compare their histories when `symmalloc_registrar_agree` or
 * `symmalloc_pool_agree` is called, and never in a sync.
 */
#define SYMMALLOC_AGREE_BY_HAND UINT32_MAX

/**
 * An option of `symmalloc_all_to_all_create`: buffers that are not registered on the communicator are refused. NCCL moves other
 * memory through buffers of its own.
 */
#define SYMMALLOC_ALL_TO_ALL_REGISTERED 1

/**
 * An option of `symmalloc_all_to_all_create`: the ranks compare their splits before each call, and all get the same error when they
 * disagree. To find mistakes: the host waits for an exchange.
 */
#define SYMMALLOC_ALL_TO_ALL_CHECKED 2

/**
 * How a call ended. After anything but `SYMMALLOC_OK`, `symmalloc_error_message` says what happened and what to do.
 */
enum symmalloc_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * Done.
   */
  SYMMALLOC_OK = 0,
  /**
   * An argument is missing or means nothing: a null pointer, a text that is not UTF-8, a device below 0.
   */
  SYMMALLOC_INVALID_ARGUMENT = 1,
  /**
   * A configuration is not understood; the message names the byte.
   */
  SYMMALLOC_INVALID_SETTINGS = 2,
  /**
   * There is no memory within the limits, or the driver refused it.
   */
  SYMMALLOC_OUT_OF_MEMORY = 3,
  /**
   * The pointer is no live allocation of this allocator.
   */
  SYMMALLOC_UNKNOWN_POINTER = 4,
  /**
   * There is no such pool, or it was given up.
   */
  SYMMALLOC_UNKNOWN_POOL = 5,
  /**
   * libcuda cannot be used, a call of it failed, or there is no such device.
   */
  SYMMALLOC_CUDA = 6,
  /**
   * The ranks differ; the message says where.
   */
  SYMMALLOC_MISALIGNED = 7,
  /**
   * The ranks could not hear each other.
   */
  SYMMALLOC_TRANSPORT = 8,
  /**
   * libnccl cannot be used, or a call of it failed or took too long.
   */
  SYMMALLOC_NCCL = 9,
  /**
   * A file could not be read or written.
   */
  SYMMALLOC_IO = 10,
  /**
   * The call does not fit what was called before: scopes that do not nest, settings after the first allocation.
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
 * Memory of another process, as long as somebody here uses it.
 */
typedef struct symmalloc_opened symmalloc_opened;

/**
 * What a private pool held.
 */
typedef struct symmalloc_checkpoint symmalloc_checkpoint;

/**
 * One pool on one communicator.
 */
typedef struct symmalloc_registrar symmalloc_registrar;

/**
 * All-to-all-v on one communicator.
 */
typedef struct symmalloc_all_to_all symmalloc_all_to_all;

/**
 * Work that the program gives to a stream by itself, until this is dropped.
 */
typedef struct symmalloc_announcement symmalloc_announcement;

/**
 * What a sleep did.
 */
typedef struct symmalloc_slept {
  /**
   * Bytes that went back to the device.
   */
  uint64_t released_bytes;
  /**
   * Bytes that were copied to the host.
   */
  uint64_t kept_bytes;
  /**
   * Windows and buffers that were taken away.
   */
  uint64_t deregistered;
} symmalloc_slept;

/**
 * What a wake did.
 */
typedef struct symmalloc_woken {
  /**
   * Bytes that have memory again.
   */
  uint64_t remapped_bytes;
  /**
   * Windows and buffers that were made again.
   */
  uint64_t registered;
  /**
   * Windows that have another handle than before, on any rank: capture again what uses them.
   */
  uint64_t changed;
  /**
   * Communicators that ended since: register on new ones.
   */
  uint64_t lost;
} symmalloc_woken;

/**
 * What became of a step.
 */
typedef struct symmalloc_step_report {
  /**
   * Allocations in the step.
   */
  uint64_t allocations;
  /**
   * How many of them went where a plan says.
   */
  uint64_t planned;
  /**
   * Bytes of memory that the pool's plans hold.
   */
  uint64_t plan_bytes;
  /**
   * The number of the first allocation that was not as planned; `UINT64_MAX` when all were, or there is no plan.
   */
  uint64_t differs_at;
} symmalloc_step_report;

/**
 * Where an allocation lies. Equal on all ranks that ran the same program.
 */
typedef struct symmalloc_placement {
  /**
   * The pool.
   */
  uint32_t pool;
  /**
   * The stream of the heap, in the order of first use; `UINT32_MAX` where the pool's streams share.
   */
  uint32_t stream;
  /**
   * The segment, by birth ordinal in its heap.
   */
  uint64_t segment;
  /**
   * Bytes from the segment's first byte.
   */
  uint64_t offset_bytes;
  /**
   * Bytes that may be used: the request, rounded up.
   */
  uint64_t size_bytes;
  /**
   * Bytes that were asked for.
   */
  uint64_t requested_bytes;
} symmalloc_placement;

/**
 * How a pool is registered. All zero: windows, compared at every sync, with a deadline of five minutes. All ranks give the same, but
 * for `rank`.
 */
typedef struct symmalloc_registrar_options {
  /**
   * Milliseconds after which anything that waits for other ranks ends; 0: five minutes.
   */
  uint32_t deadline_ms;
  /**
   * `SYMMALLOC_REGISTER_WINDOWS` or `SYMMALLOC_REGISTER_BUFFERS`.
   */
  uint32_t registration;
  /**
   * The ranks compare their histories at every so many syncs: 0 and 1 mean each one, `SYMMALLOC_AGREE_BY_HAND` none. A sync that
   * compares nothing and finds nothing new returns at once; that ranks differ in *whether* there is something new is noticed by the
   * deadline then.
   */
  uint32_t agree_every;
  /**
   * What the program takes this rank of the communicator for. Refused when NCCL says another one.
   */
  uint32_t rank;
  /**
   * What it takes the communicator's number of ranks for; 0: neither is compared.
   */
  uint32_t world;
  /**
   * "host:port", a free port of the machine of the communicator's rank 0: there the ranks meet, and keep connections by which each
   * learns which rank died, is stopped or does not come. NULL: nothing tells which rank it is.
   */
  const char *rendezvous;
  /**
   * The communicator's name in errors and flight records; NULL: "borrowed". A pool that is on several communicators sleeps where each of
   * them has a name of its own, the same on all of its ranks and another one than that of any communicator of the job.
   */
  const char *name;
} symmalloc_registrar_options;

/**
 * Gives `len` bytes of this rank to all ranks and writes everybody's, in rank order, to `all` (world times `len` bytes). Zero
 * when it is done. It must not throw.
 */
typedef int (*symmalloc_gather_fn)(void *context, const uint8_t *mine, size_t len, uint8_t *all);

/**
 * What is known of a live allocation.
 */
typedef struct symmalloc_found {
  /**
   * Its device.
   */
  int32_t device;
  /**
   * Memory of its pool comes in segments that grow.
   */
  bool is_expandable;
  /**
   * The stream it was allocated for.
   */
  void *stream;
  /**
   * Bytes of its block.
   */
  uint64_t bytes;
  /**
   * Bytes that were asked for.
   */
  uint64_t requested_bytes;
  /**
   * PyTorch's name of its pool: (0, 0) for the default pool and those that PyTorch does not know.
   */
  uint64_t id_first;
  /**
   * Its second word.
   */
  uint64_t id_second;
} symmalloc_found;

/**
 * Says whether allocations on a stream are the scope's. May throw a C++ exception.
 */
typedef bool (*symmalloc_filter_fn)(void *context, void *stream);

/**
 * Gives up what a callback is called with.
 */
typedef void (*symmalloc_destroy_fn)(void *context);

/**
 * Functions of the program that a pool takes its memory from.
 */
typedef struct symmalloc_source {
  /**
   * Device memory, or NULL where there is none.
   */
  void *(*allocate)(void *context, size_t bytes);
  /**
   * Takes it back.
   */
  void (*free)(void *context, void *pointer);
  /**
   * What they are called with.
   */
  void *context;
  /**
   * Gives the context up, when the pool and its memory are gone.
   */
  symmalloc_destroy_fn destroy;
} symmalloc_source;

/**
 * A quantity over time.
 */
typedef struct symmalloc_stat {
  /**
   * Now.
   */
  uint64_t current;
  /**
   * The most since peaks were reset.
   */
  uint64_t peak;
  /**
   * Everything that was ever added.
   */
  uint64_t allocated;
  /**
   * Everything that was ever taken away.
   */
  uint64_t freed;
} symmalloc_stat;

/**
 * What a device's allocators counted, those over memory of the program's included. Of three, the first is all, then small blocks,
 * then large ones.
 */
typedef struct symmalloc_counts {
  /**
   * Number of allocations.
   */
  struct symmalloc_stat allocations[3];
  /**
   * Bytes of their blocks.
   */
  struct symmalloc_stat allocated_bytes[3];
  /**
   * Bytes that were asked for.
   */
  struct symmalloc_stat requested_bytes[3];
  /**
   * Device memory held, in all.
   */
  struct symmalloc_stat reserved_bytes;
  /**
   * Live segments.
   */
  uint64_t segments;
  /**
   * Segments born so far.
   */
  uint64_t segments_born;
  /**
   * Free blocks.
   */
  uint64_t free_blocks;
  /**
   * Allocations that were tried again.
   */
  uint64_t retries;
  /**
   * Allocations that failed.
   */
  uint64_t failures;
  /**
   * The limit over all pools; 0: none.
   */
  uint64_t limit_bytes;
  /**
   * Bytes that the device has.
   */
  uint64_t total_bytes;
} symmalloc_counts;

/**
 * A contiguous part of a segment.
 */
typedef struct symmalloc_segment {
  /**
   * Its first byte.
   */
  uint64_t address;
  /**
   * Its bytes.
   */
  uint64_t bytes;
  /**
   * The stream of its heap; that of its first allocation where streams share, or NULL.
   */
  void *stream;
  /**
   * PyTorch's name of the pool: (0, 0) for the default pool.
   */
  uint64_t id_first;
  /**
   * Its second word.
   */
  uint64_t id_second;
  /**
   * It can grow.
   */
  bool is_expandable;
  /**
   * It serves large requests, or all.
   */
  bool is_large;
} symmalloc_segment;

/**
 * A block of the segment that came before it.
 */
typedef struct symmalloc_block {
  /**
   * Its first byte.
   */
  uint64_t address;
  /**
   * Its bytes.
   */
  uint64_t bytes;
  /**
   * Bytes that were asked for; 0 for a free block.
   */
  uint64_t requested_bytes;
  /**
   * It is a live allocation.
   */
  bool is_allocated;
} symmalloc_block;

/**
 * Is told of a segment (`block` NULL), then of its blocks (`segment` NULL).
 */
typedef void (*symmalloc_visit_fn)(void *context,
                                   const struct symmalloc_segment *segment,
                                   const struct symmalloc_block *block);

/**
 * Is told of an allocation: of one that was live before (`is_live` 0), and then of those that are live now (1).
 */
typedef void (*symmalloc_restored_fn)(void *context, void *pointer, uint64_t requested_bytes, uint32_t is_live);

/**
 * Is told of memory that was mapped (`is_mapped` 1), and of memory before it goes (0). Called under a heap's lock: a call of
 * this library that it makes is an error.
 */
typedef void (*symmalloc_memory_fn)(int32_t device, uint32_t is_mapped, uint64_t address, uint64_t bytes);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The message of the calling thread's last failure; empty if there was none. It stays until this thread's next failure.
 */
const char *symmalloc_error_message(void);

/**
 * The library's version, as in its package.
 */
const char *symmalloc_version(void);

/**
 * Makes the allocator of a device. `conf` is a text as in SYMMALLOC_CONF; NULL: the defaults.
 *
 * # Safety
 * `conf` is NULL or a C string; `out` is valid for writing.
 */
symmalloc_status symmalloc_create(int32_t device, const char *conf, struct symmalloc_allocator **out);

/**
 * Ends an allocator that `symmalloc_create` made. All of its memory goes back, live allocations included. NULL is no op.
 *
 * # Safety
 * The allocator is used by nobody else and not after this; work on its memory is done; it has no registrar.
 */
symmalloc_status symmalloc_destroy(struct symmalloc_allocator *allocator);

/**
 * Allocates from a pool for work on a stream. Zero bytes are a null pointer.
 *
 * # Safety
 * `allocator` is live; the stream is one of the device's primary context and lives as long as the allocator; `out` is valid for
 * writing.
 */
symmalloc_status symmalloc_allocate(struct symmalloc_allocator *allocator,
                                    uint32_t pool,
                                    size_t bytes,
                                    void *stream,
                                    void **out);

/**
 * As `symmalloc_allocate`, with a name for snapshots and reports.
 *
 * # Safety
 * As `symmalloc_allocate`; `name` is NULL or a C string.
 */
symmalloc_status symmalloc_allocate_named(struct symmalloc_allocator *allocator,
                                          uint32_t pool,
                                          size_t bytes,
                                          void *stream,
                                          const char *name,
                                          void **out);

/**
 * Frees an allocation: other work may use the memory at once, ordered behind this one's uses on the device. NULL is no op.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_free(struct symmalloc_allocator *allocator,
                                void *pointer);

/**
 * Tells that work on another stream uses the allocation, too. Whoever takes the memory after the free waits for it on the
 * device.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_record_use(struct symmalloc_allocator *allocator,
                                      void *pointer,
                                      void *stream);

/**
 * Allocates memory for work on any stream, now or later: for callers that know no stream. It comes from a pool of its own. Free it
 * with `symmalloc_free_unordered`. Zero bytes are a null pointer.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_allocate_unordered(struct symmalloc_allocator *allocator,
                                              size_t bytes,
                                              void **out);

/**
 * Frees an allocation when all work that was given to the device so far is done. Blocks until then, as cuMemFree does. NULL is no
 * op. Fails while a stream is captured; the allocation is live then.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_free_unordered(struct symmalloc_allocator *allocator,
                                          void *pointer);

/**
 * Frees an allocation behind the work that was given to this stream so far, whatever stream it was allocated for: for callers that
 * name the stream of a free. What came from `symmalloc_allocate_unordered` is freed as by `symmalloc_free_unordered`. NULL is no op.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_free_on(struct symmalloc_allocator *allocator,
                                   void *pointer,
                                   void *stream);

/**
 * Says that sessions of ONNX Runtime on this device work on this stream alone: its `user_compute_stream`. From then on its memory
 * is ordered by the stream, and `symmalloc_ort_free` does not wait. Without it, memory is as from `symmalloc_allocate_unordered`.
 *
 * # Safety
 * The stream is one of the device's primary context and lives as long as the process.
 */
symmalloc_status symmalloc_ort_use_stream(int32_t device,
                                          void *stream);

/**
 * ONNX Runtime's `gpu_external_alloc`. Allocates on the device whose context is current, from the allocator that PyTorch's entry
 * points use. NULL when there is no memory, which ONNX Runtime makes an error of; what happened is on the error output once, and in
 * the statistics.
 */
void *symmalloc_ort_alloc(size_t bytes);

/**
 * ONNX Runtime's `gpu_external_free`. Blocks until the device is idle, unless the memory was allocated for a stream that
 * `symmalloc_ort_use_stream` named. What fails is counted, and once written to the error output.
 *
 * # Safety
 * The pointer is NULL, or came from `symmalloc_ort_alloc` and is not used by work that is submitted after this.
 */
void symmalloc_ort_free(void *pointer);

/**
 * ONNX Runtime's `gpu_external_empty_cache`: gives free memory of all devices back. Waits for streams that used it.
 */
void symmalloc_ort_empty_cache(void);

/**
 * Makes a pool with a policy of its own, the keys of a pool as in SYMMALLOC_CONF. NULL: as the default pool, but private.
 * Make pools in the same order on every rank.
 *
 * # Safety
 * `allocator` is live; `conf` is NULL or a C string; `out` is valid for writing.
 */
symmalloc_status symmalloc_pool_create(struct symmalloc_allocator *allocator,
                                       const char *conf,
                                       uint32_t *out);

/**
 * Gives a pool up. Nothing can be allocated in it any more; its memory goes back with the first trim after its last
 * allocation was freed.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_pool_destroy(struct symmalloc_allocator *allocator,
                                        uint32_t pool);

/**
 * Brings the device memory that a stream has in a pool to at least so many bytes, so that later allocations find it.
 *
 * # Safety
 * As `symmalloc_allocate`.
 */
symmalloc_status symmalloc_reserve(struct symmalloc_allocator *allocator,
                                   uint32_t pool,
                                   void *stream,
                                   size_t bytes);

/**
 * Gives the free memory of all pools back to the device, but not that of private pools that a graph uses. Waits for streams
 * that used it. `released_bytes` may be NULL.
 *
 * # Safety
 * `allocator` is live; `released_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_trim(struct symmalloc_allocator *allocator,
                                uint64_t *released_bytes);

/**
 * Lets another device read and write the allocator's memory: what there is, and what will be.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_grant_access(struct symmalloc_allocator *allocator, int32_t peer);

/**
 * Puts a pool to sleep: its memory goes back to the device, and its addresses, allocations and graphs stay what they are, to be used when
 * it is awake again. Waits for the device. `contents` is one of `SYMMALLOC_CONTENTS_...`. Until it wakes nothing may use the pool's memory,
 * and no graph that uses it may be launched; allocating from it is an error, and freeing is not.
 *
 * A pool with registrars sleeps on all ranks together: call it at the same point on every rank, once no collective in its windows is
 * running. Its windows go first. The ranks talk over the communicator with the most ranks, of those the one that was registered last; it
 * must have all ranks of all others. `out` may be NULL.
 *
 * # Safety
 * `allocator` is live; `out` is NULL or valid for writing.
 */
symmalloc_status symmalloc_sleep(struct symmalloc_allocator *allocator,
                                 uint32_t pool,
                                 uint32_t contents,
                                 struct symmalloc_slept *out);

/**
 * Wakes a pool: it has memory at the addresses that it had, with what was kept. `SYMMALLOC_OUT_OF_MEMORY` where the device has no
 * room: it sleeps on, nothing is lost, and another call may succeed. A pool with registrars wakes on all ranks or on none, and has its
 * windows again. `out` may be NULL.
 *
 * # Safety
 * As `symmalloc_sleep`.
 */
symmalloc_status symmalloc_wake(struct symmalloc_allocator *allocator,
                                uint32_t pool,
                                struct symmalloc_woken *out);

/**
 * As `symmalloc_sleep`, for the pools whose configuration has the tag (`tag:weights`), in the order in which they were made. When one of
 * them fails, those before it sleep: another call goes on. `SYMMALLOC_UNKNOWN_POOL` when there are none.
 *
 * # Safety
 * As `symmalloc_sleep`; `tag` is a C string.
 */
symmalloc_status symmalloc_sleep_tagged(struct symmalloc_allocator *allocator,
                                        const char *tag,
                                        uint32_t contents,
                                        struct symmalloc_slept *out);

/**
 * As `symmalloc_wake`, for the pools whose configuration has the tag, in the order in which they were made. When one of them fails, those
 * before it are awake: another call goes on. `SYMMALLOC_UNKNOWN_POOL` when there are none.
 *
 * # Safety
 * As `symmalloc_sleep`; `tag` is a C string.
 */
symmalloc_status symmalloc_wake_tagged(struct symmalloc_allocator *allocator,
                                       const char *tag,
                                       struct symmalloc_woken *out);

/**
 * Whether a pool is awake: writes one of `SYMMALLOC_PHASE_...`.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_phase(struct symmalloc_allocator *allocator, uint32_t pool, uint32_t *out);

/**
 * Makes a pool with a quota hold so many bytes, rounded up to granules: no more and no less, whatever is allocated and freed in it until
 * the next call. A pool has a quota where it was made with `growth_mb:0,streams:shared`; `range_mb` is the most that it can hold. It holds
 * nothing at first. Live allocations stay where they are; `SYMMALLOC_INVALID_STATE` when they need more than that, and then the pool is as
 * it was. A pool that gets smaller waits for the streams that used its free memory. `held_bytes` may be NULL.
 *
 * # Safety
 * As `symmalloc_allocate`; `held_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_resize(struct symmalloc_allocator *allocator,
                                  uint32_t pool,
                                  void *stream,
                                  size_t bytes,
                                  uint64_t *held_bytes);

/**
 * Obtains pinned host memory for what pools will keep while they sleep, so that the first sleep does not: that takes much longer than
 * copying.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_reserve_host_memory(struct symmalloc_allocator *allocator,
                                               size_t bytes);

/**
 * Gives pinned host memory back that no sleeping pool needs. `released_bytes` may be NULL.
 *
 * # Safety
 * `allocator` is live; `released_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_release_host_memory(struct symmalloc_allocator *allocator,
                                               uint64_t *released_bytes);

/**
 * A step of a pool begins: what the program repeats, such as a training step. In a pool with `plan:learn` a step that comes twice
 * alike is planned when it ends, and later ones follow the plan. `key` says which steps are alike; 0 when all are. Call it at the
 * same point on every rank, while no other thread uses the pool and no stream is captured.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_step_begin(struct symmalloc_allocator *allocator,
                                      uint32_t pool,
                                      uint64_t key);

/**
 * The step of a pool ends. `out` may be NULL.
 *
 * # Safety
 * `allocator` is live; `out` is NULL or valid for writing.
 */
symmalloc_status symmalloc_step_end(struct symmalloc_allocator *allocator,
                                    uint32_t pool,
                                    struct symmalloc_step_report *out);

/**
 * Adopts the plans that a file of `symmalloc plan -o FILE` has for a pool, plain or compressed. Later steps of their keys follow
 * them. Streams have the numbers of their first use, so use each stream once before. `count` may be NULL; it says how many plans
 * there are.
 *
 * # Safety
 * `allocator` is live; `path` is a C string; `count` is NULL or valid for writing.
 */
symmalloc_status symmalloc_plans_adopt(struct symmalloc_allocator *allocator,
                                       uint32_t pool,
                                       const char *path,
                                       uint32_t *count);

/**
 * Gives the plans of a pool up. What they placed stays where it is.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_plans_drop(struct symmalloc_allocator *allocator, uint32_t pool);

/**
 * Where a live allocation lies.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_placement_of(struct symmalloc_allocator *allocator,
                                        const void *pointer,
                                        struct symmalloc_placement *out);

/**
 * Everything that is counted, as JSON. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `json` is valid for writing.
 */
symmalloc_status symmalloc_stats_json(struct symmalloc_allocator *allocator, char **json);

/**
 * Starts all peaks anew at the current values.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_reset_peaks(struct symmalloc_allocator *allocator);

/**
 * The history of a pool as one number: equal on two ranks exactly when their ops and placements in it are.
 *
 * # Safety
 * `allocator` is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_digest(struct symmalloc_allocator *allocator, uint32_t pool, uint64_t *out);

/**
 * What the allocator holds now, as a pickle in the form of PyTorch's memory snapshots. Free the bytes with
 * `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `bytes` and `len` are valid for writing.
 */
symmalloc_status symmalloc_snapshot(struct symmalloc_allocator *allocator, uint8_t **bytes, size_t *len);

/**
 * The live allocations, largest first, for people. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `text` is valid for writing.
 */
symmalloc_status symmalloc_leak_report(struct symmalloc_allocator *allocator, char **text);

/**
 * The settings as canonical text: every value that is set, defaults too. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `allocator` is live; `text` is valid for writing.
 */
symmalloc_status symmalloc_config(struct symmalloc_allocator *allocator,
                                  char **text);

/**
 * Frees what another call handed out. NULL is no op.
 *
 * # Safety
 * It was handed out by this library and is not used after this.
 */
void symmalloc_release_bytes(void *bytes);

/**
 * Records every op from now on to a file, as text, or compressed where its name ends in `.zst` or `.gz`: what `symmalloc replay`
 * reads. Begin before the first allocation, while no other thread uses the allocator. Ops take longer meanwhile.
 *
 * # Safety
 * `allocator` is live; `path` is a C string.
 */
symmalloc_status symmalloc_trace_start(struct symmalloc_allocator *allocator,
                                       const char *path);

/**
 * Ends the recording. What was recorded is on disk then. Ending the allocator does the same.
 *
 * # Safety
 * `allocator` is live.
 */
symmalloc_status symmalloc_trace_stop(struct symmalloc_allocator *allocator);

/**
 * Attaches a symmetric pool to a communicator that other code owns. Nothing is registered before the first sync. Every rank
 * of the communicator calls it. Anything that waits for other ranks ends after `deadline_ms` milliseconds; 0: after
 * five minutes. `rendezvous` is as in `symmalloc_registrar_options`.
 *
 * # Safety
 * `rendezvous` is a C string or NULL; `allocator` is live; `nccl_comm` is a live and ready `ncclComm_t` on its device, of the NCCL library of this process, which
 * lives until the registrar is destroyed and is not used by other threads while a call of this library uses it; `out` is valid
 * for writing.
 */
symmalloc_status symmalloc_registrar_create(struct symmalloc_allocator *allocator,
                                            uint32_t pool,
                                            void *nccl_comm,
                                            uint32_t deadline_ms,
                                            const char *rendezvous,
                                            struct symmalloc_registrar **out);

/**
 * As `symmalloc_registrar_create`, for any kind of registration, agreement and name.
 *
 * # Safety
 * As `symmalloc_registrar_create`; `options` is valid for reading, and its texts are C strings or NULL.
 */
symmalloc_status symmalloc_registrar_create_with(struct symmalloc_allocator *allocator,
                                                 uint32_t pool,
                                                 void *nccl_comm,
                                                 const struct symmalloc_registrar_options *options,
                                                 struct symmalloc_registrar **out);

/**
 * Registers new segments of the pool and deregisters dead ones, on every rank of the communicator, after the ranks have
 * compared what they did. Both counts may be NULL.
 *
 * # Safety
 * The registrar is live; the counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_registrar_sync(struct symmalloc_registrar *registrar,
                                          uint64_t *registered,
                                          uint64_t *deregistered);

/**
 * As `symmalloc_registrar_sync`, and the ranks compare their histories also where `agree_every` would not have it.
 *
 * # Safety
 * As `symmalloc_registrar_sync`.
 */
symmalloc_status symmalloc_registrar_agree(struct symmalloc_registrar *registrar,
                                           uint64_t *registered,
                                           uint64_t *deregistered);

/**
 * What NCCL says of the registrar's communicator: this rank, and how many ranks there are.
 *
 * # Safety
 * The registrar is live; `rank` and `world` are valid for writing.
 */
symmalloc_status symmalloc_registrar_rank(struct symmalloc_registrar *registrar,
                                          uint32_t *rank,
                                          uint32_t *world);

/**
 * The window that all of these bytes lie in, an `ncclWindow_t` of the registrar's communicator, and where they begin in it: at the
 * same offset on every rank. `SYMMALLOC_INVALID_STATE` when they are in none.
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
 * Deregisters everything, on every rank of the communicator, and lets go of it. NULL is no op. The registrar is gone also when
 * an error is returned.
 *
 * # Safety
 * The registrar is live and not used after this.
 */
symmalloc_status symmalloc_registrar_destroy(struct symmalloc_registrar *registrar);

/**
 * Syncs all registrars of a pool, in the order in which they were made, which is the same on every rank. When one fails, the others
 * are synced all the same, since their ranks wait for this one; the first error is returned. Both counts may be NULL.
 *
 * # Safety
 * `allocator` is live; the counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_pool_sync(struct symmalloc_allocator *allocator,
                                     uint32_t pool,
                                     uint64_t *registered,
                                     uint64_t *deregistered);

/**
 * As `symmalloc_pool_sync`, and the ranks compare their histories.
 *
 * # Safety
 * As `symmalloc_pool_sync`.
 */
symmalloc_status symmalloc_pool_agree(struct symmalloc_allocator *allocator,
                                      uint32_t pool,
                                      uint64_t *registered,
                                      uint64_t *deregistered);

/**
 * What this thread allocates through PyTorch's entry points on the device goes to the pool until `symmalloc_scope_end`, as by
 * `symmalloc_torch_push_pool`.
 */
symmalloc_status symmalloc_scope_begin(int32_t device,
                                       uint32_t pool);

/**
 * Ends the scope that this thread began last on the device, and syncs all registrars of the pool, as `symmalloc_pool_sync`: what was
 * allocated inside is registered then. Every rank does the same. While a graph is captured nothing can be registered and the ranks
 * cannot talk: the scope ends quietly when it finds nothing new, and with an error otherwise. Reserve and sync before the capture.
 * Both counts may be NULL.
 *
 * # Safety
 * The counts are NULL or valid for writing.
 */
symmalloc_status symmalloc_scope_end(int32_t device,
                                     uint32_t pool,
                                     uint64_t *registered,
                                     uint64_t *deregistered);

/**
 * Makes an all-to-all-v on the registrar's communicator. Talks to no rank. `options` is a sum of `SYMMALLOC_ALL_TO_ALL_...`, the same
 * on every rank; 0: any memory, no checks. Destroy it before the registrar.
 *
 * # Safety
 * The registrar is live; `out` is valid for writing.
 */
symmalloc_status symmalloc_all_to_all_create(struct symmalloc_registrar *registrar,
                                             uint32_t options,
                                             struct symmalloc_all_to_all **out);

/**
 * Tells all ranks how many rows this one sends to each (`sent`, by rank), and writes how many it receives from each (`received`, by
 * rank). All ranks call it: when the splits of any of them changed, and at no other time. The host waits for the answer. `sent` NULL:
 * this rank has no splits to tell, and all ranks get an error for it, in place of waiting.
 *
 * # Safety
 * `all_to_all` is live; `sent` is NULL or valid for reading as many numbers as the communicator has ranks, and `received` is valid for
 * writing them.
 */
symmalloc_status symmalloc_all_to_all_exchange(struct symmalloc_all_to_all *all_to_all,
                                               const uint64_t *sent,
                                               uint64_t *received);

/**
 * Sends the input's rows to all ranks and receives theirs in the output, in rank order. A row is `row_bytes` bytes; `sent` and
 * `received` say how many rows go to and come from each rank. Both NULL: equal parts of both whole buffers. Nothing is exchanged: every
 * rank knows both. A buffer may be longer than its rows. Returns when the work is in the stream; it can be captured in a graph.
 *
 * # Safety
 * `all_to_all` is live; `stream` is one of its device and lives as long as the communicator; the buffers are memory of the device
 * until the stream is past the call, and nothing else writes them or reads the output until then; `sent` and `received` are NULL or
 * valid for reading as many numbers as the communicator has ranks.
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
 * Gives it up. What is in streams is carried out. NULL is no op.
 *
 * # Safety
 * It is live and not used after this.
 */
symmalloc_status symmalloc_all_to_all_destroy(struct symmalloc_all_to_all *all_to_all);

/**
 * Compares this rank's history in symmetric pools with all other ranks'. Every rank calls it, at the same point of its program.
 *
 * `SYMMALLOC_MISALIGNED` when they differ: on every rank, and the message names the first op that differs.
 *
 * # Safety
 * `allocator` is live; `gather` does what its type says with `context`.
 */
symmalloc_status symmalloc_agree(struct symmalloc_allocator *allocator,
                                 uint32_t rank,
                                 uint32_t world,
                                 symmalloc_gather_fn gather,
                                 void *context);

/**
 * As `symmalloc_agree`, and then compares the heaps of all other pools, whose histories nobody keeps: the message names the
 * heaps that differ.
 *
 * # Safety
 * As `symmalloc_agree`.
 */
symmalloc_status symmalloc_agree_all(struct symmalloc_allocator *allocator,
                                     uint32_t rank,
                                     uint32_t world,
                                     symmalloc_gather_fn gather,
                                     void *context);

/**
 * Tells the watchdog of work that the program gives to a stream by itself and that all ranks of the registrar's communicator give
 * alike: a collective of the library that owns it. The program gives it to the stream after this and before
 * `symmalloc_announce_end`, in the same order on every rank. It is numbered among the communicator's collectives in flight records,
 * and has its deadline: a rank that does not come is named on stderr, in a flight record and at the next sync.
 *
 * `kind` says what it is, and `elements` how large, as in flight records: the same on every rank; 0 where ranks may differ.
 *
 * # Safety
 * The registrar is live; `kind` is a C string; `stream` is one of its device and lives as long as the registrar; `out` is valid for
 * writing.
 */
symmalloc_status symmalloc_announce_begin(struct symmalloc_registrar *registrar,
                                          const char *kind,
                                          uint64_t elements,
                                          void *stream,
                                          struct symmalloc_announcement **out);

/**
 * What was announced is in its stream, or the program failed to give it to it. NULL is no op.
 *
 * # Safety
 * The announcement is live and not used after this.
 */
symmalloc_status symmalloc_announce_end(struct symmalloc_announcement *announcement);

/**
 * What this process knows of its communicators: the last collectives of each, how far it is with them, and what became of other
 * ranks. JSON, which `symmalloc diff` takes from all ranks. A record is also written when a communicator fails, and at the signal
 * that `SYMMALLOC_FLIGHT_SIGNAL` names. Free the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `reason` is a C string; `json` is valid for writing.
 */
symmalloc_status symmalloc_flight_record(const char *reason,
                                         char **json);

/**
 * Allocates for work on a stream; PyTorch's `alloc_fn`. Zero bytes are a null pointer.
 *
 * Throws `c10::OutOfMemoryError` when there is no memory, and `c10::Error` when anything else is wrong.
 *
 * # Safety
 * The stream is one of the device's primary context and lives as long as the process.
 */
void *symmalloc_torch_alloc(ptrdiff_t size, int device, void *stream);

/**
 * Frees; PyTorch's `free_fn`. Never throws: what fails is counted, logged, and once written to the error output.
 *
 * # Safety
 * None: a pointer that is no live allocation of the device is an error.
 */
void symmalloc_torch_free(void *pointer,
                          ptrdiff_t _size,
                          int device,
                          void *_stream);

/**
 * PyTorch begins to use CUDA. Allocators are made when they are needed; what is wrong with the settings shows here.
 *
 * # Safety
 * None.
 */
void symmalloc_torch_init(int _device_count);

/**
 * Gives free memory of all devices back: `torch.cuda.empty_cache()`. Memory of private pools that a graph uses stays.
 *
 * # Safety
 * None.
 */
void symmalloc_torch_reset(void);

/**
 * Limits the device's memory: `torch.cuda.set_per_process_memory_fraction(fraction, device)`.
 *
 * # Safety
 * None.
 */
void symmalloc_torch_memory_fraction(double fraction, int device);

/**
 * The segment that a pointer lies in: its first byte, and its size if `size` is not null. What is in no segment is its own
 * base.
 *
 * # Safety
 * `size` is null or valid for writing.
 */
void *symmalloc_torch_base_alloc(void *pointer,
                                 size_t *size);

/**
 * `tensor.record_stream(stream)`. A pointer that no allocator of this process gave is passed over, as PyTorch does.
 *
 * # Safety
 * The stream is one of the primary context of the pointer's device and lives as long as the process.
 */
void symmalloc_torch_record_stream(void *pointer,
                                   void *stream);

/**
 * From now on allocations on the streams that the filter takes come from the private pool of this id, which is made if there
 * is none. The id's two words come as PyTorch's `MempoolId_t` does, in two registers.
 *
 * # Safety
 * `filter` is null or points to a living `std::function<bool(cudaStream_t)>` of libstdc++.
 */
void symmalloc_torch_begin_allocate_to_pool(int device,
                                            uint64_t id_first,
                                            uint64_t id_second,
                                            void *filter);

/**
 * Ends what was begun last for the private pool of this id.
 *
 * # Safety
 * None.
 */
void symmalloc_torch_end_allocate_to_pool(int device, uint64_t id_first, uint64_t id_second);

/**
 * Gives up one use of the private pool of this id. After the last its memory goes back with the next `empty_cache`, or before
 * an allocation fails.
 *
 * # Safety
 * None.
 */
void symmalloc_torch_release_pool(int device,
                                  uint64_t id_first,
                                  uint64_t id_second);

/**
 * Settings for the allocators behind the entry points, in place of `SYMMALLOC_CONF`: before the first use of CUDA memory.
 *
 * # Safety
 * `conf` is a C string.
 */
symmalloc_status symmalloc_torch_configure(const char *conf);

/**
 * The allocator behind the entry points for a device. It is made if there is none, and belongs to the library: do not destroy
 * it.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_allocator(int32_t device,
                                           struct symmalloc_allocator **out);

/**
 * Sends what this thread allocates on the device without naming a pool to this one, until [`symmalloc_torch_pop_pool`].
 * Nests. As with PyTorch's own allocator, what was opened last wins: a pool pushed within a capture comes before the
 * capture's, and a capture within the scope of a pushed pool has its own memory.
 */
symmalloc_status symmalloc_torch_push_pool(int32_t device,
                                           uint32_t pool);

/**
 * Takes back this thread's last pushed pool on the device.
 */
symmalloc_status symmalloc_torch_pop_pool(int32_t device);

/**
 * Names what this thread allocates on the device through PyTorch, for snapshots, traces and reports, until
 * [`symmalloc_torch_pop_name`]. Nests: the last name holds. Names change no placement and no digest.
 *
 * # Safety
 * `name` is a C string.
 */
symmalloc_status symmalloc_torch_push_name(int32_t device, const char *name);

/**
 * Takes back this thread's last pushed name on the device.
 */
symmalloc_status symmalloc_torch_pop_name(int32_t device);

/**
 * Allocates for work on a stream, where the scopes say. Zero bytes are a null pointer.
 *
 * `inherited` is the number of a scope for whose thread this one works, as a backward pass does, or 0. What the filters of open
 * scopes throw passes through.
 *
 * # Safety
 * The stream is one of the device's primary context and lives as long as the process; `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_allocate(int32_t device,
                                          size_t bytes,
                                          void *stream,
                                          uint64_t inherited,
                                          void **out);

/**
 * As `symmalloc_torch_allocate`, with a name for traces, snapshots and reports. A name that the thread pushed wins. What is no UTF-8 is
 * replaced; NULL is no name.
 *
 * # Safety
 * As `symmalloc_torch_allocate`, and `name` is NULL or a C string.
 */
symmalloc_status symmalloc_torch_allocate_named(int32_t device,
                                                size_t bytes,
                                                void *stream,
                                                uint64_t inherited,
                                                const char *name,
                                                void **out);

/**
 * Frees. `device` is where the pointer probably is, and `block_bytes`, which may be NULL, becomes the size of its block. What fails
 * is counted, and the first failure is written to the error output, as PyTorch frees in destructors.
 *
 * # Safety
 * `block_bytes` is NULL or valid for writing.
 */
symmalloc_status symmalloc_torch_deallocate(int32_t device,
                                            void *pointer,
                                            uint64_t *block_bytes);

/**
 * What is known of a live allocation, on whichever device.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_find(const void *pointer, struct symmalloc_found *out);

/**
 * The device of a live allocation, or -1.
 */
int32_t symmalloc_torch_device_of(const void *pointer);

/**
 * Work on another stream uses the allocation, too. A pointer that no allocator of this process gave is passed over.
 *
 * # Safety
 * The stream is one of the primary context of the pointer's device and lives as long as the process.
 */
symmalloc_status symmalloc_torch_record_use(void *pointer,
                                            void *stream);

/**
 * Gives free memory back: of all devices where the id is (0, 0), memory of private pools in use excepted; otherwise that of the
 * private pool of this id, if it was released.
 */
symmalloc_status symmalloc_torch_trim(uint64_t id_first,
                                      uint64_t id_second);

/**
 * Raises `largest` to the largest block that there could be now. It follows from what the program did and from the device's size,
 * never from what other processes left free (rule D4).
 *
 * # Safety
 * `largest` is valid for reading and writing.
 */
symmalloc_status symmalloc_torch_largest_block(int32_t device,
                                               size_t *largest);

/**
 * Limits the device's memory to a share of what it has.
 */
symmalloc_status symmalloc_torch_set_fraction(int32_t device, double fraction);

/**
 * Lets a device read and write the memory of another one.
 */
symmalloc_status symmalloc_torch_enable_peer(int32_t device, int32_t owner);

/**
 * Reads the settings that hold, to find their errors early.
 */
symmalloc_status symmalloc_torch_check(void);

/**
 * The settings of all devices' allocators, also of those that were not made yet. Release the text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `text` is valid for writing.
 */
symmalloc_status symmalloc_torch_settings(char **text);

/**
 * From now on allocations on the streams that the filter takes come from the private pool of this id, which is made if there is
 * none. Writes the number of the scope, above 0. The filter is given up when the scope ends, or when the call fails.
 *
 * # Safety
 * The filter may be called with its context on any thread until it is given up; `number` is valid for writing.
 */
symmalloc_status symmalloc_torch_begin_scope(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second,
                                             symmalloc_filter_fn filter,
                                             void *context,
                                             symmalloc_destroy_fn destroy,
                                             uint64_t *number);

/**
 * Ends what was begun last for the private pool of this id.
 */
symmalloc_status symmalloc_torch_end_scope(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Takes the private pool of this id into use, as a `MemPool` of PyTorch's. With a source, its memory comes from there, where the
 * pool is new.
 *
 * # Safety
 * `source` is NULL or valid for reading, and its functions may be called with its context on any thread until that is given up.
 */
symmalloc_status symmalloc_torch_retain_pool(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second,
                                             const struct symmalloc_source *source);

/**
 * Gives up one use of the private pool of this id. After the last its memory goes back with the next trim, or before an allocation
 * fails.
 */
symmalloc_status symmalloc_torch_release_use(int32_t device,
                                             uint64_t id_first,
                                             uint64_t id_second);

/**
 * How many uses the private pool of this id has.
 */
uint32_t symmalloc_torch_pool_uses(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Says whether the free memory of the private pool of this id serves allocations outside of it, before they fail.
 */
symmalloc_status symmalloc_torch_pool_helps_out(int32_t device,
                                                uint64_t id_first,
                                                uint64_t id_second,
                                                bool helps_out);

/**
 * Gives every allocation in the private pool of this id a segment of its own. Before the first of them.
 */
symmalloc_status symmalloc_torch_pool_unsplit(int32_t device, uint64_t id_first, uint64_t id_second);

/**
 * Everything that is counted of a device. Makes no allocator: what was never used is all 0.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_counts(int32_t device, struct symmalloc_counts *out);

/**
 * Starts all peaks of a device anew at the current values.
 */
symmalloc_status symmalloc_torch_reset_peaks(int32_t device);

/**
 * Tells of every segment and block of a device, by pool; of one private pool where the id is not (0, 0).
 *
 * # Safety
 * `visit` may be called with `context` until the call returns. It must not use the allocator.
 */
symmalloc_status symmalloc_torch_visit(int32_t device,
                                       uint64_t id_first,
                                       uint64_t id_second,
                                       symmalloc_visit_fn visit,
                                       void *context);

/**
 * Notes what the private pool of this id holds. Destroy it with `symmalloc_torch_checkpoint_destroy`.
 *
 * # Safety
 * `out` is valid for writing.
 */
symmalloc_status symmalloc_torch_checkpoint(int32_t device,
                                            uint64_t id_first,
                                            uint64_t id_second,
                                            struct symmalloc_checkpoint **out);

/**
 * Gives a checkpoint up. NULL is no op.
 *
 * # Safety
 * It came from `symmalloc_torch_checkpoint` and is not used after this.
 */
void symmalloc_torch_checkpoint_destroy(struct symmalloc_checkpoint *checkpoint);

/**
 * The private pool holds again what it held at the checkpoint, and nothing else; memory obtained since stays. Tells first of every
 * allocation that was live, then of every one that is.
 *
 * # Safety
 * The checkpoint is live, and no other thread uses the pool; `told` may be called with `context` until the call returns, and must
 * not use the allocator.
 */
symmalloc_status symmalloc_torch_restore(int32_t device,
                                         const struct symmalloc_checkpoint *checkpoint,
                                         symmalloc_restored_fn told,
                                         void *context);

/**
 * Tells of memory from now on; NULL ends it.
 *
 * # Safety
 * The function may be called on any thread for the rest of the process.
 */
void symmalloc_torch_on_memory(symmalloc_memory_fn listener);

/**
 * Makes a text by which another process opens the memory of a live allocation, and says where in it the allocation is. Release the
 * text with `symmalloc_release_bytes`.
 *
 * # Safety
 * `text` and `offset` are valid for writing.
 */
symmalloc_status symmalloc_torch_share(void *pointer,
                                       char **text,
                                       uint64_t *offset);

/**
 * Opens memory by the text that `symmalloc_torch_share` made in another process. Close it with `symmalloc_torch_close`.
 *
 * # Safety
 * `text` is a C string; `base` and `out` are valid for writing.
 */
symmalloc_status symmalloc_torch_open(int32_t device,
                                      const char *text,
                                      void **base,
                                      const struct symmalloc_opened **out);

/**
 * Gives one use of opened memory up; after the last it is unmapped, when all work of the device is done.
 *
 * # Safety
 * It came from `symmalloc_torch_open` and is not used after this.
 */
void symmalloc_torch_close(const struct symmalloc_opened *opened);

/**
 * Gives PyTorch's current allocator the functions that its class refuses. Call it once, after the allocator was made the
 * current one and before it is used. Writes how many functions were replaced: 2, or fewer with a PyTorch that has other ones.
 *
 * # Safety
 * PyTorch's current allocator is its `CUDAPluggableAllocator` with this library's functions, and no thread uses it. `replaced`
 * is valid for writing.
 */
symmalloc_status symmalloc_torch_complete(uint32_t *replaced);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SYMMALLOC_H */
