//! Fuzzes the work of a replay: hostile traces are read and executed, and the executed basic blocks are counted. Their number must not
//! exceed a bound for each byte of the trace. A count does not depend on the machine, unlike time.
//!
//! The compiler inserts a call at each basic block if it is asked to: `RUSTFLAGS=-Cllvm-args=-sanitizer-coverage-trace-pc`, as CI does.
//! Without it, only the steps that the core counts are compared with the bound.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

/// Number of basic blocks executed so far.
static mut BLOCKS: u64 = 0;

/// Counts a basic block. The compiler inserts no call into a function of this name. The fuzzer's own definition does nothing; `build.rs`
/// lets this one take precedence.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_trace_pc() {
    // SAFETY: the target runs on one thread. The statement contains no call, which would count itself.
    unsafe { BLOCKS += 1 };
}

/// Returns the number of basic blocks, or the core's steps if blocks are not counted.
fn operations() -> u64 {
    // SAFETY: as above.
    let blocks = unsafe { BLOCKS };
    if blocks > 0 { blocks } else { symmalloc_core::work::steps() }
}

fn begin() {
    count::print_at_exit();
    targets::count_operations_with(operations);
}

fuzz_target!(init: begin(), |bytes: &[u8]| count::add(targets::work(bytes)));
