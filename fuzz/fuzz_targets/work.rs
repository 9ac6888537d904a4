//! Fuzzes the work of a replay: hostile traces are read and executed, and the steps that the core counts must stay within what the ops
//! allow. Their number does not depend on the machine, unlike time.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::work(bytes)));
