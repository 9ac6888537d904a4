//! Buffers, driver calls and memory on the device.

use crate::device;
use crate::kernels::Kernels;
use cudarc::driver::result::{self, ctx};
use cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg, sys};
use std::time::{Duration, Instant};
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_cuda::{
    CudaAllocator, CudaBackend, CudaDevice, CudaError, CudaMemory, DeviceBuffer, GraphPool, PinnedAllocator,
};

const MIB: usize = 1 << 20;

#[test]
fn a_cache_hit_without_fences_makes_no_driver_call() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    drop(allocator.alloc_zeroed::<u8>(&stream, 64 * MIB).expect("allocated"));
    let before = CudaDevice::driver_calls();
    for round in 0..1000_usize {
        // SAFETY: never read.
        let buffers = [3, 7, 1].map(|size| unsafe { allocator.alloc::<u8>(&stream, size * MIB + round) });
        drop(buffers);
    }
    let calls = CudaDevice::driver_calls() - before;
    println!("3000 allocations and frees: {calls} driver calls");
    assert_eq!(calls, 0);
}

#[test]
fn a_trim_releases_memory_to_the_device() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let small = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("allocated");
    let before = free();
    drop(allocator.alloc_zeroed::<u8>(&stream, 4096 * MIB).expect("allocated"));
    let held = before - free();
    let released = allocator.trim_all().expect("trimmed");
    let left = before.saturating_sub(free());
    println!("4 GiB: the driver reports {held} bytes held, trim released {released}, {left} left");
    assert!(held >= 4096 * MIB as u64 - (2 << 20) && released >= 4094 * MIB as u64 && left <= 2 << 20);
    assert_eq!(stream.clone_dtoh(&small).expect("copied"), vec![0; MIB], "other buffers are unchanged");
}

#[test]
fn a_stitched_buffer_is_the_memory_of_its_pieces_and_no_other() {
    let Some(device) = device() else { return };
    for granule_mib in [2, 20] {
        let text = format!("stitching:true,stitching_granule_mb:{granule_mib},stitching_least_mb:{granule_mib}");
        let allocator = CudaAllocator::new(&device, text.parse().expect("valid")).expect("made");
        let stream = device.context().new_stream().expect("a stream");
        let piece = granule_mib * MIB;
        let buffers: Vec<_> = (0..32_u8)
            .map(|value| {
                let mut buffer = allocator.alloc_zeroed::<u8>(&stream, piece).expect("allocated");
                stream.memset_zeros(&mut buffer).expect("set");
                stream.memcpy_htod(&vec![value; piece], &mut buffer).expect("copied");
                buffer
            })
            .collect();
        let (kept, freed): (Vec<_>, Vec<_>) = buffers.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        drop(freed);
        let free = device.memory_info().expect("queried").free_bytes;
        let before = Instant::now();
        // SAFETY: written before it is read.
        let mut whole = unsafe { allocator.alloc::<u8>(&stream, 15 * piece) }.expect("allocated");
        println!("15 granules of {granule_mib} MiB: stitched in {:?}", before.elapsed());
        assert_eq!(whole.placement().segment.0, 1);
        // The driver may need memory for its page tables.
        assert!(free.saturating_sub(device.memory_info().expect("queried").free_bytes) <= 8 << 20);
        let pattern: Vec<u8> = (0..15 * piece).map(|at| (at / 4096) as u8 ^ (at % 251) as u8).collect();
        stream.memcpy_htod(&pattern, &mut whole).expect("copied");
        assert!(stream.clone_dtoh(&whole).expect("copied") == pattern, "the buffer holds the written data");
        drop(whole);
        let before = Instant::now();
        // SAFETY: written before it is read.
        let mut again = unsafe { allocator.alloc::<u8>(&stream, 15 * piece - 4096) }.expect("allocated");
        println!("the same range again: {:?}", before.elapsed());
        stream.memset_zeros(&mut again).expect("set");
        for (value, buffer) in &kept {
            let bytes = stream.clone_dtoh(buffer).expect("copied");
            assert!(bytes.iter().all(|byte| usize::from(*byte) == *value), "only its neighbors were written");
        }
        drop((again, kept));
        let released = allocator.trim_all().expect("trimmed");
        assert_eq!(released, 32 * piece as u64);
    }
}

