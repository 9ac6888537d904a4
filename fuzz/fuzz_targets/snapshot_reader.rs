//! Fuzzes the PyTorch memory snapshot reader.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::snapshot_reader(bytes)));
