//! The program `symmalloc`. Everything it does is in the library of the same package.

use std::process::ExitCode;

fn main() -> ExitCode {
    symmalloc_cli::main(std::env::args_os())
}
