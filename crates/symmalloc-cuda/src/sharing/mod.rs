//! Memory of one process in another one, without a copy.
//!
//! ```text
//!  exporter                                                        importer
//!  CudaAllocator ── export ──► Export ── serve ══ Unix socket ══ attach ──► Import ── view ──► kernels, copies
//!        │                                layout, descriptors,                 │
//!        ╰── free, unmap ──► page, before it happens ──────────────────────────╯ check, each time a view is made
//! ```
//! The physical memory goes over, chunk by chunk, as descriptors or fabric handles (`memory/export.rs`); what each chunk is goes in
//! a message (`message.rs`), which its reader does not trust. A handful of descriptors are open at a time, whatever the size.
//!
//! Nobody's memory goes away under an importer: a mapping holds it, whatever the exporter does, also after its end. What can happen
//! is that it is no longer what was exported, and the page says that (`memory/share_page.rs`).

mod channel;
mod error;
mod export;
mod import;
mod message;
mod view;

#[doc(hidden)]
pub use channel::Channel;
pub use error::{DeviceUuid, ImportError, ShareError};
pub use export::{Export, ExportReport};
pub use import::{Import, ImportReport, ImportedAllocation};
pub use message::MessageError;
pub use view::{ImportedView, ImportedViewMut};
