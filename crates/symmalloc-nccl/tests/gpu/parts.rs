//! Communicators over some of the ranks: two that overlap in half of the ranks, and ones whose last rank leaves, rejoins or is missing.

use crate::job::{
    Calls, MIB, Rank, devices, devices_with, fixed, leave, processes, ranks, reduce_and_check, status_of, take,
};
use std::ops::Range;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_cuda::{CudaDevice, DeviceBuffer};
use symmalloc_nccl::{
    Capability, CommError, CommState, Communicator, Launch, ReduceOp, Registration, UniqueId, WatchdogMode,
};

const ROUNDS: u64 = 40;
const CHILD: &str = "SYMMALLOC_PARTS_CHILD";

/// Two communicators share half of the ranks. Both have windows on one pool, and each on a separate pool.
#[test]
fn communicators_that_overlap_in_half_of_the_ranks_reduce_correctly() {
    let Some(count) = devices() else { return };
    if !count.is_multiple_of(4) {
        println!("skipped, {count} devices: a multiple of four is needed");
        return;
    }
    let members = [0..count - count / 4, count / 4..count];
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let world = rank.connect(id, calls);
            let comms = members.clone().map(|members| {
                world.split(members.contains(&rank.rank).then_some(0), rank.rank).expect("all ranks should split")
            });
            let allocator = rank.allocator(fixed());
            let registrar = rank.registrar(&allocator);
            // Every rank creates both pools, but only the members of a communicator allocate from its pool.
            let pools = [(); 2].map(|()| allocator.create_pool(fixed()).expect("the pool is created"));
            for (comm, pool) in comms.iter().zip(&pools) {
                if let Some(comm) = comm {
                    let attached = [PoolId::DEFAULT, pool.id()];
                    registrar.attach(comm, &attached, Registration::Windows).expect("the pool should be attachable");
                }
            }
            let mut shared: Vec<DeviceBuffer<f32>> = Vec::new();
            let mut own: [Vec<DeviceBuffer<f32>>; 2] = Default::default();
            for round in 0..ROUNDS {
                take(rank, &allocator, &mut shared, round);
                for ((comm, pool), tensors) in comms.iter().zip(&pools).zip(&mut own) {
                    if comm.is_some() {
                        take(rank, &allocator.with_pool(pool), tensors, round);
                    }
                }
                if round % 10 == 9 {
                    allocator.trim_all().expect("the driver releases the memory");
                }
                // Ranks pass their communicators in different orders.
                let mut order: Vec<&Communicator> = comms.iter().flatten().collect();
                let first = (rank.rank as usize + round as usize) % order.len();
                order.rotate_left(first);
                registrar.sync(&order).expect("the members should agree");
                for ((comm, members), tensors) in comms.iter().zip(&members).zip(&mut own) {
                    if let Some(comm) = comm {
                        let tensors: Vec<_> = shared.iter_mut().chain(tensors).collect();
                        reduce_and_check(rank, comm, members.clone(), tensors, round);
                    }
                }
            }
            if rank.is_first() {
                println!("{calls:?}, members {members:?} of {count} ranks: {:?}", registrar.stats());
            }
        });
    }
}

/// A split that leaves out the last rank replaces the communicator. The memory gets new windows.
#[test]
fn a_communicator_continues_without_its_last_rank() {
    continue_without_the_last_rank(|rank, world| {
        let color = (rank.rank + 1 < rank.ranks).then_some(0);
        world.split(color, rank.rank).expect("all ranks should split")
    });
}

/// The same with a shrink, in which only the remaining ranks take part.
#[test]
fn a_communicator_that_shrinks_continues() {
    if devices_with(&[Capability::Shrink]).is_none() {
        return;
    }
    continue_without_the_last_rank(|rank, world| {
        let last = rank.ranks - 1;
        (rank.rank < last).then(|| world.shrink(&[last]).expect("the remaining ranks shrink"))
    });
}

