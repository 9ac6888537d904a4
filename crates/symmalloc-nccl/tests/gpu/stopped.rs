//! A peer that dies while a collective on windows runs. NCCL's symmetric kernels do not look whether they were aborted, so the
//! device never gets done. What is asked for then is that every call of this crate returns within the deadline, with an error
//! that says what happened. In a process of its own, since only its end ends the kernel.

use crate::job::{Calls, MIB, Rank, again, devices, ranks, reserved};
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_nccl::{ReduceOp, Registration, UniqueId};

const CHILD: &str = "SYMMALLOC_STOPPED_CHILD";
const NAME: &str = "stopped::a_peer_that_dies_under_a_collective_on_windows_ends_in_an_error";
const WAIT: Duration = Duration::from_secs(2);

#[test]
fn a_peer_that_dies_under_a_collective_on_windows_ends_in_an_error() {
    if let Ok(calls) = std::env::var(CHILD) {
        return live(if calls == "blocking" { Calls::Blocking } else { Calls::Nonblocking });
    }
    let Some(_) = devices() else { return };
    for calls in ["blocking", "nonblocking"] {
        let begun = Instant::now();
        let mut child = again(NAME).env(CHILD, calls).spawn().expect("started again");
        let status = loop {
            if let Some(status) = child.try_wait().expect("asked") {
                break status;
            }
            if begun.elapsed() > Duration::from_secs(40) {
                child.kill().expect("killed");
                panic!("{calls}: it hangs");
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        // 7: the survivor got through.
        assert_eq!(status.code(), Some(7), "{calls}");
    }
}

/// All ranks but one, whose collective has no peer.
fn live(calls: Calls) {
    let id = UniqueId::new().expect("NCCL makes one");
    ranks(devices().expect("as before"), |rank: &Rank<'_>| {
        let comm = rank.builder(calls).deadline(WAIT).connect(id, rank.rank, rank.ranks).expect("connected");
        let allocator = rank.allocator(reserved(64 * MIB));
        let registrar = rank.registrar(&allocator);
        registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("attached");
        let mut buffer = allocator.alloc_zeroed::<f32>(&rank.stream, 1 << 18).expect("allocated");
        registrar.sync(&[&comm]).expect("registered");
        rank.write(&mut buffer, 1);
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("submitted");
        assert_eq!(rank.wrong_sums(&buffer, 1), 0);
        rank.meet();
        if !rank.is_first() {
            // Dead: it comes to nothing any more.
            loop {
                std::thread::park();
            }
        }
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("submitted");
        let begun = Instant::now();
        let error = registrar.sync(&[&comm]).expect_err("the peers are gone");
        println!("{calls:?}, sync, after {} ms: {error}", begun.elapsed().as_millis());
        assert!(begun.elapsed() < WAIT + Duration::from_secs(10), "{:?}", begun.elapsed());
        // Allocating goes on, since nothing there waits on the host.
        drop(buffer);
        let _later = allocator.allocate(&rank.stream, MIB).expect("allocated");
        let begun = Instant::now();
        let ended = comm.abort();
        println!("{calls:?}, state {}, abort again: {ended:?} after {} ms", comm.state(), begun.elapsed().as_millis());
        assert!(begun.elapsed() < WAIT + Duration::from_secs(10), "{:?}", begun.elapsed());
        std::process::exit(7);
    });
}
