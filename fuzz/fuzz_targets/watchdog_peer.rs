//! Fuzzes the watchdog's protocol: a process, or the hub, sends arbitrary bytes. What is known of the other processes must stay true.
#![no_main]

#[path = "../count.rs"]
mod count;

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(init: count::print_at_exit(), |bytes: &[u8]| count::add(targets::watchdog_peer(bytes)));
