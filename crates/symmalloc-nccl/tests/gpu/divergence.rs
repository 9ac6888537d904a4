//! Tests of ranks that diverge: each divergence yields the correct report on every rank within the deadline.

use crate::job::{Calls, DEADLINE, MIB, Rank, devices, fixed, ranks, reserved};
use std::time::{Duration, Instant};
use symmalloc_agreement::Disagreement;
use symmalloc_core::{Config, PoolConfig, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, DeviceBuffer};
use symmalloc_nccl::{CommState, Communicator, ReduceOp, Registrar, Registration, SyncError, UniqueId};

/// Runs the part of the program that is equal on all ranks, before they diverge.
fn begin(rank: &Rank<'_>, comm: &Communicator, allocator: &CudaAllocator) -> (Registrar, DeviceBuffer<f32>) {
    let registrar = rank.registrar(allocator);
    registrar.attach(comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
    let weights =
        allocator.alloc_zeroed_named::<f32>(&rank.stream, 1 << 18, "weights").expect("the allocation should succeed");
    registrar.sync(&[comm]).expect("the ranks agree so far");
    (registrar, weights)
}

/// Runs `differs`, which acts differently on one rank, and returns the report, which must be equal on all ranks.
fn disagreement(calls: Calls, differs: impl Fn(&Rank<'_>, &CudaAllocator) + Sync) -> Option<Disagreement> {
    let count = devices()?;
    let id = UniqueId::new().expect("NCCL creates an id");
    let reports = ranks(count, |rank| {
        let comm = rank.connect(id, calls);
        let allocator = rank.allocator(fixed());
        let (registrar, mut weights) = begin(rank, &comm, &allocator);
        differs(rank, &allocator);
        let begun = Instant::now();
        let error = registrar.sync(&[&comm]).expect_err("the ranks differ");
        let took = begun.elapsed();
        assert!(took < DEADLINE, "{took:?}");
        let SyncError::Disagreed { disagreement, .. } = error else { panic!("unexpected report: {error}") };
        // Nothing was registered. The communicator still works, and its windows are unchanged.
        assert_eq!((comm.state(), registrar.stats().windows), (CommState::Ready, 1));
        rank.write(&mut weights, 5);
        comm.all_reduce_in_place(&mut weights, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
        assert_eq!(rank.wrong_sums(&weights, 5), 0);
        (*disagreement, took)
    });
    let (first, took) = &reports[0];
    assert!(reports.iter().all(|(report, _)| report == first), "all ranks have the same report");
    println!("{calls:?}, {} ms: {first}", took.as_millis());
    Some(first.clone())
}

fn last_rank(rank: &Rank<'_>) -> bool {
    rank.rank + 1 == rank.ranks
}

fn allocate(rank: &Rank<'_>, allocator: &CudaAllocator, size_bytes: u64, name: &str) {
    let allocated = allocator.allocate_named(&rank.stream, size_bytes, name);
    // The block is never freed.
    let _handle = allocated.expect("the allocation should succeed").handle;
}

#[test]
fn another_size_is_reported() {
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let report = disagreement(calls, |rank, allocator| {
            allocate(rank, allocator, if last_rank(rank) { MIB + 512 } else { MIB }, "gradient");
        });
        let Some(report) = report else { return };
        let heap = report.first_heap().expect("a heap should differ");
        assert_eq!(heap.groups.len(), 2, "{report}");
        assert!(report.to_string().contains("1,049,088 bytes \"gradient\""), "{report}");
    }
}

#[test]
fn another_order_is_reported() {
    let report = disagreement(Calls::Blocking, |rank, allocator| {
        let mut sizes = [(MIB, "first"), (MIB / 2, "second")];
        if last_rank(rank) {
            sizes.reverse();
        }
        sizes.iter().for_each(|(size, name)| allocate(rank, allocator, *size, name));
    });
    let Some(report) = report else { return };
    let text = report.to_string();
    assert!(text.contains("\"first\"") && text.contains("\"second\""), "{text}");
}

#[test]
fn another_op_is_reported() {
    let report = disagreement(Calls::Blocking, |rank, allocator| {
        let block =
            allocator.allocate_named(&rank.stream, MIB, "activation").expect("the allocation should succeed").handle;
        if last_rank(rank) {
            allocator.free(block).expect("the memory should be freed");
        } else {
            allocate(rank, allocator, MIB, "activation");
        }
    });
    let Some(report) = report else { return };
    assert!(report.first_heap().is_some(), "{report}");
}

/// If one rank cannot allocate the next segment, all ranks report it. Here, its address range is exhausted.
#[test]
fn memory_that_one_rank_is_refused_is_reported() {
    let Some(count) = devices() else { return };
    let id = UniqueId::new().expect("NCCL creates an id");
    let reports = ranks(count, |rank| {
        let comm = rank.connect(id, Calls::Blocking);
        let room = if last_rank(rank) { 4 * MIB } else { 64 * MIB };
        let backend = CudaBackend::builder(&rank.device)
            .descending_addresses(room)
            .build()
            .expect("the options should be supported");
        let config = Config::builder().default_pool(fixed()).build().expect("the configuration should be valid");
        let allocator = CudaAllocator::with_backend(backend, config).expect("the allocator is created");
        let (registrar, _weights) = begin(rank, &comm, &allocator);
        let allocated = allocator.allocate_named(&rank.stream, 12 * MIB, "cache");
        assert_eq!(allocated.is_err(), last_rank(rank));
        let error = registrar.sync(&[&comm]).expect_err("the ranks differ");
        let SyncError::Disagreed { disagreement, .. } = error else { panic!("unexpected report: {error}") };
        assert_eq!(comm.state(), CommState::Ready);
        *disagreement
    });
    println!("{}", reports[0]);
    assert!(reports.iter().all(|report| *report == reports[0]));
}

/// Ranks with different configurations report the difference.
#[test]
fn another_configuration_is_reported() {
    let Some(count) = devices() else { return };
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        let comm = rank.connect(id, Calls::Blocking);
        let size = if last_rank(rank) { 16 * MIB } else { 8 * MIB };
        let allocator = rank.allocator(reserved(size));
        let registrar = rank.registrar(&allocator);
        registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
        allocate(rank, &allocator, MIB, "weights");
        let error = registrar.sync(&[&comm]).expect_err("the ranks differ");
        if rank.is_first() {
            println!("{error}");
        }
        assert!(matches!(error, SyncError::Disagreed { .. }), "{error}");
    });
}

