//! Interleavings: threads on one allocator under shuttle, which runs them one at a time and chooses at every lock who goes
//! on. A failure prints its schedule, and `shuttle::replay` runs that schedule again.
//!
//! Every thread works on the simulated device as a correct program does, so a wait that an interleaving loses is a race
//! that the simulator reports. The lock-free pieces below the locks are explored by loom, in the core's `interleavings.rs`.

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::{Arc, Mutex, MutexGuard, mpsc};
use shuttle::{Config as ShuttleConfig, Runner, thread};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, PoolConfig, Reclaim, StreamPolicy};
use symmalloc_core::errors::{AllocateError, PoolError};
use symmalloc_core::held::{Heap, HeapCell, Keepsake, Vacant};
use symmalloc_core::lock::{Exclusive, Lock, LockCell};

use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, Allocator, Binding, Digest, Handle, PoolId, Retry, StreamId};
use symmalloc_sim::{SimBackend, SplitMix64};

/// The third kind of lock: shuttle's, where another thread may go on.
#[derive(Debug)]
enum Shuttled {}

#[derive(Debug)]
struct ShuttledCell<T>(Mutex<T>);

impl Lock for Shuttled {
    const IS_EXCLUSIVE: bool = false;
    type Tally = ();
    type Cell<T> = ShuttledCell<T>;
    type Keepsake = Nothing;
    type HeapRef = Arc<HeapCell<Self>>;
}

/// Nothing is kept beside a heap. What comes with a free is the allocator.
#[derive(Debug, Default)]
struct Nothing;

impl Keepsake for Nothing {
    type Held = Shared;

    fn keep(&mut self, allocator: Shared) -> Option<Shared> {
        Some(allocator)
    }

    fn free_late(allocator: &Shared, heap: &mut Heap, handle: Handle) {
        allocator.free_late(heap, handle).expect("live");
    }

    fn vacant() -> &'static Vacant<Self> {
        static VACANT: Vacant<Nothing> = std::sync::Mutex::new(Vec::new());
        &VACANT
    }
}

impl<T> LockCell<T> for ShuttledCell<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        ShuttledCell(Mutex::new(value))
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

type Shared = Arc<Allocator<SimBackend, Shuttled>>;

/// Runs `test` on `schedules` schedules of each of two kinds: random ones, and ones that preempt rarely but anywhere.
fn explore(schedules: usize, test: impl Fn() + Send + Sync + Clone + 'static) {
    let mut config = ShuttleConfig::new();
    config.stack_size = 256 << 10;
    let random = RandomScheduler::new_from_seed(0x5eed, schedules);
    assert_eq!(Runner::new(random, config.clone()).run(test.clone()), schedules);
    let rare = PctScheduler::new_from_seed(0x5eed, 3, schedules);
    assert_eq!(Runner::new(rare, config).run(test), schedules);
}

const STREAMS: u16 = 3;

fn allocator<L: Lock>(config: Config, seed: u64) -> Allocator<SimBackend, L> {
    let allocator = Allocator::new(SimBackend::builder().seed(seed).build(), config).expect("a device");
    (0..STREAMS).for_each(|stream| assert_eq!(allocator.register_stream(), Ok(StreamId(stream))));
    allocator
}

fn of_pool(pool: PoolConfig) -> Config {
    Config::builder().default_pool(pool).build().expect("valid")
}

fn shared(config: Config, seed: u64) -> Shared {
    Arc::new(allocator(config, seed))
}

/// Work on all of an allocation.
fn use_it<L: Lock>(allocator: &Allocator<SimBackend, L>, stream: StreamId, made: &Allocation) {
    let used = allocator.backend().submit(stream, made.address, made.size_bytes);
    used.unwrap_or_else(|race| panic!("a wait is missing at {}: {race}", made.placement));
}

/// Work of another stream on an allocation, which waits for the owner's first.
fn lend<L: Lock>(allocator: &Allocator<SimBackend, L>, owner: StreamId, other: StreamId, made: &Allocation) {
    let device = allocator.backend();
    let event = device.record(owner).expect("no faults");
    device.wait(other, event).expect("no faults");
    device.recycle(event);
    use_it(allocator, other, made);
    allocator.record_use_by_owner(made.handle, other).expect("live");
}

