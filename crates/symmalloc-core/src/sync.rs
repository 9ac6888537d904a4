//! State that threads share: the lock of a heap, and tables that grow while they are read.

pub mod lock;
pub(crate) mod registry;
