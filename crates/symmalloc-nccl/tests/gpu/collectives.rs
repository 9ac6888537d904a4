//! Correctness and speed of collectives on windows. The baseline here is plain buffers; `pytorch_collectives.py` measures PyTorch's
//! collectives.

use crate::job::{Calls, MIB, Rank, descriptors, devices, fixed, ranks, reserved};
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::{PoolConfig, PoolId};
use symmalloc_cuda::{CudaAllocator, DeviceBuffer};
use symmalloc_nccl::{AllToAll, Communicator, ReduceOp, Registration, Splits, UniqueId};

/// Bytes of the input on each rank.
const SIZES: [usize; 8] = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20];

/// Tests several communicators with windows on the same memory, with frees and new segments between collectives.
#[test]
fn reductions_are_correct_across_frees_and_new_segments() {
    let Some(count) = devices() else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let ids = [(); 2].map(|()| UniqueId::new().expect("NCCL creates an id"));
        ranks(count, |rank| {
            let comms = ids.map(|id| rank.connect(id, calls));
            let split = comms[0].split(Some(0), rank.ranks - rank.rank).expect("split").expect("it has a color");
            assert_eq!((split.rank(), split.ranks()), (rank.ranks - 1 - rank.rank, rank.ranks));
            let comms = [&comms[0], &comms[1], &split];
            let allocator = rank.allocator(fixed());
            let registrar = rank.registrar(&allocator);
            for comm in comms {
                registrar
                    .attach(comm, &[PoolId::DEFAULT], Registration::Windows)
                    .expect("the pool should be attachable");
            }
            let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
            for round in 0..60_u64 {
                let length = 1000 + 37_003 * (round as usize % 17);
                // SAFETY: the memory is written before it is read.
                tensors.push(unsafe { allocator.alloc(&rank.stream, length) }.expect("the allocation should succeed"));
                if tensors.len() > 6 {
                    drop(tensors.swap_remove(round as usize % 5));
                }
                if round % 20 == 19 {
                    allocator.trim_all().expect("the driver releases the memory");
                }
                // Each rank passes the communicators in a different order.
                let mut order = comms;
                order.rotate_left((rank.rank as usize + round as usize) % 3);
                registrar.sync(&order).expect("the ranks should agree");
                for (index, tensor) in tensors.iter_mut().enumerate() {
                    rank.write(tensor, round + index as u64);
                    let comm = comms[(round as usize + index) % 3];
                    comm.all_reduce_in_place(tensor, ReduceOp::Sum, &rank.stream)
                        .expect("the work should be submitted");
                }
                for (index, tensor) in tensors.iter().enumerate() {
                    assert_eq!(rank.wrong_sums(tensor, round + index as u64), 0, "round {round}, tensor {index}");
                }
            }
            if rank.is_first() {
                println!("{calls:?}: {:?}", registrar.stats());
            }
        });
    }
}

/// One rank's memory, either plain or registered.
struct Memory {
    allocator: CudaAllocator,
    send: DeviceBuffer<f32>,
    receive: DeviceBuffer<f32>,
}

impl Memory {
    fn new(rank: &Rank<'_>, pool: PoolConfig) -> Self {
        let allocator = rank.allocator(pool);
        let largest = SIZES[SIZES.len() - 1] / 4;
        let send = allocator.alloc_zeroed(&rank.stream, largest).expect("the allocation should succeed");
        let receive =
            allocator.alloc_zeroed(&rank.stream, rank.ranks as usize * largest).expect("the allocation should succeed");
        Memory { allocator, send, receive }
    }
}