/// The heap of a stream, which takes mail from now on.
fn open_mail(allocator: &Shared, stream: StreamId) -> Binding<Shuttled> {
    let heap = allocator.binding(PoolId::DEFAULT, stream).expect("both exist");
    allocator.open_mail(&heap);
    heap
}

/// Frees what lies in the heap, and waits for no other thread if it takes mail. Of allocations with uses as well: there are no
/// captures here, so events that are recorded later are as good.
fn free_or_leave(allocator: &Shared, heap: &Binding<Shuttled>, handle: Handle) {
    let refused = |_: &Arc<Allocator<_, _>>, error| panic!("{error}");
    drop(heap.entrance().free(handle, Arc::clone(allocator), |allocator| &**allocator, refused));
}

/// Everything is freed: nothing is left, neither on the device nor in the books.
fn assert_nothing_is_left(allocator: &Shared) {
    allocator.check().expect("sound");
    assert_eq!(allocator.stats().usage.all.allocations.current, 0, "a free was lost");
    allocator.trim(None).expect("no faults");
    assert_eq!(allocator.stats().reserved_bytes.current, 0);
    assert!(allocator.backend().leaks().is_empty(), "{}", allocator.backend().leaks());
}

/// What a thread does on its own stream. Every third free is left to `free`.
fn drive<L: Lock>(allocator: &Allocator<SimBackend, L>, stream: StreamId, seed: u64, free: impl Fn(Handle)) {
    let mut random = SplitMix64::new(seed ^ u64::from(stream.0) << 32);
    let mut live: Vec<Allocation> = Vec::new();
    let mut lent: Vec<Handle> = Vec::new();
    let give_back = |made: Allocation| match made.handle {
        handle if (made.size_bytes / 512).is_multiple_of(3) => free(handle),
        handle => allocator.free(handle).expect("live"),
    };
    for _ in 0..14 {
        match random.below(8) {
            0..=3 => {
                let size_bytes = [512, 3 * KIB, 700 * KIB, 3 * MIB][random.below(4) as usize];
                let made = allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("no limit");
                use_it(allocator, stream, &made);
                live.push(made);
            }
            4 | 5 if !live.is_empty() => give_back(live.swap_remove(random.below(live.len() as u64) as usize)),
            6 if !live.is_empty() => {
                let other = StreamId(random.below(STREAMS.into()) as u16);
                let made = &live[random.below(live.len() as u64) as usize];
                // A third user would have to wait for the second one too.
                if other != stream && !lent.contains(&made.handle) {
                    lend(allocator, stream, other, made);
                    lent.push(made.handle);
                }
            }
            _ => allocator.reserve(PoolId::DEFAULT, stream, random.below(3) * 2 * MIB).expect("no limit"),
        }
    }
    live.into_iter().for_each(give_back);
}

/// What other threads may do meanwhile without moving anything in the default pool (rule D8).
fn disturb(allocator: &Allocator<SimBackend, Shuttled>) {
    let pool = allocator.create_pool(PoolConfig::default()).expect("few");
    let (observer, _) = allocator.observe(pool).expect("it exists");
    let made = allocator.allocate(pool, StreamId(0), MIB).expect("no limit");
    use_it(allocator, StreamId(0), &made);
    allocator.drop_completed_fences().expect("no faults");
    let stats = allocator.stats();
    assert!(stats.usage.all.allocations.current >= 1 && stats.reserved_bytes.current >= 2 * MIB);
    assert_eq!(allocator.segment_at(made.address).map(|position| position.pool), Some(pool));
    allocator.free(made.handle).expect("live");
    allocator.trim(Some(pool)).expect("no faults");
    assert_eq!(allocator.segment_at(made.address).filter(|position| position.pool == pool), None);
    allocator.acknowledge(observer, &allocator.unread(observer)).expect("no faults");
    allocator.forget(observer).expect("no faults");
    allocator.destroy_pool(pool).expect("empty");
    assert!(matches!(allocator.allocate(pool, StreamId(1), 1), Err(AllocateError::Unknown(_))));
    allocator.snapshot();
}

type HeapDigests = Vec<(Option<StreamId>, Digest)>;

