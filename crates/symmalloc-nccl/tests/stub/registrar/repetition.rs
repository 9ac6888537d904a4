//! Repetition: rounds of sleeps, detachments, captures and communicators end like the first one. Each rank compares its windows, addresses
//! and statistics. Rank 0 also compares the driver objects of the process, except events, and its descriptors.

use super::growth::{SharedId, builder, grow, share_id};
use super::support::{Job, MIB, Rank, nothing_is_left};
use cudarc::driver::DevicePtr;
use std::sync::Mutex;
use stub_process::{cuda, descriptors, nccl, nccl_test, steady};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_core::report::MemoryStats;
use symmalloc_cuda::{DeviceBuffer, GraphPool};
use symmalloc_harness::levels::levels;
use symmalloc_nccl::{Communicator, CommunicatorStats, RegistrarStats, WindowHandle};

const ROUNDS: usize = 6;

/// Everything that must be equal after every round.
#[derive(Debug, PartialEq)]
struct Held {
    /// Resources of all ranks. Only rank 0 reads them, because reading the list of descriptors opens one. The number of events and the
    /// size of pinned memory depend on how threads interleave.
    shared: Option<(nccl::Live, cuda::Live, usize)>,
    stats: MemoryStats,
    registrar: RegistrarStats,
    communicators: Vec<CommunicatorStats>,
    addresses: Vec<u64>,
    windows: Vec<WindowHandle>,
}

/// Returns what a rank holds once all ranks have ended a round.
fn held(it: &Rank, comms: &[&Communicator], buffers: &[DeviceBuffer<f32>]) -> Held {
    it.check();
    it.stream.synchronize().expect("the work should complete");
    let mut registrar = it.registrar.stats();
    (registrar.syncs, registrar.quiet_syncs, registrar.rounds) = (0, 0, 0);
    (registrar.registrations, registrar.deregistrations) = (0, 0);
    let windows = buffers.iter().flat_map(|buffer| {
        comms.iter().map(|comm| it.registrar.window_of(comm, buffer).expect("it has a window").window)
    });
    let addresses = buffers.iter().map(|buffer| buffer.device_ptr(&it.stream).0).collect();
    let stats = levels(it.allocator.stats());
    let communicators = comms
        .iter()
        .map(|comm| it.registrar.communicator_stats(comm).expect("the communicator should be ready"))
        .collect();
    let windows = windows.collect();
    it.meet();
    let cuda = cuda::Live { events: 0, host_bytes: 0, ..cuda::live() };
    let shared = (it.rank == 0).then(|| (nccl::live(), cuda, descriptors()));
    it.meet();
    Held { shared, stats, registrar, communicators, addresses, windows }
}

nccl_test!(sleeps_and_wakes_hold_what_the_first_one_held, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    Job::new(2).run(|it| {
        let pair = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        let comms = [&it.world, &pair];
        let pool = it.attached_pool();
        it.registrar.attach(&pair, &[pool.id()], it.windows()).expect("the pool should not be attached yet");
        let tensors = [20, 2, 30].map(|size| it.take(&pool, size * MIB));
        it.registrar.sync(&comms).expect("the ranks should agree");
        steady(ROUNDS, |_| {
            [Contents::Keep, Contents::Drop, Contents::Zero].map(|contents| {
                let slept =
                    it.registrar.sleep(&it.world, pool.id(), contents).expect("all ranks should sleep together");
                let asleep = held(it, &comms, &[]);
                let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
                it.registrar.sync(&comms).expect("the ranks should agree");
                (slept.deregistrations, woken.registrations, asleep, held(it, &comms, &tensors))
            })
        });
        pair.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});

nccl_test!(pools_that_are_detached_and_attached_hold_what_the_first_one_held, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let tensors = [20, 2, 30].map(|size| it.take(&pool, size * MIB));
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        steady(ROUNDS, |_| {
            let temporary = it.take(&pool, 40 * MIB);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            drop(temporary);
            it.trim(&pool);
            it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should have been attached");
            let detached = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            let alone = held(it, &[], &[]);
            it.registrar
                .attach(&it.world, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            let attached = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            (detached.deregistrations, attached.registrations, alone, held(it, &[&it.world], &tensors))
        });
    });
    nothing_is_left();
});