/// Returns the time per collective, back to back, in microseconds: the best of three runs.
fn microseconds(rank: &Rank<'_>, size_bytes: usize, mut collective: impl FnMut()) -> f64 {
    let count = (200_usize << 20).div_ceil(size_bytes).clamp(10, 500);
    (0..count.min(30)).for_each(|_| collective());
    let mut best = f64::MAX;
    for _ in 0..3 {
        rank.stream.synchronize().expect("the work should complete");
        rank.meet();
        let begun = Instant::now();
        (0..count).for_each(|_| collective());
        rank.stream.synchronize().expect("the work should complete");
        best = best.min(begun.elapsed().as_secs_f64() * 1e6 / count as f64);
    }
    best
}

fn row(rank: &Rank<'_>, comm: &Communicator, memory: &mut Memory, all_to_all: &AllToAll, size: usize) -> [f64; 3] {
    let (stream, length, world) = (&rank.stream, size / 4, rank.ranks as usize);
    let reduce = microseconds(rank, size, || {
        // The call is in place, because PyTorch's all-reduce always is.
        comm.all_reduce_in_place(&mut memory.send.slice_mut(..length), ReduceOp::Sum, stream)
            .expect("the work should be submitted");
    });
    let gather = microseconds(rank, size, || {
        let (send, mut receive) = (memory.send.slice(..length), memory.receive.slice_mut(..world * length));
        comm.all_gather(&send, &mut receive, stream).expect("the work should be submitted");
    });
    // The splits are uneven: rank i receives i + 1 shares from every rank.
    let parts: u64 = (1..=world as u64).sum();
    let rows = |to: usize| (length as u64 / parts) * (to as u64 + 1);
    let sent: Vec<u64> = (0..world).map(rows).collect();
    let received = vec![rows(rank.rank as usize); world];
    let splits = Splits::sending(&sent).receiving(&received).expect("the splits are valid");
    let exchange = microseconds(rank, size, || {
        all_to_all.run(stream, &memory.send, &mut memory.receive, 1, &splits).expect("the work should be submitted");
    });
    [reduce, gather, exchange]
}

#[test]
fn the_cost_of_all_reduces_on_windows_and_on_plain_buffers() {
    let Some(count) = devices() else { return };
    for calls in [Calls::Blocking, Calls::Nonblocking] {
        let id = UniqueId::new().expect("NCCL creates an id");
        ranks(count, |rank| {
            let comm = rank.connect(id, calls);
            let mut plain = Memory::new(rank, PoolConfig::default());
            let windows = (u64::from(rank.ranks) + 1) * (256 << 20) + 2 * MIB;
            let mut windows = Memory::new(rank, reserved(windows));
            let registrar = Arc::new(rank.registrar(&windows.allocator));
            registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
            registrar.sync(&[&comm]).expect("the registration should succeed");
            let on_plain = AllToAll::new(&comm).expect("the instance is created");
            let on_windows =
                AllToAll::builder(&comm).require_registered(&registrar).build().expect("the instance is created");
            if rank.is_first() {
                println!(
                    "{calls:?}, {count} ranks, us per collective: all-reduce, all-gather, all-to-all-v; plain / window"
                );
            }
            for size in SIZES {
                let plain = row(rank, &comm, &mut plain, &on_plain, size);
                let window = row(rank, &comm, &mut windows, &on_windows, size);
                if rank.is_first() {
                    let cells = [0, 1, 2].map(|kind| format!("{:>9.1} / {:<9.1}", plain[kind], window[kind]));
                    println!("{:>9} KiB {}", size >> 10, cells.join("  "));
                }
            }
        });
    }
}

