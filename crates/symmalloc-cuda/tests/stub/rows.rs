//! Frees in a row: how many events they take, what the events stand for, and that nobody takes memory that is in use.

use crate::process::{LongWork, calls, device, fail, heal, hold, live, stub_test};
use cudarc::driver::result::memcpy_htod_async;
use cudarc::driver::{CudaStream, DevicePtr};
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::errors::AllocateError;
use symmalloc_cuda::{CudaAllocator, CudaError, DeviceBuffer, DropError, GraphPool};
use symmalloc_sim::SplitMix64;

const MIB: usize = 1 << 20;

/// An allocator that orders memory and leaves the content to the program, with streams.
fn allocator<const N: usize>(config: Config) -> (CudaAllocator, [Arc<CudaStream>; N]) {
    let allocator = CudaAllocator::new(&device(), config).expect("the stub supports it");
    let context = allocator.device().context();
    // SAFETY: the tests order what they read.
    unsafe { context.disable_event_tracking() };
    let streams = std::array::from_fn(|_| context.new_stream().expect("a stream"));
    for stream in &streams {
        allocator.register_stream(stream).expect("registered");
    }
    (allocator, streams)
}

/// So many buffers of one stream that another one used.
fn used(allocator: &CudaAllocator, count: usize, on: &Arc<CudaStream>, by: &CudaStream) -> Vec<DeviceBuffer<u8>> {
    let buffers: Vec<_> = (0..count).map(|_| allocator.alloc_zeroed(on, MIB).expect("allocated")).collect();
    buffers.iter().for_each(|buffer| drop(buffer.device_ptr(by)));
    buffers
}

fn counts() -> (u64, u64) {
    (calls("cuEventRecord"), calls("cuStreamWaitEvent"))
}

