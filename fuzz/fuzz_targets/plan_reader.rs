//! Fuzzes the plan reader: text is read, written, read back, and followed or rejected.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::plan_reader(bytes)));
