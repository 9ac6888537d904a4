//! Drops of buffers: the ordering of the memory's next user, the thread of the drop, and the state after everything is dropped.

use crate::process::{LongWork, advance, calls, device, hold, live, own_calls, stub_test};
use cudarc::driver::result::memcpy_htod_async;
use cudarc::driver::{CudaStream, DevicePtr};
use std::sync::Arc;
use std::thread;
use stub_process::{Barrier, until};
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, GraphPool, PinnedAllocator};
use symmalloc_sim::SplitMix64;

const MIB: usize = 1 << 20;

/// Creates an allocator with streams. The allocator orders the reuse of memory, but not accesses to buffers.
fn allocator<const N: usize>(config: Config) -> (CudaAllocator, [Arc<CudaStream>; N]) {
    let allocator = CudaAllocator::new(&device(), config).expect("the stub supports it");
    let context = allocator.device().context();
    // SAFETY: the tests order the data that they read.
    unsafe { context.disable_event_tracking() };
    let streams = std::array::from_fn(|_| context.new_stream().expect("a stream"));
    for stream in &streams {
        allocator.register_stream(stream).expect("registered");
    }
    (allocator, streams)
}

/// Allocates `count` buffers on one stream and uses them on another.
fn used(allocator: &CudaAllocator, count: usize, on: &Arc<CudaStream>, by: &CudaStream) -> Vec<DeviceBuffer<u8>> {
    let buffers: Vec<_> = (0..count).map(|_| allocator.alloc_zeroed(on, MIB).expect("allocated")).collect();
    buffers.iter().for_each(|buffer| drop(buffer.device_ptr(by)));
    buffers
}

fn counts() -> (u64, u64) {
    (calls("cuEventRecord"), calls("cuStreamWaitEvent"))
}

/// Returns `true` if work on the stream is blocked. Submits a write to memory of the stream to find out.
fn is_held_up(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> bool {
    let mut mark = allocator.alloc_zeroed::<u8>(stream, 512).expect("allocated");
    stream.memcpy_htod(&[1; 512], &mut mark).expect("copied");
    let is_over = advance(stream.cu_stream() as u64);
    assert_eq!(is_over, first_byte(&mark) == 1);
    !is_over
}

/// Returns the first byte of the buffer, without waiting.
fn first_byte(buffer: &DeviceBuffer<u8>) -> u8 {
    let pointer = buffer.device_ptr(cudarc::driver::DeviceSlice::stream(buffer)).0;
    // SAFETY: the stub maps device memory at its addresses, and the buffer has at least a byte.
    unsafe { std::ptr::read_volatile(pointer as *const u8) }
}

fn buffers(allocator: &CudaAllocator, stream: &Arc<CudaStream>, count: usize) -> Vec<DeviceBuffer<u8>> {
    // SAFETY: never read.
    (0..count).map(|at| unsafe { allocator.alloc(stream, 512 + at) }.expect("allocated")).collect()
}

/// Asserts that no resources of any allocator remain.
fn assert_gone(what: &str) {
    let left = live();
    let left = (left.device_bytes, left.ranges, left.events, left.streams, left.host_bytes);
    assert_eq!(left, (0, 0, 0, 0, 0), "{what}");
}

stub_test!(a_drop_records_an_event_for_each_other_stream, {
    let (allocator, [a, b, c]) = allocator(Config::default());
    drop(used(&allocator, 10, &a, &b));
    assert_eq!(counts(), (10, 0));
    let both = used(&allocator, 1, &a, &b);
    let before = counts();
    drop(both[0].device_ptr(&c));
    drop(both);
    assert_eq!(counts(), (before.0 + 2, before.1));
    drop(used(&allocator, 5, &a, &a));
    assert_eq!(counts().0, before.0 + 2, "the buffer's stream needs no event");
    assert_eq!(allocator.device_calls().records, before.0 + 2);
    allocator.core().check().expect("consistent");
});

stub_test!(nothing_waits_for_work_after_the_drop, {
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&allocator, 1, &a, &b));
    assert_eq!(counts(), (1, 0));
    let _long = hold(b.cu_stream() as u64);
    assert!(!is_held_up(&allocator, &a));
    assert_eq!(counts(), (1, 1));
});

stub_test!(the_device_and_not_the_drop_waits_for_earlier_work, {
    let (allocator, [a, b]) = allocator(Config::default());
    let buffers = used(&allocator, 2, &a, &b);
    let long = hold(b.cu_stream() as u64);
    drop(buffers);
    assert!(is_held_up(&allocator, &a));
    drop(long);
    assert!(!is_held_up(&allocator, &a));
});

stub_test!(frees_by_handle_record_an_event_each, {
    let (allocator, [a, b]) = allocator(Config::default());
    let taken: Vec<_> = (0..5).map(|_| allocator.allocate(&a, 1 << 20).expect("allocated").handle).collect();
    let user = allocator.stream_id(&b).expect("registered");
    for handle in &taken {
        allocator.core().record_use(*handle, user).expect("live");
    }
    taken.into_iter().for_each(|handle| allocator.free(handle).expect("live"));
    assert_eq!(counts(), (5, 0));
});