/// Registrations, descriptors and memory do not grow over 100,000 calls with changing splits.
#[test]
fn all_to_all_with_changing_splits_does_not_leak() {
    let Some(count) = devices() else { return };
    let calls = std::env::var("SYMMALLOC_CALLS").ok().and_then(|calls| calls.parse().ok()).unwrap_or(100_000_u64);
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(count, |rank| {
        const ROWS: usize = 512;
        let (comm, world) = (rank.connect(id, Calls::Blocking), rank.ranks as usize);
        let allocator = rank.allocator(reserved(64 * MIB));
        let registrar = Arc::new(rank.registrar(&allocator));
        registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
        let all_to_all =
            AllToAll::builder(&comm).require_registered(&registrar).build().expect("the instance is created");
        let input: Vec<u32> = (0..world * ROWS).map(|row| (rank.rank << 16) + row as u32).collect();
        let mut send =
            allocator.alloc_zeroed::<u32>(&rank.stream, world * ROWS).expect("the allocation should succeed");
        rank.stream.memcpy_htod(&input, &mut send).expect("the copy should succeed");
        registrar.sync(&[&comm]).expect("the registration should succeed");
        // Rows that one rank sends to another in a call. Every rank can compute them, so every result can be checked.
        let rows = |call: u64, from: usize, to: usize| {
            let mixed = (call * 31 + from as u64 * 7 + to as u64 * 13).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            if mixed.is_multiple_of(5) { 0 } else { mixed % ROWS as u64 }
        };
        let mut before = None;
        let begun = Instant::now();
        for call in 0..calls {
            let sent: Vec<u64> = (0..world).map(|to| rows(call, rank.rank as usize, to)).collect();
            // Every tenth call has new splits and exchanges them; for the others, each rank computes all splits itself.
            let splits = if call % 10 == 0 {
                all_to_all.exchange_splits(&sent).expect("the ranks should exchange their splits")
            } else {
                let received: Vec<u64> = (0..world).map(|from| rows(call, from, rank.rank as usize)).collect();
                Splits::sending(&sent).receiving(&received).expect("the splits are valid")
            };
            // Each call has a new output, with the same size on all ranks.
            let mut receive =
                allocator.alloc_zeroed::<u32>(&rank.stream, world * ROWS).expect("the allocation should succeed");
            all_to_all.run(&rank.stream, &send, &mut receive, 1, &splits).expect("the work should be submitted");
            if call % 1000 == 0 {
                let host = rank.stream.clone_dtoh(&receive).expect("the copy should succeed");
                rank.stream.synchronize().expect("the work should complete");
                let mut expected = Vec::new();
                for from in 0..world {
                    let first: u64 = (0..rank.rank as usize).map(|to| rows(call, from, to)).sum();
                    let range = first..first + rows(call, from, rank.rank as usize);
                    expected.extend(range.map(|row| ((from as u32) << 16) + row as u32));
                }
                assert_eq!(host[..expected.len()], expected, "call {call}");
            }
            if call == calls / 100 {
                before = Some(seen(rank, &registrar.stats()));
            }
        }
        rank.stream.synchronize().expect("the work should complete");
        let seconds = begun.elapsed().as_secs_f64();
        let after = seen(rank, &registrar.stats());
        if rank.is_first() {
            println!(
                "{calls} calls of {count} ranks, {:.1} us each: {before:?} before, {after:?} after",
                seconds * 1e6 / calls as f64
            );
        }
        let before = before.expect("the first values were recorded");
        assert_eq!(before.0, after.0, "registrations");
        assert!(after.1 <= before.1 && after.2 <= before.2, "descriptors, device memory: {before:?}, {after:?}");
        assert!(after.3 <= before.3 + 16 * 1024, "resident KiB: {before:?}, {after:?}");
        rank.meet();
    });
}

/// Waits until all ranks are idle. Returns the registrations, file descriptors, device memory in MiB, and resident host memory in KiB in use.
fn seen(rank: &Rank<'_>, stats: &symmalloc_nccl::RegistrarStats) -> (u64, usize, u64, u64) {
    rank.stream.synchronize().expect("the work should complete");
    rank.meet();
    let info = rank.device.memory_info().expect("the driver reports free memory");
    let pages = std::fs::read_to_string("/proc/self/statm").expect("a page count");
    let resident: u64 = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("it should be a number");
    let seen = (stats.registrations, descriptors(), (info.total_bytes - info.free_bytes) >> 20, resident * 4);
    rank.meet();
    seen
}
