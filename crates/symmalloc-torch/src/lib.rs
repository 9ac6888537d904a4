//! symmalloc as PyTorch's CUDA allocator, and as a C library.
//!
//! The placements of `symmalloc-core` on CUDA's memory under every tensor, so that the n-th allocation lies at the same segment and
//! offset on every rank. PyTorch's own class for allocators is C++ without a stable binary form: `python/symmalloc/pytorch` is ours, compiled
//! against the PyTorch that is installed, thin over the calls of `class/`. Where it cannot be compiled, PyTorch's class for functions of a
//! shared library (`CUDAPluggableAllocator`) stands in, over `torch_entry.rs`. The Python package (`python/symmalloc`) installs either:
//!
//! ```python
//! import torch, symmalloc
//! symmalloc.install()          # before CUDA is used
//! ```
//!
//! The same library is a C interface to the allocator, `include/symmalloc.h`, for programs that are not PyTorch.
//!
//! # What there is
//! | | |
//! |---|---|
//! | `symmalloc_create` ... `symmalloc_destroy` | an allocator of a device by raw streams and raw pointers |
//! | `symmalloc_torch_allocate` ... `symmalloc_torch_close` | our class's calls, over one allocator per device |
//! | `symmalloc_torch_alloc` ... `symmalloc_torch_release_pool` | the entry points of PyTorch's class for pluggable allocators |
//! | `symmalloc_torch_push_pool`, `symmalloc_torch_push_name` ... | a thread's allocations go to a pool, have a name |
//! | `symmalloc_allocate_unordered`, `symmalloc_ort_alloc` ... | memory for runtimes that name no stream |
//! | `symmalloc_agree` | ranks compare their histories, over any gather |
//! | `symmalloc_announce_begin`, `symmalloc_announce_end` | the watchdog learns of a collective that other code submits |
//! | `symmalloc_flight_record` | what the process's communicators did last, for `symmalloc diff` |
//! | `symmalloc_registrar_create` ... | NCCL windows over a symmetric pool, on a communicator of PyTorch's or an engine's |
//! | `symmalloc_sleep`, `symmalloc_wake`, `symmalloc_resize` ... | pools give their memory back for a while, or a part of it |
//! | `symmalloc_scope_begin`, `symmalloc_scope_end` | a thread's allocations go to a pool, and are registered at the end |
//! | `symmalloc_all_to_all_run` ... | all-to-all-v on registered memory |
//!
//! # What is different from PyTorch's allocator
//! - A block that other streams used is free at `free`, and its next user waits on the device: `record_stream` costs nothing
//!   until then, and no event is polled.
//! - Streams are numbered by their first use. Programs that use them in the same order on every rank get the same places.
//! - Segments are expandable unless `SYMMALLOC_CONF` says otherwise.
//! - Before an allocation fails, the free memory of private pools goes back, as PyTorch's does; symmetric pools keep theirs,
//!   so that one rank that is short of memory does not place differently from then on. `out_of_memory:fail` gives nothing back.
//!   The default pool is private unless the settings say `symmetric:true`: then every op is remembered, so that agreement can
//!   name the first that differs, at about a hundred instructions each.
//! - `set_per_process_memory_fraction` is a share of the device's *total* memory, in bytes from then on: the same on equal
//!   devices, and compared between ranks (rule D4).
//!
//! # Implementation
//! `device.rs` is one device's allocator: `streams.rs` turns raw streams into ids, `scopes.rs` says which pool is meant
//! and `private_pools.rs` what PyTorch's pool ids stand for; the core finds allocations by pointer. `process.rs` has the
//! allocators behind PyTorch's calls (`class/`, `torch_entry.rs`); `pool_memory.rs` is what private pools add. `cxx_abi.rs` throws C++ exceptions and calls C++ functions
//! without a C++ compiler, and says what it relies on. `c_interface/` is the header, function by function; cbindgen makes
//! `include/symmalloc.h` of it, and a test says when that is stale.

mod alignment;
mod c_interface;
mod class;
mod complaints;
mod cxx_abi;
mod device;
mod error;
mod filter;
mod guard;
mod memory_events;
mod peak;
mod pool_memory;
mod private_pools;
mod process;
mod refusal;
mod registrations;
mod scopes;
mod settings;
mod shared_chunks;
mod sleep;
mod slept;
mod statistics;
mod status;
mod streams;
mod torch_entry;
mod trace;
mod unordered;
mod unordered_pool;
mod virtuals;

pub use alignment::symmalloc_gather_fn;
pub use c_interface::*;
pub use class::*;
pub use device::DeviceAllocator;
pub use filter::{symmalloc_destroy_fn, symmalloc_filter_fn};
pub use guard::symmalloc_error_message;
pub use memory_events::{symmalloc_memory_fn, symmalloc_torch_on_memory};
pub use registrations::{PoolRegistration, RankAnnouncement};
pub use status::symmalloc_status;
pub use torch_entry::*;
pub use virtuals::symmalloc_torch_complete;
