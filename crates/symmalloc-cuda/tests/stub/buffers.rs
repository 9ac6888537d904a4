//! Buffers and allocators on the stub: contents, streams, and costs in driver calls.

use crate::process::{all_calls, calls, device, fail, heal, hold, live, stub_test};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::{Digest, Placement, PoolId, StreamId};
use symmalloc_cuda::{
    CudaAllocator, CudaBackend, CudaDevice, CudaError, CudaMemory, DeviceBuffer, DropError, StreamAllocator,
    StreamAllocatorRef,
};

const MIB: usize = 1 << 20;

fn allocator() -> CudaAllocator {
    CudaAllocator::new(&device(), Config::default()).expect("the stub supports it")
}

fn is_send_and_sync<T: Send + Sync>(_: &T) {}

stub_test!(buffers_hold_the_data_copied_into_them, {
    let allocator = allocator();
    is_send_and_sync(&allocator);
    let stream = allocator.device().context().new_stream().expect("a stream");
    let mut buffer = allocator.alloc_zeroed::<u32>(&stream, 1000).expect("allocated");
    is_send_and_sync(&buffer);
    assert_eq!(stream.clone_dtoh(&buffer).expect("copied"), vec![0; 1000]);
    let numbers: Vec<u32> = (0..1000).collect();
    stream.memcpy_htod(&numbers, &mut buffer).expect("copied");
    assert_eq!(stream.clone_dtoh(&buffer.slice(100..=199)).expect("copied"), numbers[100..200]);
    stream.memset_zeros(&mut buffer.slice_mut(..500)).expect("set");
    let (zeros, rest) = buffer.as_view().split_at(500);
    assert_eq!(stream.clone_dtoh(&zeros).expect("copied"), vec![0; 500]);
    assert_eq!(stream.clone_dtoh(&rest).expect("copied"), numbers[500..]);
    // SAFETY: written before it is read.
    let mut copy = unsafe { allocator.alloc::<u32>(&stream, 1000) }.expect("allocated");
    stream.memcpy_dtod(&buffer, &mut copy).expect("copied");
    assert_eq!(stream.clone_dtoh(&copy.slice(700..)).expect("copied"), numbers[700..]);
    let (mut low, mut high) = copy.split_at_mut(10);
    stream.memcpy_htod(&[7; 10], &mut low).expect("copied");
    stream.memcpy_htod(&[9; 10], &mut high.slice_mut(..10)).expect("copied");
    assert_eq!(stream.clone_dtoh(&copy.slice(9..11)).expect("copied"), [7, 9]);
});

stub_test!(a_buffer_of_nothing_makes_no_driver_call, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    allocator.register_stream(&stream).expect("registered");
    let before = all_calls();
    let empty = allocator.alloc_zeroed::<f64>(&stream, 0).expect("no elements");
    assert!(empty.is_empty() && empty.as_view().is_empty());
    assert_eq!(empty.device_ptr(&stream).0, 0);
    drop(empty);
    assert_eq!(all_calls(), before);
});

stub_test!(a_cache_hit_without_fences_makes_no_driver_call, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    drop(allocator.alloc_zeroed::<u8>(&stream, 3 * MIB).expect("allocated"));
    let (before, ours) = (all_calls(), CudaDevice::driver_calls());
    for len in [3 * MIB, MIB, 100] {
        // SAFETY: never read.
        let buffer = unsafe { allocator.alloc::<u8>(&stream, len) }.expect("allocated");
        let _pointer = buffer.device_ptr(&stream).0;
        drop(buffer);
    }
    assert_eq!((all_calls(), CudaDevice::driver_calls()), (before, ours));
});

