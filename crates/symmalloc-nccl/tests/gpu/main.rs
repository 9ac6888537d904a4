//! The crate on GPUs and a real libnccl. With fewer than two devices, or no libnccl, every test says so and passes. Commands and
//! what was seen: `docs/measured/nccl.md`.
//!
//! Run with `--test-threads=1`: some tests look at how much memory the devices have left. All devices that the process can see
//! take part, a thread for each; `CUDA_VISIBLE_DEVICES` makes them fewer.

mod all_to_all;
mod collectives;
mod costs;
mod divergence;
mod engine;
mod job;
mod kernels;
mod leaks;
mod recorded;
mod stopped;
mod table;
mod watchdog;
