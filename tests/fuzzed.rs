//! Runs random programs on the fuzz targets that execute ops, without a fuzzer: `cargo run --release -p symmalloc-harness -- 100000000`
//! runs that many ops. Each program runs on every target. A failure prints the program's seed and its trace.

use std::time::Instant;
use symmalloc_harness::generate::{OPS_MAX, bytes_of_seed};
use symmalloc_harness::targets::{Target, local_recovery, ops_vs_oracle, two_ranks};

const TARGETS: [(&str, Target); 3] =
    [("ops_vs_oracle", ops_vs_oracle), ("two_ranks", two_ranks), ("local_recovery", local_recovery)];

/// Seeds of programs, far from those of the tests.
const FIRST_SEED: u64 = 1 << 40;

/// Number of ops between two lines of output.
const PRINT_EVERY: u64 = 5_000_000;

fn main() {
    let wanted: u64 = std::env::args().nth(1).map_or(10_000_000, |text| text.parse().expect("a number of ops"));
    let (begun, mut counts, mut printed) = (Instant::now(), [0; TARGETS.len()], 0);
    for seed in FIRST_SEED.. {
        let bytes = bytes_of_seed(seed, OPS_MAX);
        for ((name, target), count) in TARGETS.iter().zip(&mut counts) {
            let _seed = PrintSeedOnPanic(name, seed);
            *count += target(&bytes);
        }
        let ops: u64 = counts.iter().sum();
        let is_done = ops >= wanted;
        if ops / PRINT_EVERY > printed || is_done {
            printed = ops / PRINT_EVERY;
            let programs = seed - FIRST_SEED + 1;
            println!("{ops} ops of {programs} programs in {:.0?}: {counts:?}", begun.elapsed());
        }
        if is_done {
            break;
        }
    }
}

/// A guard that prints the seed of a program that failed.
struct PrintSeedOnPanic(&'static str, u64);

impl Drop for PrintSeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{} failed: seed {}", self.0, self.1);
        }
    }
}
