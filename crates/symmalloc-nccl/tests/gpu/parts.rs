//! Communicators over some of the ranks: two that overlap in half of the ranks, and one that loses its last rank.

use crate::job::{Calls, MIB, Rank, devices, fixed, ranks};
use std::ops::Range;
use symmalloc_core::PoolId;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer};
use symmalloc_nccl::{Capability, Communicator, Nccl, ReduceOp, Registration, UniqueId};

const ROUNDS: u64 = 40;

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
                world.split(members.contains(&rank.rank).then_some(0), rank.rank).expect("all ranks split")
            });
            let allocator = rank.allocator(fixed());
            let registrar = rank.registrar(&allocator);
            // Every rank creates both pools, but only the members of a communicator allocate from its pool.
            let pools = [(); 2].map(|()| allocator.create_pool(fixed()).expect("the pool is created"));
            for (comm, pool) in comms.iter().zip(&pools) {
                if let Some(comm) = comm {
                    let attached = [PoolId::DEFAULT, pool.id()];
                    registrar.attach(comm, &attached, Registration::Windows).expect("attached");
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
                    allocator.trim().expect("the driver releases the memory");
                }
                // Ranks pass their communicators in different orders.
                let mut order: Vec<&Communicator> = comms.iter().flatten().collect();
                let first = (rank.rank as usize + round as usize) % order.len();
                order.rotate_left(first);
                registrar.sync(&order).expect("the members agree");
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

/// Allocates a tensor, and frees one if there are several.
fn take(rank: &Rank<'_>, allocator: &CudaAllocator, tensors: &mut Vec<DeviceBuffer<f32>>, round: u64) {
    let length = 1000 + 90_001 * (round as usize % 13);
    // SAFETY: the memory is written before it is read.
    tensors.push(unsafe { allocator.alloc(&rank.stream, length) }.expect("allocated"));
    if tensors.len() > 4 {
        drop(tensors.swap_remove(round as usize % 3));
    }
}

/// Reduces every tensor over the members of a communicator and checks every element.
fn reduce_and_check(
    rank: &Rank<'_>,
    comm: &Communicator,
    members: Range<u32>,
    mut tensors: Vec<&mut DeviceBuffer<f32>>,
    round: u64,
) {
    for (index, tensor) in tensors.iter_mut().enumerate() {
        rank.write(*tensor, round + index as u64);
        comm.all_reduce_in_place(*tensor, ReduceOp::Sum, &rank.stream).expect("submitted");
    }
    comm.synchronize(&rank.stream).expect("every member arrives");
    for (index, tensor) in tensors.iter().enumerate() {
        let wrong = rank.wrong_sums_over(members.clone(), &**tensor, round + index as u64);
        assert_eq!(wrong, 0, "round {round}, tensor {index}, members {members:?}");
    }
}

/// A split that leaves out the last rank replaces the communicator. The memory gets new windows.
#[test]
fn a_communicator_continues_without_its_last_rank() {
    continue_without_the_last_rank(|rank, world| {
        let color = (rank.rank + 1 < rank.ranks).then_some(0);
        world.split(color, rank.rank).expect("all ranks split")
    });
}

/// The same with a shrink, in which only the remaining ranks take part.
#[test]
fn a_communicator_that_shrinks_continues() {
    let Some(_) = devices() else { return };
    let nccl = Nccl::load().expect("libnccl is available");
    if !nccl.supports(Capability::Shrink) {
        println!("skipped: NCCL {} has no ncclCommShrink", nccl.version());
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
            registrar.attach(comm, &[PoolId::DEFAULT], Registration::Windows).expect("attached");
            for round in first..first + 10 {
                take(rank, &allocator, tensors, round);
                registrar.sync(&[comm]).expect("the members agree");
                reduce_and_check(rank, comm, members.clone(), tensors.iter_mut().collect(), round);
            }
        };
        rounds(&world, 0..count, &mut tensors, 0);
        rank.meet();
        let rest = replace(rank, &world);
        rank.meet();
        // The windows of all ranks are deregistered together, before the communicator ends.
        registrar.detach(&world, &[PoolId::DEFAULT]).expect("detached");
        registrar.sync(&[&world]).expect("the ranks agree");
        world.destroy().expect("destroyed");
        let Some(rest) = rest else { return };
        rounds(&rest, 0..count - 1, &mut tensors, 10);
        let stats = registrar.stats();
        assert!(stats.windows > 0, "the remaining ranks have windows");
        if rank.is_first() {
            let (windows, mib) = (stats.windows, stats.window_bytes / MIB);
            println!("{} of {count} ranks continue, with {windows} windows of {mib} MiB", rest.ranks());
        }
        registrar.detach(&rest, &[PoolId::DEFAULT]).expect("detached");
        registrar.sync(&[&rest]).expect("the members agree");
    });
}