stub_test!(more_streams_than_slots_are_served_from_several_threads, {
    // Growable ranges would need more addresses than the stub's device has.
    let pool = PoolConfig::builder().fixed().build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    let allocator = CudaAllocator::new(&device(), config).expect("the stub supports it");
    let context = allocator.device().context();
    let streams: Vec<_> = (0..100).map(|_| context.new_stream().expect("a stream")).collect();
    thread::scope(|scope| {
        for part in streams.chunks(25) {
            let allocator = &allocator;
            scope.spawn(move || {
                for stream in part.iter().chain(part) {
                    // SAFETY: the stream outlives the wrapper and the allocator's buffers.
                    let wrapper = unsafe { context.wrap_borrowed_stream(stream.cu_stream()) };
                    // SAFETY: never read.
                    let (one, twin) =
                        unsafe { (allocator.alloc::<u8>(stream, MIB), allocator.alloc::<u8>(&wrapper, MIB)) };
                    let (one, twin) = (one.expect("allocated"), twin.expect("allocated"));
                    assert!(Arc::ptr_eq(one.stream(), twin.stream()), "both wrappers refer to the same stream");
                }
            });
        }
    });
    assert_eq!(allocator.core().stream_count(), 100);
    let usage = allocator.stats().usage.all;
    assert_eq!((usage.allocations.current, usage.allocations.allocated), (0, 400));
});

stub_test!(a_buffer_outlives_all_clones_of_its_allocator, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    // SAFETY: never read.
    let buffer = unsafe { allocator.clone().alloc::<u8>(&stream, MIB) }.expect("allocated");
    drop(allocator);
    assert!(live().device_bytes >= MIB as u64, "the buffer keeps its memory");
    thread::spawn(move || drop(buffer)).join().expect("no panic");
    assert_eq!(live().device_bytes, 0, "dropping the last buffer drops the allocator");
});

stub_test!(allocating_and_freeing_never_waits_on_the_host, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let waits = || calls("cuStreamSynchronize") + calls("cuEventSynchronize") + calls("cuEventQuery");
    let before = waits();
    for _ in 0..50 {
        let buffer = allocator.alloc_zeroed::<u8>(&a, 2 * MIB).expect("allocated");
        let _ = buffer.device_ptr(&b);
        drop(buffer);
    }
    assert_eq!(waits(), before);
});

stub_test!(taking_a_pointer_on_another_stream_orders_both_and_fences_the_memory, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    allocator.register_stream(&a).expect("registered");
    allocator.register_stream(&b).expect("registered");
    let mut buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    let counts = || (calls("cuEventRecord"), calls("cuStreamWaitEvent"));
    assert_eq!(counts(), (0, 0), "the buffer's stream needs no event");
    let _ = buffer.device_ptr(&b);
    assert_eq!(counts(), (1, 1), "the reader waits for the writer");
    let _ = buffer.device_ptr(&b);
    assert_eq!(counts(), (1, 1), "once");
    let _ = buffer.device_ptr(&a);
    assert_eq!(counts(), (1, 1), "the writer's stream is already ordered");
    let _ = buffer.device_ptr_mut(&a);
    assert_eq!(counts(), (2, 2), "a writer waits for the readers");
    drop(buffer);
    assert_eq!(counts(), (3, 2), "freeing records the use on the other stream");
    // SAFETY: never read.
    let next = unsafe { allocator.alloc::<u8>(&a, MIB) }.expect("allocated");
    assert_eq!(counts(), (3, 3), "the next user of the memory waits on the device");
    drop(next);
});

/// Returns a buffer of zeros on the first stream, and a copy target on the second.
fn source_and_target(allocator: &CudaAllocator, [a, b]: [&Arc<CudaStream>; 2]) -> (DeviceBuffer<u8>, DeviceBuffer<u8>) {
    let source = allocator.alloc_zeroed::<u8>(a, MIB).expect("allocated");
    let target = allocator.alloc_zeroed::<u8>(b, MIB).expect("allocated");
    (source, target)
}

stub_test!(a_stream_that_read_before_a_write_waits_for_the_writer, {
    let allocator = allocator();
    let [a, b, c] = [(); 3].map(|()| allocator.device().context().new_stream().expect("a stream"));
    for stream in [&a, &b, &c] {
        allocator.register_stream(stream).expect("registered");
    }
    let (mut source, mut target) = source_and_target(&allocator, [&a, &b]);
    b.memcpy_dtod(&source, &mut target).expect("copied");
    let long = hold(c.cu_stream() as u64);
    c.memcpy_htod(&[9; MIB], &mut source).expect("copied");
    b.memcpy_dtod(&source, &mut target).expect("copied");
    drop(long);
    assert_eq!(b.clone_dtoh(&target.slice(..4)).expect("copied"), [9; 4]);
});

