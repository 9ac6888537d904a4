//! The C interface: the functions of `include/symmalloc.h`. PyTorch's calls are in `pytorch/`.
//!
//! | file | calls |
//! |---|---|
//! | `memory.rs` | an allocator, and memory from it |
//! | `pools.rs` | pools, and operations on all of them: reserve, trim, peers |
//! | `sleep.rs` | sleep, wake and resize of pools |
//! | `steps.rs` | steps, and the plans that they follow |
//! | `reports.rs` | placements, statistics, snapshots, traces |
//! | `ranks.rs` | comparison of ranks, announcements to the watchdog, flight records |
//! | `registrars.rs` | registration of pools on communicators, scopes that end in a sync |
//! | `all_to_all.rs` | all-to-all-v on registered memory |
//! | `dma_buf.rs` | dma-bufs, for network cards |
//! | `runtimes.rs` | the process's allocators, memory without a stream, ONNX Runtime's external allocator |
//! | `arguments.rs` | checks of arguments, and writes of results |
//!
//! Each call checks its arguments, performs one operation, and returns a status. No panic leaves a call. A call writes through its output
//! pointers only on success.

mod all_to_all;
pub(crate) mod arguments;
mod dma_buf;
mod memory;
mod pools;
mod ranks;
mod registrars;
mod reports;
mod runtimes;
mod sleep;
mod steps;

pub use all_to_all::*;
pub use dma_buf::*;
pub use memory::*;
pub use pools::*;
pub use ranks::*;
pub use registrars::*;
pub use reports::*;
pub use runtimes::*;
pub use sleep::*;
pub use steps::*;
