//! Counts the ops of a fuzzing process, and prints them when the process ends: `symmalloc: 1234567 ops in 4321 runs`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static RUNS: AtomicU64 = AtomicU64::new(0);
static OPS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    safe fn atexit(function: extern "C" fn()) -> i32;
}

extern "C" fn print() {
    eprintln!("symmalloc: {} ops in {} runs", OPS.load(Relaxed), RUNS.load(Relaxed));
}

/// Prints the counts at exit. The fuzzer ends the process with `exit`, which drops nothing.
pub fn print_at_exit() {
    assert_eq!(atexit(print), 0, "the C library rejected the exit function");
}

/// Counts one run that executed this many ops.
pub fn add(ops: u64) {
    RUNS.fetch_add(1, Relaxed);
    OPS.fetch_add(ops, Relaxed);
}
