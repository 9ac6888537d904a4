//! Forgotten guards: `std::mem::forget` is safe, so no memory may be reused while work under a forgotten guard runs.

use crate::process::{calls, device, hold, stub_test};
use cudarc::driver::result::{memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, HostSlice};
use std::mem::forget;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use symmalloc_core::config::Config;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, PinnedAllocator};

const LEN: usize = 4096;
/// Contents of the buffer whose guard is forgotten.
static FIVES: [u8; LEN] = [5; LEN];

/// A function that submits a copy from an address on the test's stream.
type Submit<'s> = &'s dyn Fn(u64);

/// Numbers of uses on the stream before it is blocked: around the number from which on uses share an event, and many.
const EARLIER: [usize; 6] = [0, 1, 7, 8, 9, 30];

/// Drops a buffer after `take` submitted a copy from it on an unregistered stream that is blocked, and reuses its memory. The copy must
/// still read the buffer's contents, after any number of earlier uses on the stream.
fn check(what: &str, take: impl Fn(DeviceBuffer<u8>, &Arc<CudaStream>, &Arc<CudaStream>, Submit<'_>)) {
    EARLIER.into_iter().for_each(|earlier| check_after(earlier, &format!("{what}, {earlier} earlier uses"), &take));
}

fn check_after(
    earlier: usize,
    what: &str,
    take: impl FnOnce(DeviceBuffer<u8>, &Arc<CudaStream>, &Arc<CudaStream>, Submit<'_>),
) {
    let allocator = CudaAllocator::new(&device(), Config::default()).expect("the stub supports it");
    let context = allocator.device().context();
    let (own, other) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let buffer = allocator.clone_htod(&own, &FIVES).expect("copied");
    let target = allocator.alloc_zeroed::<u8>(&own, LEN).expect("allocated");
    let (address, place) = (target.device_ptr(&own).0, buffer.placement());
    (0..earlier).for_each(|_| drop(buffer.device_ptr(&other)));
    [&own, &other].into_iter().for_each(|stream| stream.synchronize().expect("done"));
    let work = hold(other.cu_stream() as u64);
    let release = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        drop(work);
    });
    take(buffer, &own, &other, &|from| {
        // SAFETY: both are large enough; `from` is alive as long as the guard keeps it alive.
        unsafe { memcpy_dtod_async(address, from, LEN, other.cu_stream()) }.expect("submitted");
    });
    let reused = allocator.alloc_zeroed::<u8>(&own, LEN).expect("allocated");
    assert_eq!(reused.placement(), place, "{what}: the memory is reused");
    own.synchronize().expect("done");
    release.join().expect("no panic");
    other.synchronize().expect("done");
    assert_eq!(own.clone_dtoh(&target).expect("copied"), FIVES, "{what}");
    assert_eq!(allocator.drop_errors().count, 0, "{what}");
    allocator.core().check().expect("consistent");
}

stub_test!(a_forgotten_read_guard_keeps_the_memory, {
    check("device_ptr", |buffer, _, other, submit| {
        let (pointer, guard) = buffer.device_ptr(other);
        submit(pointer);
        forget(guard);
    });
    check("read_on", |buffer, _, other, submit| {
        let arg = buffer.read_on(other);
        submit(arg.pointer());
        forget(arg);
    });
    check("a view", |buffer, _, other, submit| {
        let (pointer, guard) = buffer.as_view().view_ptr(other);
        submit(pointer);
        forget(guard);
    });
});

stub_test!(a_forgotten_write_guard_keeps_the_memory, {
    check("device_ptr_mut", |mut buffer, _, other, submit| {
        let (pointer, guard) = buffer.device_ptr_mut(other);
        submit(pointer);
        forget(guard);
    });
    check("on", |mut buffer, _, other, submit| {
        let arg = buffer.on(other);
        submit(arg.pointer());
        forget(arg);
    });
});

