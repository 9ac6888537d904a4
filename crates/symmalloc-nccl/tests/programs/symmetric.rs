//! The cases of `docs/check-symmetric.md` that need no PyTorch, as programs that every rank runs. They run both on stubs and on GPUs.
//!
//! A symmetric kernel finds the peers' buffers by this rank's window and offset, on the stub as well. Odd ranks get their addresses in
//! descending order. After the collectives of a round, every program checks all tensors of that round, so that it detects a sum that was
//! written to another tensor.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use symmalloc_core::op::Contents;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, GraphPool, Pool};
use symmalloc_nccl::{CommState, Communicator, ReduceOp, Registered, Registrar, Registration, SyncError, UniqueId};

const MIB: u64 = 1 << 20;
/// Number of elements of a tensor for which NCCL selects a kernel that accesses the peers' buffers.
const ELEMENTS: usize = 1 << 18;
const COMMUNICATORS: usize = 4;

/// A rank with an allocator, a registrar, and several communicators of all ranks.
pub(crate) struct Rank<'a> {
    rank: usize,
    ranks: usize,
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    allocator: CudaAllocator,
    registrar: Registrar,
    comms: Vec<Communicator>,
    barrier: &'a Barrier,
}

/// Runs a program on every rank, each with a thread and a device. The allocator of rank 0 has addresses for `rank_0_bytes` only, if given.
pub(crate) fn on_ranks(ranks: u32, rank_0_bytes: Option<u64>, program: impl Fn(&Rank<'_>) + Sync) {
    let ids = [(); COMMUNICATORS].map(|()| UniqueId::new().expect("NCCL creates an id"));
    let (barrier, program) = (&Barrier::new(ranks as usize), &program);
    std::thread::scope(|scope| {
        let run = |rank: u32| {
            scope.spawn(move || {
                let device = CudaDevice::for_local_rank(rank).expect("a device for every rank");
                let builder = CudaBackend::builder(&device);
                let builder = match rank_0_bytes {
                    Some(bytes) if rank == 0 => builder.descending_addresses(bytes),
                    _ if rank % 2 == 1 => builder.descending_addresses(1 << 40),
                    _ => builder,
                };
                let backend = builder.build().expect("the options should be supported");
                let allocator =
                    CudaAllocator::with_backend(backend, Config::default()).expect("the allocator should be created");
                let stream = device.context().new_stream().expect("the driver should create a stream");
                allocator.register_stream(&stream).expect("the stream should be registered");
                let registrar = Registrar::builder(&allocator).build().expect("the registrar should be created");
                let connect = |id| {
                    let builder = Communicator::builder(&device).deadline(Duration::from_secs(60));
                    builder.connect(id, rank, ranks).expect("the connection should succeed")
                };
                let comms = ids.map(connect).into();
                let (rank, ranks) = (rank as usize, ranks as usize);
                program(&Rank { rank, ranks, device, stream, allocator, registrar, comms, barrier });
            })
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no rank should panic"));
    });
}

impl Rank<'_> {
    fn world(&self) -> &Communicator {
        &self.comms[0]
    }

    /// Creates a symmetric pool with PyTorch's segments, on the first communicators.
    fn pool(&self, comms: usize) -> Pool<CudaBackend> {
        let config = PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration should be valid");
        let pool = self.allocator.create_pool(config).expect("the pool should be created");
        for comm in &self.comms[..comms] {
            self.registrar.attach(comm, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
        }
        pool
    }

    fn take(&self, pool: &Pool<CudaBackend>, len: usize) -> DeviceBuffer<f32> {
        self.allocator.with_pool(pool).alloc_zeroed(&self.stream, len).expect("the allocation should succeed")
    }

    fn sync(&self) {
        self.registrar.sync(&[self.world()]).expect("the ranks should agree");
    }

    fn meet(&self) {
        self.barrier.wait();
    }

    /// Writes this rank's values. The tag distinguishes tensors and rounds.
    fn write(&self, buffer: &mut impl DevicePtrMut<f32>, tag: usize) {
        let values: Vec<f32> = (0..buffer.len()).map(|at| (self.rank + 1) as f32 * base(at, tag)).collect();
        self.stream.memcpy_htod(&values, buffer).expect("the copy should succeed");
    }

    /// Checks that every element is this multiple of the base.
    fn expect(&self, buffer: &impl DevicePtr<f32>, tag: usize, factor: usize) {
        let values = self.stream.clone_dtoh(buffer).expect("the copy should succeed");
        self.stream.synchronize().expect("the stream should complete");
        let wrong = values.iter().enumerate().filter(|(at, value)| **value != factor as f32 * base(*at, tag)).count();
        assert_eq!(wrong, 0, "rank {}, tag {tag}: wrong elements of {}", self.rank, values.len());
    }

    /// Returns the sum of all ranks, as a multiple of the base.
    fn sum(&self) -> usize {
        self.ranks * (self.ranks + 1) / 2
    }

    fn submit(&self, comm: &Communicator, buffer: &mut impl DevicePtrMut<f32>) {
        comm.all_reduce_in_place(buffer, ReduceOp::Sum, &self.stream).expect("the work should be submitted");
    }

    /// Writes and reduces all tensors, and then checks them all.
    fn reduce(&self, comm: &Communicator, tensors: &mut [DeviceBuffer<f32>], tag: usize) {
        for (number, tensor) in tensors.iter_mut().enumerate() {
            self.write(tensor, tag + number);
        }
        tensors.iter_mut().for_each(|tensor| self.submit(comm, tensor));
        for (number, tensor) in tensors.iter().enumerate() {
            self.expect(tensor, tag + number, self.sum());
        }
    }

    /// Returns a random number below a limit. All ranks draw the same numbers.
    fn draw(state: &mut u64, limit: u64) -> usize {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 33) % limit) as usize
    }

    fn random_len(state: &mut u64) -> usize {
        [ELEMENTS, ELEMENTS + 128, 2 * ELEMENTS, 3 * ELEMENTS, 5 * ELEMENTS][Self::draw(state, 5)]
    }
}

