//! Every interleaving of the small lock-free pieces, by loom: `RUSTFLAGS="--cfg symmalloc_loom" cargo test -p symmalloc-core --lib
//! --release interleavings`. Larger programs are explored by shuttle, in `tests/interleavings.rs`.
//!
//! Loom sees [`crate::sync`] and the [`Modelled`] lock. `OnceLock` and `boxcar` are taken for right: a step each.

use crate::allocator::Allocator;
use crate::backend::{Backend, BackendError, DeviceAddress, Event, Range};
use crate::bound::Binding;
use crate::budget::{Budget, Budgets, LimitMet, LimitScope};
use crate::config::Config;
use crate::errors::PoolError;
use crate::handle::Handle;
use crate::held::{Heap, HeapCell, Keepsake, Vacant};
use crate::ids::{PoolId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::registry::Registry;
use crate::stats::Stat;
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;

/// Locks whose every order loom tries.
#[derive(Debug)]
enum Modelled {}

impl Lock for Modelled {
    const IS_EXCLUSIVE: bool = false;
    type Tally = ();
    type Cell<T> = Mutex<T>;
    type Keepsake = Count;
    type HeapRef = std::sync::Arc<HeapCell<Self>>;
}

/// What came with frees: nothing, and how many times.
#[derive(Debug, Default)]
struct Count(usize);

impl Keepsake for Count {
    type Held = ();

    fn keep(&mut self, (): ()) -> Option<()> {
        self.0 += 1;
        None
    }

    fn free_late((): &(), _: &mut Heap, handle: Handle) {
        panic!("{handle} is more than a block");
    }

    fn vacant() -> &'static Vacant<Self> {
        static VACANT: Vacant<Count> = std::sync::Mutex::new(Vec::new());
        &VACANT
    }
}

impl<T> LockCell<T> for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        Mutex::new(value)
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        Mutex::lock(self).expect("no thread panicked")
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Mutex::try_lock(self).ok()
    }
}

/// A device on which every call succeeds. It is here because the types that `symmalloc-sim` implements are not those of a crate
/// under test.
#[derive(Debug, Default)]
struct Idle(std::sync::atomic::AtomicU64);

impl Backend for Idle {
    fn granularity_bytes(&self) -> u64 {
        2 << 20
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let base = self.0.fetch_add(size_bytes, std::sync::atomic::Ordering::Relaxed);
        Ok(Range { base: DeviceAddress((1 << 40) + base), size_bytes })
    }

    fn map(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn unmap(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn release(&self, _: Range) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&self, _: StreamId) -> Result<Event, BackendError> {
        Ok(Event(0))
    }

    fn wait(&self, _: StreamId, _: Event) -> Result<(), BackendError> {
        Ok(())
    }

    fn query(&self, _: Event) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn recycle(&self, _: Event) {}

    fn synchronize(&self, _: StreamId) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Runs the closures on threads of their own, the last one on this one.
fn together<T: Send + Sync + 'static>(shared: &Arc<T>, one: fn(&T), other: fn(&T)) {
    let theirs = Arc::clone(shared);
    let thread = thread::spawn(move || one(&theirs));
    other(shared);
    thread.join().expect("no panic");
}

struct Three {
    heap: Budget,
    pool: Budget,
    allocator: Budget,
}

impl Three {
    fn new(pool_limit: u64, allocator_limit: u64) -> Arc<Self> {
        let [pool, allocator] = [pool_limit, allocator_limit].map(|limit| Budget::new(Some(limit)));
        Arc::new(Three { heap: Budget::new(None), pool, allocator })
    }

    fn budgets(&self) -> Budgets<'_> {
        Budgets { heap: &self.heap, pool: &self.pool, allocator: &self.allocator }
    }

    fn reserved(&self) -> [u64; 3] {
        [&self.heap, &self.pool, &self.allocator].map(Budget::reserved_bytes)
    }
}

#[test]
fn two_charges_that_fit_one_by_one_never_exceed_the_limit_together() {
    loom::model(|| {
        let three = Three::new(100, 100);
        let charge = |three: &Three| match three.budgets().charge(60) {
            Ok(()) => three.budgets().confirm(60),
            Err(met) => assert_eq!(met, LimitMet { scope: LimitScope::Pool, limit_bytes: 100 }),
        };
        together(&three, charge, charge);
        assert_eq!(three.reserved(), [60; 3], "one of them was served");
        assert_eq!(three.pool.stat(), Stat { current: 60, peak: 60, allocated: 60, freed: 0 });
    });
}

#[test]
fn a_refused_charge_beside_others_loses_nothing() {
    loom::model(|| {
        let three = Three::new(100, 50);
        together(
            &three,
            // The pool has room and the allocator has not: the pool's charge is taken back.
            |three| assert!(three.budgets().charge(60).is_err()),
            |three| {
                three.budgets().charge(40).expect("fits beside a request that is refused");
                three.budgets().confirm(40);
                assert_eq!(three.allocator.reserved_bytes(), 40);
            },
        );
        assert_eq!(three.reserved(), [40; 3]);
        three.budgets().refund(40);
        assert_eq!(three.pool.stat(), Stat { current: 0, peak: three.pool.stat().peak, allocated: 40, freed: 40 });
    });
}

