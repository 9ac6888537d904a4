//! Tests of the crate on GPUs with a real libnccl. With fewer than two devices, or without libnccl, every test prints the reason and
//! passes. `docs/measured/nccl.md` lists the commands and their results.
//!
//! Run with `--test-threads=1`: some tests measure the free memory of the devices. All visible devices take part, with one thread each;
//! `CUDA_VISIBLE_DEVICES` limits them.

mod all_to_all;
mod collectives;
mod costs;
mod divergence;
mod engine;
mod job;
mod kernels;
mod leaks;
mod parts;
mod recorded;
mod stopped;
mod symmetric;
mod table;
mod watchdog;
mod windows;
