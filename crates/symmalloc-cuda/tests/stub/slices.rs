//! Buffers in place of `CudaSlice`s: cudarc's method names, owned parts, and buffers lent as `CudaSlice`s.

use crate::process::{calls, device, fail, heal, hold, live, stub_test};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;
use symmalloc_core::config::Config;
use symmalloc_cuda::{BufferPart, BufferView, CudaAllocator, CudaError, DropError, SharedPart};

const MIB: usize = 1 << 20;

fn allocator() -> CudaAllocator {
    CudaAllocator::new(&device(), Config::default()).expect("the stub supports it")
}

fn stream(allocator: &CudaAllocator) -> Arc<CudaStream> {
    let stream = allocator.device().context().new_stream().expect("a stream");
    allocator.register_stream(&stream).expect("registered");
    stream
}

fn live_allocations(allocator: &CudaAllocator) -> u64 {
    allocator.stats().usage.all.allocations.current
}

fn waits() -> u64 {
    calls("cuStreamWaitEvent")
}

stub_test!(buffers_are_created_from_content_like_cuda_slices, {
    let allocator = allocator();
    let stream = stream(&allocator);
    let numbers: Vec<u32> = (0..1000).collect();
    assert!(allocator.null::<u32>(&stream).expect("made").is_empty());
    let zeros = allocator.alloc_zeros::<u32>(&stream, 1000).expect("made");
    assert_eq!(stream.clone_dtoh(&zeros).expect("copied"), vec![0; 1000]);
    let buffer = allocator.clone_htod(&stream, &numbers).expect("made");
    assert_eq!((buffer.len(), buffer.num_bytes(), buffer.ordinal()), (1000, 4000, 0));
    assert_eq!(buffer.context().cu_ctx(), allocator.device().context().cu_ctx());
    let copy = buffer.try_clone().expect("made");
    drop(buffer);
    assert_eq!(stream.clone_dtoh(&copy).expect("copied"), numbers);
    let of_a_part = allocator.clone_dtod(&stream, &copy.slice(100..200)).expect("made");
    assert_eq!(Vec::try_from(of_a_part).expect("copied"), numbers[100..200]);
    let of_a_slice = allocator.clone_dtod(&stream, &*copy.lend_on(&stream).expect("lent")).expect("made");
    assert_eq!(Vec::try_from(of_a_slice).expect("copied"), numbers);
    let on = allocator.for_stream(&stream).expect("registered");
    assert!(on.null::<u8>().expect("made").is_empty());
    assert_eq!(Vec::try_from(on.alloc_zeros::<u8>(3).expect("made")).expect("copied"), [0; 3]);
    let borrows = on.clone_htod(&numbers).expect("made");
    let copies = [borrows.try_clone().expect("made"), on.clone_dtod(&borrows).expect("made")];
    assert_eq!(copies.map(|copy| Vec::try_from(copy).expect("copied")), [numbers.clone(), numbers.clone()]);
    assert_eq!(Vec::try_from(allocator.null::<u32>(&stream).expect("made")).expect("no elements"), [0; 0]);
    drop((zeros, copy, borrows));
    assert_eq!(live_allocations(&allocator), 0);
});

stub_test!(a_failed_copy_leaves_no_buffer_and_preserves_the_context, {
    let allocator = allocator();
    let stream = stream(&allocator);
    let buffer = allocator.clone_htod(&stream, &[1_u8; 100]).expect("made");
    for (call, copy) in [("cuMemcpyHtoDAsync_v2", true), ("cuMemcpyDtoDAsync_v2", false)] {
        fail(call, 1, 719);
        let copied = if copy { allocator.clone_htod(&stream, &[1_u8; 100]) } else { buffer.try_clone() };
        let Err(CudaError::Driver(error)) = copied else { panic!("{call} must fail") };
        assert_eq!((error.call, error.code), (call, 719));
        heal();
    }
    assert_eq!(live_allocations(&allocator), 1);
    // Another stream copies memory of the first stream, and waits for it.
    let other = self::stream(&allocator);
    let before = waits();
    let copy = allocator.clone_dtod(&other, &buffer).expect("made");
    assert_eq!(waits(), before + 1);
    assert_eq!(copy.stream().cu_stream(), other.cu_stream());
});