fn heaps_decide_as_if_alone(pool: &PoolConfig, schedules: usize) {
    for seed in 0..6 {
        let alone = allocator::<Exclusive>(of_pool(pool.clone()), seed);
        for stream in (0..STREAMS).map(StreamId) {
            drive(&alone, stream, seed, |handle| alone.free(handle).expect("live"));
        }
        let expected: HeapDigests = alone.heap_digests(PoolId::DEFAULT).expect("the default pool");
        let pool = pool.clone();
        explore(schedules, move || {
            let together = shared(of_pool(pool.clone()), seed + 1);
            let mut threads = Vec::new();
            for stream in (0..STREAMS).map(StreamId) {
                let (handles, theirs) = mpsc::channel::<Handle>();
                let (done, freed) = mpsc::channel();
                let freeing = Arc::clone(&together);
                let heap = open_mail(&together, stream);
                threads.push(thread::spawn(move || {
                    for handle in theirs {
                        free_or_leave(&freeing, &heap, handle);
                        done.send(()).expect("it waits");
                    }
                }));
                let driving = Arc::clone(&together);
                threads.push(thread::spawn(move || {
                    drive(&driving, stream, seed, |handle| {
                        handles.send(handle).expect("it listens");
                        freed.recv().expect("it answers");
                    });
                }));
            }
            let disturbing = Arc::clone(&together);
            threads.push(thread::spawn(move || disturb(&disturbing)));
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            assert_eq!(together.heap_digests(PoolId::DEFAULT).expect("the default pool"), expected);
            assert_nothing_is_left(&together);
        });
    }
}

#[test]
fn expandable_heaps_decide_as_if_alone() {
    heaps_decide_as_if_alone(&PoolConfig::default(), 250);
}

#[test]
fn fixed_heaps_decide_as_if_alone() {
    heaps_decide_as_if_alone(&PoolConfig::builder().fixed().build().expect("valid"), 250);
}