#[test]
fn prefetched_memory_is_usable_and_is_released() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let backend = CudaBackend::builder(&device).prefetch_bytes(256 << 20).build().expect("supported");
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let spare_bytes = || allocator.core().backend().spare_bytes();
    let stream = device.context().new_stream().expect("a stream");
    let small = allocator.alloc_zeroed::<u8>(&stream, 20 * MIB).expect("allocated");
    stream.synchronize().expect("done");
    assert_eq!(allocator.trim_all().expect("trimmed"), 0);
    let before = free();
    let mut buffers = Vec::new();
    for value in 0..12_u8 {
        let begun = Instant::now();
        while value > 0 && spare_bytes() < 20 << 20 {
            assert!(begun.elapsed() < Duration::from_secs(10), "no memory is prefetched");
            std::thread::yield_now();
        }
        // SAFETY: written before it is read.
        let mut buffer = unsafe { allocator.alloc::<u8>(&stream, 20 * MIB) }.expect("allocated");
        stream.memcpy_htod(&vec![value; 20 * MIB], &mut buffer).expect("copied");
        buffers.push((value, buffer));
    }
    for (value, buffer) in &buffers {
        assert!(stream.clone_dtoh(buffer).expect("copied").iter().all(|byte| byte == value), "buffer {value}");
    }
    drop(buffers);
    println!("{} bytes prefetched, {} released by a trim", spare_bytes(), allocator.trim_all().expect("trimmed"));
    assert!(spare_bytes() == 0 && before.saturating_sub(free()) <= 2 << 20);
    drop(small);
}

#[test]
fn without_virtual_memory_segments_are_fixed_and_are_released() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let backend = CudaBackend::builder(&device).plain().build().expect("every device supports cuMemAlloc");
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let small = allocator.alloc_zeroed::<u8>(&stream, MIB / 2).expect("allocated");
    let before = free();
    let large = allocator.alloc_zeroed::<u8>(&stream, 1024 * MIB).expect("allocated");
    assert_eq!(stream.clone_dtoh(&large.slice(1023 * MIB..)).expect("copied"), vec![0; MIB]);
    drop(large);
    let held = before - free();
    let released = allocator.trim_all().expect("trimmed");
    println!("1 GiB of cuMemAlloc: {held} bytes held, trim released {released}, {} left", before - free());
    assert_eq!((held, released, free()), (1 << 30, 1 << 30, before));
    assert_eq!(stream.clone_dtoh(&small).expect("copied"), vec![0; MIB / 2]);
}

#[test]
fn a_full_device_is_an_error_that_changes_nothing() {
    let Some(device) = device() else { return };
    let free = || device.memory_info().expect("queried").free_bytes;
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let kept = allocator.alloc_zeroed::<u8>(&stream, 8 * MIB).expect("allocated");
    device.context().bind_to_thread().expect("current");
    // SAFETY: freed below, and not used.
    let others = unsafe { result::malloc_sync(free() as usize - 1024 * MIB) }.expect("allocated");
    let (before, reserved) = (free(), allocator.stats().reserved_bytes.current);
    // SAFETY: never read.
    let error = unsafe { allocator.alloc::<u8>(&stream, 4096 * MIB) }.expect_err("only 1 GiB is free");
    println!("{error}");
    let CudaError::Allocate(AllocateError::OutOfMemory(error)) = error else { panic!("unexpected error: {error:?}") };
    assert!(matches!(error.cause, OutOfMemoryCause::Driver(_)), "{error:?}");
    assert_eq!((free(), allocator.stats().reserved_bytes.current), (before, reserved));
    // SAFETY: allocated above.
    unsafe { result::free_sync(others) }.expect("freed");
    drop(allocator.alloc_zeroed::<u8>(&stream, 4096 * MIB).expect("the memory is free again"));
    assert_eq!(stream.clone_dtoh(&kept).expect("copied"), vec![0; 8 * MIB]);
}

