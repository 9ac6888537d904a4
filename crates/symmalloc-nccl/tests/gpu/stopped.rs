//! Tests with a peer that dies. NCCL's symmetric kernels do not check whether they were aborted, so a kernel that waits for a dead peer
//! never ends. The tests therefore require that every call of this crate returns soon after the deadline, with an error that states the
//! cause. Each test runs in separate processes, because such a kernel ends only with its process.

use crate::job::{Calls, MIB, Rank, again, devices, processes, ranks, reserved, status_of};
use std::sync::Barrier;
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_cuda::CudaDevice;
use symmalloc_nccl::{Communicator, CommunicatorBuilder, Launch, ReduceOp, Registration, UniqueId, WatchdogMode};

const CHILD: &str = "SYMMALLOC_STOPPED_CHILD";
const WAIT: Duration = Duration::from_secs(2);
/// Exit statuses of a survivor and of the rank that dies.
const SURVIVED: i32 = 7;
const DEAD: i32 = 9;

/// Work that the survivors have in flight when they notice the death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InFlight {
    Nothing,
    CollectiveOnWindows,
}

#[test]
fn a_thread_that_stops_under_a_collective_on_windows_ends_in_an_error() {
    const NAME: &str = "stopped::a_thread_that_stops_under_a_collective_on_windows_ends_in_an_error";
    if let Ok(calls) = std::env::var(CHILD) {
        let calls = if calls == "blocking" { Calls::Blocking } else { Calls::Nonblocking };
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(devices().expect("the devices are still available"), |rank| {
            let connect = |builder: CommunicatorBuilder| builder.connect(id, rank.rank, rank.ranks);
            let stop = || loop {
                std::thread::park();
            };
            let comm = connect(rank.builder(calls).deadline(WAIT).watchdog(WatchdogMode::Abort))
                .expect("the connection should succeed");
            live(rank, &comm, InFlight::CollectiveOnWindows, stop);
        });
        return;
    }
    let Some(_) = devices() else { return };
    for calls in ["blocking", "nonblocking"] {
        let mut child = again(NAME).env(CHILD, calls).spawn().expect("the process should start again");
        assert_eq!(status_of(&mut child), Some(SURVIVED), "{calls}");
    }
}

#[test]
fn a_process_that_dies_ends_in_an_error_on_all_others() {
    const NAME: &str = "stopped::a_process_that_dies_ends_in_an_error_on_all_others";
    if let Ok(in_flight) = std::env::var(CHILD) {
        let in_flight = if in_flight == "nothing" { InFlight::Nothing } else { InFlight::CollectiveOnWindows };
        let launch = Launch::from_env().expect("started as a rank");
        let device = CudaDevice::for_local_rank(launch.local_rank).expect("the device should be created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        let builder = Communicator::builder(&device).deadline(WAIT).watchdog(WatchdogMode::Abort);
        let comm = builder.connect_env().expect("the connection should succeed");
        let barrier = Barrier::new(1);
        let rank = Rank { rank: launch.rank, ranks: launch.ranks, device, stream, barrier: &barrier };
        live(&rank, &comm, in_flight, || {
            if in_flight == InFlight::CollectiveOnWindows {
                // The survivors submit their collective before they are notified of the death, which fails later calls.
                std::thread::sleep(Duration::from_millis(250));
            }
            // SAFETY: no code of this process runs afterwards; the call imitates a crash.
            unsafe { libc::_exit(DEAD) }
        });
        return;
    }
    let Some(count) = devices() else { return };
    for in_flight in ["nothing", "collective"] {
        let children = processes(NAME, count, (CHILD, in_flight));
        let statuses: Vec<_> = children.into_iter().map(|mut child| status_of(&mut child)).collect();
        let (dead, survivors) = statuses.split_last().expect("there are at least two ranks");
        assert_eq!(*dead, Some(DEAD), "{in_flight}");
        assert!(survivors.iter().all(|status| *status == Some(SURVIVED)), "{in_flight}: {statuses:?}");
    }
}

/// Runs one rank: the last one stops after a successful collective, and the first survivor to finish ends the process.
fn live(rank: &Rank<'_>, comm: &Communicator, in_flight: InFlight, stop: impl Fn()) {
    let allocator = rank.allocator(reserved(64 * MIB));
    let registrar = rank.registrar(&allocator);
    registrar.attach(comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    let mut buffer = allocator.alloc_zeroed::<f32>(&rank.stream, 1 << 18).expect("the allocation should succeed");
    registrar.sync(&[comm]).expect("the registration should succeed");
    rank.write(&mut buffer, 1);
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    assert_eq!(rank.wrong_sums(&buffer, 1), 0);
    rank.meet();
    if rank.rank + 1 == rank.ranks {
        stop();
    }
    if in_flight == InFlight::CollectiveOnWindows {
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    }
    let begun = Instant::now();
    let error = registrar.sync(&[comm]).expect_err("a peer is gone");
    println!("rank {}, {in_flight:?}, sync, after {} ms: {error}", rank.rank, begun.elapsed().as_millis());
    assert!(begun.elapsed() < WAIT + Duration::from_secs(2), "{:?}", begun.elapsed());
    // Allocation continues to work, because it never blocks on the device.
    drop(buffer);
    let _later = allocator.allocate(&rank.stream, MIB).expect("the allocation should succeed");
    let begun = Instant::now();
    let ended = comm.abort();
    println!("rank {}, {}, abort again: {ended:?} after {} ms", rank.rank, comm.state(), begun.elapsed().as_millis());
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // SAFETY: ends the process without running `exit`'s handlers; the driver's handler would wait for the kernel.
    unsafe { libc::_exit(SURVIVED) }
}