stub_test!(uses_before_a_capture_have_finished_when_it_begins, {
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&allocator, 3, &a, &b));
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
    let capture = graphs.begin(&b).expect("begun");
    let temporary = allocator.alloc_zeroed::<u8>(&b, MIB).expect("allocated");
    drop(temporary);
    let taken: Vec<_> = (0..3).map(|_| allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated")).collect();
    drop(capture.end().expect("the capture is valid"));
    assert_eq!(allocator.drop_errors().count, 0);
    drop(taken);
});

stub_test!(a_buffer_is_dropped_while_another_thread_maps_memory, ["STUB_MAPPING_MICROSECONDS" = "100000"], {
    let (allocator, [stream]) = allocator::<1>(Config::default());
    let dropped = buffers(&allocator, &stream, 2);
    let made = calls("cuMemCreate");
    thread::scope(|scope| {
        let growing = scope.spawn(|| allocator.alloc_zeroed::<u8>(&stream, 100 * MIB).expect("allocated"));
        until(|| calls("cuMemCreate") > made);
        drop(dropped);
        drop(growing.join().expect("no panic"));
    });
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(a_buffer_that_was_used_is_fenced_before_its_drop_on_another_thread_returns, {
    let (allocator, [stream, other]) = allocator(Config::default());
    for takes_apart in [false, true] {
        let mut used = buffers(&allocator, &stream, 1).remove(0);
        drop(used.on(&other));
        if takes_apart {
            let raw = used.into_raw().expect("ordered");
            // SAFETY: restored only once.
            used = unsafe { DeviceBuffer::from_raw(&allocator, raw) };
        }
        let recorded = || {
            drop(used);
            own_calls("cuEventRecord")
        };
        assert!(thread::scope(|scope| scope.spawn(recorded).join().expect("no panic")) > 0);
    }
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(a_pinned_buffer_is_fenced_when_a_stream_used_it, {
    let (allocator, [stream]) = allocator::<1>(Config::default());
    let pinned = PinnedAllocator::pinned(allocator.device(), Config::default()).expect("made");
    pinned.register_stream(&stream).expect("registered");
    let mut target = buffers(&allocator, &stream, 1).remove(0);
    let [unused, used] = [0, 1].map(|_| pinned.alloc_host_zeroed::<u8>(100).expect("allocated"));
    stream.memcpy_htod(&used, &mut target).expect("copied");
    drop(unused);
    assert_eq!(counts().0, 0);
    drop(used);
    assert_eq!(counts().0, 1);
});

stub_test!(the_last_drop_releases_the_allocator, {
    let device = device();
    for order in 0..60_u64 {
        let streams = if order % 3 == 0 { StreamPolicy::Shared } else { StreamPolicy::Separate };
        let config = PoolConfig::builder().streams(streams).build().expect("valid");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
        let [a, b] = [0, 1].map(|_| device.context().new_stream().expect("a stream"));
        let pool = allocator.create_pool(config).expect("made");
        let inside = allocator.with_pool(&pool);
        let mut things: Vec<Box<dyn Send>> = Vec::new();
        for (name, stream) in [(&allocator, &a), (&allocator, &b), (&inside, &a), (&inside, &b)] {
            drop((buffers(name, stream, 3), buffers(name, stream, 5)));
            buffers(name, stream, 4).into_iter().for_each(|buffer| things.push(Box::new(buffer)));
        }
        let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
        drop([0, 1].map(|_| pinned.alloc_host_zeroed::<u8>(100).expect("allocated")));
        things.push(Box::new(pinned.alloc_host_zeroed::<u8>(100).expect("allocated")));
        things.extend([Box::new(allocator.clone()) as Box<dyn Send>, Box::new(allocator), Box::new(pinned)]);
        things.extend([Box::new(inside.clone()) as Box<dyn Send>, Box::new(inside), Box::new(pool)]);
        drop((a, b));
        let mut at = order;
        while !things.is_empty() {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let thing = things.swap_remove((at >> 33) as usize % things.len());
            if at & 1 << 40 == 0 {
                drop(thing);
            } else {
                thread::scope(|scope| drop(scope.spawn(|| drop(thing))));
            }
        }
        assert_gone(&format!("order {order}"));
    }
});

stub_test!(dropping_buffers_concurrently_with_the_last_clone_leaks_nothing, {
    let device = device();
    for round in 0..200 {
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
        let stream = device.context().new_stream().expect("a stream");
        drop(buffers(&allocator, &stream, 10));
        let shares = [0, 1].map(|_| buffers(&allocator, &stream, 10));
        drop(stream);
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for share in shares {
                scope.spawn(|| {
                    start.wait();
                    drop(share);
                });
            }
            start.wait();
            drop(allocator);
        });
        assert_gone(&format!("round {round}"));
    }
});

/// Number of programs of the random test.
const SEEDS: u64 = 200;
const STEPS: u64 = 120;

/// The written data. It is static because the host memory must outlive the work.
static BYTES: [[u8; 4096]; 256] = {
    let (mut bytes, mut value) = ([[0; 4096]; 256], 0);
    while value < 256 {
        bytes[value] = [value as u8; 4096];
        value += 1;
    }
    bytes
};

/// Creates an allocator with `N` streams, which share a heap or use separate heaps.
fn allocator_with<const N: usize>(streams_share: StreamPolicy) -> (CudaAllocator, [Arc<CudaStream>; N]) {
    let pool = PoolConfig::builder().streams(streams_share).build().expect("valid");
    allocator(Config::builder().default_pool(pool).build().expect("valid"))
}

/// A buffer, and the value that its owner wrote.
type Written = (DeviceBuffer<u8>, u8);

/// Runs a random program. Each buffer is written by its own stream, and by other streams immediately before it is dropped. Streams are
/// blocked at random. Returns the remaining buffers, which must hold their owners' values once no stream is blocked.
fn random_program(seed: u64, allocator: &CudaAllocator, streams: &[Arc<CudaStream>]) -> Vec<Written> {
    let mut draw = SplitMix64::new(seed);
    let mut buffers: Vec<Written> = Vec::new();
    let mut long: Vec<LongWork> = Vec::new();
    for step in 0..STEPS {
        let stream = &streams[draw.below(4) as usize];
        match draw.below(12) {
            0..=4 => {
                // SAFETY: written next.
                let mut buffer = unsafe { allocator.alloc::<u8>(stream, 4096) }.expect("allocated");
                let value = 1 + (step % 250) as u8;
                stream.memcpy_htod(&BYTES[usize::from(value)], &mut buffer).expect("copied");
                buffers.push((buffer, value));
            }
            5 => allocator.wait(stream, &streams[draw.below(4) as usize]).expect("ordered"),
            6 => long.push(hold(stream.cu_stream() as u64)),
            7 if !long.is_empty() => drop(long.swap_remove(draw.below(long.len() as u64) as usize)),
            8 if !buffers.is_empty() => {
                buffers.swap_remove(draw.below(buffers.len() as u64) as usize);
            }
            _ => {
                let count = (draw.below(4) as usize).min(buffers.len());
                let row: Vec<_> = buffers.drain(buffers.len() - count..).collect();
                let users: Vec<_> = row
                    .iter()
                    .map(|(buffer, _)| {
                        let users: Vec<_> = streams.iter().filter(|_| draw.below(2) == 0).collect();
                        (users.iter().map(|user| buffer.device_ptr(user).0).max(), users)
                    })
                    .collect();
                // Submit work between the drops that bypasses the allocator.
                for ((buffer, _), (pointer, users)) in row.into_iter().zip(users) {
                    for user in users {
                        if draw.below(4) == 0 {
                            long.push(hold(user.cu_stream() as u64));
                        }
                        // SAFETY: the buffer is alive and large enough, and the host bytes are static.
                        unsafe {
                            memcpy_htod_async(pointer.expect("the pointer was taken"), &BYTES[255], user.cu_stream())
                        }
                        .expect("copied");
                    }
                    drop(buffer);
                }
            }
        }
    }
    buffers
}

fn assert_sound(seed: u64, allocator: &CudaAllocator, buffers: Vec<Written>) {
    allocator.device().synchronize().expect("no stream is blocked");
    for (buffer, value) in buffers {
        assert_eq!(first_byte(&buffer), value, "seed {seed}");
    }
    allocator.core().check().expect("consistent");
    assert_eq!(allocator.drop_errors().count, 0);
}

fn seeds() -> u64 {
    std::env::var("SYMMALLOC_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

fn policy(seed: u64) -> StreamPolicy {
    if seed.is_multiple_of(2) { StreamPolicy::Separate } else { StreamPolicy::Shared }
}

stub_test!(reused_memory_is_never_overwritten_by_earlier_users, {
    for seed in 0..seeds() {
        let (allocator, streams) = allocator_with::<4>(policy(seed));
        let buffers = random_program(seed, &allocator, &streams);
        assert_sound(seed, &allocator, buffers);
    }
});

stub_test!(threads_never_overwrite_memory_in_use_by_other_threads, {
    for seed in 0..seeds() / 8 {
        let before = calls("cuEventRecord");
        let (allocator, streams) = allocator_with::<12>(policy(seed));
        let buffers = thread::scope(|scope| {
            let programs = streams.chunks(4).zip(0..);
            let allocator = &allocator;
            let run = |(own, thread): (_, u64)| {
                scope.spawn(move || {
                    let _current = allocator.device().enter().expect("the context can be entered");
                    random_program(seed << 2 | thread, allocator, own)
                })
            };
            let threads: Vec<_> = programs.map(run).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_sound(seed, &allocator, buffers);
        assert_eq!(allocator.device_calls().records, calls("cuEventRecord") - before);
        drop((allocator, streams));
        assert_eq!(live().events, 0);
    }
});
