//! Programs on the allocator beside the oracle.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::ops_vs_oracle(bytes));