stub_test!(buffers_are_sliced_like_cuda_slices, {
    let allocator = allocator();
    let stream = stream(&allocator);
    let numbers: Vec<u32> = (0..100).collect();
    let mut buffer = allocator.clone_htod(&stream, &numbers).expect("made");
    fn read(view: &BufferView<'_, u32>) -> Vec<u32> {
        DeviceSlice::stream(view).clone_dtoh(view).expect("copied")
    }
    assert!(buffer.try_slice(50..101).is_none() && buffer.try_split_at(101).is_none());
    assert!(buffer.try_slice_mut(..=100).is_none() && buffer.try_split_at_mut(101).is_none());
    assert_eq!(read(&buffer.try_slice(50..).expect("within the bounds").slice(1..3)), [51, 52]);
    let (low, high) = buffer.try_split_at(40).expect("within the bounds");
    assert_eq!((low.len(), read(&high.slice(..2))), (40, vec![40, 41]));
    let chunks: Vec<_> = buffer.as_view().chunks_exact(25).map(|chunk| read(&chunk.slice(..1))).collect();
    assert_eq!(chunks, [[0], [25], [50], [75]]);
    {
        let (low, mut high) = buffer.try_split_at_mut(50).expect("within the bounds");
        let (mut quarter, mut next) = high.split_at_mut(25);
        stream.memcpy_htod(&[7; 5], &mut quarter.try_slice_mut(20..).expect("within the bounds")).expect("copied");
        stream.memcpy_htod(&[8; 5], &mut next.slice_mut(..5)).expect("copied");
        assert!(high.try_split_at_mut(51).is_none() && low.try_slice(..51).is_none());
        assert_eq!(read(&low.slice(49..)), [49]);
        assert_eq!(read(&high.into_view().slice(19..31)), [69, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 80]);
    }
    for (index, mut chunk) in buffer.as_view_mut().chunks_exact_mut(50).enumerate() {
        stream.memcpy_htod(&[index as u32], &mut chunk.slice_mut(..1)).expect("copied");
    }
    assert_eq!((read(&buffer.slice(..2)), read(&buffer.slice(50..51))), (vec![0, 1], vec![1]));
    let (pointer, _guard) = buffer.slice(10..).view_ptr(&stream);
    assert_eq!(pointer, buffer.device_ptr(&stream).0 + 40);
});

stub_test!(bytes_transmute_to_another_type_if_size_and_alignment_fit, {
    let allocator = allocator();
    let stream = stream(&allocator);
    let mut bytes = allocator.alloc_zeros::<u8>(&stream, 10).expect("made");
    // SAFETY: every bit pattern is a valid `u32` and `u64`.
    unsafe {
        assert!(bytes.transmute::<u32>(3).is_none(), "12 bytes do not fit in 10");
        assert!(bytes.transmute::<u64>(usize::MAX).is_none(), "the size overflows");
        assert!(bytes.slice(1..).transmute::<u32>(1).is_none(), "not aligned");
        let mut words = bytes.transmute_mut::<u32>(2).expect("8 bytes of 10");
        stream.memcpy_htod(&[0x0102_0304, 0x0506_0708], &mut words).expect("copied");
        assert_eq!(words.transmute::<u16>(4).expect("8 bytes").len(), 4);
        let mut tail = words.slice_mut(1..);
        let mut tail = tail.transmute_mut::<u8>(4).expect("4 bytes");
        stream.memcpy_htod(&[9], &mut tail.slice_mut(3..)).expect("copied");
        let seen = bytes.slice(4..).transmute::<u32>(1).expect("aligned");
        assert_eq!(stream.clone_dtoh(&seen).expect("copied"), [0x0906_0708]);
    }
});

