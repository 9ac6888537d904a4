//! A libnccl without a device: the calls that `symmalloc-nccl` makes, over the stub of libcuda.
//!
//! Tests put the shared library of this package on the library path under the name `libnccl.so.2`, next to the stub of libcuda. Ranks are
//! threads of one process, each with a stub device (`STUB_DEVICES`), or processes. Collectives compute what NCCL would, *including its
//! wrong results*: a symmetric kernel finds the other ranks' buffers by its own window and offset. If the offsets differ, the result is
//! wrong and the code is `ncclSuccess`. A collective never blocks the host: it waits on its stream until all ranks have joined. Nothing has
//! a timeout.
//!
//! | file | contents |
//! |---|---|
//! | `member` | one rank's communicator |
//! | `window` | its windows and registered buffers |
//! | `group`, `streams` | its calls, and its collectives on streams |
//! | `suspension` | release and restoration of NCCL's memory |
//! | `shrink`, `grow` | communicators with fewer and with more ranks |
//! | `job`, `registry` | a communicator over all ranks, and the joining of ranks |
//! | `wire` | ranks in other processes |
//! | `data`, `arithmetic` | the computations of collectives |
//! | `ledger` | counts, faults, violations |
//! | `outputs` | outputs that NCCL has not written yet |
//!
//! The environment selects the version and the features of NCCL (`options.rs`); `control.rs` lists the controls for tests.

#![allow(non_snake_case, reason = "NCCL's names")]
#![allow(clippy::missing_safety_doc, reason = "each call is NCCL's: see nccl.h")]

#[path = "../../stub-libcuda/src/abi.rs"]
pub mod abi;
#[path = "../../stub-libcuda/src/space.rs"]
pub mod space;

pub mod arithmetic;
pub mod calls;
pub mod codes;
pub mod control;
pub mod cuda;
pub mod data;
pub mod group;
pub mod grow;
pub mod job;
pub mod ledger;
pub mod member;
pub mod messages;
pub mod options;
pub mod outputs;
pub mod registry;
pub mod shrink;
pub mod streams;
pub mod suspension;
pub mod window;
pub mod wire;
