//! Layouts as text: a pool's layout is saved to a file, and another process restores the pool from the file.
//!
//! [`symmalloc_core::layout`] defines layouts and restoration; `docs/layout.md` specifies the format.
//!
//! ```
//! use symmalloc::{Allocator, Config, PoolId};
//! use symmalloc::sim::SimBackend;
//! use symmalloc::trace::layout;
//!
//! let rank = |device| Allocator::new(SimBackend::builder().rank(device).build(), Config::default());
//! let old = rank(0)?;
//! let stream = old.register_stream()?;
//! let weights = old.allocate_named(PoolId::DEFAULT, stream, 48 << 20, "weights")?;
//! let text = layout::to_text(&old.save_layout(PoolId::DEFAULT)?);
//!
//! // The rank restarts, on another device.
//! let new = rank(1)?;
//! let stream = new.register_stream()?;
//! let restored = new.restore_layout(PoolId::DEFAULT, &layout::parse(&text)?)?;
//! let again = restored.find(stream, weights.placement).expect("the allocation should have been live");
//! assert_eq!(again.name.as_deref(), Some("weights"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod contradiction;
mod line;
mod reader;
mod rules;
#[cfg(test)]
mod tests;
mod writer;

pub use contradiction::Contradiction;
pub use line::{MAGIC, VERSION};
pub use reader::{LayoutTextError, parse, read};
pub use writer::to_text;