/// Whether work on the stream is held up. Any memory of it is written.
fn is_held_up(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> bool {
    let mut mark = allocator.alloc_zeroed::<u8>(stream, 512).expect("allocated");
    stream.memcpy_htod(&[1; 512], &mut mark).expect("copied");
    first_byte(&mark) != 1
}

/// What lies there now, without waiting.
fn first_byte(buffer: &DeviceBuffer<u8>) -> u8 {
    let pointer = buffer.device_ptr(cudarc::driver::DeviceSlice::stream(buffer)).0;
    // SAFETY: the stub maps device memory at its addresses, and the buffer has at least a byte.
    unsafe { std::ptr::read_volatile(pointer as *const u8) }
}

stub_test!(a_row_of_frees_takes_two_events_and_one_wait, {
    let (allocator, [a, b]) = allocator(Config::default());
    let buffers = used(&allocator, 10, &a, &b);
    drop(buffers);
    assert_eq!(counts(), (1, 0), "the first says at once that it is in use, the others join it");
    allocator.core().check().expect("sound");
    let again: Vec<_> = (0..10).map(|_| allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated")).collect();
    assert_eq!(counts(), (2, 1), "whoever waits for one is behind them all");
    assert_eq!(allocator.device_calls().records, 2);
    drop(again);
    allocator.core().check().expect("sound");
});

stub_test!(a_single_free_is_over_with_its_drop, {
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&allocator, 1, &a, &b));
    assert_eq!(counts(), (1, 0));
    let _long = hold(b.cu_stream() as u64);
    assert!(!is_held_up(&allocator, &a), "what came after the drop is nobody's business");
    assert_eq!(counts(), (1, 1));
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

/// Frees in a row, then something of the program, then long work on the stream that used the memory: not waited for.
fn a_row_ends_with(act: impl FnOnce(&CudaAllocator, &Arc<CudaStream>, &Arc<CudaStream>, &DeviceBuffer<u8>)) {
    let (allocator, [a, b, c]) = allocator(Config::default());
    let other = allocator.alloc_zeroed::<u8>(&b, MIB).expect("allocated");
    drop(used(&allocator, 4, &a, &b));
    let before = calls("cuEventRecord");
    act(&allocator, &b, &c, &other);
    assert!(calls("cuEventRecord") > before, "the row is over");
    let _long = hold(b.cu_stream() as u64);
    let again: Vec<_> = (0..4).map(|_| allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated")).collect();
    assert!(!is_held_up(&allocator, &a));
    drop(again);
}

stub_test!(a_row_ends_when_memory_is_allocated, {
    a_row_ends_with(|allocator, _, c, _| drop(allocator.alloc_zeroed::<u8>(c, 512).expect("allocated")));
});

stub_test!(a_row_ends_when_bytes_are_allocated_by_handle_or_by_name, {
    a_row_ends_with(|allocator, _, c, _| {
        allocator.allocate(c, 512).expect("allocated");
    });
    a_row_ends_with(|allocator, _, c, _| {
        allocator.allocate_named(c, 512, "named").expect("allocated");
    });
});

stub_test!(a_row_ends_when_a_pointer_is_taken_on_the_buffers_own_stream, {
    a_row_ends_with(|_, b, _, other| drop(other.device_ptr(b)));
});

stub_test!(a_row_ends_when_a_pointer_is_taken_on_another_stream, {
    a_row_ends_with(|_, _, c, other| drop(other.device_ptr(c)));
});

stub_test!(a_row_ends_when_a_stream_is_made_to_wait, {
    a_row_ends_with(|allocator, b, c, _| allocator.wait(c, b).expect("ordered"));
});

stub_test!(a_row_ends_when_captures_are_watched, {
    a_row_ends_with(|allocator, _, _, _| drop(allocator.device().watch_captures()));
});

stub_test!(a_row_ends_when_another_allocator_of_the_device_is_used, {
    a_row_ends_with(|allocator, _, c, _| {
        let other = CudaAllocator::new(allocator.device(), Config::default()).expect("made");
        drop(other.alloc_zeroed::<u8>(c, 512).expect("allocated"));
    });
});

stub_test!(long_work_before_the_end_of_a_row_is_waited_for, {
    let (allocator, [a, b]) = allocator(Config::default());
    let mut buffers = used(&allocator, 3, &a, &b);
    buffers.truncate(2);
    let long = hold(b.cu_stream() as u64);
    drop(buffers);
    assert!(is_held_up(&allocator, &a), "the memory of the first drop is taken, behind the row's event");
    drop(long);
    assert!(!is_held_up(&allocator, &a));
});

/// Takes memory without this crate's knowledge: no row ends.
fn take(allocator: &CudaAllocator, stream: &Arc<CudaStream>, size_bytes: usize) {
    let stream = allocator.stream_id(stream).expect("registered");
    allocator.core().allocate(allocator.pool(), stream, size_bytes as u64).expect("allocated");
}

stub_test!(a_row_that_somebody_waited_for_takes_no_more_frees, {
    let (allocator, [a, b]) = allocator(Config::default());
    let mut buffers = used(&allocator, 5, &a, &b);
    // No two free blocks touch each other.
    let (last, between) = (buffers.pop(), [buffers.remove(3), buffers.remove(1)]);
    drop(buffers);
    take(&allocator, &a, MIB);
    assert_eq!(counts(), (2, 1));
    let _long = hold(b.cu_stream() as u64);
    drop(last);
    assert_eq!(counts(), (3, 1), "an event of its own: the stream is behind the first two only");
    take(&allocator, &a, MIB);
    assert_eq!(counts(), (3, 1), "the second one's");
    take(&allocator, &a, MIB);
    assert_eq!(counts(), (3, 2));
    assert!(is_held_up(&allocator, &a));
    drop(between);
});

stub_test!(frees_of_a_row_are_told_from_those_that_somebody_waited_for_between_them, {
    let (allocator, [a, b]) = allocator(Config::default());
    let mut buffers = used(&allocator, 3, &a, &b);
    let (last, between) = (buffers.pop(), buffers.pop());
    let handle = allocator.allocate(&a, 3 << 20).expect("allocated").handle;
    allocator.core().record_use(handle, allocator.stream_id(&b).expect("registered")).expect("live");
    drop(buffers);
    allocator.free(handle).expect("live");
    take(&allocator, &a, 3 * MIB);
    assert_eq!(counts(), (2, 1));
    let _long = hold(b.cu_stream() as u64);
    drop(last);
    assert_eq!(counts(), (2, 1), "it joins the first drop, which nobody waited for");
    take(&allocator, &a, MIB);
    assert_eq!(counts(), (2, 1), "the first one's, which the stream is behind");
    take(&allocator, &a, MIB);
    assert_eq!(counts(), (3, 2));
    assert!(is_held_up(&allocator, &a));
    drop(between);
});

stub_test!(no_row_begins_in_a_capture, {
    let (allocator, [a, b]) = allocator(Config::default());
    let buffers = used(&allocator, 3, &a, &b);
    let before = calls("cuEventRecord");
    let watch = allocator.device().watch_captures();
    drop(buffers);
    assert_eq!(calls("cuEventRecord"), before + 3);
    drop(watch);
});

stub_test!(the_uses_of_a_row_are_over_before_a_capture_of_their_stream, {
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&allocator, 3, &a, &b));
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
    let capture = graphs.begin(&b).expect("begun");
    assert_eq!(calls("cuEventRecord"), 2, "not in the capture");
    let temporary = allocator.alloc_zeroed::<u8>(&b, MIB).expect("allocated");
    drop(temporary);
    let taken: Vec<_> = (0..3).map(|_| allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated")).collect();
    drop(capture.end().expect("legal"));
    assert_eq!(allocator.drop_errors().count, 0);
    drop(taken);
});

stub_test!(an_event_that_is_refused_at_the_end_of_a_row_is_recorded_by_whoever_waits, {
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&allocator, 3, &a, &b));
    fail("cuEventRecord", 0, 999);
    let error = allocator.alloc_zeroed::<u8>(&a, MIB).expect_err("its memory cannot be waited for");
    assert!(matches!(error, CudaError::Allocate(AllocateError::Fence { .. })), "{error:?}");
    heal();
    let before = counts();
    let long = hold(b.cu_stream() as u64);
    let again = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    assert_eq!(counts(), (before.0 + 1, before.1 + 1));
    assert!(is_held_up(&allocator, &a), "later than it must, and never too early");
    drop((long, again));
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(a_refused_first_event_keeps_the_buffer_and_the_row_goes_on, {
    let (allocator, [a, b]) = allocator(Config::default());
    let buffers = used(&allocator, 3, &a, &b);
    fail("cuEventRecord", 1, 999);
    drop(buffers);
    let errors = allocator.drop_errors();
    assert!(matches!(errors.last, Some(DropError::Free(_))) && errors.count == 1, "{errors:?}");
    assert_eq!(allocator.stats().usage.all.allocations.current, 1);
    allocator.core().check().expect("sound");
});

stub_test!(an_open_row_leaves_no_event_behind, {
    let (kept, [c, d]) = allocator(Config::default());
    let (allocator, [a, b]) = allocator(Config::default());
    drop(used(&kept, 3, &c, &d));
    drop(used(&allocator, 3, &a, &b));
    let before = live().events;
    drop(allocator);
    assert_eq!(live().events, before - 1);
    assert_eq!(used(&kept, 3, &c, &d).len(), 3);
    drop((kept, a, b, c, d));
    assert_eq!(live().events, 0);
});

/// Programs of the random test.
const SEEDS: u64 = 200;
const STEPS: u64 = 120;

/// What is written: the host keeps it until the work is done.
static BYTES: [[u8; 4096]; 256] = {
    let (mut bytes, mut value) = ([[0; 4096]; 256], 0);
    while value < 256 {
        bytes[value] = [value as u8; 4096];
        value += 1;
    }
    bytes
};

/// An allocator whose streams share a heap or do not, with streams.
fn allocator_with<const N: usize>(streams_share: StreamPolicy) -> (CudaAllocator, [Arc<CudaStream>; N]) {
    let pool = PoolConfig::builder().streams(streams_share).build().expect("valid");
    allocator(Config::builder().default_pool(pool).build().expect("valid"))
}

/// A buffer, and what its owner wrote.
type Written = (DeviceBuffer<u8>, u8);

/// Buffers that the streams write as their owner, and others just before they are dropped, while streams are held up at random.
/// Returns those that are left, which have what their owners wrote when no stream is held up any more.
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
                // Work that this crate does not see, between the drops.
                for ((buffer, _), (pointer, users)) in row.into_iter().zip(users) {
                    for user in users {
                        if draw.below(4) == 0 {
                            long.push(hold(user.cu_stream() as u64));
                        }
                        // SAFETY: the buffer is alive and has as many bytes, and the host's live as long as the process.
                        unsafe { memcpy_htod_async(pointer.expect("used"), &BYTES[255], user.cu_stream()) }
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
    for (buffer, value) in buffers {
        assert_eq!(first_byte(&buffer), value, "seed {seed}");
    }
    allocator.core().check().expect("sound");
    assert_eq!(allocator.drop_errors().count, 0);
}

fn seeds() -> u64 {
    std::env::var("SYMMALLOC_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

fn policy(seed: u64) -> StreamPolicy {
    if seed.is_multiple_of(2) { StreamPolicy::Separate } else { StreamPolicy::Shared }
}

stub_test!(nobody_writes_into_memory_that_was_taken_again, {
    for seed in 0..seeds() {
        let (allocator, streams) = allocator_with::<4>(policy(seed));
        let buffers = random_program(seed, &allocator, &streams);
        assert_sound(seed, &allocator, buffers);
    }
});

stub_test!(threads_end_the_rows_of_each_other, {
    for seed in 0..seeds() / 8 {
        let before = calls("cuEventRecord");
        let (allocator, streams) = allocator_with::<12>(policy(seed));
        let buffers = std::thread::scope(|scope| {
            let programs = streams.chunks(4).zip(0..);
            let allocator = &allocator;
            let run = |(own, thread): (_, u64)| {
                scope.spawn(move || {
                    let _current = allocator.device().enter().expect("the stub lets it");
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
