//! Values that are exchanged with other code as plain numbers: streams, buffers and pointers.

use crate::device;
use crate::kernels::Worker;
use cudarc::driver::DevicePtr;
use cudarc::driver::result::stream::{self, StreamKind};
use symmalloc_core::config::Config;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer};

const MIB: usize = 1 << 20;

#[test]
fn a_stream_that_other_code_owns_is_registered_ordered_and_left_alive() {
    let Some(device) = device() else { return };
    let context = device.context();
    context.bind_to_thread().expect("current");
    let raw = stream::create(StreamKind::NonBlocking).expect("the driver creates a stream");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let main = Worker::on_new_stream(context);
    // SAFETY: destroyed below, after the allocator and its buffers.
    let id = unsafe { allocator.register_raw_stream(raw) }.expect("registered");
    // SAFETY: as above.
    assert_eq!(unsafe { allocator.register_raw_stream(raw) }.expect("found"), id);
    // SAFETY: as above.
    let theirs = Worker::new(unsafe { context.wrap_borrowed_stream(raw) });
    assert_eq!(allocator.stream_id(&theirs.stream), Some(id));
    for round in 0..1000 {
        for (owner, user) in [(&main, &theirs), (&theirs, &main)] {
            // SAFETY: written before it is read.
            let mut buffer = unsafe { allocator.alloc::<u32>(&owner.stream, MIB / 4) }.expect("allocated");
            user.delay();
            user.fill(&mut buffer, round);
            owner.expect(&buffer, round);
            user.delay();
            user.expect(&buffer, round);
        }
    }
    assert_eq!((main.wrong_elements(), theirs.wrong_elements(), allocator.drop_errors().count), (0, 0, 0));
    let reserved = allocator.stats().reserved_bytes.peak;
    println!("2000 buffers of two streams, {reserved} bytes reserved");
    drop((allocator, theirs, main));
    context.bind_to_thread().expect("current");
    // SAFETY: the stream must be alive, because the allocator does not own it.
    unsafe { stream::synchronize(raw) }.expect("alive");
    // SAFETY: created above, and not used anymore.
    unsafe { stream::destroy(raw) }.expect("destroyed by its owner");
}

#[test]
fn raw_parts_keep_the_buffers_placement_content_and_uses() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let (main, stranger) = (Worker::on_new_stream(device.context()), Worker::on_new_stream(device.context()));
    allocator.register_stream(&main.stream).expect("registered");
    for round in 0..500 {
        // SAFETY: written before it is read.
        let mut buffer = unsafe { allocator.alloc::<u32>(&main.stream, MIB / 4) }.expect("allocated");
        let placement = buffer.placement();
        main.fill(&mut buffer, round);
        // A late read on a stream without an id: taking the buffer apart must not lose this use.
        stranger.delay();
        stranger.expect(&buffer, round);
        let raw = buffer.into_raw().expect("ordered");
        assert_eq!(raw.len, MIB / 4);
        // SAFETY: the elements exist, and only the stream that owns them uses them.
        unsafe { main.expect_at(raw.pointer, round, raw.len as u32) };
        let allocator = allocator.clone();
        let buffer = std::thread::spawn(move || {
            // SAFETY: from `into_raw`, and restored only once.
            unsafe { DeviceBuffer::<u32>::from_raw(&allocator, raw) }
        });
        let buffer = buffer.join().expect("restored");
        assert_eq!((buffer.placement(), buffer.device_ptr(&main.stream).0), (placement, raw.pointer));
        main.expect(&buffer, round);
    }
    assert_eq!((main.wrong_elements(), stranger.wrong_elements(), allocator.drop_errors().count), (0, 0, 0));
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    assert_eq!(allocator.stats().reserved_bytes.peak, 2 << 20, "every round used the same memory");
}

#[test]
fn leaked_memory_is_kept_until_the_allocator_is_dropped() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let worker = Worker::on_new_stream(device.context());
    let allocator = || CudaAllocator::new(&device, Config::default()).expect("made");
    // The first launch of a kernel allocates additional memory.
    let mut first = allocator().alloc_zeroed::<u32>(&worker.stream, 1).expect("allocated");
    worker.fill(&mut first, 7);
    worker.expect(&first, 7);
    drop(first);
    assert_eq!(worker.wrong_elements(), 0);
    let (before, allocator) = (free(), allocator());
    // SAFETY: written before it is read.
    let mut buffer = unsafe { allocator.alloc_named::<u32>(&worker.stream, 4 * MIB, "leaked") }.expect("allocated");
    worker.fill(&mut buffer, 7);
    let pointer = buffer.leak();
    for round in 0..20 {
        let mut other = allocator.alloc_zeroed::<u32>(&worker.stream, 4 * MIB + round).expect("allocated");
        worker.fill(&mut other, 8);
    }
    allocator.trim_all().expect("trimmed");
    // SAFETY: leaked, so the elements exist and nobody writes them.
    unsafe { worker.expect_at(pointer, 7, 4 << 20) };
    assert_eq!(worker.wrong_elements(), 0);
    println!("{}", allocator.leak_report());
    assert!(allocator.leak_report().to_string().contains("leaked"));
    assert_eq!((allocator.stats().usage.all.allocations.current, before - free()), (1, 16 << 20));
    drop(allocator);
    assert_eq!(free(), before, "the last owner releases everything");
}
