//! Sharing of device memory between processes, without a copy.
//!
//! ```text
//!  exporter                                                        importer
//!  CudaAllocator ── export ──► Export ── serve ══ Unix socket ══ attach ──► Import ── view ──► kernels, copies
//!        │                                layout, descriptors,                 │
//!        ╰── free, unmap ──► page, before the change ──────────────────────────╯ check, each time a view is created
//! ```
//! The physical memory is passed chunk by chunk, as descriptors or fabric handles (`memory/export.rs`). A message (`message.rs`), which its
//! reader does not trust, describes the chunks. The number of open descriptors is bounded, regardless of the size.
//!
//! Memory never disappears under an importer: its mapping keeps the memory alive regardless of what the exporter does, even after the
//! exporter exits. The memory may change, however, and the page reports that (`memory/share_page.rs`).
//!
//! A dma-buf (`dma_buf.rs`) is an export to a network card. It uses the same page, and its owner keeps the memory alive.

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
