//! A libnccl without a device: the calls that `symmalloc-nccl` makes, over the stub of libcuda.
//!
//! Tests put the shared library of this package on the library path under the name `libnccl.so.2`, beside the stub of
//! libcuda. Ranks are threads of one process, each with a stub device (`STUB_DEVICES`), or processes. Collectives compute
//! what NCCL would, *also where that is wrong*: a symmetric kernel finds the other ranks' buffers by its own window and
//! offset, and where they differ the result is wrong and the code is `ncclSuccess`. A collective never blocks the host: it
//! waits on its stream until all ranks are there. Nothing has a timeout.
//!
//! | file | noun |
//! |---|---|
//! | `member` | one rank's communicator |
//! | `window` | its windows and registered buffers |
//! | `group`, `streams` | its calls, and its collectives on streams |
//! | `job`, `registry` | a communicator over all ranks, and who joins which |
//! | `wire` | ranks in other processes |
//! | `data`, `arithmetic` | what collectives compute |
//! | `ledger` | counts, faults, violations |
//!
//! The environment says what kind of NCCL it is (`options.rs`); `control.rs` lists what a test can ask and tell.

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
pub mod job;
pub mod ledger;
pub mod member;
pub mod messages;
pub mod options;
pub mod registry;
pub mod streams;
pub mod window;
pub mod wire;
