//! Fuzzes steps: programs that repeat steps, on two ranks and the model of plans.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::steps(bytes)));
