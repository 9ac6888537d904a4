//! Tests of programs that run with the preloaded library, on a stub of libcuda. Each test runs in a separate process.

mod driver;
mod environment;
mod programs;
mod promises;
mod rejected;
mod serving;
mod single_failures;
mod storm;
