//! NCCL registration on stubs of libcuda and libnccl, which replace only the devices and the network. The tests run everywhere, each in a
//! separate process (see `stub_process`).

mod all_reduce;
mod all_to_all;
mod communicator;
mod interleavings;
mod launched;
mod long_runs;
mod machines;
mod raw;
mod registrar;
mod stub_faults;
mod stub_itself;
mod stub_processes;
mod stub_violations;
mod symmetric;
mod take_turns;
mod watchdog;

#[global_allocator]
static WATCHED: stub_process::nccl::WatchedFrees = stub_process::nccl::WatchedFrees;
