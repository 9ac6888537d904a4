//! The program `symmalloc`. The library of the same package contains its implementation.

use std::process::ExitCode;

fn main() -> ExitCode {
    symmalloc_cli::main(std::env::args_os())
}