/// Reduces in windows over all ranks, replaces the communicator by one without the last rank, and continues on that. `replace` returns
/// `None` on the last rank.
fn continue_without_the_last_rank(replace: impl Fn(&Rank<'_>, &Communicator) -> Option<Communicator> + Sync) {
    let Some(count) = devices() else { return };
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        let world = rank.connect(id, Calls::Blocking);
        let allocator = rank.allocator(fixed());
        let registrar = rank.registrar(&allocator);
        let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
        let rounds = |comm: &Communicator, members: Range<u32>, tensors: &mut Vec<_>, first: u64| {
            registrar.attach(comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
            for round in first..first + 10 {
                take(rank, &allocator, tensors, round);
                registrar.sync(&[comm]).expect("the members should agree");
                reduce_and_check(rank, comm, members.clone(), tensors.iter_mut().collect(), round);
            }
        };
        rounds(&world, 0..count, &mut tensors, 0);
        rank.meet();
        let rest = replace(rank, &world);
        rank.meet();
        // The windows of all ranks are deregistered together, before the communicator ends.
        registrar.detach(&world, &[PoolId::DEFAULT]).expect("the pool should be detached");
        registrar.sync(&[&world]).expect("the ranks should agree");
        world.destroy().expect("the communicator should be destroyed");
        let Some(rest) = rest else { return };
        rounds(&rest, 0..count - 1, &mut tensors, 10);
        let stats = registrar.stats();
        assert!(stats.windows > 0, "the remaining ranks have windows");
        if rank.is_first() {
            let (windows, mib) = (stats.windows, stats.window_bytes / MIB);
            println!("{} of {count} ranks continue, with {windows} windows of {mib} MiB", rest.ranks());
        }
        registrar.detach(&rest, &[PoolId::DEFAULT]).expect("the pool should be detached");
        registrar.sync(&[&rest]).expect("the members should agree");
    });
}

/// The last rank leaves, the others continue with their windows, and it rejoins. Meanwhile it makes the same allocations.
#[test]
fn a_communicator_shrinks_and_grows_again() {
    let Some(count) = devices_with(&[Capability::Shrink, Capability::Grow]) else { return };
    let last = count - 1;
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let (id, grow_id) = (UniqueId::new().expect("NCCL creates an id"), Mutex::new(None));
        ranks(count, |rank| {
            let world = rank.connect(id, calls);
            let allocator = rank.allocator(fixed());
            let registrar = rank.registrar(&allocator);
            let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
            let mut rounds = |comm: Option<&Communicator>, members: Range<u32>, first: u64| {
                if let Some(comm) = comm {
                    registrar
                        .attach(comm, &[PoolId::DEFAULT], Registration::Windows)
                        .expect("the pool should be attachable");
                }
                for round in first..first + 10 {
                    take(rank, &allocator, &mut tensors, round);
                    if let Some(comm) = comm {
                        registrar.sync(&[comm]).expect("the members should agree");
                        reduce_and_check(rank, comm, members.clone(), tensors.iter_mut().collect(), round);
                    }
                }
            };
            rounds(Some(&world), 0..count, 0);
            rank.meet();
            let rest = (rank.rank < last).then(|| world.shrink(&[last]).expect("the remaining ranks shrink"));
            rank.meet();
            leave(&registrar, &world);
            rounds(rest.as_ref(), 0..last, 10);

            if let Some(rest) = rest.as_ref().filter(|_| rank.is_first()) {
                let id = rest.grow_id().expect("rank 0 creates an id");
                *grow_id.lock().expect("the lock is not poisoned") = Some(id);
            }
            rank.meet();
            let id = grow_id.lock().expect("the lock is not poisoned").expect("rank 0 set it");
            let since = Instant::now();
            let builder = rank.builder(calls).name("grown");
            let grown = match &rest {
                Some(rest) => builder.grow(rest, id, count),
                None => builder.join(id, last, count),
            };
            let grown = grown.expect("all ranks should arrive");
            let waited = since.elapsed();
            assert_eq!((grown.rank(), grown.ranks()), (rank.rank, count));
            rest.iter().for_each(|rest| leave(&registrar, rest));
            rounds(Some(&grown), 0..count, 20);
            let stats = registrar.stats();
            assert!(stats.windows > 0, "all ranks have windows");
            if rank.is_first() {
                println!("{calls:?}: {last} of {count} ranks grew in {waited:?}, {} windows", stats.windows);
            }
            leave(&registrar, &grown);
        });
    }
}

/// The last rank is killed or stopped before a collective on plain buffers. The others revoke, shrink and continue with windows on the same
/// memory. Each rank is a process: if the ranks are threads, NCCL's revoke waits for the connections of the missing one.
#[test]
fn ranks_revoke_and_continue_without_the_missing_one() {
    const NAME: &str = "parts::ranks_revoke_and_continue_without_the_missing_one";
    if let Ok(case) = std::env::var(CHILD) {
        let calls = if case.ends_with("nonblocking") { Calls::Nonblocking } else { Calls::Blocking };
        return continue_after_a_revoke(calls, case.starts_with("killed"));
    }
    let Some(count) = devices_with(&[Capability::Shrink, Capability::Revoke]) else { return };
    for case in ["killed, blocking", "killed, nonblocking", "stopped, blocking", "stopped, nonblocking"] {
        let mut children = processes(NAME, count, (CHILD, case));
        let mut missing = children.pop().expect("there are at least two ranks");
        let statuses: Vec<_> = children.iter_mut().map(status_of).collect();
        missing.kill().expect("the process should be killed");
        missing.wait().expect("it should have ended");
        assert!(statuses.iter().all(|status| *status == Some(0)), "{case}: {statuses:?}");
    }
}

