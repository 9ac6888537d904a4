//! Where a backend's bytes come from: virtual memory of a device, or allocations of the driver on a device or on the host.
//!
//! | kind | reserve | map | unmap | release |
//! |---|---|---|---|---|
//! | [`VirtualMemory`] | addresses | `cuMemCreate`, `cuMemMap`, access | `cuMemUnmap` | addresses back |
//! | [`Prefetching`] | the same | the same, or nothing where a thread has done it already | the same | the same |
//! | [`DriverAllocations`] | an allocation | nothing | nothing | the allocation back |
//!
//! [`Images`] keep the bytes of memory that is given back for a while, and `fills.rs` puts them where memory is mapped again.
//!
//! An allocation of the driver has no addresses without memory, so `reserve` takes what `map` would take. Pools of fixed and
//! reserved segments map what they reserve at once and notice no difference. Expandable ones need virtual memory.

mod addresses;
mod backing;
mod chunks;
mod copies;
mod driver_allocations;
mod export;
mod exported;
mod fills;
mod handle;
mod images;
mod imported;
mod interface;
mod prefetch_thread;
mod prefetch_window;
mod properties;
mod share_page;
mod spare;
mod virtual_memory;

pub use driver_allocations::MemorySource;
pub(crate) use driver_allocations::{AllocationKind, DriverAllocations};
pub use exported::{Access, Peer};
pub(crate) use exported::{ExportedList, ExportedMemory, is_held};
pub(crate) use handle::{ExportedHandle, FABRIC_BYTES, HandleKind};
pub(crate) use images::Images;
pub use imported::ImportedMemory;
pub(crate) use interface::BackendMemory;
pub(crate) use prefetch_thread::Prefetching;
pub use share_page::ExportState;
pub(crate) use share_page::SharePage;
pub(crate) use virtual_memory::{VirtualMemory, VirtualOptions};
