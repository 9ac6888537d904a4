//! Programs on two ranks that have nothing in common but the program.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::two_ranks(bytes));
