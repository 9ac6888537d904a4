//! Fuzzes whole jobs: a few ranks run a program under adverse conditions, with interleaved threads.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::job(bytes)));