#[cfg(unix)]
#[test]
fn memory_can_be_exported_as_its_traits_state() {
    use std::os::fd::{FromRawFd, OwnedFd, RawFd};
    let Some(device) = device() else { return };
    let backend = CudaBackend::builder(&device).build().expect("supported");
    let traits = backend.traits();
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let buffer = allocator.alloc_zeroed::<u8>(&stream, MIB).expect("allocated");
    let (address, posix_fd) =
        (buffer.device_ptr(&stream).0, sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    device.context().bind_to_thread().expect("current");
    let (mut handle, mut fd) = (0, RawFd::from(-1));
    // SAFETY: `handle` is valid for writing, and the address is mapped.
    unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, address as *mut _) }.result().expect("a handle");
    // Read as words: handle types are or-ed, which cudarc's enum cannot represent.
    let mut properties = [0_u64; size_of::<sys::CUmemAllocationProp>() / 8];
    // SAFETY: the properties have this size and alignment and are valid for writing, and the handle is alive.
    unsafe { sys::cuMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr().cast(), handle) }
        .result()
        .expect("known");
    let [_, _, _, flags] = properties.map(u64::to_ne_bytes);
    assert_eq!(flags[1] != 0, traits.gpu_direct_rdma);
    // SAFETY: `fd` is valid for writing, and the handle is alive.
    let exported = unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, posix_fd, 0) }.result();
    assert_eq!(exported.is_ok(), traits.posix_fd, "{exported:?}");
    // SAFETY: retained above.
    unsafe { sys::cuMemRelease(handle) }.result().expect("released");
    if exported.is_ok() {
        // SAFETY: just created, and not owned elsewhere.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    println!("{traits:?}");
}

#[test]
fn calls_leave_a_thread_without_a_context() {
    let Some(device) = device() else { return };
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let (main, side) = (allocator.register_stream(&a).expect("an id"), allocator.register_stream(&b).expect("an id"));
    std::thread::spawn(move || {
        let is_without = || ctx::get_current().expect("queried").is_none();
        assert!(is_without());
        for _ in 0..2 {
            let block = allocator.core().allocate(PoolId::DEFAULT, main, 4 << 20).expect("allocated");
            allocator.core().record_use(block.handle, side).expect("known");
            allocator.core().free(block.handle).expect("freed");
            assert!(is_without());
        }
        let buffer = allocator.alloc_zeroed::<u8>(&a, 8 * MIB).expect("allocated");
        assert!(is_without());
        let _pointer = buffer.device_ptr(&b).0;
        drop(buffer);
        allocator.wait(&a, &b).expect("ordered");
        allocator.synchronize(&a).expect("done");
        allocator.trim_all().expect("trimmed");
        assert!(is_without());
        drop((allocator, a, b));
        device.memory_info().expect("queried");
    })
    .join()
    .expect("no panic");
}

#[test]
fn buffers_go_through_copies_kernels_and_other_streams() {
    let Some(device) = device() else { return };
    let kernels = Kernels::compile(device.context());
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    pinned.register_stream(&b).expect("registered");
    for round in 0..200_u32 {
        let count = 100_000 + round;
        let mut buffer = allocator.alloc_zeroed::<u32>(&a, count as usize).expect("allocated");
        {
            let argument = buffer.on(&a);
            // SAFETY: writes `count` elements of a buffer that has them, on the stream of the argument.
            unsafe {
                let mut launch = a.launch_builder(&kernels.fill);
                launch.arg(&argument).arg(&round).arg(&count).launch(LaunchConfig::for_num_elems(count))
            }
            .expect("launched");
        }
        let mut host = pinned.alloc_host_zeroed::<u32>(count as usize).expect("allocated");
        b.memcpy_dtoh(&buffer, &mut host).expect("copied on another stream, which waits");
        drop(buffer);
        assert!(host.as_slice().expect("done").iter().all(|value| *value == round));
    }
    assert_eq!(allocator.drop_errors().count, 0);
}

