//! The library on a stub of libcuda, through its C functions: everything but C++. Each test is a process of its own.

mod alignment;
mod all_to_all;
mod c_calls;
mod captures;
mod class_calls;
mod library;
mod nulls;
mod pools;
mod registrar;
mod runtimes;
mod scopes;
mod sharing;
mod sleep;
mod steps;
mod threads;
mod torch_calls;
mod traces;
