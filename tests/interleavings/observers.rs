//! Observers that are added and removed while other threads allocate and free.

use super::explored::{STREAMS, Shared, assert_nothing_is_left, explore, shared};
use shuttle::sync::Arc;
use shuttle::thread;
use symmalloc_core::config::Config;
use symmalloc_core::units::MIB;
use symmalloc_core::{PoolId, StreamId};

#[test]
fn a_temporary_observer_misses_no_segment_and_holds_none() {
    explore(2000, || {
        let allocator = shared(&Config::default(), 6);
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            for stream in (0..STREAMS).map(StreamId) {
                let made = using.allocate(PoolId::DEFAULT, stream, MIB).expect("no limit should be reached");
                using.free(made.handle).expect("the allocation should be live");
                using.trim_all().expect("no fault should be injected");
            }
        });
        let (observer, births) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
        let unread = allocator.unread(observer);
        let mut known: Vec<_> =
            births.iter().chain(&unread.events).map(|event| (event.heap.stream(), event.kind)).collect();
        allocator.acknowledge(observer, &unread).expect("no fault should be injected");
        user.join().expect("the thread should not panic");
        known.extend(allocator.unread(observer).events.iter().map(|event| (event.heap.stream(), event.kind)));
        for stream in (0..STREAMS).map(StreamId) {
            let of_stream = known.iter().filter(|(of, _)| *of == Some(stream)).count();
            assert!(of_stream.is_multiple_of(2), "{stream}: a birth without a death, or vice versa: {known:?}");
        }
        allocator.forget(observer).expect("no fault should be injected");
        assert_nothing_is_left(&allocator);
    });
}

/// The third heap sorts between two existing heaps and is created while the observer is added to them.
#[test]
fn an_observer_is_added_exactly_once_to_a_heap_that_is_created_concurrently() {
    explore(2000, || {
        let allocator = shared(&Config::default(), 6);
        let take = |allocator: &Shared, stream| {
            let made = allocator.allocate(PoolId::DEFAULT, StreamId(stream), MIB).expect("no limit should be reached");
            allocator.free(made.handle).expect("the allocation should be live");
        };
        take(&allocator, 0);
        take(&allocator, 2);
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || take(&using, 1));
        let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
        user.join().expect("the thread should not panic");
        allocator.trim_all().expect("no fault should be injected");
        let unread = allocator.unread(observer);
        allocator.acknowledge(observer, &unread).expect("no fault should be injected");
        assert_eq!(allocator.stats().retired_bytes, 0, "memory is held although the observer has read its events");
        assert_nothing_is_left(&allocator);
    });
}

#[test]
fn an_observer_is_removed_from_heaps_that_are_created_concurrently() {
    explore(2000, || {
        let allocator = shared(&Config::default(), 7);
        let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
        let using = Arc::clone(&allocator);
        let user = thread::spawn(move || {
            let made = using.allocate(PoolId::DEFAULT, StreamId(1), MIB).expect("no limit should be reached");
            using.free(made.handle).expect("the allocation should be live");
        });
        allocator.forget(observer).expect("no fault should be injected");
        user.join().expect("the thread should not panic");
        assert_nothing_is_left(&allocator);
    });
}
