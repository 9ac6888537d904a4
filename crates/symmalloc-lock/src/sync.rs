//! What threads share: the standard primitives, or under `--cfg symmalloc_loom` those whose interleavings a model test explores.

#[cfg(all(symmalloc_loom, test))]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
#[cfg(not(all(symmalloc_loom, test)))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
