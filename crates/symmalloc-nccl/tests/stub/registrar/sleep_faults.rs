//! Tests of calls that fail or hang at any point of a sleep and a wake across ranks. The outcomes must be those in the tables of
//! `docs/sleep-protocol.md`.

use super::support::{Job, MIB, PATIENT, Rank};
use std::sync::Mutex;
use std::time::Instant;
use stub_process::{cuda, nccl, nccl_test, until};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{CollectiveSleepError, CommState, Communicator, Obstacle, SleepStep, UniqueId};

/// A fault on rank 1.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The n-th NCCL call of this name fails.
    Fails(&'static str, u64),
    /// The n-th NCCL call of this name never reaches the other ranks.
    Hangs(&'static str, u64),
    /// The n-th driver call of this name fails.
    Driver(&'static str, u64),
}

/// The outcome of a sleep and a wake on one rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Done,
    Sleep(String),
    Wake(String),
}

/// Returns a second communicator of all ranks, a pool with two windows on each of the two communicators, and the pool's buffers.
fn with_windows(it: &Rank) -> (Communicator, Pool<CudaBackend>, Vec<DeviceBuffer<f32>>) {
    let other = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
    let pool = it.attached_pool();
    it.registrar.attach(&other, &[pool.id()], it.windows()).expect("the pool is not attached to this communicator yet");
    let tensors = [20, 30].map(|size| it.take(&pool, size * MIB)).into();
    it.registrar.sync(&[&it.world, &other]).expect("the ranks should agree");
    (other, pool, tensors)
}

/// Runs a sleep and a wake with one fault. Checks that each rank ends in the state that the tables specify, and that the pool recovers over
/// a new communicator. Returns the outcomes of the ranks, or `None` if no call failed.
fn strike(fault: Fault) -> Option<Vec<End>> {
    let (before, shared) = (cuda::live().device_bytes, Mutex::new(None));
    let ends = Job::new(2).impatient().run(|it| {
        let (other, pool, mut tensors) = with_windows(it);
        it.meet();
        if it.rank == 0 {
            match fault {
                Fault::Fails(call, nth) => nccl::fail(call, Some(1), nth, 3),
                Fault::Hangs(call, nth) => nccl::hang(call, Some(1), nth),
                Fault::Driver(call, nth) => cuda::fail_elsewhere(call, nth, 719),
            }
        }
        it.meet();
        let begun = Instant::now();
        let end = sleep_and_wake(it, &other, pool.id(), fault);
        assert!(begun.elapsed() < 40 * it.deadline, "{fault:?}: {:?}", begun.elapsed());
        it.check();
        it.meet();
        if it.rank == 0 {
            nccl::heal();
            cuda::heal();
        }
        it.meet();
        heal(it, &other, pool.id(), &mut tensors, &shared, fault);
        end
    });
    nccl::assert_clean();
    let live = nccl::live();
    assert_eq!((live.communicators, live.windows, live.kept_rounds), (0, 0, 0), "{fault:?}");
    // If NCCL fails to deregister a window, it keeps the window's memory, on that rank only.
    let is_refused = matches!(fault, Fault::Fails("ncclCommWindowDeregister", _));
    let kept = cuda::live().device_bytes - before;
    assert!(kept == 0 || is_refused && kept <= 50 * MIB, "{fault:?}: {kept} bytes of device memory are left");
    ends.iter().any(|end| *end != End::Done).then_some(ends)
}

/// Runs the sleep and the wake, and checks the state that the tables specify for this rank.
fn sleep_and_wake(it: &Rank, other: &Communicator, pool: PoolId, fault: Fault) -> End {
    let phase = || it.registrar.phase(pool).expect("the pool should exist");
    let is_ready = |comm: &Communicator| comm.state() == CommState::Ready;
    match it.registrar.sleep(&it.world, pool, Contents::Drop) {
        Ok(_) => assert_eq!(phase(), Phase::Asleep, "{fault:?}"),
        Err(error) => {
            let is_asleep = match &error {
                CollectiveSleepError::Refused { .. }
                | CollectiveSleepError::Broken { step: SleepStep::Agree | SleepStep::Decide, .. } => false,
                CollectiveSleepError::Broken { step: SleepStep::Check, .. } | CollectiveSleepError::Held { .. } => true,
                error => panic!("{fault:?}: {error}"),
            };
            assert_eq!(phase() != Phase::Awake, is_asleep, "{fault:?}: {error}");
            match &error {
                // A refusal has no effect.
                CollectiveSleepError::Refused { .. } => {
                    assert!(is_ready(&it.world) && is_ready(other), "{fault:?}: {error}");
                }
                CollectiveSleepError::Broken { step: SleepStep::Decide, .. } => {
                    // Other ranks may have put the pool to sleep, so no rank may use windows that a peer has deregistered.
                    assert!(!is_ready(&it.world) && !is_ready(other), "{fault:?}: {error}");
                }
                CollectiveSleepError::Broken { .. } => assert!(!is_ready(&it.world), "{fault:?}: {error}"),
                _ => {}
            }
            return End::Sleep(kind_of(&error));
        }
    }
    match it.registrar.wake(&it.world, pool) {
        Ok(woken) => {
            assert_eq!(phase(), Phase::Awake, "{fault:?}");
            let is_lost = !is_ready(other);
            assert_eq!(woken.lost, if is_lost { vec![other.name().to_owned()] } else { vec![] }, "{fault:?}");
            if is_lost { End::Wake("lost".into()) } else { End::Done }
        }
        Err(error) => {
            let is_asleep = match &error {
                CollectiveSleepError::Refused { .. }
                | CollectiveSleepError::Broken { step: SleepStep::Agree | SleepStep::Decide, .. } => true,
                CollectiveSleepError::Broken { step: SleepStep::Register | SleepStep::Check, .. } => false,
                CollectiveSleepError::Gone { .. } => true,
                error => panic!("{fault:?}: {error}"),
            };
            assert_eq!(phase() != Phase::Awake, is_asleep, "{fault:?}: {error}");
            if let CollectiveSleepError::Broken { step: SleepStep::Register, .. } = &error {
                assert!(!is_ready(&it.world) && !is_ready(other), "{fault:?}: {error}");
            }
            End::Wake(kind_of(&error))
        }
    }
}

/// Returns the kind and the step of an error.
fn kind_of(error: &impl std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let kind = text.split([' ', '(']).next().unwrap_or_default().to_owned();
    let step =
        ["Agree", "Decide", "Register", "Check"].into_iter().find(|step| text.contains(&format!("step: {step}")));
    step.map_or(kind.clone(), |step| format!("{kind} in {step}"))
}

/// Puts the pool to sleep and wakes it over a new communicator, after any outcome, and checks a reduction.
fn heal(
    it: &Rank,
    other: &Communicator,
    pool: PoolId,
    tensors: &mut [DeviceBuffer<f32>],
    shared: &Mutex<Option<UniqueId>>,
    fault: Fault,
) {
    for comm in [other, &it.world] {
        until(|| {
            let is_settled = comm.state() == CommState::Ready || comm.abort().is_ok();
            it.registrar.sweep();
            is_settled
        });
    }
    it.registrar.sweep();
    // A real program decides out of band which communicators to abort. This test aborts every communicator that is not ready on both
    // ranks.
    it.meet();
    other.abort().expect("the communicator should end");
    it.meet();
    it.registrar.sweep();
    // No further fault is expected, so the deadline allows for a busy machine.
    let next = it.connect_within(PATIENT, "next", shared);
    it.registrar.attach(&next, &[pool], it.windows()).expect("the pool is not attached to this communicator yet");
    if it.world.state() == CommState::Ready {
        it.world.abort().expect("the communicator should end");
        it.registrar.sweep();
    }
    it.registrar.sleep(&next, pool, Contents::Drop).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
    assert_eq!(it.registrar.phase(pool), Ok(Phase::Asleep), "{fault:?}");
    it.registrar.wake(&next, pool).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
    it.registrar.sync(&[&next]).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
    tensors.iter_mut().for_each(|tensor| it.reduce_right(&next, tensor));
    next.destroy().expect("the communicator should be destroyed");
    it.registrar.sweep();
}

/// Repeats [`strike`] for each occurrence of the call until none fails. Returns the outcomes of all runs.
fn strike_all(fault: impl Fn(u64) -> Fault) -> Vec<Vec<End>> {
    let ends: Vec<_> = (1..).map_while(|nth| strike(fault(nth))).collect();
    for (nth, ends) in ends.iter().enumerate() {
        println!("{:?}: {ends:?}", fault(nth as u64 + 1));
    }
    ends
}

nccl_test!(a_gather_that_fails_or_hangs_in_any_step_ends_in_the_documented_state, {
    // The sleep and the wake each run one gather for Agree, its page, Decide and Check.
    let failed = strike_all(|nth| Fault::Fails("ncclAllGather", nth));
    assert_eq!(failed.len(), 8);
    let hung = strike_all(|nth| Fault::Hangs("ncclAllGather", nth));
    assert_eq!(hung.len(), 8);
    let step = |ends: &[Vec<End>], at: usize, rank: usize| ends[at][rank].clone();
    for ends in [&failed, &hung] {
        assert_eq!(step(ends, 0, 1), End::Sleep("Broken in Agree".into()));
        assert_eq!(step(ends, 2, 1), End::Sleep("Broken in Decide".into()));
        assert_eq!(step(ends, 3, 1), End::Sleep("Broken in Check".into()));
        assert_eq!(step(ends, 4, 1), End::Wake("Broken in Agree".into()));
        assert_eq!(step(ends, 6, 1), End::Wake("Broken in Decide".into()));
        assert_eq!(step(ends, 7, 1), End::Wake("Broken in Check".into()));
    }
});

nccl_test!(a_registration_that_fails_or_hangs_in_a_wake_ends_in_the_documented_state, {
    for ends in [
        strike_all(|nth| Fault::Fails("ncclCommWindowRegister", nth)),
        strike_all(|nth| Fault::Hangs("ncclCommWindowRegister", nth)),
    ] {
        // Two windows are on the world, over which the ranks communicate. The other two are on the other communicator, whose loss is not
        // fatal.
        assert_eq!(ends.len(), 4);
        for ends in &ends[..2] {
            assert_eq!(ends[1], End::Wake("Broken in Register".into()));
        }
        for ends in &ends[2..] {
            assert_eq!(*ends, [End::Wake("lost".into()), End::Wake("lost".into())]);
        }
    }
});

nccl_test!(a_deregistration_that_fails_in_a_sleep_ends_its_communicator, {
    let ends = strike_all(|nth| Fault::Fails("ncclCommWindowDeregister", nth));
    assert_eq!(ends.len(), 4);
    for ends in &ends[..2] {
        assert_eq!(ends[1], End::Sleep("Broken in Check".into()));
    }
});

nccl_test!(a_window_of_a_lost_communicator_keeps_its_memory_until_the_communicator_ends, {
    Job::new(2).impatient().run(|it| {
        let (other, pool, mut tensors) = with_windows(it);
        it.meet();
        if it.rank == 0 {
            // The first two windows belong to the world. The third belongs to the other communicator, whose abort is then slow.
            nccl::fail("ncclCommWindowDeregister", Some(1), 3, 3);
            nccl::slow("ncclCommAbort", Some(1), 1, 4000);
        }
        it.meet();
        let phase = || it.registrar.phase(pool.id()).expect("the pool should exist");
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect_err("a window is left");
        let CollectiveSleepError::Held { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(ranks.to_string(), "1");
        let (state, held) = [(CommState::Ready, Phase::Asleep), (CommState::Lost, Phase::Held)][it.rank];
        assert_eq!((other.state(), phase()), (state, held));
        // Another attempt fails with the reason on all ranks, and no pool changes.
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect_err("it is still lost");
        let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(ranks.iter().map(|of| (of.rank, of.obstacle)).collect::<Vec<_>>(), [(1, Obstacle::Lost)]);
        assert_eq!(phase(), held);
        until(|| other.state() != CommState::Lost);
        it.registrar.sweep();
        it.meet();
        it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect("it should have ended");
        assert_eq!(phase(), Phase::Asleep);
        let woken = it.registrar.wake(&it.world, pool.id()).expect("the world still works");
        assert_eq!((phase(), woken.lost), (Phase::Awake, vec![other.name().to_owned()]));
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        other.abort().expect("the communicator should end");
        it.registrar.sweep();
    });
    nccl::assert_clean();
});

nccl_test!(a_pool_whose_memory_the_driver_holds_sleeps_again_before_it_wakes, {
    Job::new(1).run(|it| {
        let (other, pool, _tensors) = with_windows(it);
        let phase = || it.registrar.phase(pool.id()).expect("the pool should exist");
        cuda::fail("cuMemUnmap", 1, 700);
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect_err("the driver fails");
        assert!(matches!(error, CollectiveSleepError::Held { .. }), "{error}");
        assert_eq!(phase(), Phase::Held);
        let error = it.registrar.wake(&it.world, pool.id()).expect_err("its memory is held");
        let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(ranks.iter().map(|of| of.obstacle).collect::<Vec<_>>(), [Obstacle::Held], "{error}");
        it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect("the driver releases it");
        assert_eq!(phase(), Phase::Asleep);
        it.registrar.wake(&it.world, pool.id()).expect("it sleeps");
        other.abort().expect("the communicator should end");
        it.registrar.sweep();
    });
});

nccl_test!(driver_calls_that_fail_at_any_point_end_in_the_documented_state, {
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        let ends = strike_all(|nth| Fault::Driver(call, nth));
        assert_eq!(ends.len(), 2, "{call}: one call per segment");
        for ends in ends {
            assert_eq!(
                ends,
                [End::Wake("Refused".into()), End::Wake("Refused".into())],
                "{call}: the same on all ranks"
            );
        }
    }
    let ends = strike_all(|nth| Fault::Driver("cuMemUnmap", nth));
    assert_eq!(ends.len(), 2);
    for ends in ends {
        assert_eq!(ends, [End::Sleep("Held".into()), End::Sleep("Held".into())], "the same on all ranks");
    }
});
