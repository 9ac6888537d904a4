//! A deterministic caching device allocator: the same program gets the same placements on every rank.
//!
//! This is the crate to depend on. It reexports [`symmalloc_core`] and provides the companion crates as modules.
//!
//! | feature | module | contents |
//! |---|---|---|
//! | always enabled | the crate root | the allocator: [`Allocator`], [`Config`], [`Backend`] |
//! | `trace` (default) | [`trace`] | ops as text, their replay, layouts as text |
//! | `agreement` (default) | [`agreement`] | comparison of ranks that finds the first op that differs |
//! | `sim` (default) | [`sim`] | a simulated, seeded device, and simulated jobs of thousands of ranks under adverse conditions |
//! | `import` | `import` | trace files, and recordings of other tools: PyTorch snapshots, RMM logs |
//! | `cuda` | `cuda` | NVIDIA devices, buffers compatible with cudarc, graphs; requires one feature of `cuda-11040` to `cuda-13040` |
//! | `nccl` | `nccl` | NCCL: communicators, windows registered in the same order on all ranks, all-to-all-v |
//! | `half` | | the element types of the `half` crate in NCCL collectives |
//! | `dynamic-linking` | | links libcuda at build time instead of loading it at run time |
//! | `conformance` | `conformance` | a test suite for implementations of [`Backend`] |
//! | `metrics` | `metrics` | statistics through the `metrics` facade |
//!
//! # Determinism
//! A placement depends on the configuration and on the ops of its heap so far, and never on an address, a clock, a
//! thread or the progress of the device. Ranks that run the same program with the same configuration therefore get the
//! same placements. [`Allocator`] states the condition for programs with several threads.
//!
//! # Threads
//! An [`Allocator`] belongs to one thread. [`SharedAllocator`] is the same type with a different lock, for any number
//! of threads.
//!
//! # Errors
//! Every error is typed and states a remedy: see [`errors`]. A call that fails leaves live allocations intact.
//!
//! # Examples
#![cfg_attr(feature = "sim", doc = "```")]
#![cfg_attr(not(feature = "sim"), doc = "```ignore")]
//! use symmalloc::{Allocator, Config, PoolId, sim::SimBackend};
//!
//! // A simulated device; any `Backend` works. `SharedAllocator` is the thread-safe variant.
//! let allocator = Allocator::new(SimBackend::builder().seed(1).build(), Config::default())?;
//! let (compute, communication) = (allocator.register_stream()?, allocator.register_stream()?);
//!
//! let gradients = allocator.allocate_named(PoolId::DEFAULT, compute, 5 << 20, "gradients")?;
//! allocator.record_use(gradients.handle, communication)?; // an all-reduce reads it on this stream
//! allocator.free(gradients.handle)?; // free immediately: its next user waits on the device
//!
//! let activations = allocator.allocate(PoolId::DEFAULT, compute, 3 << 20)?;
//! assert_eq!(activations.placement, gradients.placement);
//! println!("{} at {:#x}", activations.placement, activations.address.0);
//! println!("history {}", allocator.digest(PoolId::DEFAULT)?); // equal digests: equal placements
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

#[doc(inline)]
pub use symmalloc_core::*;
// The glob shows these modules only where they are defined.
#[doc(inline)]
pub use symmalloc_core::{config_text, errors, op};

#[cfg(feature = "agreement")]
#[doc(inline)]
pub use symmalloc_agreement as agreement;
#[cfg(feature = "conformance")]
#[doc(inline)]
pub use symmalloc_conformance as conformance;
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use symmalloc_cuda as cuda;
#[cfg(feature = "import")]
#[doc(inline)]
pub use symmalloc_import as import;
#[cfg(feature = "nccl")]
#[doc(inline)]
pub use symmalloc_nccl as nccl;
#[cfg(feature = "sim")]
#[doc(inline)]
pub use symmalloc_sim as sim;
#[cfg(feature = "trace")]
#[doc(inline)]
pub use symmalloc_trace as trace;