stub_test!(a_writer_on_an_unregistered_stream_waits_for_readers, {
    let allocator = allocator();
    let [a, b, foreign] = [(); 3].map(|()| allocator.device().context().new_stream().expect("a stream"));
    let (mut source, mut target) = source_and_target(&allocator, [&a, &b]);
    b.memcpy_htod(&[7; MIB], &mut target).expect("copied");
    let long = hold(b.cu_stream() as u64);
    b.memcpy_dtod(&source, &mut target).expect("copied");
    foreign.memcpy_htod(&[9; MIB], &mut source).expect("copied");
    drop(long);
    assert_eq!(b.clone_dtoh(&target.slice(..4)).expect("copied"), [0; 4], "the reader came first");
    assert_eq!(a.clone_dtoh(&source.slice(..4)).expect("copied"), [9; 4]);
});

/// Returns the results of a program with two streams: buffer placements, the digest, and the calls that order its streams.
fn history<'a, A: StreamAllocatorRef<Memory = CudaBackend> + 'a>(
    allocator: &CudaAllocator,
    b: &CudaStream,
    alloc: impl Fn(usize) -> DeviceBuffer<u8, A>,
) -> (Vec<Placement>, Digest, [u64; 2]) {
    let calls = || [calls("cuEventRecord"), calls("cuStreamWaitEvent")];
    let before = calls();
    let mut buffers: Vec<_> = (1..20).map(|count| alloc(count * MIB / 4)).collect();
    drop(buffers[3].device_ptr(b));
    drop(buffers[7].split_at_mut(MIB).1.device_ptr_mut(b));
    let places = buffers.iter().map(DeviceBuffer::placement).collect();
    buffers.retain(|buffer| buffer.len() % MIB == 0);
    let kept = buffers.pop().expect("more than one").into_raw().expect("ordered");
    drop((alloc(MIB), buffers));
    allocator.free(kept.handle).expect("live");
    let after = calls();
    (places, allocator.digest(PoolId::DEFAULT).expect("known"), [after[0] - before[0], after[1] - before[1]])
}

stub_test!(borrowing_buffers_behave_like_counted_ones, {
    let device = device();
    let streams = [(); 2].map(|()| device.context().new_stream().expect("a stream"));
    let allocators = [(); 2].map(|()| allocator());
    for (allocator, stream) in allocators.iter().flat_map(|allocator| streams.iter().map(move |it| (allocator, it))) {
        allocator.register_stream(stream).expect("registered");
    }
    let [counting, borrowing] = &allocators;
    let counted = history(counting, &streams[1], |len| counting.alloc_zeroed(&streams[0], len).expect("allocated"));
    let a = borrowing.for_stream(&streams[0]).expect("registered");
    let borrowed = history(borrowing, &streams[1], |len| a.alloc_zeroed(len).expect("allocated"));
    assert_eq!(borrowed, counted);
    assert_ne!(counted.2, [0, 0]);
    assert_eq!(borrowing.stats().usage.all.allocations.current, 0);
    let named = a.alloc_zeroed_named::<u8>(MIB, "borrows").expect("allocated");
    is_send_and_sync(&named);
    assert!(borrowing.leak_report().to_string().contains("borrows"), "{}", borrowing.leak_report());
});

stub_test!(a_stream_allocator_keeps_the_memory_and_not_the_pool, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let pool = allocator.create_pool(PoolConfig::default()).expect("made");
    let inside: Arc<StreamAllocator> = Arc::clone(allocator.with_pool(&pool).for_stream(&stream).expect("registered"));
    assert_eq!((inside.pool(), inside.stream_id()), (pool.id(), StreamId(0)));
    let buffer = inside.alloc_zeroed::<u8>(MIB).expect("allocated");
    drop(pool);
    allocator.trim_all().expect("trimmed");
    drop(buffer);
    allocator.trim_all().expect("trimmed");
    let error = inside.alloc_zeroed::<u8>(MIB).expect_err("the pool is gone");
    assert!(matches!(error, CudaError::Allocate(AllocateError::Unknown(_))), "{error:?}");
    drop(allocator.alloc_zeroed::<u8>(&stream, MIB).expect("allocated"));
    drop(allocator);
    assert!(live().device_bytes >= MIB as u64, "the allocator's memory is kept");
    drop(inside);
    assert_eq!(live().device_bytes, 0);
});

