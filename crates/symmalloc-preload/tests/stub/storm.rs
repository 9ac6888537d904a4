//! A stress test: many threads make a random mixture of calls while driver calls fail occasionally. No memory is allocated twice or lost,
//! no thread waits indefinitely, and every error code came from the driver.
//!
//! `SYMMALLOC_STORM` sets the number of calls; the default is 50,000.

use crate::driver::*;
use crate::environment::preload;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::cuda::{calls, fail, heal, live};
use stub_process::stub_test;

const THREADS: u64 = 16;
/// The stub driver's codes for invalid or impossible calls.
const OWN_CODES: [i32; 3] = [1, 2, 400];
/// Codes of injected failures: out of memory, a lost device, and a code that no header defines.
const CODES: [i32; 3] = [2, 719, 4242];
const FAILING: [&str; 15] = [
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventSynchronize",
    "cuCtxSynchronize",
    "cuCtxGetCurrent",
    "cuStreamGetCtx",
    "cuStreamCreate",
];

/// A pseudorandom number generator: equal seeds give equal sequences.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

/// An allocation that is marked at both ends.
#[derive(Clone, Copy)]
struct Block {
    address: u64,
    size: usize,
    mark: u64,
}

impl Block {
    fn ends(self) -> [*mut u64; 2] {
        [self.address as *mut u64, (self.address + self.size as u64 - 8) as *mut u64]
    }

    fn mark(self) -> Self {
        // SAFETY: the stub's memory belongs to this process, and this test owns the allocation.
        self.ends().into_iter().for_each(|end| unsafe { end.write_unaligned(self.mark) });
        self
    }

    fn check(self) {
        // SAFETY: as above.
        let found = self.ends().map(|end| unsafe { end.read_unaligned() });
        assert_eq!(found, [self.mark; 2], "{:#x} of {} bytes was allocated twice", self.address, self.size);
    }
}

/// State that the threads share.
struct Storm {
    blocks: Mutex<Vec<Block>>,
    streams: Vec<u64>,
    pool: u64,
    made: AtomicU64,
}

/// The calls of one thread.
struct Sailor {
    storm: Arc<Storm>,
    dice: Dice,
    own: Vec<u64>,
    number: u64,
}

impl Sailor {
    fn stream(&mut self) -> u64 {
        let shared = self.storm.streams.len();
        match self.dice.below(shared + self.own.len() + 2) {
            0 => 0,
            1 => 2,
            at if at < shared + 2 => self.storm.streams[at - 2],
            at => self.own[at - 2 - shared],
        }
    }

    fn size(&mut self) -> usize {
        match self.dice.below(20) {
            0 => (1 + self.dice.below(48)) << 20,
            1..5 => 4096 * (1 + self.dice.below(400)),
            _ => 16 + self.dice.below(9000),
        }
    }

    /// Makes one or a few calls. Only checks their error codes.
    fn act(&mut self) {
        let answer =
            |code: i32| assert!(code == 0 || OWN_CODES.contains(&code) || CODES.contains(&code), "code {code}");
        match self.dice.below(16) {
            0..6 => {
                let (size, mut address) = (self.size(), 0);
                let code = match self.dice.below(4) {
                    0 => mem_alloc(&raw mut address, size),
                    1 => mem_alloc_from_pool(&raw mut address, size, self.storm.pool, self.stream()),
                    2 => mem_alloc_async_ptsz(&raw mut address, size, self.stream()),
                    _ => mem_alloc_async(&raw mut address, size, self.stream()),
                };
                answer(code);
                if code == 0 {
                    self.number += 1;
                    let mark = self.dice.0 ^ self.number;
                    self.storm
                        .blocks
                        .lock()
                        .expect("no thread should panic")
                        .push(Block { address, size, mark }.mark());
                }
            }
            6..13 => {
                let mut blocks = self.storm.blocks.lock().expect("no thread should panic");
                if blocks.is_empty() {
                    return;
                }
                let block = {
                    let at = self.dice.below(blocks.len());
                    blocks.swap_remove(at)
                };
                drop(blocks);
                block.check();
                let code = match self.dice.below(4) {
                    0 => mem_free(block.address),
                    1 => mem_free_async_ptsz(block.address, self.stream()),
                    _ => mem_free_async(block.address, self.stream()),
                };
                answer(code);
                if code != 0 {
                    // The block is still live.
                    block.check();
                    self.storm.blocks.lock().expect("no thread should panic").push(block);
                }
            }
            13 => {
                let (mut free, mut total) = (0, 0);
                answer(mem_info(&raw mut free, &raw mut total));
                answer(mem_free(0x1000));
            }
            14 => {
                let block = {
                    let blocks = self.storm.blocks.lock().expect("no thread should panic");
                    blocks.last().copied()
                };
                if let Some(block) = block {
                    let mut start = 0_u64;
                    answer(pointer_attribute((&raw mut start).cast(), 11, block.address + 8));
                }
            }
            _ => {
                if self.own.len() < 4 {
                    let mut stream = 0;
                    let code = stream_create(&raw mut stream, 1);
                    answer(code);
                    self.own.extend((code == 0).then_some(stream));
                } else {
                    let at = self.dice.below(self.own.len());
                    let code = stream_destroy(self.own[at]);
                    answer(code);
                    if code == 0 {
                        self.own.swap_remove(at);
                    }
                }
            }
        }
        self.storm.made.fetch_add(1, Ordering::Relaxed);
    }
}

