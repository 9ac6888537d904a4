//! The C interface: what `include/symmalloc.h` declares. The functions behind PyTorch's are in `torch_entry.rs`.
//!
//! | file | calls |
//! |---|---|
//! | `memory.rs` | an allocator, and memory from it |
//! | `pools.rs` | pools, and what holds for all of them: reserve, trim, peers |
//! | `sleep.rs` | pools that sleep and wake, or are resized |
//! | `steps.rs` | steps, and the plans that they follow |
//! | `reports.rs` | placements, statistics, snapshots, traces |
//! | `ranks.rs` | ranks compared, and what the watchdog is told |
//! | `registrars.rs` | pools registered on communicators, scopes that end in a sync |
//! | `all_to_all.rs` | all-to-all-v on registered memory |
//! | `runtimes.rs` | memory without a stream, ONNX Runtime's external allocator |
//! | `arguments.rs` | how arguments are checked and answers written |
//!
//! Each call checks its arguments, carries out one thing, and returns a status; no panic leaves it. What it writes through a
//! pointer it writes only when it succeeds.

mod all_to_all;
pub(crate) mod arguments;
mod memory;
mod pools;
mod ranks;
mod registrars;
mod reports;
mod runtimes;
mod sleep;
mod steps;

pub use all_to_all::*;
pub use memory::*;
pub use pools::*;
pub use ranks::*;
pub use registrars::*;
pub use reports::*;
pub use runtimes::*;
pub use sleep::*;
pub use steps::*;
