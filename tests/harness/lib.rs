//! What the tests, benches and fuzz targets of symmalloc share.
//!
//! ```text
//!  generate  bytes ──► Scenario: configuration and valid ops
//!  oracle    ops ──► what must be decided, worked out the slow way
//!  run       one run of a Scenario: each op by handle or by address, as drawn
//!  hooked    a backend that tells of every call
//!  checker   runs a Scenario on the allocator and compares every decision, block and invariant with the oracle
//!  targets   the fuzz targets as functions
//!  jobs      the recorded jobs
//!  memory    a sink that keeps records in memory
//!  restart   a rank that goes on in a new process
//!  mutation  one difference in one rank's program
//!  conformance   what every backend must do
//!  steps     programs that repeat steps, beside a model of following a plan
//! ```

pub mod checker;
pub mod conformance;
pub mod generate;
pub mod hooked;
pub mod jobs;
pub mod memory;
pub mod mutation;
pub mod oracle;
pub mod restart;
pub mod run;
pub mod steps;
pub mod targets;

/// Whether tests may take long: with `SYMMALLOC_NIGHT=1` they do more of the same.
pub fn is_night() -> bool {
    std::env::var_os("SYMMALLOC_NIGHT").is_some()
}
