//! The calls that PyTorch makes through the compiled class in `python/symmalloc/pytorch/allocator.cpp`. The class is a `CUDAAllocator`,
//! compiled against the installed PyTorch.
//!
//! ```text
//!  PyTorch ──► CUDAAllocator (C++: exceptions, DataPtr, contexts of a history) ──► these calls ──► DeviceAllocator
//! ```
//!
//! | file | calls |
//! |---|---|
//! | `addressed.rs` | allocate at an address |
//! | `memory.rs` | allocate, free, streams, caches |
//! | `pools.rs` | mempools and their scopes, the program's memory |
//! | `scopes.rs` | pool and name of a thread's allocations |
//! | `settings.rs` | the settings of all allocators |
//! | `counts.rs`, `blocks.rs` | statistics; segments and blocks |
//! | `checkpoints.rs` | checkpoint and restore of mempools |
//! | `sharing.rs`, `channel.rs` | memory of other processes |
//!
//! The interface of these calls is stable only within one version of symmalloc, because the class ships with the library.

mod addressed;
mod blocks;
mod channel;
mod checkpoints;
mod counts;
mod memory;
mod pools;
mod scopes;
mod settings;
mod sharing;

pub use addressed::*;
pub use blocks::*;
pub use checkpoints::*;
pub use counts::*;
pub use memory::*;
pub use pools::*;
pub use scopes::*;
pub use settings::*;
pub use sharing::*;