/// Returns the value that rank 0 contributes: never 0, and exact in sums.
fn base(at: usize, tag: usize) -> f32 {
    (1 + (at * 7 + tag * 1009) % 16_381) as f32
}

/// Case 1: frees and reallocates tensors in segments whose addresses are ordered differently on each rank.
pub(crate) fn address_order(it: &Rank<'_>) {
    let pool = it.pool(1);
    for round in 0..3 {
        let mut tensors: Vec<_> = (0..8).map(|_| it.take(&pool, ELEMENTS)).collect();
        it.sync();
        it.reduce(it.world(), &mut tensors, 10 * round);
    }
}

/// Case 2: frees a block that a second stream uses, while that stream is busy on some ranks only.
pub(crate) fn event_on_one_rank(it: &Rank<'_>) {
    let pool = it.pool(1);
    let side = it.device.context().new_stream().expect("the driver should create a stream");
    it.allocator.register_stream(&side).expect("the stream should be registered");
    // Private memory, whose writes keep the second stream busy for milliseconds.
    let mut work = it.allocator.alloc_zeroed::<u8>(&side, 64 << 20).expect("the allocation should succeed");
    let mut held = Vec::new();
    for round in 0..6 {
        let mut used = it.take(&pool, 2 * ELEMENTS);
        it.stream.synchronize().expect("the stream should complete");
        if (round + it.rank) % 2 == 1 {
            (0..300).for_each(|_| side.memset_zeros(&mut work).expect("the work should be submitted"));
        }
        side.memset_zeros(&mut used).expect("the work should be submitted");
        drop(used);
        if (round + it.rank).is_multiple_of(2) {
            side.synchronize().expect("the stream should complete");
        }
        held.push(it.take(&pool, 2 * ELEMENTS));
        it.sync();
        it.reduce(it.world(), &mut held[round..], round);
    }
    for (round, tensor) in held.iter().enumerate() {
        it.expect(tensor, round, it.sum());
    }
}

