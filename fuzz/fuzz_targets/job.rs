//! Programs as whole jobs: a few ranks in adverse surroundings, whose threads interleave.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::job(bytes));