stub_test!(a_forgotten_guard_of_a_split_keeps_the_memory, {
    check("a split view", |mut buffer, _, other, submit| {
        let (low, high) = buffer.split_at_mut(LEN / 2);
        let (pointer, low) = low.view_ptr_mut(other);
        let (_, high) = high.view_ptr_mut(other);
        submit(pointer);
        drop(high);
        forget(low);
    });
    check("an owned part", |buffer, _, other, submit| {
        let mut low = buffer.into_part();
        let (pointer, guard) = low.device_ptr(other);
        submit(pointer);
        forget(guard);
        let high = low.split_off(LEN / 2);
        drop(low);
        drop(high);
    });
    check("a shared part", |buffer, _, other, submit| {
        let shared = buffer.into_part().into_shared();
        let (low, high) = shared.split_at(LEN / 2);
        let (pointer, guard) = low.device_ptr(other);
        submit(pointer);
        forget(guard);
        drop((high, low, shared));
    });
});

stub_test!(a_forgotten_lent_slice_keeps_the_memory, {
    check("lend_on", |buffer, own, other, submit| {
        let lent = buffer.lend_on(own).expect("lent");
        let (pointer, guard) = lent.device_ptr(other);
        submit(pointer);
        drop(guard);
        forget(lent);
    });
    check("lend_on the stream itself", |buffer, _, other, submit| {
        let lent = buffer.lend_on(other).expect("lent");
        submit(lent.device_ptr(other).0);
        forget(lent);
    });
});

stub_test!(a_forgotten_mutable_lent_slice_keeps_the_memory, {
    check("lend_mut_on", |mut buffer, own, other, submit| {
        // SAFETY: the slice stays in the guard.
        let mut lent = unsafe { buffer.lend_mut_on(own) }.expect("lent");
        let (pointer, guard) = lent.device_ptr_mut(other);
        submit(pointer);
        drop(guard);
        forget(lent);
    });
});

stub_test!(a_guard_that_waits_on_the_host_and_is_forgotten_keeps_the_memory, {
    check("without event tracking", |buffer, _, other, submit| {
        // SAFETY: nothing is read before it is ordered.
        unsafe { other.context().disable_event_tracking() };
        let (pointer, guard) = buffer.device_ptr(other);
        submit(pointer);
        forget(guard);
    });
});

stub_test!(guards_that_are_dropped_make_no_drop_wait, {
    let allocator = CudaAllocator::new(&device(), Config::default()).expect("the stub supports it");
    let context = allocator.device().context();
    let (own, other) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let buffer = allocator.clone_htod(&own, &FIVES).expect("copied");
    drop(buffer.device_ptr(&other));
    drop(buffer.lend_on(&own).expect("lent"));
    let before = calls("cuCtxSynchronize");
    drop(buffer);
    assert_eq!(calls("cuCtxSynchronize"), before);
});

stub_test!(a_forgotten_guard_of_a_pinned_buffer_keeps_the_memory, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    let memory = CudaAllocator::new(&device, Config::default()).expect("made");
    let mut source = pinned.alloc_host_zeroed::<u8>(LEN).expect("allocated");
    source.as_mut_slice().expect("idle").copy_from_slice(&FIVES);
    let own = device.context().new_stream().expect("a stream");
    let target = memory.alloc_zeroed::<u8>(&own, LEN).expect("allocated");
    let address = target.device_ptr(&own).0;
    own.synchronize().expect("done");
    let release = |work| {
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(work);
        })
    };
    let released = release(hold(stream.cu_stream() as u64));
    // SAFETY: used only on this stream, and the buffer keeps the elements until the work is done.
    let (elements, guard) = unsafe { source.stream_synced_slice(&stream) };
    // SAFETY: both are large enough.
    unsafe { memcpy_htod_async(address, elements, stream.cu_stream()) }.expect("submitted");
    forget(guard);
    drop(source);
    let mut reused = pinned.alloc_host_zeroed::<u8>(LEN).expect("allocated");
    released.join().expect("no panic");
    stream.synchronize().expect("done");
    assert_eq!(own.clone_dtoh(&target).expect("copied"), FIVES);

    let released = release(hold(stream.cu_stream() as u64));
    // SAFETY: as above.
    let (elements, guard) = unsafe { reused.stream_synced_mut_slice(&stream) };
    // SAFETY: both are large enough.
    unsafe { memcpy_dtoh_async(elements, address, stream.cu_stream()) }.expect("submitted");
    forget(guard);
    assert_eq!(reused.as_slice().expect("waited"), FIVES, "the host reads after the copy");
    released.join().expect("no panic");
});