stub_test!(a_buffer_given_to_a_kernel_is_ordered_behind_other_streams, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    allocator.register_stream(&a).expect("registered");
    allocator.register_stream(&b).expect("registered");
    let module = context.load_module(Ptx::from_src("")).expect("loaded");
    let kernel = module.load_function("kernel").expect("the stub accepts any kernel name");
    let mut buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    let waits = || calls("cuStreamWaitEvent");
    a.launch_builder(&kernel).arg(&buffer);
    a.launch_builder(&kernel).arg(&mut buffer);
    assert_eq!(waits(), 0, "the buffer's stream needs no event");
    let _ = buffer.device_ptr_mut(&b);
    assert_eq!(waits(), 1, "the other writer waits");
    a.launch_builder(&kernel).arg(&buffer);
    assert_eq!(waits(), 2, "a kernel that reads waits for the writer");
    a.launch_builder(&kernel).arg(&buffer);
    assert_eq!(waits(), 2, "once");
    a.launch_builder(&kernel).arg(&mut buffer);
    assert_eq!(waits(), 3, "a kernel that writes waits again, because the other stream may have read in the meantime");
    let _ = buffer.device_ptr(&b);
    assert_eq!(waits(), 4, "the next reader waits for the kernel that wrote");
    a.launch_builder(&kernel).arg(&mut buffer);
    assert_eq!(waits(), 5, "a kernel that writes waits for the reader");
});

stub_test!(a_reader_that_writes_waits_for_what_the_writer_has_read_in_the_meantime, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (writer, reader) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    allocator.register_stream(&reader).expect("registered");
    let mut buffer = allocator.alloc_zeroed::<u8>(&writer, MIB).expect("allocated");
    let mut copy = allocator.alloc_zeroed::<u8>(&writer, MIB).expect("allocated");
    assert_eq!(reader.clone_dtoh(&buffer.slice(..1)).expect("copied"), [0]);
    let slow = hold(writer.cu_stream() as u64);
    writer.memcpy_dtod(&buffer, &mut copy).expect("submitted");
    reader.memcpy_htod(&vec![9; MIB], &mut buffer).expect("submitted");
    drop(slow);
    assert_eq!(
        writer.clone_dtoh(&copy).expect("copied"),
        vec![0; MIB],
        "the copy reads the buffer before it is overwritten"
    );
});

stub_test!(memory_used_on_an_unregistered_stream_is_reused_after_its_work, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, foreign) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    assert_eq!(allocator.stream_id(&foreign), None);
    for _ in 0..3 {
        drop(buffer.device_ptr(&foreign));
    }
    assert_eq!(calls("cuEventCreate"), 4, "one from the pool, and one for each use by the foreign stream");
    let before = (calls("cuStreamWaitEvent"), calls("cuCtxSynchronize"));
    drop(buffer);
    let after = (calls("cuStreamWaitEvent"), calls("cuCtxSynchronize"));
    assert_eq!(
        after,
        (before.0 + 3, before.1),
        "the buffer's stream waits for the foreign stream, and the host does not"
    );
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(without_event_tracking_the_program_orders_and_memory_is_still_fenced, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    // SAFETY: this test orders nothing and reads nothing.
    unsafe { context.disable_event_tracking() };
    allocator.register_stream(&b).expect("registered");
    let buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    drop(buffer.device_ptr(&b));
    assert_eq!(calls("cuEventRecord"), 0);
    drop(buffer);
    assert_eq!(calls("cuEventRecord"), 1);
});

