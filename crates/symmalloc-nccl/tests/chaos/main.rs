//! A load of three ranks, as processes on the stubs of libcuda and libnccl, while events disturb it.
//!
//! The ranks meet, connect, run rounds of work, destroy their communicator and meet again: a *generation*. Each of them keeps buffers and a
//! sleeping pool for as long as it lives, and records each generation to a disk. Meanwhile, the test stops and kills ranks, fills the disk
//! and the devices, moves the clock, floods the ports, and makes driver calls fail. After each event, it checks the following:
//!
//! - The load goes on, or ends with exactly one error on every rank. If one rank caused the error, it names this rank.
//! - All ranks meet again, also the one that was started again.
//! - All results are correct, and the contents that a rank keeps are unchanged.
//! - Recordings are complete and replay to the digest of their pool, unless the disk was full. A saved layout stays readable.
//!
//! Each rank measures what must not grow. The test prints the slope of each figure, and a long run fails if one is above zero beyond its
//! confidence.
//!
//! | variable | meaning |
//! |---|---|
//! | `SYMMALLOC_CHAOS_EVENTS` | number of events of each kind, by default 1 |
//! | `SYMMALLOC_CHAOS_KINDS` | the kinds of events, such as `Kill,Stop`; by default all |
//! | `SYMMALLOC_SOAK_SECONDS` | time over which the events are spread, by default none |
//! | `SYMMALLOC_FIRST_SEED` | seed of the load and of the events, by default 1 |
//! | `SYMMALLOC_SOAK_FOLDER` | folder for the log and the samples |
//! | `SYMMALLOC_STUB_LIMIT_SECONDS` | time limit of the whole test |

mod clock;
mod conductor;
mod disk;
mod flood;
mod load;
mod samples;
mod status;

use stub_process::{nccl_test, this_rank};

/// Number of ranks.
const RANKS: usize = 3;

// A small device, which is filled quickly. Before 2.29, communicators that end with windows leak memory.
nccl_test!(the_load_goes_on_after_every_event, ["STUB_MEMORY_BYTES" = "268435456", "STUB_NCCL_VERSION" = "23007"], {
    if let Some(rank) = this_rank() {
        load::run(rank);
        std::process::exit(0);
    }
    conductor::conduct();
});

/// Returns an environment variable as a number.
fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("the variable should be a number"))
}