nccl_test!(communicators_that_come_and_go_hold_what_the_first_one_held, {
    let shared = Mutex::new(None);
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let mut tensors = [20, 30].map(|size| it.take(&pool, size * MIB));
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        steady(ROUNDS, |_| {
            let next = it.connect("next", &shared);
            it.registrar
                .attach(&next, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[&it.world, &next]).expect("the ranks should agree");
            it.reduce_right(&next, &mut tensors[0]);
            let stats = it.registrar.communicator_stats(&next).expect("the communicator should be ready");
            next.destroy().expect("the communicator should be idle");
            it.registrar.sweep();
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            (stats, held(it, &[&it.world], &tensors))
        });
    });
    nothing_is_left();
});

// The last rank leaves and joins again.
nccl_test!(ranks_that_rejoin_hold_what_the_first_one_held, ["STUB_NCCL_VERSION" = "23203"], {
    let shared = SharedId::default();
    Job::new(3).run(|it| {
        let pool = it.attached_pool();
        let mut tensors = [20, 30].map(|size| it.take(&pool, size * MIB));
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let mut whole =
            it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        it.registrar.attach(&whole, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        it.registrar.sync(&[&whole]).expect("the ranks should agree");
        steady(ROUNDS, |_| {
            let rest = (it.rank != 2).then(|| whole.shrink(&[2]).expect("the remaining ranks shrink"));
            whole.destroy().expect("the communicator should be idle");
            it.registrar.sweep();
            if let Some(rest) = &rest {
                it.registrar
                    .attach(rest, &[pool.id()], it.windows())
                    .expect("the pool should be symmetric and registrable");
                it.registrar.sync(&[rest]).expect("the remaining ranks agree");
                it.reduce_right(rest, &mut tensors[1]);
            }
            let id = share_id(it, rest.as_ref(), &shared);
            whole = grow(builder(it), rest.as_ref(), id, 3).expect("all ranks should arrive");
            if let Some(rest) = rest {
                rest.destroy().expect("the communicator should be idle");
            }
            it.registrar
                .attach(&whole, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[&whole]).expect("the ranks should agree");
            it.registrar.sweep();
            tensors.iter_mut().for_each(|tensor| it.reduce_right(&whole, tensor));
            let stats = it.registrar.communicator_stats(&whole).expect("the communicator should be ready");
            (stats, held(it, &[&it.world], &tensors))
        });
        whole.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});

nccl_test!(captures_with_windows_hold_what_the_first_one_held, {
    Job::new(2).quiet().run(|it| {
        let config = PoolConfig::builder()
            .symmetric(true)
            .reserved(64 * MIB)
            .build()
            .expect("the configuration should be valid");
        let graphs = GraphPool::new(&it.allocator, config).expect("the pool should fit into the device");
        it.registrar
            .attach(&it.world, &[graphs.id()], it.windows())
            .expect("the pool should be symmetric and registrable");
        let stream = it.allocator.register_stream(&it.stream).expect("the stream should be registered");
        it.allocator.core().reserve(graphs.id(), stream, 64 * MIB).expect("the memory should fit");
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        steady(ROUNDS, |_| {
            let capture = graphs.begin(&it.stream).expect("no other capture is active");
            // SAFETY: the memory is never read.
            let tensor =
                unsafe { it.allocator.alloc::<f32>(&it.stream, 1 << 20) }.expect("the reservation should succeed");
            let offset = it.offset_of(&it.world, &tensor);
            it.registrar.sync(&[&it.world]).expect("there is nothing new");
            drop(tensor);
            let graph = capture.end().expect("the capture is valid");
            graph.launch(&it.stream).expect("the graph should be launched");
            drop(graph);
            (offset, held(it, &[&it.world], &[]))
        });
    });
    nothing_is_left();
});
