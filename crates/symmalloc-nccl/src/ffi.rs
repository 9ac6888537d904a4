//! The calls into libnccl, and the driver calls that cudarc does not wrap.
//!
//! `calls.rs` has one function per NCCL call and states its safety contract. `library.rs` opens
//! libnccl and reports its version and capabilities. `operation.rs` has the arguments of collectives. `driver.rs` has the few driver calls.

pub(crate) mod calls;
pub(crate) mod driver;
pub(crate) mod error;
pub(crate) mod handles;
pub(crate) mod library;
pub(crate) mod operation;
pub(crate) mod version;
pub(crate) mod window_flags;