/// What a thread does in a heap that it shares, with frees of what others made.
fn share(allocator: &Shared, stream: StreamId, seed: u64, bag: &Mutex<Vec<Allocation>>) {
    let mut random = SplitMix64::new(seed ^ u64::from(stream.0) << 32);
    for _ in 0..12 {
        match random.below(10) {
            0..=4 => {
                let size_bytes = [512, 700 * KIB, 3 * MIB][random.below(3) as usize];
                match allocator.allocate(PoolId::DEFAULT, stream, size_bytes) {
                    Ok(made) => {
                        use_it(allocator, stream, &made);
                        bag.lock().expect("no panic").push(made);
                    }
                    Err(AllocateError::OutOfMemory(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            5..=7 => {
                let taken = bag.lock().expect("no panic").pop();
                if let Some(made) = taken {
                    let handle = made.handle;
                    allocator.free(handle).expect("live");
                    assert!(allocator.free(handle).is_err(), "it was freed");
                }
            }
            8 => {
                allocator.trim(None).expect("no faults");
            }
            _ => {
                allocator.drop_completed_fences().expect("no faults");
            }
        }
    }
}

/// The heap's order is that of the threads, so placements are theirs too. What holds is everything else.
#[test]
fn a_shared_heap_with_a_limit_stays_sound_and_loses_no_free() {
    for seed in 0..4 {
        explore(300, move || {
            let pool = PoolConfig::builder()
                .streams(StreamPolicy::Shared)
                .limit_bytes(Some(8 * MIB))
                .reclaim(Reclaim::Pool)
                .build()
                .expect("valid");
            let allocator = shared(of_pool(pool), seed);
            let asked = Arc::new(AtomicU64::new(0));
            let asking = Arc::clone(&asked);
            allocator.set_failure_callback(move |allocator, error| {
                asking.fetch_add(1, Relaxed);
                assert!(error.reserved_bytes <= 8 * MIB);
                allocator.trim(None).expect("no faults");
                if asking.load(Relaxed).is_multiple_of(2) { Retry::Again } else { Retry::GiveUp }
            });
            let bag = Arc::new(Mutex::new(Vec::new()));
            let threads = (0..STREAMS).map(StreamId).map(|stream| {
                let (allocator, bag) = (Arc::clone(&allocator), Arc::clone(&bag));
                thread::spawn(move || share(&allocator, stream, seed, &bag))
            });
            let threads: Vec<_> = threads.collect();
            for _ in 0..3 {
                let stats = allocator.pool_stats(PoolId::DEFAULT).expect("the default pool");
                assert!(stats.reserved_bytes.current <= 8 * MIB, "over the limit: {stats:?}");
                let scope = allocator.open_stat_scope();
                allocator.reset_peak_stats();
                allocator.close_stat_scope(scope);
            }
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            for made in bag.lock().expect("no panic").drain(..) {
                allocator.free(made.handle).expect("live");
            }
            assert_nothing_is_left(&allocator);
        });
    }
}

/// Threads free what others allocated while these map memory. They synchronise in nothing, so the order is theirs; what holds
/// is that no free is lost, and that no memory is taken before its uses are over.
#[test]
fn frees_that_are_left_are_done_whoever_comes_whenever_the_mail_is_closed() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(2000, move || {
        let allocator = shared(Config::default(), 9);
        let heaps = Arc::new([one, other].map(|stream| open_mail(&allocator, stream)));
        let (to_other, of_one) = mpsc::channel::<Allocation>();
        let (to_one, of_other) = mpsc::channel::<Allocation>();
        let ways = [(one, to_other, of_other), (other, to_one, of_one)];
        let threads = ways.map(|(stream, gives, takes)| {
            let (allocator, heaps) = (Arc::clone(&allocator), Arc::clone(&heaps));
            thread::spawn(move || {
                for size_bytes in [MIB, 3 * MIB, 512, 5 * MIB] {
                    let made = allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("no limit");
                    use_it(&allocator, stream, &made);
                    gives.send(made).expect("it listens until all is freed");
                    if let Ok(theirs) = takes.try_recv() {
                        free_or_leave(&allocator, &heaps[1 - stream.index()], theirs.handle);
                    }
                }
                drop(gives);
                for theirs in takes {
                    free_or_leave(&allocator, &heaps[1 - stream.index()], theirs.handle);
                }
            })
        });
        allocator.close_mail(&heaps[0]);
        allocator.stats();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        heaps.iter().for_each(|heap| allocator.close_mail(heap));
        assert_nothing_is_left(&allocator);
        assert_eq!(Arc::strong_count(&allocator), 1, "mail of a closed box is done");
    });
}

/// A thread that comes after the one that left a free finds the memory.
#[test]
fn who_comes_after_a_free_that_was_left_finds_the_memory_free() {
    explore(1000, || {
        let allocator = shared(Config::default(), 10);
        let heap = Arc::new(open_mail(&allocator, StreamId(0)));
        let made = allocator.allocate(PoolId::DEFAULT, StreamId(0), MIB).expect("no limit");
        let growing = Arc::clone(&allocator);
        let grower = thread::spawn(move || {
            growing.reserve(PoolId::DEFAULT, StreamId(0), 64 * MIB).expect("no limit");
        });
        let (freeing, theirs) = (Arc::clone(&allocator), Arc::clone(&heap));
        let freer = thread::spawn(move || free_or_leave(&freeing, &theirs, made.handle));
        freer.join().expect("no panic");
        let again = allocator.allocate(PoolId::DEFAULT, StreamId(0), MIB).expect("no limit");
        assert_eq!(again.placement, made.placement);
        allocator.free(again.handle).expect("live");
        grower.join().expect("no panic");
        allocator.close_mail(&heap);
        assert_nothing_is_left(&allocator);
    });
}

/// One thread gives memory back, and so waits for a stream that another thread gives more work to.
#[test]
fn a_host_that_waits_for_a_stream_has_not_waited_for_what_comes_meanwhile() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(2000, move || {
        let allocator = shared(Config::default(), 3);
        let cached = allocator.allocate(PoolId::DEFAULT, other, 6 * MIB).expect("no limit");
        use_it(&allocator, other, &cached);
        allocator.free(cached.handle).expect("live");
        let trimming = Arc::clone(&allocator);
        let trimmer = thread::spawn(move || {
            trimming.trim(None).expect("no faults");
        });
        let lending = Arc::clone(&allocator);
        let lender = thread::spawn(move || {
            let made = lending.allocate(PoolId::DEFAULT, one, MIB).expect("no limit");
            use_it(&lending, one, &made);
            lend(&lending, one, other, &made);
            lending.free(made.handle).expect("live");
            let again = lending.allocate(PoolId::DEFAULT, one, MIB).expect("no limit");
            use_it(&lending, one, &again);
            lending.free(again.handle).expect("live");
        });
        [trimmer, lender].into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_nothing_is_left(&allocator);
    });
}

/// One thread takes a block of a shared heap, and so makes its stream wait for another one, which a third thread gives more
/// work to.
#[test]
fn a_stream_that_waits_for_another_has_not_waited_for_what_comes_meanwhile() {
    let (one, other) = (StreamId(0), StreamId(1));
    explore(2000, move || {
        let allocator = shared(Config::default(), 4);
        let pool = PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("valid");
        let pool = allocator.create_pool(pool).expect("few");
        let left = allocator.allocate(pool, other, MIB).expect("no limit");
        use_it(&allocator, other, &left);
        allocator.free(left.handle).expect("live");
        let taking = Arc::clone(&allocator);
        let taker = thread::spawn(move || {
            let taken = taking.allocate(pool, one, MIB).expect("no limit");
            use_it(&taking, one, &taken);
            taking.free(taken.handle).expect("live");
        });
        let lent = allocator.allocate(PoolId::DEFAULT, one, MIB).expect("no limit");
        use_it(&allocator, one, &lent);
        lend(&allocator, one, other, &lent);
        allocator.free(lent.handle).expect("live");
        taker.join().expect("no panic");
        let again = allocator.allocate(PoolId::DEFAULT, one, MIB).expect("no limit");
        use_it(&allocator, one, &again);
        allocator.free(again.handle).expect("live");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn a_pool_is_destroyed_by_one_thread_and_used_by_another() {
    explore(2000, || {
        let allocator = shared(Config::default(), 5);
        let pool = allocator.create_pool(PoolConfig::default()).expect("few");
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            for stream in (0..STREAMS).map(StreamId) {
                match using.allocate(pool, stream, MIB) {
                    Ok(made) => {
                        use_it(&using, stream, &made);
                        assert!(matches!(using.destroy_pool(pool), Err(PoolError::InUse { .. })));
                        using.free(made.handle).expect("live");
                    }
                    Err(error) => assert!(matches!(error, AllocateError::Unknown(_)), "{error}"),
                }
            }
        });
        let destroyed = allocator.destroy_pool(pool);
        user.join().expect("no panic");
        if destroyed.is_err() {
            allocator.destroy_pool(pool).expect("nothing is live any more");
        }
        assert_eq!(allocator.backend().mapped_bytes(), 0, "a destroyed pool holds memory");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn an_observer_that_comes_and_goes_misses_no_segment_and_holds_none() {
    explore(2000, || {
        let allocator = shared(Config::default(), 6);
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            for stream in (0..STREAMS).map(StreamId) {
                let made = using.allocate(PoolId::DEFAULT, stream, MIB).expect("no limit");
                using.free(made.handle).expect("live");
                using.trim(None).expect("no faults");
            }
        });
        let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("it exists");
        let unread = allocator.unread(observer);
        let mut known: Vec<_> = births.iter().chain(&unread.events).map(|event| (event.stream, event.kind)).collect();
        allocator.acknowledge(observer, &unread).expect("no faults");
        user.join().expect("no panic");
        known.extend(allocator.unread(observer).events.iter().map(|event| (event.stream, event.kind)));
        for stream in (0..STREAMS).map(StreamId) {
            let of_stream = known.iter().filter(|(of, _)| *of == Some(stream)).count();
            assert!(of_stream.is_multiple_of(2), "{stream}: a birth without a death, or the other way: {known:?}");
        }
        allocator.forget(observer).expect("no faults");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn an_observer_is_forgotten_by_heaps_that_are_made_meanwhile() {
    explore(2000, || {
        let allocator = shared(Config::default(), 7);
        let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("it exists");
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            let made = using.allocate(PoolId::DEFAULT, StreamId(1), MIB).expect("no limit");
            using.free(made.handle).expect("live");
        });
        allocator.forget(observer).expect("no faults");
        user.join().expect("no panic");
        assert_nothing_is_left(&allocator);
    });
}

/// Where the address lay, or nothing: no stale answer.
#[test]
fn an_address_is_looked_up_while_its_segment_dies() {
    explore(1000, || {
        let allocator = shared(Config::default(), 8);
        let made = allocator.allocate(PoolId::DEFAULT, StreamId(0), MIB).expect("no limit");
        allocator.free(made.handle).expect("live");
        let trimming = Arc::clone(&allocator);
        let trimmer = thread::spawn(move || {
            trimming.trim(None).expect("no faults");
        });
        if let Some(position) = allocator.segment_at(made.address) {
            assert_eq!(position.base, made.address);
        }
        trimmer.join().expect("no panic");
        assert_eq!(allocator.segment_at(made.address), None);
    });
}
