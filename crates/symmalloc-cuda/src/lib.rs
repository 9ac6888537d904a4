//! Deterministic device memory for CUDA: the placements of `symmalloc-core` on real GPUs, and buffers that fit cudarc.
//!
//! A runtime asks this crate for memory where it would ask `cuMemAlloc`, and gets what the core promises: the n-th
//! allocation lies at the same segment and offset on every rank and in every run, uses by other streams are waited for on
//! the device and never polled, and in a steady state no allocation makes a driver call.
//!
//! # Examples
//! ```no_run
//! use symmalloc_core::Config;
//! use symmalloc_cuda::{CudaAllocator, CudaDevice};
//!
//! let device = CudaDevice::new(0)?;
//! let (compute, copies) = (device.context().new_stream()?, device.context().new_stream()?);
//! let allocator = CudaAllocator::new(&device, Config::default())?;
//!
//! let mut input = allocator.alloc_zeroed_named::<f32>(&compute, 4096, "input")?;
//! copies.memcpy_htod(&vec![1.0_f32; 4096], &mut input)?; // waits for `compute`, and is noted as a use
//! let host = compute.clone_dtoh(&input)?; // waits for `copies`
//! drop(input); // the next user of the memory waits for `copies` on the device
//! compute.synchronize()?;
//! assert_eq!(host, vec![1.0_f32; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What there is
//! | type | what it is |
//! |---|---|
//! | [`CudaDevice`] | a device with a context: its primary one, or your own |
//! | [`CudaAllocator`] | the allocator, shared by threads, one per device |
//! | [`DeviceBuffer`] | memory that is freed when dropped and goes wherever a `CudaSlice` goes |
//! | [`BufferPart`], [`SharedPart`] | parts of a buffer that are owned: disjoint ones that may be written, and ones that are only read |
//! | [`LentSlice`] | a buffer as a `CudaSlice`, for interfaces that take nothing else |
//! | [`StreamAllocator`] | the allocator for one stream, whose buffers borrow it |
//! | [`Pool`] | a policy of its own, for a part of the program |
//! | [`PinnedAllocator`], [`PinnedBuffer`] | the same for page-locked host memory |
//! | [`GraphPool`], [`DeviceGraph`] | memory that a captured graph keeps |
//! | [`Export`], [`Import`] | memory of one process in another one, without a copy |
//! | [`CudaBackend`] | the driver behind all this, for a core allocator that you drive yourself |
//!
//! # Beside other crates that use cudarc
//! Features of cudarc add up over a whole build. This crate compiles and works with whatever others turn on there, and turns on
//! only what it needs itself (`std`, `driver`, `fallback-dynamic-loading`).
//!
//! cudarc's bindings follow one version of the CUDA headers, and so **exactly one** of the features `cuda-11040` ... `cuda-13040` (or
//! `cuda-version-from-build-system`) must be chosen, by the program at the end of the line or by one of the crates it uses:
//!
//! | situation | what to do |
//! |---|---|
//! | cudarc's build script says "Must specify one of the following features" | name one here: `symmalloc-cuda = { features = ["cuda-12080"] }`, the oldest that the program must run with |
//! | candle, or another crate, names one already | name none |
//! | two are named: cudarc stops with some 190 errors about duplicate definitions | remove one of them; `cargo tree -e features -i cudarc` says who names which. If both are named here, this crate's build script says so as well |
//! | the version is to come from the machine that builds | `CUDARC_CUDA_VERSION=13000` in the environment and no feature at all, or `cuda-version-from-build-system`, which asks `nvcc` |
//!
//! This crate behaves alike with all versions: it resolves its own driver calls. Within the repository `.cargo/config.toml` chooses.
//!
//! libcuda is opened when it is first needed, so everything builds and runs without CUDA, up to the first
//! [`CudaDevice::new`], which then returns an error that says what was tried and what is missing. Another file than the usual ones is
//! named in `SYMMALLOC_CUDA_LIBRARY`, see [`CudaDevice::library`]. With cudarc's feature `dynamic-linking`, which candle sets, the
//! linker needs libcuda to build the program and the loader to start it; this crate uses that same library. cudarc does not build with
//! both `dynamic-linking` and `dynamic-loading`: leave the second out.
//!
//! # Errors
//! No call of this crate panics because of the driver: [`LoadError`] when the library or a call in it is missing,
//! [`DriverError`] with the call, the code and what to do about it otherwise. cudarc's own safe calls still panic when a
//! symbol is missing that this crate does not need.
//!
//! # Implementation
//! Rooms, each using only those above it:
//!
//! | room | what is there |
//! |---|---|
//! | `error.rs`, `library.rs`, `loading.rs`, `driver.rs`, `call_counters.rs`, `device.rs` | libcuda, found; its calls, resolved and counted; a device with its context |
//! | `memory/` | where bytes come from: virtual memory in chunks, made ahead of growth where asked for, or allocations of the driver |
//! | `streams/` | registered streams, events, captures |
//! | `backend.rs` | memory and streams together: the core's backend |
//! | `pools/` | the core's allocator with CUDA's streams, pools as scopes |
//! | `allocator.rs`, `steps.rs` | the names by which programs use them; steps that follow plans |
//! | `sleep.rs` (after `graphs/`) | pools that give their memory back for a while |
//! | `resize.rs` | pools that hold a quota of memory |
//! | `buffers/` | device and pinned buffers, their views, and which streams used them |
//! | `sharing/` | memory that goes to another process, and comes from one |
//! | `graphs/`, `metrics.rs` | captures into graphs; statistics |
//!
//! An allocation finds its pool's side of the stream in a table without a lock, and asks the core; a drop gives the handle back
//! to the core. `unsafe` stands only where the driver is called, pointers are taken apart or cudarc's traits demand it.

mod allocator;
mod backend;
mod buffers;
mod call_counters;
mod device;
mod driver;
mod error;
mod graphs;
mod library;
#[doc(hidden)]
pub mod loading;
mod memory;
#[cfg(feature = "metrics")]
pub mod metrics;
mod pools;
mod resize;
mod sharing;
mod sleep;
mod steps;
mod streams;

pub use allocator::{CachingAllocator, CudaAllocator};
pub use backend::{CudaBackend, CudaBackendBuilder, CudaMemory, MemoryChange, MemoryTraits, PinnedBackend};
pub use buffers::{
    BufferPart, BufferView, BufferViewMut, DeviceBuffer, KernelArg, LentSlice, LentSliceMut, PinnedAllocator,
    PinnedBuffer, RawDeviceBuffer, SharedPart,
};
pub use call_counters::DeviceCalls;
pub use device::{CudaDevice, CurrentContext, DeviceFeatures, MemoryInfo};
pub use driver::RelaxedCapture;
pub use error::{CudaError, DriverError, DropError, DropErrors, LoadError};
pub use graphs::{DeviceGraph, GraphCapture, GraphPool};
pub use memory::{Access, ExportState, ImportedMemory, MemorySource, Peer};
pub use pools::{Pool, StreamAllocator, StreamAllocatorRef};
pub use resize::{ResizeError, resize};
#[doc(hidden)]
pub use sharing::Channel;
pub use sharing::{
    DeviceUuid, Export, ExportReport, Import, ImportError, ImportReport, ImportedAllocation, ImportedView,
    ImportedViewMut, MessageError, ShareError,
};
pub use steps::Step;
pub use streams::{CaptureWatch, LentStream};
