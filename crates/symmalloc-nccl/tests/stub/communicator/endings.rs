//! Tests of missing ranks, calls that fail or hang, and aborts: the resulting errors and the remaining resources.

use super::{Rank, SHORT, builder, in_both_modes, ranks, ranks_with};
use std::time::{Duration, Instant};
use stub_process::{ExitOnPanic, Library, nccl, nccl_test, until};
use symmalloc_agreement::{Transport, TransportError};
use symmalloc_cuda::CudaDevice;
use symmalloc_nccl::{
    BufferRegistration, CommError, CommState, Communicator, CommunicatorBuilder, FailureCause, NcclError,
    NcclTransport, ReduceOp, Stage, UniqueId, WatchdogMode, Window,
};

nccl_test!(a_rank_that_never_arrives_is_an_error_within_the_deadline, {
    let device = CudaDevice::new(0).expect("the stub should have a device");
    for (is_blocking, expected) in [(true, CommState::Lost), (false, CommState::Aborted)] {
        let id = UniqueId::new().expect("NCCL should create an id");
        let builder = builder(&device).deadline(*SHORT);
        let builder = if is_blocking { builder } else { builder.nonblocking() };
        let since = Instant::now();
        let Err(CommError::Deadline { name, stage, waited, state }) = builder.connect(id, 0, 2).map(|_| ()) else {
            panic!("connected without the other rank");
        };
        assert_eq!((&*name, stage, state), ("world", Stage::Connect, expected));
        assert!(waited >= *SHORT && since.elapsed() < *SHORT + Duration::from_millis(4600), "{:?}", since.elapsed());
    }
    nccl::assert_clean();
});

/// Runs a registration that rank 1 does not join. Returns the state of rank 0's communicator and the number of its aborts.
fn lone_registration(is_blocking: bool) -> (CommState, u64) {
    let left = std::sync::Mutex::new(None);
    let mode = |builder: CommunicatorBuilder| {
        let builder = builder.deadline(*SHORT).watchdog(WatchdogMode::Off);
        if is_blocking { builder } else { builder.nonblocking() }
    };
    ranks_with(2, mode, |rank| {
        let (_allocation, base) = rank.segment();
        if rank.number() == 0 {
            let since = Instant::now();
            let Err(CommError::Deadline { stage, waited, state, .. }) = rank.register(base).map(|_| ()) else {
                panic!("a window was registered without the other rank");
            };
            assert_eq!((stage, state), (Stage::Register, rank.comm.state()));
            assert!(waited >= *SHORT && since.elapsed() < *SHORT + Duration::from_secs(3), "{:?}", since.elapsed());
            let later = rank.comm.split(Some(0), 0).map(|_| ());
            let Err(CommError::Gone { cause: Some(cause), .. }) = later else { panic!("{later:?}") };
            assert!(matches!(*cause, CommError::Deadline { stage: Stage::Register, .. }));
            *left.lock().expect("the lock is not poisoned") = Some((state, nccl::calls("ncclCommAbort")));
        }
        rank.meet();
    });
    left.into_inner().expect("the lock is not poisoned").expect("rank 0 stored its result")
}

nccl_test!(the_watchdog_names_the_rank_that_does_not_register, {
    ranks_with(
        2,
        |builder| builder.deadline(*SHORT),
        |rank| {
            let (_allocation, base) = rank.segment();
            if rank.number() == 0 {
                let since = Instant::now();
                let Err(CommError::Failed(failure)) = rank.register(base).map(|_| ()) else {
                    panic!("a window was registered without the other rank");
                };
                assert_eq!(failure.cause, FailureCause::RanksBehind { ranks: vec![(1, 0)] });
                let waited = failure.waited;
                assert!(waited >= *SHORT && since.elapsed() < *SHORT + Duration::from_secs(1), "{:?}", since.elapsed());
            }
            rank.meet();
            let later = rank.comm.split(Some(0), 0).map(|_| ());
            assert!(matches!(later, Err(CommError::Gone { .. } | CommError::Failed(_))), "{later:?}");
        },
    );
    nccl::assert_clean();
});

