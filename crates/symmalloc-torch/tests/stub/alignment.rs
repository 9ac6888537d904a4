//! Comparison of ranks: two allocators of one process, with a gather between two threads.

use crate::library::*;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::thread;
use stub_process::Barrier;
use symmalloc_torch::*;

/// The channel of a gather between two threads.
struct Exchange {
    places: Mutex<[Vec<u8>; 2]>,
    barrier: Barrier,
}

struct Rank {
    rank: usize,
    exchange: Arc<Exchange>,
}

unsafe extern "C" fn gather(context: *mut c_void, mine: *const u8, len: usize, all: *mut u8) -> c_int {
    // SAFETY: the context is a rank, and the buffers have the sizes in the contract.
    let (rank, mine, all) = unsafe {
        (&*context.cast::<Rank>(), std::slice::from_raw_parts(mine, len), std::slice::from_raw_parts_mut(all, 2 * len))
    };
    rank.exchange.places.lock().expect("no panic")[rank.rank] = mine.to_vec();
    rank.exchange.barrier.wait();
    all.copy_from_slice(&rank.exchange.places.lock().expect("no panic").concat());
    rank.exchange.barrier.wait();
    0
}

unsafe extern "C" fn broken(_: *mut c_void, _: *const u8, _: usize, _: *mut u8) -> c_int {
    7
}

type Agree = unsafe extern "C" fn(*mut DeviceAllocator, u32, u32, symmalloc_gather_fn, *mut c_void) -> symmalloc_status;

/// Returns the statuses and messages of both ranks.
fn compared(allocators: [Allocator; 2], agree: Agree) -> [(symmalloc_status, String); 2] {
    let exchange = Arc::new(Exchange { places: Mutex::default(), barrier: Barrier::new(2) });
    let run = |rank: usize| {
        let (exchange, allocator) = (Arc::clone(&exchange), allocators[rank]);
        move || {
            let allocator = allocator;
            let mut context = Rank { rank, exchange };
            // SAFETY: a live allocator, and a gather that meets its contract with this context.
            let status = unsafe { agree(allocator.0, rank as u32, 2, Some(gather), (&raw mut context).cast()) };
            (status, message())
        }
    };
    thread::scope(|scope| [0, 1].map(|rank| scope.spawn(run(rank))).map(|rank| rank.join().expect("no panic")))
}

stub_test!(the_first_op_that_differs_in_a_symmetric_pool_is_named, {
    let (ranks, streams) = ([0, 1].map(|_| Allocator::new("symmetric:true")), Streams::new(1));
    for allocator in ranks {
        allocator.allocate(0, MIB, streams.get(0));
    }
    assert_eq!(compared(ranks, symmalloc_agree).map(|(status, _)| status), [SYMMALLOC_OK; 2]);
    ranks[0].allocate(0, 3 * MIB, streams.get(0));
    ranks[1].allocate(0, 3 * MIB + 1, streams.get(0));
    for (status, text) in compared(ranks, symmalloc_agree) {
        assert_eq!(status, SYMMALLOC_MISALIGNED);
        assert!(text.contains("3,145,728") && text.contains("3,145,729"), "{text}");
    }
});

stub_test!(heaps_of_private_pools_that_differ_are_named, {
    let (ranks, streams) = ([0, 1].map(|_| Allocator::new("")), Streams::new(2));
    for allocator in ranks {
        let pointer = allocator.allocate(0, MIB, streams.get(0));
        allocator.allocate(0, MIB, streams.get(1));
        allocator.free(pointer);
    }
    assert_eq!(compared(ranks, symmalloc_agree_all).map(|(status, _)| status), [SYMMALLOC_OK; 2]);
    ranks[1].allocate(0, 512, streams.get(1));
    assert_eq!(
        compared(ranks, symmalloc_agree).map(|(status, _)| status),
        [SYMMALLOC_OK; 2],
        "there is no symmetric pool to compare"
    );
    let [(status, text), (_, same)] = compared(ranks, symmalloc_agree_all);
    assert_eq!(status, SYMMALLOC_MISALIGNED);
    assert!(text.contains("differ in 1 heap of") && text.contains("pool 0, stream 1"), "{text}");
    assert!(text.contains("2 ops") && text.contains("3 ops") && text.contains(": rank 1"), "{text}");
    assert_eq!(text, same);
});

/// The ops of a rank on its private pools, of which there are three, on two streams.
type Ops = fn(Allocator, &Streams, [u32; 3]);

/// Two lists of ops that differ in one respect. Each rank runs one of them.
const DIFFERENCES: &[(&str, Ops, Ops)] = &[
    ("the size", |it, on, [a, ..]| take(it, a, MIB, on.get(0)), |it, on, [a, ..]| take(it, a, MIB + 512, on.get(0))),
    ("the stream", |it, on, [a, ..]| take(it, a, MIB, on.get(0)), |it, on, [a, ..]| take(it, a, MIB, on.get(1))),
    ("the pool", |it, on, [a, ..]| take(it, a, MIB, on.get(0)), |it, on, [_, b, _]| take(it, b, MIB, on.get(0))),
    ("the number of ops", |it, on, [a, ..]| take(it, a, MIB, on.get(0)), |_, _, _| ()),
    ("the pools in use", |_, _, _| (), |it, on, [.., c]| take(it, c, MIB, on.get(0))),
    (
        "the order",
        |it, on, [a, ..]| [1, 2].into_iter().for_each(|size| take(it, a, size * MIB, on.get(0))),
        |it, on, [a, ..]| [2, 1].into_iter().for_each(|size| take(it, a, size * MIB, on.get(0))),
    ),
    ("what is freed", |it, on, [a, ..]| free_one(it, a, on.get(0), 0), |it, on, [a, ..]| free_one(it, a, on.get(0), 1)),
];

/// Allocates two blocks, and frees one of them.
fn free_one(allocator: Allocator, pool: u32, stream: *mut c_void, which: usize) {
    let blocks = [0, 1].map(|_| allocator.allocate(pool, MIB, stream));
    allocator.free(blocks[which]);
}

fn take(allocator: Allocator, pool: u32, bytes: usize, stream: *mut c_void) {
    allocator.allocate(pool, bytes, stream);
}

stub_test!(ranks_that_differ_in_anything_in_private_pools_are_told, {
    let streams = Streams::new(2);
    for (what, one, other) in DIFFERENCES {
        for ops in [[one, one], [other, other], [one, other], [other, one]] {
            let ranks = ops.map(|ops| {
                let allocator = Allocator::new("stitching:false");
                let pools = [0, allocator.create_pool(None), allocator.create_pool(None)];
                for stream in [0, 1] {
                    pools[..2].iter().for_each(|pool| take(allocator, *pool, MIB, streams.get(stream)));
                }
                ops(allocator, &streams, pools);
                allocator
            });
            let expected = if std::ptr::eq(ops[0], ops[1]) { SYMMALLOC_OK } else { SYMMALLOC_MISALIGNED };
            let outcome = compared(ranks, symmalloc_agree_all);
            assert_eq!(outcome.clone().map(|(status, _)| status), [expected; 2], "{what}: {outcome:?}");
            ranks.into_iter().for_each(Allocator::destroy);
        }
    }
});

stub_test!(a_gather_that_fails_is_a_transport_error, {
    let allocator = Allocator::new("");
    // SAFETY: a live allocator, and a gather that needs no context.
    let status = unsafe { symmalloc_agree(allocator.0, 0, 2, Some(broken), std::ptr::null_mut()) };
    assert_eq!(status, SYMMALLOC_TRANSPORT);
    assert!(message().contains("the gather function failed with code 7"), "{}", message());
});