stub_test!(the_last_owned_part_frees_the_memory, {
    let allocator = allocator();
    let stream = stream(&allocator);
    let buffer = allocator.clone_htod(&stream, &(0..100_u32).collect::<Vec<_>>()).expect("made");
    let handle = buffer.handle();
    let mut first: BufferPart<u32> = buffer.into_part();
    let mut rest = first.split_off(10);
    let mut last = rest.split_off(80);
    assert_eq!((first.len(), rest.len(), last.len()), (10, 80, 10));
    assert!(first.try_split_off(11).is_none());
    stream.memcpy_htod(&[500; 10], &mut last).expect("copied");
    assert_eq!(stream.clone_dtoh(&rest.as_view().slice(78..)).expect("copied"), [88, 89]);
    let shared: SharedPart<u32> = last.into_shared();
    let (tail, twin) = (shared.slice(8..), shared.clone());
    assert!(shared.try_slice(..11).is_none() && shared.try_split_at(11).is_none());
    let shared = shared.try_into_part().expect_err("other references exist");
    drop((first, rest, shared, twin));
    assert_eq!(live_allocations(&allocator), 1, "the last part keeps the memory");
    assert!(allocator.core().allocation(handle).is_ok());
    let mut tail =
        std::thread::spawn(move || tail.try_into_part().expect("the only reference")).join().expect("no panic");
    stream.memcpy_htod(&[7], &mut tail).expect("copied");
    assert_eq!(stream.clone_dtoh(&tail).expect("copied"), [7, 500]);
    assert_eq!(DeviceSlice::stream(&tail).cu_stream(), stream.cu_stream());
    drop(tail);
    assert_eq!(live_allocations(&allocator), 0);
    let mut empty = allocator.null::<u32>(&stream).expect("made").into_part();
    let others = empty.split_off(0).into_shared();
    assert_eq!((empty.device_ptr(&stream).0, others.slice(..).device_ptr(&stream).0), (0, 0));
});

stub_test!(streams_that_write_different_parts_do_not_wait_for_each_other, {
    let allocator = allocator();
    let [a, b, c] = [(); 3].map(|()| stream(&allocator));
    let mut low = allocator.alloc_zeros::<u8>(&a, 2 * MIB).expect("made").into_part();
    let mut high = low.split_off(MIB);
    let before = waits();
    // Both pointers are taken before work is submitted with either of them.
    let (low_pointer, low_guard) = low.device_ptr_mut(&b);
    let (high_pointer, high_guard) = high.device_ptr_mut(&c);
    assert_eq!(
        (high_pointer - low_pointer, waits() - before),
        (MIB as u64, 2),
        "each part waits only for its initialization"
    );
    let slow = hold(b.cu_stream() as u64);
    drop((low_guard, high_guard));
    c.memcpy_htod(&[3], &mut high).expect("copied");
    assert_eq!(
        c.clone_dtoh(&high.as_view().slice(..1)).expect("copied"),
        [3],
        "the parts are independent of each other"
    );
    drop(slow);
    let before = waits();
    drop(low.device_ptr(&c));
    assert_eq!(waits(), before + 1, "a reader waits for the part's writer");
    let others = low.split_off(1);
    assert_eq!(waits(), before + 3, "before a part is split, the buffer's stream waits for the other two");
    drop(others.device_ptr(&b));
    assert_eq!(waits(), before + 4);
    let records = calls("cuEventRecord");
    drop((low, high, others));
    assert_eq!(calls("cuEventRecord"), records + 2, "the free is ordered after both streams that used it");
});

stub_test!(a_part_that_an_unknown_stream_used_is_waited_for_or_kept, {
    let allocator = allocator();
    let a = stream(&allocator);
    let foreign = allocator.device().context().new_stream().expect("a stream");
    for refused in [false, true] {
        let mut low = allocator.alloc_zeros::<u8>(&a, 2 * MIB).expect("made").into_part();
        let high = low.split_off(MIB);
        drop(high.device_ptr(&foreign));
        let before = waits();
        drop(low);
        assert_eq!(waits(), before);
        if refused {
            fail("cuStreamWaitEvent", 1, 719);
        }
        drop(high);
        assert_eq!((waits(), live_allocations(&allocator)), (before + 1, u64::from(refused)));
    }
    heal();
    let errors = allocator.drop_errors();
    assert!(errors.count == 1 && matches!(errors.last, Some(DropError::Order(_))), "{errors:?}");
});