nccl_test!(a_lone_registration_is_revoked_and_aborted, {
    assert_eq!(lone_registration(true), (CommState::Aborted, 1));
    nccl::assert_clean();
});

nccl_test!(a_lone_registration_without_revoke_is_lost, Library::StubWithout("ncclCommRevoke"), [], {
    assert_eq!(lone_registration(true), (CommState::Lost, 0), "a thread is still inside");
    nccl::assert_clean();
});

/// A call that rank 1 does not join, and to whose output NCCL may write until the abort.
type LoneCall = fn(&Rank) -> Result<(), CommError>;

/// Makes calls whose abort lasts longer than the caller waits for it. The stub detects outputs that are freed before.
fn late_aborts() {
    let calls: [LoneCall; 3] = [
        |rank| {
            let (_allocation, base) = rank.segment();
            rank.register(base).map(drop)
        },
        |rank| rank.comm.split(Some(0), 0).map(drop),
        |rank| rank.comm.shrink(&[2]).map(drop),
    ];
    for call in calls {
        for is_blocking in [true, false] {
            let mode = |builder: CommunicatorBuilder| {
                let builder = builder.deadline(*SHORT).watchdog(WatchdogMode::Off);
                if is_blocking { builder } else { builder.nonblocking() }
            };
            ranks_with(3, mode, |rank| {
                if rank.number() == 0 {
                    nccl::slow("ncclCommAbort", Some(0), 1, 600);
                    let late = call(rank);
                    assert!(matches!(late, Err(CommError::Deadline { .. })), "{late:?}");
                    if !is_blocking {
                        until(|| rank.comm.state() == CommState::Aborted);
                    }
                    nccl::heal();
                }
                rank.meet();
            });
        }
    }
    nccl::assert_clean();
}

nccl_test!(outputs_are_kept_until_a_late_abort, {
    late_aborts();
});

nccl_test!(outputs_are_kept_until_a_late_abort_without_a_revoke, Library::StubWithout("ncclCommRevoke"), [], {
    late_aborts();
});

nccl_test!(a_lost_communicator_is_aborted_when_its_call_returns, Library::StubWithout("ncclCommRevoke"), [], {
    ranks_with(
        2,
        |builder| builder.deadline(*SHORT).watchdog(WatchdogMode::Off),
        |rank| {
            let (_allocation, base) = rank.segment();
            if rank.number() == 0 {
                let late = rank.register(base).map(|_| ());
                assert!(matches!(late, Err(CommError::Deadline { state: CommState::Lost, .. })), "{late:?}");
            }
            rank.meet();
            if rank.number() == 1 {
                // The missing rank now registers, which ends the call of rank 0's thread.
                let _window = rank.register(base).expect("the memory should have a window");
            } else {
                until(|| rank.comm.state() == CommState::Aborted);
                assert!(matches!(rank.comm.cause(), Some(CommError::Deadline { .. })));
            }
            rank.meet();
        },
    );
    nccl::assert_clean();
});

/// Exits with status 3 while another thread's abort takes this long. Returns `true` if an exit handler ran that was registered earlier, as
/// those of NCCL and the driver are.
fn handlers_run_after_an_abort_of(ms: u64) -> bool {
    extern "C" fn handler() {
        // SAFETY: writes a string that exists.
        unsafe { libc::write(1, c"it ran".as_ptr().cast(), 6) };
    }
    let [child] = &stub_process::ranks(1, &[], |_| {
        // SAFETY: the function neither unwinds nor exits, and stays loaded.
        assert_eq!(unsafe { libc::atexit(handler) }, 0);
        let device = CudaDevice::new(0).expect("the stub should have a device");
        let comm = builder(&device)
            .connect(UniqueId::new().expect("NCCL should create an id"), 0, 1)
            .expect("the connection should succeed");
        nccl::slow("ncclCommAbort", None, 1, ms);
        std::thread::spawn(move || comm.abort());
        until(|| nccl::calls("ncclCommAbort") == 1);
        // SAFETY: a C string. The pipe is buffered, so `exit` writes it.
        unsafe { libc::puts(c"buffered".as_ptr()) };
        std::process::exit(3);
    })[..] else {
        panic!("one process");
    };
    assert_eq!(child.code, Some(3), "{}", child.text);
    assert!(child.text.contains("buffered"), "{}", child.text);
    child.text.contains("it ran")
}