/// If one rank stops calling sync, the sync of the others fails at the deadline, and their allocators continue to work.
#[test]
fn a_rank_that_stops_ends_the_others_sync_within_the_deadline() {
    let Some(count) = devices() else { return };
    let deadline = Duration::from_secs(2);
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let comm = rank
                .builder(calls)
                .deadline(deadline)
                .connect(id, rank.rank, rank.ranks)
                .expect("the connection should succeed");
            let allocator = rank.allocator(fixed());
            let (registrar, weights) = begin(rank, &comm, &allocator);
            if last_rank(rank) {
                // This rank does nothing until the other ranks have given up.
                rank.meet();
                let _ended = comm.abort();
                return;
            }
            let begun = Instant::now();
            let error = registrar.sync(&[&comm]).expect_err("a rank is missing");
            let took = begun.elapsed();
            println!("{calls:?}, after {} ms: {error}", took.as_millis());
            assert!(matches!(error, SyncError::Transport { .. }), "{error}");
            assert!((deadline..deadline + Duration::from_secs(6)).contains(&took), "{took:?}");
            assert_ne!(comm.state(), CommState::Ready);
            // The allocator continues to work.
            drop(weights);
            allocate(rank, &allocator, 30 * MIB, "later");
            let error = registrar.sync(&[&comm]).expect_err("it is gone");
            assert!(matches!(error, SyncError::Gone { .. } | SyncError::NotAttached { .. }), "{error}");
            rank.meet();
            // NCCL releases the memory once the last rank has aborted its communicator or its process has ended. The memory can be returned
            // only after that.
            let begun = Instant::now();
            while comm.state() == CommState::Lost && begun.elapsed() < DEADLINE {
                std::thread::sleep(Duration::from_millis(20));
            }
            registrar.sweep();
            allocator.trim_all().expect("the driver releases the memory");
            println!("{calls:?}: {} after {} ms more", comm.state(), begun.elapsed().as_millis());
            assert_eq!((comm.state(), registrar.stats().dead_bytes), (CommState::Aborted, 0));
        });
    }
}

/// A new communicator registers all live segments.
#[test]
fn a_new_communicator_takes_over_from_an_aborted_one() {
    let Some(count) = devices() else { return };
    let ids = [(); 2].map(|()| UniqueId::new().expect("NCCL creates an id"));
    ranks(count, |rank| {
        let allocator = rank.allocator(fixed());
        let old = rank.connect(ids[0], Calls::Blocking);
        let (registrar, mut weights) = begin(rank, &old, &allocator);
        rank.meet();
        old.abort().expect("the communicator should be aborted");
        let new = rank.connect(ids[1], Calls::Blocking);
        registrar.attach(&new, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
        assert_eq!(registrar.sync(&[&new]).expect("the registration should succeed").registrations, 1);
        assert!(registrar.window_of(&old, &weights).is_err());
        let window = registrar.window_of(&new, &weights).expect("it has a window");
        assert_eq!(window.offset_bytes, 0);
        rank.write(&mut weights, 9);
        new.all_reduce_in_place(&mut weights, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
        assert_eq!(rank.wrong_sums(&weights, 9), 0);
    });
}

/// A private pool may differ between ranks.
#[test]
fn private_pools_may_differ() {
    let Some(count) = devices() else { return };
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        let comm = rank.connect(id, Calls::Blocking);
        let allocator = rank.allocator(fixed());
        let (registrar, _weights) = begin(rank, &comm, &allocator);
        let pool = allocator.create_pool(PoolConfig::default()).expect("the pool is created");
        let private = allocator.with_pool(&pool);
        let blocks: Vec<_> = (0..=rank.rank)
            .map(|count| {
                private
                    .alloc_zeroed::<u8>(&rank.stream, (1 + count as usize) << 20)
                    .expect("the allocation should succeed")
            })
            .collect();
        registrar.attach(&comm, &[pool.id()], Registration::Buffers).expect("the pool should be attachable");
        registrar.sync(&[&comm]).expect("the symmetric pools agree");
        let span = registrar.window_of(&comm, &blocks[0]);
        assert!(span.is_err(), "registered for this rank alone: {span:?}");
    });
}