/// Aborts the process when no call returns anymore, because a thread that waits indefinitely cannot be stopped.
fn watch(storm: &Arc<Storm>, is_over: &Arc<AtomicBool>) {
    let (storm, is_over) = (Arc::clone(storm), Arc::clone(is_over));
    thread::spawn(move || {
        let mut before = u64::MAX;
        while !is_over.load(Ordering::Relaxed) {
            let made = storm.made.load(Ordering::Relaxed);
            if made == before {
                eprintln!("no call returned for 20 s, after {made}");
                std::process::abort();
            }
            before = made;
            thread::sleep(Duration::from_secs(20));
        }
    });
}

/// Creates a pool of device 0.
fn make_pool() -> u64 {
    let mut pool = 0;
    // `CUmemPoolProps`: pinned memory of device 0.
    let properties: [i32; 24] = {
        let mut words = [0; 24];
        words[0] = 1;
        words[2] = 1;
        words
    };
    assert_eq!(pool_create(&raw mut pool, properties.as_ptr().cast()), 0);
    pool
}

// The driver's current pool of a device may be destroyed at any time. Allocations then come from the default pool.
stub_test!(
    allocations_from_the_current_pool_succeed_while_it_is_replaced_and_destroyed,
    ["LD_PRELOAD" = &preload(), "STUB_MEMORY_BYTES" = "4294967296"],
    {
        let context = begin(0);
        let (is_over, deadline) = (AtomicBool::new(false), Instant::now() + Duration::from_secs(30));
        thread::scope(|scope| {
            for number in 0..4_u64 {
                let is_over = &is_over;
                scope.spawn(move || {
                    assert_eq!(set_current(context), 0);
                    let stream = stream();
                    let mut mark = number << 32;
                    while !is_over.load(Ordering::Relaxed) && Instant::now() < deadline {
                        mark += 1;
                        let size = 4096 * (1 + mark as usize % 4);
                        let address = alloc_async(size, stream).expect("memory of the current pool");
                        Block { address, size, mark }.mark().check();
                        assert_eq!(mem_free_async(address, stream), 0);
                    }
                });
            }
            for _ in 0..20_000 {
                let pool = make_pool();
                assert_eq!([set_pool(0, pool), pool_destroy(pool)], [0; 2]);
                if Instant::now() > deadline {
                    break;
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(reset(0), 0);
        assert_eq!((live().device_bytes, live().ranges, live().mappings), (0, 0, 0));
    }
);

stub_test!(
    concurrent_calls_and_failures_lose_no_memory,
    ["LD_PRELOAD" = &preload(), "STUB_REUSE_STREAMS" = "1", "STUB_MEMORY_BYTES" = "4294967296"],
    {
        let all: u64 = std::env::var("SYMMALLOC_STORM").ok().and_then(|text| text.parse().ok()).unwrap_or(50_000);
        let context = begin(0);
        let pool = make_pool();
        let streams: Vec<u64> = (0..6).map(|_| stream()).collect();
        let storm = Arc::new(Storm { blocks: Mutex::default(), streams, pool, made: AtomicU64::new(0) });
        let is_over = Arc::new(AtomicBool::new(false));
        watch(&storm, &is_over);
        let sailors = (0..THREADS).map(|number| {
            let storm = Arc::clone(&storm);
            thread::spawn(move || {
                // An injected failure may also hit this call, so it is repeated.
                while set_current(context) != 0 {}
                let mut sailor = Sailor { storm, dice: Dice(number << 32), own: Vec::new(), number: 0 };
                for call in 0..all / THREADS {
                    sailor.act();
                    if call % 97 == number % 97 {
                        let call = FAILING[sailor.dice.below(FAILING.len())];
                        fail(call, 1 + sailor.dice.below(5) as u64, CODES[sailor.dice.below(CODES.len())]);
                    }
                    if call % 1009 == number {
                        heal();
                    }
                }
            })
        });
        let sailors: Vec<_> = sailors.collect();
        sailors.into_iter().for_each(|sailor| sailor.join().expect("the thread should not panic"));
        is_over.store(true, Ordering::Relaxed);
        heal();
        assert!(storm.made.load(Ordering::Relaxed) > all * 9 / 10);
        for block in storm.blocks.lock().expect("no thread should panic").drain(..) {
            block.check();
            assert_eq!(mem_free(block.address), 0);
            assert_eq!(mem_free(block.address), 1, "freed twice");
        }
        let (mut free, mut total) = (0, 0);
        assert_eq!(mem_info(&raw mut free, &raw mut total), 0);
        assert_eq!(free, total, "everything is free");
        // Most calls were served, and the driver served the rest.
        assert!(calls("cuMemAllocAsync") + calls("cuMemAlloc_v2") < all / 20);
        assert_eq!(reset(0), 0);
        assert_eq!((live().device_bytes, live().ranges, live().mappings), (0, 0, 0));
    }
);
