//! Sources of a backend's memory: virtual memory of a device, or driver allocations on a device or on the host.
//!
//! | kind | reserve | map | unmap | release |
//! |---|---|---|---|---|
//! | [`VirtualMemory`] | addresses | `cuMemCreate`, `cuMemMap`, access | `cuMemUnmap` | releases the addresses |
//! | [`Prefetching`] | the same | the same, or nothing if the prefetch thread has done it already | the same | the same |
//! | [`DriverAllocations`] | an allocation | nothing | nothing | frees the allocation |
//!
//! `spaces.rs` reserves the addresses of pools with a base, whose ranges need no further reservation.
//!
//! [`Images`] keep the contents of memory that is temporarily released, and `fills.rs` copies them back when memory is mapped again.
//!
//! A driver allocation has no addresses without memory, so `reserve` takes the memory that `map` would take. Pools with fixed and reserved
//! segments map whole reservations immediately, so this makes no difference to them. Expandable pools need virtual memory.

mod addresses;
mod backing;
mod chunks;
mod copies;
mod driver_allocations;
mod export;
mod exported;
mod fills;
mod handle;
mod image_store;
mod images;
mod imported;
mod interface;
mod nvtx;
mod prefetch_thread;
mod prefetch_window;
mod properties;
mod share_page;
mod spaces;
mod spare;
mod virtual_memory;

pub use driver_allocations::MemorySource;
pub(crate) use driver_allocations::{AllocationKind, DriverAllocations};
pub use exported::{Access, Peer};
pub(crate) use exported::{ExportedList, ExportedMemory, Lease, is_held};
pub(crate) use handle::{DmaBufRefusal, ExportedHandle, FABRIC_BYTES, HandleKind};
pub use image_store::ImageStorage;
pub(crate) use images::Images;
pub use images::SavedBytes;
pub use imported::ImportedMemory;
pub(crate) use interface::BackendMemory;
pub(crate) use nvtx::BlockReports;
pub(crate) use prefetch_thread::Prefetching;
pub use share_page::ExportState;
pub(crate) use share_page::SharePage;
pub(crate) use virtual_memory::{VirtualMemory, VirtualOptions};