stub_test!(streams_are_numbered_kept_alive_and_validated, ["STUB_DEVICES" = "2"], {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    assert_eq!(allocator.register_stream(&a).expect("registered"), StreamId(0));
    assert_eq!(allocator.register_stream(&b).expect("registered"), StreamId(1));
    assert_eq!(allocator.register_stream(&a).expect("registered"), StreamId(0));
    // SAFETY: `b` keeps the stream alive and outlives the allocator's use of it here.
    assert_eq!(unsafe { allocator.register_raw_stream(b.cu_stream()) }.expect("found"), StreamId(1));
    assert_eq!(allocator.register_stream(&context.default_stream()).expect("registered"), StreamId(2));
    let error =
        allocator.register_stream(&context.per_thread_stream()).expect_err("the stream differs between threads");
    assert_eq!(error, CudaError::PerThreadStream);
    let other = CudaDevice::new(1).expect("the second device").context().new_stream().expect("a stream");
    assert_eq!(allocator.register_stream(&other).expect_err("another device's stream"), CudaError::ForeignStream);
    drop(a);
    assert_eq!(calls("cuStreamDestroy_v2"), 0, "registered streams are kept");
});

stub_test!(a_buffer_survives_a_round_trip_through_raw_parts, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let buffer = allocator.alloc_zeroed_named::<u16>(&stream, 10, "taken apart").expect("allocated");
    let placement = buffer.placement();
    let raw = buffer.into_raw().expect("no foreign use");
    assert_eq!(raw.len, 10);
    assert_eq!(allocator.stats().usage.all.allocations.current, 1);
    assert!(allocator.leak_report().to_string().contains("taken apart"), "{}", allocator.leak_report());
    // SAFETY: from `into_raw`, and restored only once.
    let buffer = unsafe { DeviceBuffer::<u16>::from_raw(&allocator, raw) };
    assert_eq!(
        (buffer.placement(), buffer.len(), DeviceSlice::stream(&buffer).cu_stream()),
        (placement, 10, stream.cu_stream())
    );
    drop(buffer);
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    let leaked = allocator.alloc_zeroed::<u16>(&stream, 10).expect("allocated").leak();
    assert_ne!(leaked, 0);
    assert_eq!(allocator.stats().usage.all.allocations.current, 1);
});

stub_test!(allocations_of_a_pool_use_its_own_memory, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let pool = allocator.create_pool(PoolConfig::default()).expect("made");
    let inside = allocator.with_pool(&pool);
    let id = pool.id();
    assert_eq!((allocator.pool(), inside.pool()), (PoolId::DEFAULT, id));
    let buffer = inside.alloc_zeroed::<u8>(&stream, 5 * MIB).expect("allocated");
    assert_eq!(allocator.core().pool_stats(id).expect("known").usage.all.allocations.current, 1);
    drop((pool, inside));
    allocator.trim_all().expect("trimmed");
    assert!(live().device_bytes >= 5 * MIB as u64, "a live buffer keeps the pool");
    drop(buffer);
    assert!(live().device_bytes >= 5 * MIB as u64, "dropping never releases memory to the device");
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
    assert!(allocator.core().pool_stats(id).is_err(), "destroyed");
});

stub_test!(an_abandoned_pool_that_is_observed_waits_without_an_error, {
    let allocator = allocator();
    let pool = allocator.create_pool(PoolConfig::default()).expect("made");
    let id = pool.id();
    let (observer, _) = allocator.core().observe(id).expect("known");
    drop(pool);
    allocator.trim_all().expect("trimmed");
    assert!(allocator.core().pool_stats(id).is_ok(), "the pool is observed");
    allocator.core().forget(observer).expect("forgotten");
    allocator.trim_all().expect("trimmed");
    assert!(allocator.core().pool_stats(id).is_err(), "destroyed");
});

/// Returns `true` if a wait for the work on two streams ends within the limit.
fn ends_within(limit: Duration) -> bool {
    let allocator = allocator();
    let context = allocator.device().context();
    let streams = [context.new_stream().expect("a stream"), context.new_stream().expect("a stream")];
    let buffers = streams.each_ref().map(|stream| allocator.alloc_zeroed::<u8>(stream, MIB).expect("allocated"));
    let events = live().events;
    let done = allocator.synchronize_all(Instant::now() + limit).expect("queried");
    assert!(live().events <= events + 2, "events are reused");
    drop(buffers);
    done
}

stub_test!(waiting_for_all_streams_ends_with_the_work, ["STUB_POLLS" = "3"], {
    assert!(ends_within(Duration::from_secs(60)));
});

