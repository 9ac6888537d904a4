//! Deterministic device memory for CUDA: the placements of `symmalloc-core` on real GPUs, with buffers that integrate with cudarc.
//!
//! A runtime allocates memory through this crate instead of `cuMemAlloc`, with the core's guarantees. The n-th allocation has the same
//! segment and offset on every rank and in every run. The device waits for uses by other streams, and the host never polls for
//! them. In a steady state, no allocation makes a driver call.
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
//! copies.memcpy_htod(&vec![1.0_f32; 4096], &mut input)?; // waits for `compute`, and is recorded as a use
//! let host = compute.clone_dtoh(&input)?; // waits for `copies`
//! drop(input); // the next user of the memory waits for `copies` on the device
//! compute.synchronize()?;
//! assert_eq!(host, vec![1.0_f32; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Types
//! | type | description |
//! |---|---|
//! | [`CudaDevice`] | a device with its primary context, or a context of the program |
//! | [`CudaAllocator`] | the allocator, shared by threads, one per device |
//! | [`DeviceBuffer`] | memory that is freed when dropped and can be used wherever a `CudaSlice` can |
//! | [`BufferPart`], [`SharedPart`] | owned parts of a buffer: disjoint writable parts, and read-only parts |
//! | [`LentSlice`] | a buffer as a `CudaSlice`, for interfaces that accept only that type |
//! | [`StreamAllocator`] | the allocator for one stream, whose buffers borrow it |
//! | [`Pool`] | a separate policy for a part of the program |
//! | [`PinnedAllocator`], [`PinnedBuffer`] | an allocator of page-locked host memory, and its buffers |
//! | [`GraphPool`], [`DeviceGraph`] | memory that a captured graph keeps alive |
//! | [`Export`], [`Import`] | memory that processes share without a copy |
//! | [`DmaBuf`] | memory that network cards register |
//! | [`CudaBackend`] | the backend, for a core allocator that the program drives directly |
//!
//! # Use with other crates that depend on cudarc
//! Cargo unifies cudarc's features over a whole build. This crate works with any features that other crates enable, and enables only those
//! that it needs (`std`, `driver`, `fallback-dynamic-loading`).
//!
//! cudarc's bindings target one version of the CUDA headers. Therefore **exactly one** of the features `cuda-11040` ... `cuda-13040` (or
//! `cuda-version-from-build-system`) must be enabled, by the final program or by one of its dependencies:
//!
//! | situation | action |
//! |---|---|
//! | cudarc's build script reports "Must specify one of the following features" | enable one here: `symmalloc-cuda = { features = ["cuda-12080"] }`, the oldest version that the program must support |
//! | candle, or another crate, already enables one | enable none |
//! | two are enabled: cudarc fails to build with about 190 errors about duplicate definitions | remove one of them; `cargo tree -e features -i cudarc` shows which crate enables which. If both are enabled here, this crate's build script also reports it |
//! | the build machine determines the version | set `CUDARC_CUDA_VERSION=13000` in the environment and enable no feature, or enable `cuda-version-from-build-system`, which queries `nvcc` |
//!
//! This crate behaves identically with all versions, because it resolves its own driver calls. Within the repository, `.cargo/config.toml`
//! selects the version.
//!
//! libcuda is opened at its first use, so a program builds and runs without CUDA until it calls [`CudaDevice::new`]. That call then returns
//! an error that lists each library name that was tried. `SYMMALLOC_CUDA_LIBRARY` names a different library file, see
//! [`CudaDevice::library`]. With cudarc's feature `dynamic-linking`, which candle enables, the linker needs libcuda to build the program
//! and the loader needs it to start the program; this crate uses that same library. cudarc does not build with both `dynamic-linking` and
//! `dynamic-loading`: do not enable the latter.
//!
//! # Errors
//! The calls of this crate do not panic when the driver fails. They return a [`LoadError`] if libcuda or one of its functions is missing,
//! and otherwise a [`DriverError`] with the call, the code and a suggested action. cudarc's own safe calls still panic if libcuda lacks a
//! symbol that cudarc needs and this crate does not.
//!
//! # Implementation
//! Each module uses only the modules above it:
//!
//! | module | contents |
//! |---|---|
//! | `error.rs`, `library.rs`, `loading.rs`, `driver.rs`, `call_counters.rs`, `device.rs` | locating libcuda; resolving and counting its calls; a device with its context |
//! | `memory/` | sources of memory: virtual memory in chunks, optionally prefetched for growth, or driver allocations |
//! | `streams/` | registered streams, events, captures |
//! | `backend.rs` | the core's backend, composed of memory and streams |
//! | `pools/` | the core's allocator with CUDA streams; owned pools, which are destroyed after their last use |
//! | `allocator.rs` | the public allocator types |
//! | `sleep.rs`, `device_memory.rs` (after `graphs/`) | pools that release their memory temporarily; the device's used memory, by owner |
//! | `resize.rs` | pools with a memory quota |
//! | `buffers/` | device and pinned buffers, their views, and the tracking of their uses |
//! | `sharing/` | export of memory to other processes, and import from them |
//! | `graphs/`, `metrics.rs` | graph captures; statistics |
//!
//! An allocation looks up its pool's state for the stream in a lock-free table, and calls the core. A drop returns the handle to the core.
//! `unsafe` code appears only where the driver is called, raw pointers are decomposed, or cudarc's traits require it.

mod allocator;
mod backend;
mod buffers;
mod call_counters;
mod device;
mod device_memory;
mod driver;
mod error;
mod error_names;
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
mod streams;

pub use allocator::{CachingAllocator, CudaAllocator};
pub use backend::{CudaBackend, CudaBackendBuilder, CudaMemory, MemoryChange, MemoryTraits, PinnedBackend};
pub use buffers::{
    BufferPart, BufferView, BufferViewMut, DeviceBuffer, KernelArg, LentSlice, LentSliceMut, PinnedAllocator,
    PinnedBuffer, RawDeviceBuffer, SharedPart,
};
pub use call_counters::DeviceCalls;
pub use device::{CudaDevice, CurrentContext, DeviceFeatures, MemoryInfo};
pub use device_memory::DeviceMemory;
pub use driver::RelaxedCapture;
pub use error::{CudaError, DriverError, DropError, DropErrors, LoadError};
pub use graphs::{DeviceGraph, GraphCapture, GraphPool};
pub use memory::{Access, ExportState, ImageStorage, ImportedMemory, MemorySource, Peer, SavedBytes};
pub use pools::{Pool, StreamAllocator, StreamAllocatorRef, trim_private_pools};
pub use resize::{ResizeError, resize};
#[doc(hidden)]
pub use sharing::Channel;
pub use sharing::{
    DeviceUuid, DmaBuf, Export, ExportReport, Import, ImportError, ImportReport, ImportedAllocation, ImportedView,
    ImportedViewMut, MessageError, ShareError,
};
pub use streams::{CaptureWatch, LentStream};
