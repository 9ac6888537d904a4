//! Fuzzes the allocator with programs, compared with the oracle.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::ops_vs_oracle(bytes)));
