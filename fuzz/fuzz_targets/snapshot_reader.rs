//! Bytes as a PyTorch memory snapshot.
#![no_main]

use libfuzzer_sys::fuzz_target;
use symmalloc_harness::targets;

fuzz_target!(|bytes: &[u8]| targets::snapshot_reader(bytes));
