//! Many threads on one allocator.

use crate::library::*;
use std::sync::mpsc;
use std::thread;

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