#[test]
fn statistics_are_read_while_memory_comes_and_goes() {
    loom::model(|| {
        let three = Three::new(100, 100);
        together(
            &three,
            |three| {
                three.budgets().charge(60).expect("fits");
                three.budgets().confirm(60);
                three.budgets().refund(60);
            },
            |three| {
                let stat = three.pool.stat();
                assert!(stat.current <= 60 && stat.allocated <= 60 && stat.freed <= stat.allocated, "{stat:?}");
            },
        );
        assert_eq!(three.reserved(), [0; 3]);
    });
}

#[test]
fn entries_pushed_at_once_get_indices_of_their_own_and_are_found() {
    model(2, || {
        let registry = Arc::new(Registry::new());
        let push = |registry: &Registry<usize>| {
            let index = registry.push(|index| index);
            assert_eq!(registry.get(index), Some(&index));
            assert!(registry.iter().all(|(index, entry)| index == *entry));
        };
        together(&registry, push, push);
        assert_eq!(registry.iter().map(|(index, _)| index).collect::<Vec<_>>(), [0, 1]);
    });
}

/// An allocator with two streams, whose backend is the simulator: its lock is never held across a step of loom.
fn allocator() -> Arc<Allocator<Idle, Modelled>> {
    let allocator = Allocator::new(Idle::default(), Config::default()).expect("a device");
    (0..2).for_each(|stream| assert_eq!(allocator.register_stream(), Ok(StreamId(stream))));
    Arc::new(allocator)
}

fn model(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

#[test]
fn threads_that_need_one_heap_first_make_it_once() {
    model(2, || {
        let allocator = allocator();
        let use_it = |allocator: &Allocator<Idle, Modelled>| {
            allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        };
        together(&allocator, use_it, use_it);
        assert_eq!(allocator.heaps.len(), 1);
        assert_eq!(allocator.stats().usage.all.allocations.current, 2);
        allocator.check().expect("sound");
    });
}

#[test]
fn a_heap_that_is_made_while_an_observer_comes_is_observed() {
    model(2, || {
        let allocator = allocator();
        together(
            &allocator,
            |allocator| {
                let made = allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
                allocator.free(made.handle).expect("live");
            },
            |allocator| {
                let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("the default pool");
                // A segment is told of in one way or the other, unless its heap is still without one.
                allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
                assert_eq!(births.len() + allocator.unread(observer).events.len(), 1);
            },
        );
    });
}

#[test]
fn no_heap_is_made_in_a_pool_that_is_being_destroyed() {
    model(2, || {
        let allocator = allocator();
        let pool = allocator.create_pool(crate::config::PoolConfig::default()).expect("few");
        assert_eq!(pool, PoolId(1));
        together(
            &allocator,
            |allocator| {
                // Refused, or made before: then the pool was in use, and is still there.
                if allocator.allocate(PoolId(1), StreamId(0), 512).is_ok() {
                    assert!(matches!(allocator.destroy_pool(PoolId(1)), Err(PoolError::InUse { .. })));
                }
            },
            |allocator| {
                let _destroyed_or_in_use = allocator.destroy_pool(PoolId(1));
            },
        );
    });
}

/// A block of a heap that takes mail, which one thread frees while another one is inside.
struct Left {
    allocator: Arc<Allocator<Idle, Modelled>>,
    heap: Binding<Modelled>,
    handle: Handle,
}

/// Nothing but a block is freed here, which takes no allocator.
fn nobodys((): &()) -> &Allocator<Idle, Modelled> {
    unreachable!("the block is at hand")
}

impl Left {
    fn new() -> Arc<Self> {
        let allocator = allocator();
        let heap = allocator.binding(PoolId::DEFAULT, StreamId(0)).expect("both exist");
        allocator.open_mail(&heap);
        let handle = allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory").handle;
        Arc::new(Left { allocator, heap, handle })
    }

    fn free(&self) {
        let refused = |(): &(), error| unreachable!("{error}");
        assert_eq!(self.heap.entrance().free(self.handle, (), nobodys, refused), None);
    }

    fn kept(&self) -> usize {
        self.allocator.with_keepsake(&self.heap, |count| count.0)
    }
}

#[test]
fn a_free_that_is_left_is_done_by_who_comes_next() {
    model(3, || {
        let left = Left::new();
        together(&left, Left::free, |left| {
            left.allocator.with_keepsake(&left.heap, |_| {});
        });
        assert_eq!(left.kept(), 1);
        assert_eq!(left.allocator.stats().usage.all.allocations.current, 0);
    });
}

#[test]
fn nothing_is_in_the_mail_once_it_is_closed_and_somebody_was_inside() {
    model(3, || {
        let left = Left::new();
        together(&left, Left::free, |left| {
            left.allocator.close_mail(&left.heap);
            left.allocator.with_keepsake(&left.heap, |_| {});
            assert!(!left.heap.heap.mail.is_waiting());
        });
        assert_eq!(left.kept(), 1);
    });
}