stub_test!(waiting_for_all_streams_ends_with_the_deadline, {
    let begun = Instant::now();
    assert!(!ends_within(Duration::from_millis(20)), "on this stub, polling alone does not detect the end");
    assert!(begun.elapsed() < Duration::from_secs(30));
});

stub_test!(a_trim_releases_free_memory, {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let free = || allocator.device().memory_info().expect("queried").free_bytes;
    let before = free();
    let kept = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("allocated");
    drop(allocator.alloc_zeroed::<u8>(&stream, 100 * MIB).expect("allocated"));
    assert!(free() <= before - 100 * MIB as u64);
    let released = allocator.trim_all().expect("trimmed");
    assert_eq!(released, 100 * MIB as u64 / (2 << 20) * (2 << 20));
    assert_eq!(free(), before - (2 << 20), "the granule of the live buffer stays");
    drop(kept);
    allocator.trim_all().expect("trimmed");
    assert_eq!(free(), before);
});

stub_test!(memory_taken_by_another_process_is_a_typed_error, ["STUB_MEMORY_BYTES" = "67108864"], {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let kept = allocator.alloc_zeroed::<u8>(&stream, 40 * MIB).expect("allocated");
    let error = allocator.alloc_zeroed::<u8>(&stream, 40 * MIB).expect_err("the device is full");
    let CudaError::Allocate(AllocateError::OutOfMemory(out)) = &error else { panic!("{error:?}") };
    let OutOfMemoryCause::Driver(driver) = &out.cause else { panic!("{error:?}") };
    assert_eq!((driver.call, driver.code), ("cuMemCreate", 2));
    assert!(error.to_string().contains("cuMemCreate failed with 2"), "{error}");
    drop(kept);
    allocator.alloc_zeroed::<u8>(&stream, 40 * MIB).expect("a failed allocation changes nothing");
    allocator.core().check().expect("consistent");
});

stub_test!(an_error_while_dropping_is_counted_and_the_memory_kept, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    allocator.register_stream(&b).expect("registered");
    let buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    drop(buffer.device_ptr(&b));
    fail("cuEventRecord", 0, 719);
    drop(buffer);
    let errors = allocator.drop_errors();
    assert_eq!(errors.count, 1);
    assert!(matches!(errors.last, Some(DropError::Free(_))), "{errors:?}");
    assert_eq!(allocator.stats().usage.all.allocations.current, 1);
    heal();
});

stub_test!(a_use_that_cannot_be_ordered_is_waited_for_by_the_host, {
    let allocator = allocator();
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    allocator.register_stream(&b).expect("registered");
    let buffer = allocator.alloc_zeroed::<u8>(&a, MIB).expect("allocated");
    fail("cuStreamWaitEvent", 1, 999);
    let before = (calls("cuCtxSynchronize"), calls("cuStreamSynchronize"));
    drop(buffer.device_ptr(&b));
    assert_eq!((calls("cuCtxSynchronize"), calls("cuStreamSynchronize")), (before.0 + 1, before.1 + 1));
    assert!(matches!(allocator.drop_errors().last, Some(DropError::Order(_))));
});

stub_test!(a_write_after_a_failed_wait_waits_for_all_earlier_users, {
    let allocator = allocator();
    let context = allocator.device().context();
    let [owner, first, second, writer] = [(); 4].map(|()| context.new_stream().expect("a stream"));
    for stream in [&first, &second, &writer] {
        allocator.register_stream(stream).expect("registered");
    }
    let mut buffer = allocator.alloc_zeroed::<u8>(&owner, MIB).expect("allocated");
    drop(buffer.device_ptr(&first));
    drop(buffer.device_ptr(&second));
    fail("cuStreamWaitEvent", 1, 999);
    drop(buffer.device_ptr_mut(&writer));
    heal();
    let before = calls("cuStreamWaitEvent");
    drop(buffer.device_ptr_mut(&first));
    assert_eq!(calls("cuStreamWaitEvent"), before + 3, "for the writer, the owner and the second reader");
});