nccl_test!(exit_waits_for_a_short_abort, {
    assert!(handlers_run_after_an_abort_of(50));
});

nccl_test!(exit_during_a_long_abort_skips_the_other_handlers, {
    let since = Instant::now();
    assert!(!handlers_run_after_an_abort_of(60_000));
    assert!(since.elapsed() < Duration::from_secs(30), "{:?}", since.elapsed());
});

nccl_test!(threads_that_share_a_communicator_call_one_at_a_time, {
    ranks(1, |rank| {
        let (_allocation, base) = rank.segment();
        std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            for _ in 0..3 {
                scope.spawn(|| {
                    let stream = rank.comm.device().context().new_stream().expect("the driver should create a stream");
                    let mut buffer = rank.allocator.alloc_zeroed::<f32>(&stream, 8).expect("memory should suffice");
                    for _ in 0..50 {
                        rank.comm
                            .all_reduce_in_place(&mut buffer, ReduceOp::Sum, &stream)
                            .expect("the work should be submitted");
                        let registration = rank.comm.register_buffer(base, 4096).expect("buffers can be in any memory");
                        rank.comm.deregister_buffer(registration).expect("the buffer is registered");
                    }
                });
            }
        });
    });
    nccl::assert_clean();
});

nccl_test!(a_lone_nonblocking_registration_is_aborted, Library::StubWithout("ncclCommRevoke"), [], {
    assert_eq!(lone_registration(false), (CommState::Aborted, 1));
    nccl::assert_clean();
});

nccl_test!(abort_unblocks_another_thread_inside_a_call, {
    in_both_modes(2, |rank| {
        let (_allocation, base) = rank.segment();
        if rank.number() == 0 {
            std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                let registering = scope.spawn(|| rank.register(base).map(|_| ()));
                std::thread::sleep(Duration::from_millis(100));
                let since = Instant::now();
                rank.comm.abort().expect("the communicator should end");
                assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
                let outcome = registering.join().expect("the thread does not panic");
                let expected = CommError::Gone { name: "world".into(), state: CommState::Aborted, cause: None };
                assert_eq!(outcome, Err(expected));
            });
        }
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(abort_deregisters_windows_if_revoke_is_supported, {
    in_both_modes(2, |rank| {
        let (_allocation, base) = rank.segment();
        let _window = rank.register(base).expect("the memory should have a window");
        rank.meet();
        rank.comm.abort().expect("the communicator should end");
        assert_eq!(rank.comm.state(), CommState::Aborted);
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().kept_rounds, nccl::live().communicators), (0, 0, 0));
        rank.meet();
    });
    nccl::assert_clean();
});

type GiveBack = fn(&Communicator, Window, BufferRegistration) -> Result<(), CommError>;

/// Aborts while a release is on its way to NCCL. The abort releases the resource, and the call does not release it again.
fn given_back_once(call: &str, give_back: GiveBack) {
    in_both_modes(2, |rank| {
        let (_allocation, base) = rank.segment();
        let window = rank.register(base).expect("the memory should have a window");
        let buffer = rank.comm.register_buffer(base, 4096).expect("buffers can be in any memory");
        rank.meet();
        if rank.number() == 0 {
            let before = nccl::calls(call);
            nccl::slow(call, Some(0), 1, 1000);
            std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                let giving_back = scope.spawn(|| give_back(&rank.comm, window, buffer));
                until(|| nccl::calls(call) != before);
                rank.comm.abort().expect("the communicator should end");
                let outcome = giving_back.join().expect("the thread does not panic");
                assert!(matches!(outcome, Err(CommError::Gone { .. })), "{outcome:?}");
            });
        }
        rank.meet();
        rank.comm.abort().expect("the communicator should end");
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().buffers, nccl::live().communicators), (0, 0, 0));
        rank.meet();
    });
    nccl::assert_clean();
}

