//! Pinned host memory on the stub.

use crate::process::{calls, device, live, stub_test};
use symmalloc_core::config::Config;
use symmalloc_core::{PoolId, StreamId};
use symmalloc_cuda::CudaMemory;
use symmalloc_cuda::{CudaAllocator, PinnedAllocator, PinnedBackend};

stub_test!(pinned_buffers_carry_data_both_ways, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    let memory = CudaAllocator::new(&device, Config::default()).expect("made");
    pinned.register_stream(&stream).expect("registered");
    let mut from = pinned.alloc_host_zeroed::<u32>(1000).expect("allocated");
    assert!(from.as_slice().expect("idle").iter().all(|number| *number == 0));
    from.as_mut_slice().expect("idle").iter_mut().zip(0..).for_each(|(number, index)| *number = index);
    let mut there = memory.alloc_zeroed::<u32>(&stream, 1000).expect("allocated");
    stream.memcpy_htod(&from, &mut there).expect("copied");
    let mut back = pinned.alloc_host_zeroed::<u32>(1000).expect("allocated");
    stream.memcpy_dtoh(&there, &mut back).expect("copied");
    let waits = calls("cuStreamSynchronize");
    assert_eq!(back.as_slice().expect("done"), from.as_slice().expect("done"));
    assert_eq!(calls("cuStreamSynchronize"), waits + 2, "the host waits when it reads");
    assert_eq!(back.as_slice().expect("done")[999], 999);
    assert_eq!(calls("cuStreamSynchronize"), waits + 2, "a second read does not wait");
    drop((from, back));
    pinned.trim_all().expect("trimmed");
    assert_eq!(live().host_bytes, 0);
});

stub_test!(pinned_memory_is_reused_after_the_copies_from_it, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    let memory = CudaAllocator::new(&device, Config::default()).expect("made");
    assert_eq!(pinned.register_stream(&stream).expect("registered"), StreamId(1));
    let mut there = memory.alloc_zeroed::<u8>(&stream, 4096).expect("allocated");
    let first = pinned.alloc_host_zeroed::<u8>(4096).expect("allocated");
    let place = pinned.core().allocation(first.handle()).expect("live").placement;
    stream.memcpy_htod(&first, &mut there).expect("copied");
    drop(first);
    let waits = || (calls("cuEventSynchronize"), calls("cuStreamSynchronize"));
    let before = waits();
    let second = pinned.alloc_host_zeroed::<u8>(4096).expect("allocated");
    assert_eq!(pinned.core().allocation(second.handle()).expect("live").placement, place);
    assert_eq!(waits(), (before.0 + 1, before.1), "the host waits for this copy, not for the whole stream");
    drop(second);
    drop(pinned.alloc_host_zeroed::<u8>(4096).expect("allocated"));
    assert_eq!(waits(), (before.0 + 1, before.1), "memory without pending copies is reused without waiting");
});

stub_test!(the_host_waits_immediately_for_a_copy_on_an_unregistered_stream, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
    let memory = CudaAllocator::new(&device, Config::default()).expect("made");
    let mut there = memory.alloc_zeroed::<u8>(&stream, 64).expect("allocated");
    let from = pinned.alloc_host_zeroed::<u8>(64).expect("allocated");
    let before = calls("cuStreamSynchronize");
    stream.memcpy_htod(&from, &mut there).expect("copied");
    assert_eq!(calls("cuStreamSynchronize"), before + 1);
});

stub_test!(pinned_memory_has_equal_placements_on_all_ranks, {
    let device = device();
    let history = || {
        let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("made");
        let kept: Vec<_> = (1..30).map(|n| pinned.alloc_host_zeroed::<u8>(n * 50_000).expect("allocated")).collect();
        drop(kept);
        let _again: Vec<_> = (1..9).map(|n| pinned.alloc_host_zeroed::<u8>(n * 99_000).expect("allocated")).collect();
        assert!(!pinned.core().backend().is_expandable());
        pinned.digest(PoolId::DEFAULT).expect("known")
    };
    assert_eq!(history(), history());
    assert_eq!(live().host_bytes, 0);
    drop(PinnedBackend::new(&device));
});