stub_test!(dropping_the_last_owner_releases_everything, {
    let allocator = allocator();
    let device = allocator.device().clone();
    let context = device.context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let buffers: Vec<_> =
        (1..20).map(|size| allocator.alloc_zeroed::<u8>(&a, size * MIB / 3).expect("allocated")).collect();
    buffers.iter().for_each(|buffer| drop(buffer.device_ptr(&b)));
    drop(allocator);
    drop((a, b));
    assert!(live().device_bytes > 0, "buffers keep the allocator");
    drop(buffers);
    let left = live();
    assert_eq!((left.device_bytes, left.ranges, left.events, left.streams), (0, 0, 0, 0), "{left:?}");
});

stub_test!(threads_share_an_allocator, {
    let allocator = allocator();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = allocator.device().context().new_stream().expect("a stream");
                for size in 1..50_usize {
                    let buffer = allocator.alloc_zeroed::<u8>(&stream, size * 10_000).expect("allocated");
                    assert!(stream.clone_dtoh(&buffer).expect("copied").iter().all(|byte| *byte == 0));
                }
            });
        }
    });
    allocator.core().check().expect("consistent");
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
});

stub_test!(each_device_has_its_own_allocator, ["STUB_DEVICES" = "2"], {
    let devices: Vec<_> = (0..2).map(|ordinal| CudaDevice::new(ordinal).expect("a device")).collect();
    let digests: Vec<_> = devices
        .iter()
        .map(|device| {
            let allocator = CudaAllocator::new(device, Config::default()).expect("made");
            let stream = device.context().new_stream().expect("a stream");
            let buffers: Vec<_> =
                (1..9).map(|n| allocator.alloc_zeroed::<u8>(&stream, n * MIB).expect("made")).collect();
            let places: Vec<_> = buffers.iter().map(DeviceBuffer::placement).collect();
            (places, allocator.digest(PoolId::DEFAULT).expect("known"))
        })
        .collect();
    assert_eq!(digests[0], digests[1]);
});

stub_test!(without_virtual_memory_pools_get_fixed_segments, ["STUB_NO_VMM" = "1"], {
    let allocator = allocator();
    let stream = allocator.device().context().new_stream().expect("a stream");
    let buffer = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("allocated");
    assert_eq!(stream.clone_dtoh(&buffer).expect("copied"), vec![0; MIB]);
    drop(buffer);
    allocator.trim_all().expect("trimmed");
    assert_eq!(live().device_bytes, 0);
});

stub_test!(placements_do_not_depend_on_chunks, {
    let device = device();
    let places = |chunk_bytes| {
        let backend = CudaBackend::builder(&device).chunk_bytes(chunk_bytes).build().expect("made");
        let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
        let stream = device.context().new_stream().expect("a stream");
        let mut buffers = Vec::new();
        for size in [30, 1, 17, 4, 4, 9] {
            buffers.push(allocator.alloc_zeroed::<u8>(&stream, size * MIB).expect("allocated"));
        }
        buffers.remove(2);
        allocator.trim_all().expect("trimmed");
        buffers.push(allocator.alloc_zeroed::<u8>(&stream, 3 * MIB).expect("allocated"));
        let places: Vec<_> = buffers.iter().map(DeviceBuffer::placement).collect();
        (places, allocator.digest(PoolId::DEFAULT).expect("known"), allocator.core().backend().idle_bytes())
    };
    let (small, large) = (places(2 << 20), places(16 << 20));
    assert_eq!((&small.0, small.1), (&large.0, large.1));
    assert_eq!(small.2, 0);
});

stub_test!(the_default_streams_of_two_devices_are_two_streams, ["STUB_DEVICES" = "2"], {
    let allocator = allocator();
    let own = allocator.device().context().default_stream();
    let other = CudaDevice::new(1).expect("the second device").context().default_stream();
    allocator.register_stream(&own).expect("registered");
    assert_eq!(allocator.stream_id(&other), None);
    let buffer = allocator.alloc_zeroed::<u8>(&own, MIB).expect("allocated");
    let before = calls("cuStreamSynchronize");
    drop(buffer.device_ptr(&other));
    assert_eq!(calls("cuStreamSynchronize"), before + 1, "events of this context cannot be recorded there");
    drop(buffer);
    assert_eq!(allocator.drop_errors().count, 0);
});