/// Case 3: allocates private memory on rank 0, before and between symmetric tensors.
pub(crate) fn private_allocations(it: &Rank<'_>) {
    let private_pool = it.allocator.create_pool(PoolConfig::default()).expect("the pool should be created");
    let mut private = Vec::new();
    let pool = it.pool(1);
    for round in 0..3 {
        let mut tensors = Vec::new();
        for number in 0..8 {
            if it.rank == 0 {
                private.push(it.take(&private_pool, (number + 1) * ELEMENTS));
                if number % 3 == 2 {
                    private.remove(0);
                }
            }
            tensors.push(it.take(&pool, if number % 2 == 0 { 2 * ELEMENTS } else { ELEMENTS }));
        }
        it.sync();
        it.reduce(it.world(), &mut tensors, 10 * round);
        for number in [3, 0, 4, 1, 2, 0, 1, 0] {
            drop(tensors.remove(number));
        }
    }
}

/// Case 4: grows the pool at different moments. All ranks get the same error, and continue when their allocations are equal again.
pub(crate) fn grows_at_different_moments(it: &Rank<'_>) {
    let pool = it.pool(1);
    let first = if it.rank.is_multiple_of(2) { 8 } else { 4 };
    let mut tensors: Vec<_> = (0..first).map(|_| it.take(&pool, ELEMENTS)).collect();
    let error = it.registrar.sync(&[it.world()]).expect_err("the ranks differ");
    assert!(matches!(error, SyncError::Disagreed { .. }), "{error}");
    assert_eq!((it.world().state(), it.registrar.stats().windows), (CommState::Ready, 0));
    tensors.extend((first..8).map(|_| it.take(&pool, ELEMENTS)));
    it.sync();
    it.reduce(it.world(), &mut tensors, 0);
}

/// Case 4: grows the pool while an all-reduce runs, or waits for another rank.
pub(crate) fn grows_during_collective(it: &Rank<'_>) {
    let pool = it.pool(1);
    let mut work = it.allocator.alloc_zeroed::<u8>(&it.stream, 64 << 20).expect("the allocation should succeed");
    let mut tensors = vec![it.take(&pool, 2 * ELEMENTS)];
    it.sync();
    for round in 0..5 {
        let last = tensors.last_mut().expect("a tensor");
        it.write(last, round);
        if (round + it.rank) % 2 == 1 {
            (0..300).for_each(|_| it.stream.memset_zeros(&mut work).expect("the work should be submitted"));
        }
        it.submit(it.world(), last);
        tensors.push(it.take(&pool, 6 * ELEMENTS));
        it.sync();
        it.expect(&tensors[round], round, it.sum());
    }
    it.reduce(it.world(), &mut tensors, 100);
}

/// Case 5: captures all-reduces of tensors that are freed in and after the capture. Other tensors come and go between the replays.
pub(crate) fn graph_memory(it: &Rank<'_>) {
    let pool = it.pool(1);
    let config =
        PoolConfig::builder().symmetric(true).reserved(16 * MIB).build().expect("the configuration should be valid");
    let graphs = GraphPool::new(&it.allocator, config).expect("there should be a pool");
    it.registrar.attach(it.world(), &[graphs.id()], Registration::Windows).expect("the pool should be attachable");
    let stream = it.allocator.register_stream(&it.stream).expect("the stream should be registered");
    it.allocator.core().reserve(graphs.id(), stream, 16 * MIB).expect("the reservation should succeed");
    let mut source = it.allocator.alloc_zeroed::<f32>(&it.stream, ELEMENTS).expect("the allocation should succeed");
    let mut output = it.allocator.alloc_zeroed::<f32>(&it.stream, ELEMENTS).expect("the allocation should succeed");
    let mut warm = vec![it.take(&pool, ELEMENTS)];
    it.sync();
    it.reduce(it.world(), &mut warm, 0);

    let capture = graphs.begin(&it.stream).expect("the capture should begin");
    let error = it.registrar.sync(&[it.world()]).map(|synced| synced.registrations);
    assert!(matches!(error, Ok(0) | Err(SyncError::Capturing)), "nothing is registered in a capture: {error:?}");
    for _ in 0..2 {
        // SAFETY: the memory is written before it is read.
        let mut tensor =
            unsafe { it.allocator.alloc::<f32>(&it.stream, ELEMENTS) }.expect("the reservation should succeed");
        it.stream.memcpy_dtod(&source, &mut tensor).expect("the call should be captured");
        it.submit(it.world(), &mut tensor);
        it.stream.memcpy_dtod(&tensor, &mut output).expect("the call should be captured");
    }
    let graph = capture.end().expect("the capture should end");
    for replay in 0..10 {
        let mut others: Vec<_> = (0..4).map(|number| it.take(&pool, ELEMENTS * (1 + (replay + number) % 2))).collect();
        it.sync();
        it.reduce(it.world(), &mut others, 100 * replay);
        it.write(&mut source, replay);
        graph.launch(&it.stream).expect("the graph should be launched");
        it.expect(&output, replay, it.sum());
        for (number, other) in others.iter().enumerate() {
            it.expect(other, 100 * replay + number, it.sum());
        }
    }
}

