//! Tests of the core's public API on a simulated device. Unit tests of a file's internals are modules of that file.

mod by_pointer;
mod config_text;
mod threads;
