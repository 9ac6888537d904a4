//! Buffers in place of `CudaSlice`s: copies, owned parts, and buffers lent as `CudaSlice`s.

use crate::device;
use crate::kernels::Worker;
use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::{CudaSlice, DevicePtr, DeviceSlice};
use std::time::Instant;
use symmalloc_core::config::Config;
use symmalloc_cuda::{BufferPart, CudaAllocator};

const MIB: usize = 1 << 20;

#[test]
fn buffers_are_created_copied_and_sliced_like_cuda_slices() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let numbers: Vec<u32> = (0..3 * MIB as u32).collect();
    let mut buffer = allocator.clone_htod(&stream, &numbers).expect("made");
    let copy = buffer.try_clone().expect("made");
    stream.memset_zeros(&mut buffer.split_at_mut(MIB).1).expect("set");
    assert_eq!(stream.clone_dtoh(&buffer.slice(MIB - 1..MIB + 1)).expect("copied"), [MIB as u32 - 1, 0]);
    // SAFETY: every bit pattern is a valid `u64`.
    let pairs = unsafe { copy.transmute::<u64>(MIB) }.expect("the buffer is large enough");
    assert_eq!(stream.clone_dtoh(&pairs.slice(1..2)).expect("copied"), [(3 << 32) | 2]);
    let theirs: CudaSlice<u32> = stream.clone_htod(&numbers).expect("allocated by cudarc");
    let ours = allocator.clone_dtod(&stream, &theirs).expect("made");
    assert!(Vec::try_from(ours).expect("copied") == numbers && Vec::try_from(copy).expect("copied") == numbers);
}

#[test]
fn parts_on_three_streams_are_correct_and_their_memory_is_fenced() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let [a, b, stranger] = [(); 3].map(|()| Worker::on_new_stream(device.context()));
    allocator.register_stream(&a.stream).expect("registered");
    allocator.register_stream(&b.stream).expect("registered");
    let fill = |part: &mut BufferPart<u32>, worker: &Worker, value| {
        let count = part.len() as u32;
        worker.delay();
        let argument = part.on(&worker.stream);
        // SAFETY: the part has `count` elements, and the argument, which orders the streams, lives until the launch.
        unsafe { worker.fill_at(argument.pointer(), value, count) };
    };
    for round in 0..500_u32 {
        // SAFETY: written before it is read.
        let mut low = unsafe { allocator.alloc::<u32>(&a.stream, MIB) }.expect("allocated").into_part();
        let mut high = low.split_off(MIB / 2);
        fill(&mut low, &b, round);
        fill(&mut high, &stranger, !round);
        let readers = [(low.into_shared(), &stranger, round), (high.into_shared(), &b, !round)];
        for (part, reader, value) in readers {
            let (first, second) = part.split_at(MIB / 4);
            drop(part);
            reader.delay();
            for part in [first, second] {
                let argument = part.read_on(&reader.stream);
                // SAFETY: as above.
                unsafe { reader.expect_at(argument.pointer(), value, part.len() as u32) };
            }
        }
        // The next round immediately takes the same memory, after delayed readers and writers.
    }
    assert_eq!((a.wrong_elements(), b.wrong_elements(), stranger.wrong_elements()), (0, 0, 0));
    assert_eq!(allocator.drop_errors().count, 0);
    let reserved = allocator.stats().reserved_bytes.peak;
    println!("500 buffers in two parts on three streams, {reserved} bytes reserved");
    assert!(reserved <= 20 * MIB as u64, "the memory is reused");
}