/// Makes NCCL fail to deregister a window on rank 0, which ends the communicator. The end releases all remaining registrations.
///
/// The watchdog is off. It would report the end to rank 1 and end rank 1's communicator as well, before or after rank 1 deregisters its
/// window.
fn window_that_is_refused(mode: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync) {
    ranks_with(
        2,
        |builder| mode(builder.watchdog(WatchdogMode::Off)),
        |rank| {
            let (_allocation, base) = rank.segment();
            let window = rank.register(base).expect("the memory should have a window");
            rank.meet();
            if rank.number() == 0 {
                nccl::fail("ncclCommWindowDeregister", Some(0), 1, 1);
            }
            rank.meet();
            let outcome = rank.comm.deregister_window(window);
            assert_eq!(outcome.is_err(), rank.number() == 0, "{outcome:?}");
            assert_eq!(rank.comm.state() == CommState::Ready, rank.number() != 0);
            rank.meet();
            if rank.number() == 1 {
                rank.comm.abort().expect("the communicator should end");
            }
            rank.meet();
            assert_eq!((nccl::live().windows, nccl::live().kept_rounds, nccl::live().leaked), (0, 0, 0));
            rank.meet();
        },
    );
    nccl::assert_clean();
}

nccl_test!(a_window_that_cannot_be_deregistered_ends_with_its_communicator, {
    window_that_is_refused(|builder| builder);
    window_that_is_refused(CommunicatorBuilder::nonblocking);
});

