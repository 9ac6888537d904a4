//! Text as a layout: read, written, read back, restored and used.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::layout_reader(bytes));