/// Case 6: reduces parts of a tensor, and checks the rest of it.
pub(crate) fn inside_segment(it: &Rank<'_>) {
    let pool = it.pool(1);
    let _padding = it.take(&pool, 2 * ELEMENTS);
    let mut tensor = it.take(&pool, 8 * ELEMENTS);
    it.sync();
    let parts = [(0, ELEMENTS), (4, ELEMENTS), (1, ELEMENTS), (1023, ELEMENTS + 1), (3 * ELEMENTS + 7, ELEMENTS + 13)];
    for (tag, (start, len)) in parts.into_iter().enumerate() {
        it.write(&mut tensor, tag);
        it.submit(it.world(), &mut tensor.slice_mut(start..start + len));
        let values = it.stream.clone_dtoh(&tensor).expect("the copy should succeed");
        it.stream.synchronize().expect("the stream should complete");
        for (at, value) in values.into_iter().enumerate() {
            let factor = if (start..start + len).contains(&at) { it.sum() } else { it.rank + 1 };
            assert_eq!(value, factor as f32 * base(at, tag), "rank {}, part {tag}, element {at}", it.rank);
        }
    }
}

/// Case 6: registers a window over a part of a segment, and reduces inside, outside and across its end.
pub(crate) fn part_of_segment(it: &Rank<'_>) {
    let pool = it.pool(0);
    let mut tensor = it.take(&pool, 8 * ELEMENTS);
    let address = tensor.device_ptr(&it.stream).0;
    let registered = it.world().register_window(address + MIB, 4 * MIB).expect("the registration should succeed");
    let Registered::Window(window) = registered else { panic!("rank {}: no window: {registered:?}", it.rank) };
    for (tag, elements) in [1..2, 2..5, 0..1, 6..7, 4..6].into_iter().enumerate() {
        it.write(&mut tensor, tag);
        let elements = elements.start * ELEMENTS..elements.end * ELEMENTS;
        it.submit(it.world(), &mut tensor.slice_mut(elements.clone()));
        let values = it.stream.clone_dtoh(&tensor.slice(elements.clone())).expect("the copy should succeed");
        it.stream.synchronize().expect("the stream should complete");
        for (at, value) in elements.zip(values) {
            assert_eq!(value, it.sum() as f32 * base(at, tag), "rank {}, part {tag}, element {at}", it.rank);
        }
    }
    it.meet();
    it.world().deregister_window(window).expect("the deregistration should succeed");
}

/// Case 7: releases segments, and allocates again, possibly at the same addresses.
pub(crate) fn released_and_allocated_again(it: &Rank<'_>) {
    let pool = it.pool(1);
    for round in 0..4 {
        let mut tensors: Vec<_> = (0..3).map(|_| it.take(&pool, 12 * ELEMENTS)).collect();
        it.sync();
        it.reduce(it.world(), &mut tensors, 10 * round);
        drop(tensors);
        it.allocator.core().trim_pool(pool.id()).expect("the memory should be released");
        if round % 2 == 0 {
            it.sync();
        }
    }
}

/// Case 8: releases the memory of a pool and restores it, in its windows. `examples/sleep_windows.rs` does it under a captured graph.
pub(crate) fn sleep_and_wake(it: &Rank<'_>) {
    let pool = it.pool(1);
    let mut tensors: Vec<_> = (0..3).map(|_| it.take(&pool, 2 * ELEMENTS)).collect();
    it.sync();
    for round in 0..4 {
        it.reduce(it.world(), &mut tensors, 10 * round);
        let slept = it.registrar.sleep(it.world(), pool.id(), Contents::Keep).expect("all ranks should sleep together");
        assert!(slept.memory.released_bytes >= 6 * MIB, "{slept:?}");
        let woken = it.registrar.wake(it.world(), pool.id()).expect("all ranks should wake together");
        assert!(woken.lost.is_empty(), "{woken:?}");
        for (number, tensor) in tensors.iter().enumerate() {
            it.expect(tensor, 10 * round + number, it.sum());
        }
    }
    it.reduce(it.world(), &mut tensors, 100);
}

