//! Buffers that are dropped on another thread wait for nobody, and their memory is there for who comes next.

use crate::process::{calls, device, hold, live, own_calls, stub_test};
use cudarc::driver::CudaStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::config::Config;
use symmalloc_core::{Placement, StreamId};
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, PinnedAllocator};

const MIB: usize = 1 << 20;

fn allocator() -> (CudaAllocator, Arc<CudaStream>) {
    let device = device();
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
    let stream = device.context().new_stream().expect("a stream");
    (allocator, stream)
}

fn buffer(allocator: &CudaAllocator, stream: &Arc<CudaStream>, len: usize) -> DeviceBuffer<u8> {
    // SAFETY: never read.
    unsafe { allocator.alloc(stream, len) }.expect("allocated")
}

/// Waits until another thread has made a call.
#[track_caller]
fn wait_for_call(name: &str, before: u64) {
    let begun = Instant::now();
    while calls(name) == before {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody calls {name}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether `act` ends while another thread is where `is_inside` says.
#[track_caller]
fn ends_meanwhile(act: impl FnOnce() + Send + 'static, is_inside: impl FnOnce() -> bool) {
    let (ended, has_ended) = mpsc::channel();
    thread::spawn(move || {
        act();
        ended.send(()).expect("it listens");
    });
    has_ended.recv_timeout(Duration::from_secs(60)).expect("it waits for the other thread");
    assert!(is_inside(), "the other thread has left already");
}

stub_test!(a_buffer_is_dropped_while_its_owner_maps_memory, ["STUB_MAPPING_MICROSECONDS" = "400000"], {
    let (allocator, stream) = allocator();
    let [one, two, kept] = [1, 2, 3].map(|len| buffer(&allocator, &stream, len * MIB));
    let places: [Placement; 2] = [one.placement(), two.placement()];
    let mapped = calls("cuMemSetAccess");
    thread::scope(|scope| {
        let made = calls("cuMemCreate");
        let owner = scope.spawn(|| {
            let grown = buffer(&allocator, &stream, 100 * MIB);
            let again = [1, 2].map(|len| buffer(&allocator, &stream, len * MIB));
            assert_eq!([again[0].placement(), again[1].placement()], places);
            grown
        });
        wait_for_call("cuMemCreate", made);
        ends_meanwhile(move || drop((one, two)), || calls("cuMemSetAccess") == mapped);
        drop(owner.join().expect("no panic"));
    });
    drop(kept);
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(a_buffer_is_dropped_while_another_thread_gives_memory_back, {
    let (allocator, stream) = allocator();
    let [cached, dropped] = [100, 1].map(|len| buffer(&allocator, &stream, len * MIB));
    drop(cached);
    let long = hold(stream.cu_stream() as u64);
    thread::scope(|scope| {
        let waits = calls("cuStreamSynchronize");
        let trimming = scope.spawn(|| allocator.trim().expect("trimmed"));
        wait_for_call("cuStreamSynchronize", waits);
        ends_meanwhile(move || drop(dropped), || !trimming.is_finished());
        drop(long);
        assert!(trimming.join().expect("no panic") > 0);
    });
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    allocator.trim().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

stub_test!(a_pinned_buffer_waits_for_nobody_unless_a_stream_used_it, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    pinned.register_stream(&stream).expect("registered");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
    let mut target = buffer(&allocator, &stream, 100);
    let [unused, used] = [0, 1].map(|_| pinned.alloc_host_zeroed::<u8>(100).expect("allocated"));
    stream.memcpy_htod(&used, &mut target).expect("copied");
    let heap = pinned.core().binding(pinned.pool(), StreamId(0)).expect("the host's");
    let dropping = pinned.core().with_keepsake(&heap, |_| {
        ends_meanwhile(move || drop(unused), || true);
        let dropping = thread::spawn(|| {
            drop(used);
            own_calls("cuEventRecord")
        });
        thread::sleep(Duration::from_millis(20));
        assert!(!dropping.is_finished(), "it waits");
        dropping
    });
    assert!(dropping.join().expect("no panic") > 0, "the use has an event");
    assert_eq!(pinned.stats().usage.all.allocations.current, 0);
});

stub_test!(after_the_last_name_nothing_is_left_for_a_thread_that_may_never_come, {
    let (allocator, stream) = allocator();
    let last = buffer(&allocator, &stream, MIB);
    // Comes often enough to have the heap's lock to itself.
    (0..5000).for_each(|_| drop(buffer(&allocator, &stream, 512)));
    drop((allocator, stream));
    ends_meanwhile(move || drop(last), || true);
    assert_eq!((live().device_bytes, live().streams), (0, 0));
});

stub_test!(mail_keeps_no_allocator_alive, {
    let (allocator, stream) = allocator();
    let [cached, dropped] = [100, 1].map(|len| buffer(&allocator, &stream, len * MIB));
    let pinned = PinnedAllocator::pinned(allocator.device(), Config::default()).expect("made");
    drop(pinned.alloc_host_zeroed::<u8>(100).expect("allocated"));
    drop((cached, pinned));
    let long = hold(stream.cu_stream() as u64);
    let waits = calls("cuStreamSynchronize");
    let trimming = thread::spawn(move || {
        allocator.trim().expect("trimmed");
        // The last name goes, with the buffer in the mail.
    });
    wait_for_call("cuStreamSynchronize", waits);
    ends_meanwhile(move || drop(dropped), || !trimming.is_finished());
    drop((long, stream));
    trimming.join().expect("no panic");
    let left = live();
    assert_eq!((left.device_bytes, left.ranges, left.events, left.streams, left.host_bytes), (0, 0, 0, 0, 0));
});

stub_test!(a_buffer_that_was_used_is_fenced_before_its_drop_returns, {
    let (allocator, stream) = allocator();
    let other = allocator.device().context().new_stream().expect("a stream");
    allocator.register_stream(&other).expect("registered");
    for takes_apart in [false, true] {
        let mut used = buffer(&allocator, &stream, MIB);
        drop(used.on(&other));
        if takes_apart {
            let raw = used.into_raw().expect("ordered");
            // SAFETY: put together once.
            used = unsafe { DeviceBuffer::from_raw(&allocator, raw) };
        }
        thread::scope(|scope| {
            // Comes often enough to have the heap's lock to itself.
            (0..5000).for_each(|_| drop(buffer(&allocator, &stream, 512)));
            scope.spawn(move || {
                drop(used);
                assert!(own_calls("cuEventRecord") > 0, "the use has an event");
            });
        });
    }
    assert_eq!(allocator.drop_errors().count, 0);
});
