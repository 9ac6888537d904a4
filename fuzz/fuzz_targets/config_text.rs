//! Text as a configuration: read, written and read back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::config_text(bytes));
