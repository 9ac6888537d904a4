//! Sharing of device memory between processes, without a copy.
//!
//! ```text
//!  exporter                                                        importer
//!  CudaAllocator ── export ──► Export ── serve ══ Unix socket ══ attach ──► Import ── view ──► kernels, copies
//!        │                                layout, descriptors,                 │
//!        ╰── free, unmap ──► page, before the change ──────────────────────────╯ check, each time a view is created
//! ```
//! The physical memory is passed chunk by chunk, as descriptors or fabric handles (`memory/export.rs`). A message (`message.rs`) describes
//! the chunks; its reader does not trust it. The number of descriptors that are open at once is bounded, regardless of the size of the
//! memory.
//!
//! Memory never disappears under an importer: its mapping keeps the memory alive regardless of what the exporter does, even after the
//! exporter exits. The contents may change, however. A page that both processes map reports such changes (`memory/share_page.rs`).
//!
//! A dma-buf (`dma_buf.rs`) is an export to a network card. It reports changes through the same kind of page, and its owner keeps the
//! memory alive.

mod channel;
mod dma_buf;
mod error;
mod export;
mod import;
mod message;
mod view;

#[doc(hidden)]
pub use channel::Channel;
pub use dma_buf::DmaBuf;
pub use error::{DeviceUuid, ImportError, ShareError};
pub use export::{Export, ExportReport};
pub use import::{Import, ImportReport, ImportedAllocation};
pub use message::MessageError;
pub use view::{ImportedView, ImportedViewMut};
