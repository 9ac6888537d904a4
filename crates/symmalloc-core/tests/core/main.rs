//! What the core does on a simulated device, through its public API. Tests of a file's internals stand in that file.

mod by_pointer;
mod config_text;
