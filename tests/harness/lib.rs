//! Shared test code of symmalloc's tests, benches and fuzz targets.
//!
//! ```text
//!  generate  bytes ──► Scenario: configuration and valid ops
//!  oracle    ops ──► the expected decisions, computed in a naive way
//!  run       one run of a Scenario: each op by handle or by address, as drawn
//!  hostile   valid traces that cost a reader as much as possible
//!  hooked    a backend with a hook on every call
//!  checker   runs a Scenario on the allocator and compares every decision, block and invariant with the oracle
//!  targets   the fuzz targets as functions
//!  jobs      the recorded jobs
//!  levels    statistics without totals
//!  memory    a sink that keeps records in memory
//!  restart   a rank that continues in a new process
//!  mutation  one difference in one rank's program
//!  conformance   checks of the backend contract
//!  recovery  a rank that makes room for its wakes alone
//!  steps     programs that repeat steps, compared with a model of following a plan
//! ```

pub mod checker;
pub mod conformance;
pub mod generate;
pub mod hooked;
pub mod hostile;
pub mod jobs;
pub mod levels;
pub mod memory;
pub mod mutation;
pub mod oracle;
pub mod recovery;
pub mod restart;
pub mod run;
pub mod steps;
pub mod targets;

/// Returns `true` if tests may take long: with `SYMMALLOC_NIGHT=1` they run more cases.
pub fn is_night() -> bool {
    std::env::var_os("SYMMALLOC_NIGHT").is_some()
}
