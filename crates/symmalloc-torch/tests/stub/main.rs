//! The library on a stub of libcuda, through its C functions: all tests except those of C++. Each test runs in a separate process.

mod alignment;
mod all_to_all;
mod c_calls;
mod callbacks;
mod captures;
mod class_calls;
mod dma_buf;
mod forks;
mod header;
mod library;
mod nulls;
mod numbers;
mod pools;
mod registrar;
mod rejected;
mod repetition;
mod runtimes;
mod scopes;
mod sharing;
mod single_failures;
mod sleep;
mod steps;
mod threads;
mod torch_calls;
mod traces;
mod waits;
