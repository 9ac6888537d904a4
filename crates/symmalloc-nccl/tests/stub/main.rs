//! NCCL registration on stubs of libcuda and libnccl: everything but the devices. Runs everywhere, and each test in a
//! process of its own (see `stub_process`).

mod all_reduce;
mod all_to_all;
mod communicator;
mod launched;
mod raw;
mod registrar;
mod stub_faults;
mod stub_itself;
mod stub_processes;
mod stub_violations;
mod take_turns;
mod watchdog;