/// Runs one rank of [`ranks_revoke_and_continue_without_the_missing_one`].
fn continue_after_a_revoke(calls: Calls, killed: bool) {
    let launch = Launch::from_env().expect("started as a rank");
    let device = CudaDevice::for_local_rank(launch.local_rank).expect("the device should be created");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let (count, last, barrier) = (launch.ranks, launch.ranks - 1, Barrier::new(1));
    let rank = &Rank { rank: launch.rank, ranks: count, device, stream, barrier: &barrier };
    // The watchdog would notice a process that ends, and abort. It waits for a stopped process until the deadline.
    let watchdog = if killed { WatchdogMode::Off } else { WatchdogMode::Abort };
    let world = rank.builder(calls).watchdog(watchdog).connect_env().expect("the connection should succeed");
    let allocator = rank.allocator(fixed());
    let registrar = rank.registrar(&allocator);
    registrar.attach(&world, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
    (0..4).for_each(|round| take(rank, &allocator, &mut tensors, round));
    registrar.sync(&[&world]).expect("the ranks should agree");
    reduce_and_check(rank, &world, 0..count, tensors.iter_mut().collect(), 0);
    // A kernel on windows cannot be stopped, so the collective that is stuck uses other memory.
    let pool = allocator.create_pool(fixed()).expect("the pool is created");
    let mut plain =
        allocator.with_pool(&pool).alloc_zeroed::<f32>(&rank.stream, 1 << 20).expect("the allocation should succeed");
    reduce_and_check(rank, &world, 0..count, vec![&mut plain], 1);
    if rank.rank == last {
        // SAFETY: the call only sends a signal to this process.
        unsafe { libc::raise(if killed { libc::SIGKILL } else { libc::SIGSTOP }) };
        unreachable!("the first test process ends this one");
    }
    // The last rank is gone by then.
    thread::sleep(Duration::from_millis(300));
    world.all_reduce_in_place(&mut plain, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    thread::sleep(Duration::from_millis(300));
    let since = Instant::now();
    world.revoke().expect("the work should stop");
    let waited = since.elapsed();
    rank.stream.synchronize().expect("the stream continues");
    assert_eq!(world.state(), CommState::Revoked);
    assert!(matches!(world.synchronize(&rank.stream), Err(CommError::Revoked { .. })));
    registrar.sweep();
    assert_eq!(registrar.stats().windows, 0);
    let rest = world.shrink(&[last]).expect("the remaining ranks shrink");
    world.destroy().expect("it does not wait for the missing rank");
    registrar.attach(&rest, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    registrar.sync(&[&rest]).expect("the members should agree");
    reduce_and_check(rank, &rest, 0..last, tensors.iter_mut().collect(), 2);
    if rank.is_first() {
        let missing = if killed { "killed" } else { "stopped" };
        println!("{calls:?}, {missing}: revoked in {waited:?}, {last} of {count} ranks continue");
    }
    leave(&registrar, &rest);
}

/// A thread waits in a registration that the last rank does not join. Another thread revokes.
#[test]
fn a_revoke_releases_a_thread_that_registers() {
    let Some(count) = devices_with(&[Capability::Windows, Capability::Revoke]) else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let world = rank.connect(id, calls);
            let allocator = rank.allocator(fixed());
            let registrar = rank.registrar(&allocator);
            let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
            take(rank, &allocator, &mut tensors, 12);
            rank.meet();
            if rank.rank + 1 < rank.ranks {
                let key = registrar.key_of(&tensors[0]).expect("it lies in a live segment");
                let waited = thread::scope(|scope| {
                    let waits = scope.spawn(|| world.register_window(key.base, key.size_bytes).map(drop));
                    thread::sleep(Duration::from_millis(300));
                    assert!(!waits.is_finished(), "the last rank does not register");
                    let since = Instant::now();
                    world.revoke().expect("the registration should stop");
                    let refused = waits.join().expect("the thread does not panic");
                    assert!(matches!(refused, Err(CommError::Revoked { .. })), "{refused:?}");
                    since.elapsed()
                });
                if rank.is_first() {
                    println!("{calls:?}: a registration was stopped in {waited:?}");
                }
                world.destroy().expect("it does not wait for the missing rank");
            }
            rank.meet();
            if rank.rank + 1 == rank.ranks {
                world.abort().expect("the communicator should be aborted");
            }
        });
    }
}