#[test]
fn a_lent_buffer_is_read_and_written_in_order_and_never_freed_by_the_driver() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let [a, b, c] = [(); 3].map(|()| Worker::on_new_stream(device.context()));
    for worker in [&a, &b, &c] {
        allocator.register_stream(&worker.stream).expect("registered");
    }
    for round in 0..500_u32 {
        // SAFETY: written before it is read.
        let mut buffer = unsafe { allocator.alloc::<u32>(&a.stream, MIB) }.expect("allocated");
        a.delay();
        a.fill(&mut buffer, round);
        let copy: CudaSlice<u32> = {
            let lent = buffer.lend_on(&b.stream).expect("lent");
            // A third stream performs a delayed read that only cudarc tracks.
            c.delay();
            c.stream.clone_dtod(&*lent).expect("copied")
        };
        // SAFETY: the slice stays in the guard.
        let mut lent = unsafe { buffer.lend_mut_on(&b.stream) }.expect("lent");
        b.stream.memset_zeros(&mut *lent).expect("set");
        drop(lent);
        a.expect(&buffer, 0);
        let copy = allocator.clone_dtod(&c.stream, &copy).expect("copied");
        c.expect(&copy, round);
    }
    assert_eq!((a.wrong_elements(), b.wrong_elements(), c.wrong_elements()), (0, 0, 0));
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
    device.synchronize().expect("nothing failed");
    device.context().check_err().expect("cudarc freed no memory that it does not own");
}

/// The detection relies on the driver's answer for an event that was never recorded.
#[test]
fn a_forgotten_guard_keeps_the_memory_until_its_work_is_done() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let [own, other] = [(); 2].map(|()| Worker::on_new_stream(device.context()));
    allocator.register_stream(&own.stream).expect("registered");
    let target: CudaSlice<u32> = other.stream.alloc_zeros(MIB).expect("allocated by cudarc");
    for round in 1..300_u32 {
        // SAFETY: written before it is read.
        let mut buffer = unsafe { allocator.alloc::<u32>(&own.stream, MIB) }.expect("allocated");
        own.fill(&mut buffer, round);
        own.stream.synchronize().expect("done");
        let to = target.device_ptr(&other.stream).0;
        // SAFETY: both buffers are large enough. They live until the work is done, which is the property under test.
        let copy = |from| unsafe { memcpy_dtod_async(to, from, 4 * MIB, other.stream.cu_stream()) }.expect("submitted");
        match round % 3 {
            0 => {
                let lent = buffer.lend_on(&own.stream).expect("lent");
                let (from, guard) = lent.device_ptr(&other.stream);
                other.delay();
                copy(from);
                drop(guard);
                std::mem::forget(lent);
            }
            is_forgotten => {
                let (from, guard) = buffer.device_ptr(&other.stream);
                other.delay();
                copy(from);
                if is_forgotten == 1 { std::mem::forget(guard) } else { drop(guard) }
            }
        }
        let begun = Instant::now();
        drop(buffer);
        let dropped = begun.elapsed();
        drop(allocator.alloc_zeroed::<u32>(&own.stream, MIB).expect("allocated"));
        own.stream.synchronize().expect("done");
        let read = other.stream.clone_dtoh(&target).expect("copied");
        assert!(read.iter().all(|element| *element == round), "round {round}");
        if round > 290 {
            println!("round {round}: the drop took {dropped:?}");
        }
    }
    assert_eq!(allocator.drop_errors().count, 0);
}

/// Measures the time on the calling thread to create a buffer with contents and drop it.
#[test]
fn the_cost_of_buffers_with_content() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    const ROUNDS: u32 = 10_000;
    let time = |make: &dyn Fn()| {
        let mut times: Vec<f64> = (0..5)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..ROUNDS {
                    make();
                }
                let time = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
                stream.synchronize().expect("done");
                time
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[2]
    };
    println!("ns per buffer, median of 5: bytes, cudarc, symmalloc");
    for bytes in [4096, 4 * MIB] {
        let theirs = stream.alloc_zeros::<u8>(bytes).expect("made");
        let ours = allocator.alloc_zeros::<u8>(&stream, bytes).expect("made");
        let copies =
            (time(&|| drop(theirs.try_clone().expect("made"))), time(&|| drop(ours.try_clone().expect("made"))));
        let zeros = (
            time(&|| drop(stream.alloc_zeros::<u8>(bytes).expect("made"))),
            time(&|| drop(allocator.alloc_zeros::<u8>(&stream, bytes).expect("made"))),
        );
        println!("{bytes}: try_clone {:.0} / {:.0}, alloc_zeros {:.0} / {:.0}", copies.0, copies.1, zeros.0, zeros.1);
        let lend = time(&|| drop(ours.lend_on(&stream).expect("lent")));
        println!("{bytes}: lend_on {lend:.0}");
        assert_eq!(DeviceSlice::len(&ours), bytes);
    }
}