#[test]
fn a_kernel_that_takes_the_buffer_itself_is_ordered_behind_other_streams() {
    let Some(device) = device() else { return };
    let kernels = Kernels::compile(device.context());
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let count = MIB as u32;
    let (grid, one) = (LaunchConfig::for_num_elems(count), LaunchConfig::for_num_elems(1));
    let mut buffer = allocator.alloc_zeroed::<u32>(&a, MIB).expect("allocated");
    let wrong = [&a, &b].map(|stream| stream.alloc_zeros::<u32>(1).expect("a counter"));
    let delay = || {
        let cycles = 400_000_u64;
        // SAFETY: touches no memory.
        unsafe { b.launch_builder(&kernels.delay).arg(&cycles).launch(one) }.expect("launched");
    };
    for round in 1..=100_u32 {
        let (theirs, ours) = (2 * round, 2 * round + 1);
        delay();
        {
            let argument = buffer.on(&b);
            // SAFETY: writes elements that the buffer has, on the stream of the argument.
            unsafe { b.launch_builder(&kernels.fill).arg(&argument).arg(&theirs).arg(&count).launch(grid) }
                .expect("launched");
        }
        // SAFETY: reads the buffer on its own stream.
        unsafe {
            let mut launch = a.launch_builder(&kernels.count_others);
            launch.arg(&buffer).arg(&theirs).arg(&count).arg(&wrong[0]).launch(grid)
        }
        .expect("launched after the writer");
        // SAFETY: writes the buffer on its own stream.
        unsafe { a.launch_builder(&kernels.fill).arg(&mut buffer).arg(&ours).arg(&count).launch(grid) }
            .expect("launched");
        for late in [true, false] {
            if late {
                delay();
            }
            let argument = buffer.read_on(&b);
            // SAFETY: reads the buffer on the stream of the argument.
            unsafe {
                let mut launch = b.launch_builder(&kernels.count_others);
                launch.arg(&argument).arg(&ours).arg(&count).arg(&wrong[1]).launch(grid)
            }
            .expect("launched after the writer");
        }
        // SAFETY: writes the buffer on its own stream.
        unsafe { a.launch_builder(&kernels.fill).arg(&mut buffer).arg(&0_u32).arg(&count).launch(grid) }
            .expect("launched after the readers");
    }
    let found = [&a, &b].map(|stream| stream.synchronize());
    assert!(found.iter().all(Result::is_ok), "{found:?}");
    let wrong = [a.clone_dtoh(&wrong[0]).expect("copied")[0], b.clone_dtoh(&wrong[1]).expect("copied")[0]];
    assert_eq!(wrong, [0, 0], "wrong elements on the buffer's stream and on the other stream");
}

#[test]
fn a_graph_keeps_its_memory_and_a_second_capture_gets_the_same_placements() {
    let Some(device) = device() else { return };
    let kernels = Kernels::compile(device.context());
    let allocator = CudaAllocator::new(&device, Config::default()).expect("made");
    let (a, b) = (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    allocator.register_stream(&a).expect("registered");
    allocator.register_stream(&b).expect("registered");
    let pool =
        GraphPool::new(&allocator, PoolConfig::builder().reserved(256 << 20).build().expect("valid")).expect("made");
    let count = MIB as u32;
    let grid = LaunchConfig::for_num_elems(count);
    let capture = |value: u32| {
        let under_way = pool.begin(&a).expect("begun");
        let mut places = Vec::new();
        let mut output = allocator.alloc_zeroed::<u32>(&a, MIB).expect("allocated");
        places.push(output.placement());
        for step in 0..4 {
            // SAFETY: never read.
            let temporary = unsafe { allocator.alloc::<u32>(&a, MIB * (1 + step)) }.expect("allocated");
            places.push(temporary.placement());
            allocator.wait(&b, &a).expect("joins");
            let side: DeviceBuffer<u32> = allocator.alloc_zeroed(&b, MIB).expect("allocated");
            places.push(side.placement());
            let pointer = side.device_ptr(&b).0;
            // SAFETY: writes elements that the buffer has.
            unsafe { b.launch_builder(&kernels.fill).arg(&pointer).arg(&value).arg(&count).launch(grid) }
                .expect("captured");
            allocator.wait(&a, &b).expect("joins back");
        }
        // SAFETY: as above.
        unsafe { a.launch_builder(&kernels.fill).arg(&mut output).arg(&value).arg(&count).launch(grid) }
            .expect("captured");
        (under_way.end().expect("the capture is valid"), output, places)
    };
    let (first, output, places) = capture(7);
    drop(output);
    let (second, mut output, again) = capture(8);
    assert_eq!(places, again);
    // Eager work and a trim in between must not touch the graphs' memory.
    drop(allocator.alloc_zeroed::<u8>(&a, 512 * MIB).expect("allocated"));
    allocator.trim_all().expect("trimmed");
    for _ in 0..20 {
        for (graph, value) in [(&first, 7), (&second, 8)] {
            a.memset_zeros(&mut output).expect("set");
            graph.launch(&a).expect("launched");
            assert!(a.clone_dtoh(&output).expect("copied").iter().all(|found| *found == value));
        }
    }
    assert_eq!(allocator.drop_errors().count, 0);
}
