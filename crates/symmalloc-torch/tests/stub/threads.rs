//! Many threads on one allocator.

use crate::class_calls::{allocate, free, is_stream};
use crate::library::*;
use std::ffi::c_void;
use std::ptr::null;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_torch::*;

const THREADS: usize = 4;
const ROUNDS: usize = 2000;

stub_test!(threads_allocate_on_their_own_streams_and_free_each_others_memory, {
    let (allocator, streams) = (Allocator::new(""), Streams::new(THREADS));
    let streams: Vec<usize> = (0..THREADS).map(|index| streams.get(index) as usize).collect();
    // Streams get their ids in the order of first use.
    for stream in &streams {
        let pointer = allocator.allocate(0, 512, *stream as *mut _);
        allocator.free(pointer);
    }
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::sync_channel::<Pointer>(4)).unzip();
    thread::scope(|scope| {
        let senders = senders;
        for (index, receiver) in receivers.into_iter().enumerate() {
            let (next, stream) = (senders[(index + 1) % THREADS].clone(), streams[index]);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let size = 512 * (1 + (round * 7 + index) % 4000);
                    let (own, given) =
                        (allocator.allocate(0, size, stream as *mut _), allocator.allocate(0, size, stream as *mut _));
                    assert_ne!(own, given);
                    done(allocator.try_record_use(own, stream as *mut _));
                    if next.try_send(given).is_err() {
                        allocator.free(given);
                    }
                    allocator.free(own);
                    receiver.try_iter().for_each(|theirs| allocator.free(theirs));
                }
                drop(next);
                // The loop ends when the neighbor drops its sender.
                receiver.iter().for_each(|theirs| allocator.free(theirs));
            });
        }
    });
    let stats = allocator.stats();
    let allocations = &stats["total"]["allocation"]["all"];
    assert_eq!(allocations["allocated"], THREADS * (2 * ROUNDS + 1));
    assert_eq!(allocations["current"], 0);
    allocator.destroy();
    assert_eq!(live().device_bytes, 0);
});

stub_test!(heaps_do_not_depend_on_thread_interleaving, {
    let history = |allocator: Allocator, are_threads: bool, streams: &[usize]| {
        for stream in streams {
            let pointer = allocator.allocate(0, 512, *stream as *mut _);
            allocator.free(pointer);
        }
        let work = |stream: usize| {
            for round in 0..500 {
                let pointers = [1, 3, 2].map(|size| allocator.allocate(0, size * (1 + round) * 512, stream as *mut _));
                pointers.into_iter().for_each(|pointer| allocator.free(pointer));
            }
        };
        if are_threads {
            thread::scope(|scope| streams.iter().for_each(|stream| drop(scope.spawn(|| work(*stream)))));
        } else {
            streams.iter().for_each(|stream| work(*stream));
        }
        allocator.digest(0)
    };
    let streams = Streams::new(3);
    let raw: Vec<usize> = (0..3).map(|index| streams.get(index) as usize).collect();
    assert_eq!(history(Allocator::new(""), true, &raw), history(Allocator::new(""), false, &raw));
});

type PoolId = (u64, u64);

/// The owner of a mempool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Graph,
    MemPool,
    /// A `MemPool` over the program's allocator.
    Source,
}

const KINDS: [Kind; 3] = [Kind::Graph, Kind::MemPool, Kind::Source];

/// A program's allocator: unused addresses, because nothing is written there.
unsafe extern "C" fn next_address(_context: *mut c_void, bytes: usize) -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new(1 << 46);
    assert!(bytes <= 64 << 20);
    NEXT.fetch_add(64 << 20, Ordering::Relaxed) as *mut c_void
}

unsafe extern "C" fn ignore(_context: *mut c_void, _pointer: *mut c_void) {}

/// Begins a scope for the streams that the filter accepts. Creates the pool.
#[track_caller]
fn begin(kind: Kind, id: PoolId, filter: symmalloc_filter_fn, context: *mut c_void) {
    let source = symmalloc_source { allocate: Some(next_address), free: Some(ignore), context, destroy: None };
    let mut number = 0;
    // SAFETY: functions that take any context, and an output pointer.
    unsafe {
        match kind {
            Kind::Graph => {}
            Kind::MemPool => done(symmalloc_torch_retain_pool(0, id.0, id.1, null())),
            Kind::Source => done(symmalloc_torch_retain_pool(0, id.0, id.1, &raw const source)),
        }
        done(symmalloc_torch_begin_scope(0, id.0, id.1, filter, context, None, &raw mut number));
    }
}

/// Ends the scope, and releases the pool.
#[track_caller]
fn end(kind: Kind, id: PoolId) {
    done(symmalloc_torch_end_scope(0, id.0, id.1));
    for _ in 0..if kind == Kind::Graph { 1 } else { 2 } {
        done(symmalloc_torch_release_use(0, id.0, id.1));
    }
}

// Half of the threads begin and end scopes of their streams, release the pools, and trim. The other half allocates on these streams.
stub_test!(threads_capture_allocate_and_release_on_each_others_streams, {
    let streams = Streams::new(THREADS);
    let streams: Vec<usize> = (0..THREADS).map(|index| streams.get(index) as usize).collect();
    // Streams get their ids in the order of first use.
    for stream in &streams {
        free(allocate(512, *stream as *mut c_void, 0));
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    let (rounds, allocations) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for index in 0..THREADS {
            let (streams, rounds, allocations) = (&streams, &rounds, &allocations);
            let allocate = move |turn: usize| {
                allocations.fetch_add(1, Ordering::Relaxed);
                allocate(512 * (1 + turn % 200), streams[turn % (THREADS / 2)] as *mut c_void, 0)
            };
            scope.spawn(move || {
                for round in 0..5 * ROUNDS {
                    if Instant::now() > deadline {
                        break;
                    }
                    if index < THREADS / 2 {
                        let (kind, id) = (KINDS[(round + index) % 3], (index as u64 + 1, 1 + round as u64 % 3));
                        begin(kind, id, Some(is_stream), streams[index] as *mut c_void);
                        let held = [round, round + 1].map(allocate);
                        end(kind, id);
                        held.into_iter().for_each(|pointer| assert!(free(pointer) > 0));
                        // Destroys the pools without uses and allocations, unless a scope is open.
                        done(symmalloc_torch_trim(0, 0));
                        rounds.fetch_add(1, Ordering::Relaxed);
                    } else {
                        for turn in 0..8 {
                            assert!(free(allocate(round + turn)) > 0);
                        }
                    }
                }
            });
        }
    });
    println!("{rounds:?} rounds, {allocations:?} allocations");
    done(symmalloc_torch_trim(0, 0));
    let stats = Allocator::of_torch().stats();
    assert_eq!(stats["total"]["allocation"]["all"]["current"], 0);
    assert_eq!(stats["errors"]["failed_calls"], 0, "{stats}");
    assert_eq!(live().device_bytes, 0);
});
