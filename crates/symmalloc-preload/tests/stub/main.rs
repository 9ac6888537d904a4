//! Programs under the library, on a stub of libcuda. Each test is a process of its own.

mod driver;
mod environment;
mod programs;
mod promises;
mod serving;
mod storm;