nccl_test!(the_end_of_a_refused_window_ends_the_other_rank_too, {
    in_both_modes(2, |rank| {
        let (_allocation, base) = rank.segment();
        let window = rank.register(base).expect("the memory should have a window");
        rank.meet();
        if rank.number() == 0 {
            nccl::fail("ncclCommWindowDeregister", Some(0), 1, 1);
            rank.comm.deregister_window(window).expect_err("NCCL refuses");
        }
        until(|| rank.comm.state() == CommState::Aborted);
        rank.meet();
        assert_eq!((nccl::live().windows, nccl::live().kept_rounds, nccl::live().leaked), (0, 0, 0));
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(a_window_that_is_deregistered_during_an_abort_is_released_once, {
    given_back_once("ncclCommWindowDeregister", |comm, window, _| comm.deregister_window(window));
});

nccl_test!(a_buffer_that_is_deregistered_during_an_abort_is_released_once, {
    given_back_once("ncclCommDeregister", |comm, _, buffer| comm.deregister_buffer(buffer));
});

/// Returns the error of a rank whose communicator ended. Because of a race, a rank is notified of the failure by NCCL or by the other rank.
fn message(outcome: Result<(), CommError>) -> String {
    match outcome {
        Err(error @ (CommError::Nccl(_) | CommError::Failed(_) | CommError::Gone { cause: Some(_), .. })) => {
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

/// Kills rank 2 and checks the errors of the others.
fn lost_peer(mode: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync) {
    ranks_with(3, mode, |rank| {
        rank.meet();
        if rank.number() == 0 {
            nccl::kill(2);
        }
        rank.meet();
        if rank.number() != 2 {
            let mut buffer = rank.buffer(&[1.0]);
            let refused = rank.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream);
            assert!(message(refused).contains("(ncclRemoteError)"));
            assert_eq!(rank.comm.state(), CommState::Aborted);
            assert!(rank.comm.cause().is_some_and(|cause| cause.to_string().contains("(ncclRemoteError)")));
        }
        rank.meet();
    });
}

nccl_test!(a_lost_peer_ends_the_communicator_with_its_error, {
    lost_peer(|builder| builder);
});

nccl_test!(a_lost_peer_ends_a_nonblocking_communicator_too, {
    lost_peer(CommunicatorBuilder::nonblocking);
});

nccl_test!(an_argument_that_nccl_refuses_does_not_end_the_communicator, {
    ranks(2, |rank| {
        nccl::fail("ncclAllReduce", Some(rank.number() as usize), 1, 4);
        let mut buffer = rank.buffer(&[1.0]);
        let refused = rank.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream);
        assert!(
            matches!(&refused, Err(CommError::Nccl(NcclError { call: "ncclAllReduce", code: 4, .. }))),
            "{refused:?}"
        );
        assert_eq!(rank.comm.state(), CommState::Ready);
        rank.meet();
        rank.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
        assert_eq!(rank.read(&buffer), [2.0]);
    });
    nccl::assert_clean();
});

nccl_test!(a_failed_registration_ends_the_communicator, {
    in_both_modes(2, |rank| {
        nccl::fail("ncclCommWindowRegister", Some(rank.number() as usize), 1, 4);
        let (_allocation, base) = rank.segment();
        let refused = rank.register(base).map(|_| ());
        assert!(message(refused).contains("ncclCommWindowRegister failed with 4"));
        assert_eq!(rank.comm.state(), CommState::Aborted);
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(a_failed_connection_leaves_nothing, {
    let device = CudaDevice::new(0).expect("the stub should have a device");
    nccl::fail("ncclCommInitRankConfig", None, 1, 2);
    let id = UniqueId::new().expect("NCCL should create an id");
    let refused = builder(&device).connect(id, 0, 1).map(|_| ());
    assert!(matches!(&refused, Err(CommError::Nccl(NcclError { code: 2, .. }))), "{refused:?}");
    assert_eq!(nccl::live().communicators, 0);
    builder(&device)
        .connect(UniqueId::new().expect("NCCL should create an id"), 0, 1)
        .expect("the device connects again");
});

nccl_test!(a_first_collective_that_waits_for_ranks_ends_at_the_deadline, ["STUB_NCCL_CONNECT_BLOCKS" = "1"], {
    ranks_with(
        2,
        |builder| builder.deadline(*SHORT),
        |rank| {
            let mut buffer = rank.buffer(&[1.0]);
            if rank.number() == 0 {
                let late = rank.comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream);
                let Err(CommError::Failed(failure)) = late else { panic!("{late:?}") };
                assert_eq!(failure.cause, FailureCause::RanksBehind { ranks: vec![(1, 0)] });
                assert_ne!(rank.comm.state(), CommState::Ready);
            }
            rank.meet();
        },
    );
    nccl::assert_clean();
});

nccl_test!(a_silent_rank_exceeds_the_deadline, {
    ranks_with(
        2,
        |builder| builder.deadline(*SHORT),
        |rank| {
            let transport = NcclTransport::new(&rank.comm).expect("memory should suffice");
            if rank.number() == 0 {
                let since = Instant::now();
                let gathered = transport.all_gather(&[1; 64]);
                assert_eq!(gathered, Err(TransportError::RankLost { rank: 1 }));
                assert!(since.elapsed() >= *SHORT);
                assert!(since.elapsed() < *SHORT + Duration::from_secs(3));
                assert_eq!(rank.comm.state(), CommState::Aborted);
                assert!(matches!(rank.comm.cause(), Some(CommError::Failed(_))));
                assert_eq!(transport.all_gather(&[1; 64]), Err(TransportError::Closed));
            }
            rank.meet();
        },
    );
    nccl::assert_clean();
});

nccl_test!(a_gather_that_ends_without_a_message_names_the_rank, {
    ranks(3, |rank| {
        if rank.number() == 2 {
            // An aborted kernel leaves a slot that no rank wrote: 64 bytes and the transport's seal.
            let nothing = rank.allocator.alloc_zeroed::<u8>(&rank.stream, 72).expect("memory should suffice");
            let mut all = rank.allocator.alloc_zeroed::<u8>(&rank.stream, 3 * 72).expect("memory should suffice");
            rank.comm.all_gather(&nothing, &mut all, &rank.stream).expect("the work should be submitted");
        } else {
            let transport = NcclTransport::new(&rank.comm).expect("memory should suffice");
            // The other rank may have detected the failure first and notified this one.
            let gathered = transport.all_gather(&[1; 64]);
            assert!(matches!(gathered, Err(TransportError::RankLost { .. })), "{gathered:?}");
            let cause = rank.comm.cause().expect("it was ended").to_string();
            assert!(cause.contains("the message of rank 2 did not arrive"), "{cause}");
            assert_ne!(rank.comm.state(), CommState::Ready);
        }
        rank.meet();
    });
    nccl::assert_clean();
});
