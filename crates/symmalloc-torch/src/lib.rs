//! symmalloc as PyTorch's CUDA allocator, and as a C library.
//!
//! The core's placements apply to the memory of every tensor, so the n-th allocation has the same segment and offset on every rank.
//! PyTorch's allocator interface is C++ without a stable ABI. `python/symmalloc/pytorch` implements it as a thin layer over the calls in
//! `pytorch/`. This layer is compiled for each version of PyTorch, either in the release or at the first `install()` of the Python package
//! (`python/symmalloc`):
//!
//! ```python
//! import torch, symmalloc
//! symmalloc.install()          # before CUDA is used
//! ```
//!
//! The library also has a C interface, `include/symmalloc.h`, for programs other than PyTorch.
//!
//! # Contents
//! | | |
//! |---|---|
//! | `symmalloc_create` ... `symmalloc_destroy` | an allocator of a device, with raw streams and raw pointers |
//! | `symmalloc_torch_allocate` ... `symmalloc_torch_close` | the calls of the compiled class, over one allocator per device |
//! | `symmalloc_torch_push_pool`, `symmalloc_torch_push_name` ... | pool and name of a thread's allocations |
//! | `symmalloc_allocate_unordered`, `symmalloc_ort_alloc` ... | memory for runtimes that do not name a stream |
//! | `symmalloc_agree` | comparison of the ranks' histories, over a gather function of the program |
//! | `symmalloc_announce_begin`, `symmalloc_announce_end` | announcement of the program's own collectives to the watchdog |
//! | `symmalloc_flight_record` | the last collectives of the process's communicators, for `symmalloc diff` |
//! | `symmalloc_registrar_create` ... | NCCL windows over a symmetric pool, on a communicator of PyTorch or an engine |
//! | `symmalloc_sleep`, `symmalloc_wake`, `symmalloc_resize` ... | release of all or part of a pool's memory |
//! | `symmalloc_dma_buf_open`, `symmalloc_dma_buf_close` | memory for network cards |
//! | `symmalloc_scope_begin`, `symmalloc_scope_end` | scope in which a thread allocates from a pool, and whose end registers new segments |
//! | `symmalloc_all_to_all_run` ... | all-to-all-v on registered memory |
//!
//! # Differences from PyTorch's allocator
//! - A block that other streams used becomes free at `free`, and its next user waits on the device. `record_stream` costs nothing until the
//!   block is freed, and no event is polled.
//! - Streams are numbered in order of first use. Programs that first use their streams in the same order on every rank get the same
//!   placements.
//! - Segments are expandable, large blocks are stitched, and streams that the main thread or autograd's threads use first share memory,
//!   unless `SYMMALLOC_CONF` selects otherwise.
//! - Before an allocation fails, private pools release their free memory, as in PyTorch. Symmetric pools keep their free memory, so that a
//!   shortage on one rank does not change that rank's later placements. With `out_of_memory:fail` no pool releases memory. The default pool
//!   is private unless the settings contain `symmetric:true`. A symmetric pool records every op, so that an agreement can name the first op
//!   that differs. This costs about a hundred instructions per op.
//! - `set_per_process_memory_fraction` is a fraction of the device's *total* memory, converted to bytes once. The limit is the same on
//!   equal devices, and ranks compare it (rule D4).
//!
//! # Implementation
//! `device.rs` is one device's allocator. `streams.rs` maps raw streams to ids, `scopes.rs` selects the pool of an allocation, and
//! `mempools.rs` resolves PyTorch's pool ids. The core finds allocations by pointer. `process.rs` holds the allocators behind
//! PyTorch's calls (`pytorch/`), and `pool_memory.rs` adds mempools to them. `c_interface/` contains the other functions of the header.
//! cbindgen generates `include/symmalloc.h` from `pytorch/` and `c_interface/`, and a test fails if the header is stale.

mod alignment;
mod c_interface;
mod device;
mod error;
mod guard;
mod handles;
mod memory_events;
mod mempools;
mod peak;
mod pool_memory;
mod process;
mod pytorch;
mod refusal;
mod registrations;
mod scopes;
mod settings;
mod shared_chunks;
mod sleep;
mod statistics;
mod status;
mod streams;
mod trace;
mod unordered;

pub use alignment::symmalloc_gather_fn;
pub use c_interface::*;
pub use device::DeviceAllocator;
pub use guard::symmalloc_error_message;
pub use memory_events::{symmalloc_memory_fn, symmalloc_torch_on_memory};
pub use pytorch::*;
pub use registrations::{PoolRegistration, RankAnnouncement};
pub use scopes::{symmalloc_destroy_fn, symmalloc_filter_fn};
pub use status::symmalloc_status;
