//! A deterministic caching device allocator: the same program gets the same places on every rank.
//!
//! This is the crate to name in a `Cargo.toml`. It is [`symmalloc_core`] with its companions as modules.
//!
//! | feature | module | what it is |
//! |---|---|---|
//! | always | this one | the allocator: [`Allocator`], [`Config`], [`Backend`] |
//! | `trace` (default) | [`trace`] | ops as text, their replay, layouts as text |
//! | `agreement` (default) | [`agreement`] | ranks compare what they did, and find the first op that differs |
//! | `sim` (default) | [`sim`] | a device from a seed, and thousands of adverse ranks on it |
//! | `cuda` | `cuda` | NVIDIA devices, buffers that fit cudarc, graphs; with one feature `cuda-11040` to `cuda-13040` |
//! | `nccl` | `nccl` | NCCL: communicators, windows in step on all ranks, all-to-all-v |
//! | `half` | | the element types of the crate `half` in NCCL's collectives |
//! | `dynamic-linking` | | the linker finds libcuda, in place of a look at run time |
//! | `metrics` | `metrics` | statistics on the `metrics` facade |
//!
//! # Examples
#![cfg_attr(feature = "sim", doc = "```")]
#![cfg_attr(not(feature = "sim"), doc = "```ignore")]
//! use symmalloc::{Allocator, Config, PoolId, sim::SimBackend};
//!
//! // A simulated device here; any `Backend` will do. `SharedAllocator` is the same for many threads.
//! let allocator: Allocator<_> = Allocator::new(SimBackend::builder().seed(1).build(), Config::default())?;
//! let (compute, communication) = (allocator.register_stream()?, allocator.register_stream()?);
//!
//! let gradients = allocator.allocate_named(PoolId::DEFAULT, compute, 5 << 20, "gradients")?;
//! allocator.record_use(gradients.handle, communication)?; // an all-reduce reads it there
//! allocator.free(gradients.handle)?; // free at once: its next user waits on the device
//!
//! let activations = allocator.allocate(PoolId::DEFAULT, compute, 3 << 20)?;
//! assert_eq!(activations.placement, gradients.placement);
//! println!("{} at {:#x}", activations.placement, activations.address.0);
//! println!("history {}", allocator.digest(PoolId::DEFAULT)?); // equal on all ranks exactly when placements are
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub use symmalloc_core::*;

#[cfg(feature = "agreement")]
pub use symmalloc_agreement as agreement;
#[cfg(feature = "cuda")]
pub use symmalloc_cuda as cuda;
#[cfg(feature = "metrics")]
pub use symmalloc_metrics as metrics;
#[cfg(feature = "nccl")]
pub use symmalloc_nccl as nccl;
#[cfg(feature = "sim")]
pub use symmalloc_sim as sim;
#[cfg(feature = "trace")]
pub use symmalloc_trace as trace;