/// Case 9: rank 0 cannot allocate. All ranks get the same error, and no rank hangs. The windows that exist keep working.
pub(crate) fn out_of_memory_on_one_rank(it: &Rank<'_>) {
    let pool = it.pool(1);
    let mut tensors = vec![it.take(&pool, ELEMENTS)];
    it.sync();
    let allocated = it.allocator.with_pool(&pool).alloc_zeroed::<f32>(&it.stream, 64 * ELEMENTS);
    assert_eq!(allocated.is_err(), it.rank == 0);
    let error = it.registrar.sync(&[it.world()]).expect_err("the ranks differ");
    assert!(matches!(error, SyncError::Disagreed { .. }), "{error}");
    assert_eq!(it.world().state(), CommState::Ready);
    it.reduce(it.world(), &mut tensors, 1);
}

/// Size of rank 0's address space in [`out_of_memory_on_one_rank`], in bytes.
pub(crate) const RANK_0_BYTES: u64 = 32 * MIB;

/// Case 10: aborts a communicator, and registers the pool on a new one.
pub(crate) fn aborted_and_recreated(it: &Rank<'_>) {
    let pool = it.pool(2);
    let mut tensors: Vec<_> = (0..3).map(|_| it.take(&pool, 2 * ELEMENTS)).collect();
    it.registrar.sync(&[&it.comms[0], &it.comms[1]]).expect("the ranks should agree");
    for (number, comm) in it.comms[..2].iter().enumerate() {
        it.reduce(comm, &mut tensors, 10 * number);
    }
    it.meet();
    it.comms[1].abort().expect("the communicator should be aborted");
    // The last abort frees the memory of all ranks of this process, and waits for their devices. A kernel that waits for this rank would
    // never complete.
    it.meet();
    it.reduce(&it.comms[0], &mut tensors, 20);
    it.registrar.attach(&it.comms[2], &[pool.id()], Registration::Windows).expect("the pool should be attachable");
    tensors.push(it.take(&pool, 12 * ELEMENTS));
    it.registrar.sync(&[&it.comms[0], &it.comms[2]]).expect("the ranks should agree");
    for (number, comm) in [&it.comms[0], &it.comms[2]].into_iter().enumerate() {
        it.reduce(comm, &mut tensors, 30 + 10 * number);
    }
}

/// Case 10: syncs several communicators, which the ranks pass in different orders, while their pool grows.
pub(crate) fn several_communicators(it: &Rank<'_>) {
    let pool = it.pool(COMMUNICATORS);
    let mut tensors = Vec::new();
    for round in 0..4 {
        tensors.push(it.take(&pool, (2 + 4 * round) * ELEMENTS));
        let mut order: Vec<_> = it.comms.iter().collect();
        order.rotate_left((it.rank + round) % COMMUNICATORS);
        it.registrar.sync(&order).expect("the ranks should agree");
        for (number, comm) in it.comms.iter().enumerate() {
            it.reduce(comm, &mut tensors, 100 * round + 10 * number);
        }
    }
}

/// Case 12: allocates and frees at random, with splits and merges, and reduces each tensor.
pub(crate) fn churn(it: &Rank<'_>, seed: u64, ops: usize) {
    let pool = it.pool(1);
    let (mut state, mut live) = (seed, Vec::<(DeviceBuffer<f32>, usize)>::new());
    for op in 0..ops {
        if live.len() < 4 || (live.len() < 16 && Rank::draw(&mut state, 100) < 52) {
            let mut tensor = vec![it.take(&pool, Rank::random_len(&mut state))];
            it.sync();
            it.reduce(it.world(), &mut tensor, op);
            live.extend(tensor.pop().map(|tensor| (tensor, op)));
        } else {
            let (tensor, tag) = live.remove(Rank::draw(&mut state, live.len() as u64));
            it.expect(&tensor, tag, it.sum());
        }
    }
    for (tensor, tag) in &live {
        it.expect(tensor, *tag, it.sum());
    }
}