stub_test!(kernels_accept_parts, {
    let allocator = allocator();
    let (a, b) = (stream(&allocator), stream(&allocator));
    let module = a.context().load_module(Ptx::from_src("")).expect("loaded");
    let kernel = module.load_function("kernel").expect("the stub accepts any kernel name");
    let mut part = allocator.alloc_zeros::<u8>(&a, MIB).expect("made").into_part();
    let pointer = part.on(&b).pointer();
    assert_eq!(part.read_on(&b).pointer(), pointer);
    let before = waits();
    a.launch_builder(&kernel).arg(&part);
    assert_eq!(waits(), before + 1, "a kernel that reads waits for the writer");
    a.launch_builder(&kernel).arg(&mut part);
    let shared = part.into_shared();
    let tail = shared.slice(8..);
    assert_eq!(tail.read_on(&a).pointer(), shared.read_on(&a).pointer() + 8);
    let before = waits();
    a.launch_builder(&kernel).arg(&tail);
    assert_eq!(waits(), before);
});

stub_test!(a_lent_buffer_is_a_cuda_slice_that_frees_nothing, {
    let allocator = allocator();
    let a = stream(&allocator);
    let mut buffer = allocator.clone_htod(&a, &[1_u32, 2, 3, 4]).expect("made");
    let (events, frees) = (live().events, || calls("cuMemFreeAsync") + calls("cuMemFree_v2"));
    {
        let lent = buffer.lend_on(&a).expect("lent");
        let slice: &CudaSlice<u32> = &lent;
        assert_eq!((slice.len(), a.clone_dtoh(slice).expect("copied")), (4, vec![1, 2, 3, 4]));
        assert_eq!(slice.device_ptr(&a).0, buffer.device_ptr(&a).0);
    }
    // SAFETY: the slice stays in the guard.
    let mut lent = unsafe { buffer.lend_mut_on(&a) }.expect("lent");
    a.memcpy_htod(&[9_u32], &mut *lent).expect("copied");
    drop(lent);
    assert_eq!(a.clone_dtoh(&*buffer.slice(..2).lend_on(&a).expect("lent")).expect("copied"), [9, 2]);
    assert_eq!((live().events, frees(), live_allocations(&allocator)), (events, 0, 1));
    drop(buffer);
    assert_eq!((frees(), live_allocations(&allocator)), (0, 0));
});

stub_test!(uses_of_a_lent_buffer_order_streams_and_fence_the_memory, {
    let allocator = allocator();
    let [a, b, c] = [(); 3].map(|()| stream(&allocator));
    let mut buffer = allocator.alloc_zeros::<u8>(&a, MIB).expect("made");
    let (from, to) = (vec![5_u8; MIB], allocator.alloc_zeros::<u8>(&c, MIB).expect("made"));
    let mut to = to;
    let slow = hold(a.cu_stream() as u64);
    a.memcpy_htod(&from, &mut buffer).expect("copied");
    {
        let lent = buffer.lend_on(&b).expect("lent");
        c.memcpy_dtod(&*lent, &mut to).expect("submitted"); // a read on a third stream, which only cudarc tracks
    }
    let before = waits();
    a.memset_zeros(&mut buffer).expect("submitted");
    assert_eq!(waits(), before + 1, "the next writer waits for the stream that it was lent on");
    drop(slow);
    assert_eq!(c.clone_dtoh(&to).expect("copied"), from, "the copy runs after the writer, and before the next one");
    let records = calls("cuEventRecord");
    drop(buffer);
    assert_eq!(calls("cuEventRecord"), records + 1, "the free is ordered after the stream that it was lent on");
});

stub_test!(lending_fails_if_the_driver_creates_no_event, {
    let allocator = allocator();
    let a = stream(&allocator);
    let buffer = allocator.alloc_zeros::<u8>(&a, MIB).expect("made");
    fail("cuEventCreate", 1, 2);
    let Err(CudaError::Driver(error)) = buffer.lend_on(&a) else { panic!("the slice was lent without events") };
    assert_eq!((error.call, error.code), ("cuEventCreate", 2));
    heal();
    drop(buffer.lend_on(&a).expect("lent"));
});
