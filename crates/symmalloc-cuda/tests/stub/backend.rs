//! The backend's contract, memory and handling of the thread's context.

use crate::process::{calls, device, fail, heal, live, stub_test};
use cudarc::driver::result::ctx;
use cudarc::driver::sys::CUcontext;
use std::sync::Arc;
use symmalloc_core::backend::{Backend, Range, Reason};
use symmalloc_core::ids::StreamId;
use symmalloc_cuda::{CudaBackend, CudaBackendBuilder, CudaDevice, CudaError, CudaMemory};
use symmalloc_harness::conformance::conformance;

const MIB: u64 = 1 << 20;

/// Creates a backend with four streams.
fn with_streams(device: &Arc<CudaDevice>, builder: CudaBackendBuilder) -> CudaBackend {
    let backend = builder.build().expect("the stub supports it");
    for id in 0..4 {
        let stream = device.context().new_stream().expect("a stream");
        assert_eq!(backend.add_stream(stream), StreamId(id));
    }
    backend
}

stub_test!(the_backend_keeps_the_contract, {
    let device = device();
    conformance(|| with_streams(&device, CudaBackend::builder(&device)));
    let left = live();
    assert_eq!((left.device_bytes, left.ranges, left.events, left.mappings), (0, 0, 0, 0), "{left:?}");
});

stub_test!(the_backend_keeps_the_contract_with_large_chunks, {
    let device = device();
    conformance(|| with_streams(&device, CudaBackend::builder(&device).chunk_bytes(8 * MIB)));
    let left = live();
    assert_eq!((left.device_bytes, left.ranges, left.events, left.mappings), (0, 0, 0, 0), "{left:?}");
});

stub_test!(mapping_a_whole_range_creates_one_chunk_and_growth_is_divided, {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device).chunk_bytes(2 * MIB));
    let whole = backend.reserve(16 * MIB).expect("reserve");
    backend.map(whole, 0, 16 * MIB).expect("map");
    assert_eq!(live().mappings, 1);
    let growing = backend.reserve(64 * MIB).expect("reserve");
    backend.map(growing, 0, 16 * MIB).expect("map");
    assert_eq!(live().mappings, 1 + 8);
    assert_eq!(calls("cuMemSetAccess"), 1 + 8, "a chunk is made accessible before the next one is mapped");

    // A part of the growing range is released immediately; a part of the whole range only with the rest.
    backend.unmap(growing, 4 * MIB, 6 * MIB).expect("unmap");
    assert_eq!((live().device_bytes, backend.idle_bytes()), (26 * MIB, 0));
    backend.unmap(whole, 4 * MIB, 6 * MIB).expect("unmap");
    assert_eq!((live().device_bytes, backend.idle_bytes()), (26 * MIB, 6 * MIB));
    backend.map(whole, 4 * MIB, 2 * MIB).expect("idle memory is reused");
    assert_eq!((live().device_bytes, backend.idle_bytes()), (26 * MIB, 4 * MIB));
    for (range, offset, size) in [(whole, 0, 6), (whole, 10, 6), (growing, 0, 4), (growing, 10, 6)] {
        backend.unmap(range, offset * MIB, size * MIB).expect("unmap");
    }
    backend.release(whole).expect("release");
    backend.release(growing).expect("release");
    assert_eq!((live().device_bytes, live().ranges), (0, 0));
});

stub_test!(growth_is_divided_into_chunks_of_32_mib_by_default, {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    let range = backend.reserve(128 * MIB).expect("reserve");
    backend.map(range, 0, 80 * MIB).expect("map");
    assert_eq!((live().mappings, live().device_bytes), (3, 80 * MIB));
    backend.unmap(range, 10 * MIB, 70 * MIB).expect("unmap");
    assert_eq!((live().mappings, live().device_bytes, backend.idle_bytes()), (1, 32 * MIB, 22 * MIB));
});

stub_test!(a_configured_chunk_size_applies_to_large_growth, ["STUB_MEMORY_BYTES" = "4294967296"], {
    let device = device();
    let by_default = with_streams(&device, CudaBackend::builder(&device));
    let range = by_default.reserve(4096 * MIB).expect("reserve");
    by_default.map(range, 0, 1920 * MIB).expect("map");
    assert_eq!(live().mappings, 60, "chunks of 32 MiB");
    by_default.unmap(range, 0, 1920 * MIB).expect("unmap");
    let by_granules = with_streams(&device, CudaBackend::builder(&device).chunk_bytes(2 * MIB));
    let range = by_granules.reserve(4096 * MIB).expect("reserve");
    by_granules.map(range, 0, 1920 * MIB).expect("map");
    assert_eq!(live().mappings, 960);
    // Any granule is therefore released immediately: quotas and limits match the driver's numbers.
    by_granules.unmap(range, 2 * MIB, 1918 * MIB).expect("unmap");
    assert_eq!((live().device_bytes, by_granules.idle_bytes()), (2 * MIB, 0));
});

stub_test!(chunks_grow_with_the_size_of_the_range, ["STUB_MEMORY_BYTES" = "4294967296"], {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    let range = backend.reserve(4096 * MIB).expect("reserve");
    // From 2 GiB on, 1/64 is more than 32 MiB: large pools have few chunks, and can be put to sleep quickly.
    for (at, mib, chunks) in [(0, 1120, 35), (1120, 160, 5), (1280, 768, 24), (2048, 640, 10), (2688, 640, 10)] {
        let before = live().mappings;
        backend.map(range, at * MIB, mib * MIB).expect("map");
        assert_eq!(live().mappings - before, chunks, "{mib} MiB at {at}");
    }
    // A hole is filled with chunks of the surrounding range's size.
    backend.unmap(range, 0, 320 * MIB).expect("unmap");
    let before = live().mappings;
    backend.map(range, 0, 320 * MIB).expect("map");
    assert_eq!(live().mappings - before, 5);
});

stub_test!(a_map_that_fails_at_any_call_leaves_nothing, {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device).chunk_bytes(2 * MIB));
    let range = backend.reserve(64 * MIB).expect("reserve");
    for (call, occurrences) in [("cuMemCreate", 4), ("cuMemMap", 4), ("cuMemSetAccess", 4)] {
        for nth in 1..=occurrences {
            fail(call, nth, 2);
            let error = backend.map(range, 0, 8 * MIB).expect_err("a call fails");
            assert_eq!((error.call, error.code, error.reason), (call, 2, Reason::OutOfMemory), "{error}");
            assert_eq!((live().device_bytes, live().mappings, backend.idle_bytes()), (0, 0, 0), "{call} {nth}");
        }
    }
    backend.map(range, 0, 8 * MIB).expect("the range is unchanged");
    fail("cuMemUnmap", 1, 999);
    backend.unmap(range, 0, 8 * MIB).expect_err("the driver call fails");
    assert_eq!(backend.idle_bytes(), 0, "the part stays mapped");
    backend.unmap(range, 0, 8 * MIB).expect("unmap");
    fail("cuMemAddressFree", 1, 999);
    backend.release(range).expect_err("the driver call fails");
    backend.release(range).expect("the range stayed reserved");
    assert_eq!((live().device_bytes, live().ranges), (0, 0));
});

stub_test!(descending_addresses_start_at_the_end_and_are_reused, {
    let device = device();
    conformance(|| with_streams(&device, CudaBackend::builder(&device).descending_addresses(1 << 40)));
    assert_eq!((live().device_bytes, live().ranges), (0, 0));

    let backend = with_streams(&device, CudaBackend::builder(&device).descending_addresses(16 * MIB));
    let reserve = |mib: u64| backend.reserve(mib * MIB);
    let ranges = [reserve(2), reserve(4), reserve(6)].map(|range| range.expect("the range fits"));
    let end = ranges[0].base.0 + 2 * MIB;
    let below = |range: &Range| (end - range.base.0) / MIB;
    assert_eq!(ranges.each_ref().map(below), [2, 6, 12]);
    assert_eq!(live().ranges, 1, "one reservation");
    for range in &ranges {
        backend.map(*range, 0, range.size_bytes).expect("map");
    }
    let error = reserve(6).expect_err("4 MiB are left");
    assert_eq!((error.call, error.reason), ("cuMemAddressReserve", Reason::OutOfMemory), "{error}");
    backend.unmap(ranges[1], 0, 4 * MIB).expect("unmap");
    backend.release(ranges[1]).expect("release");
    backend.release(ranges[1]).expect_err("the range is not reserved anymore");
    let again = [reserve(2), reserve(2), reserve(4)].map(|range| range.expect("the range fits"));
    assert_eq!(again.each_ref().map(below), [4, 6, 16], "the highest gap that fits is used");
    for range in [ranges[0], ranges[2]] {
        backend.unmap(range, 0, range.size_bytes).expect("unmap");
        backend.release(range).expect("release");
    }
    drop(backend);
    assert_eq!((live().device_bytes, live().ranges), (0, 0), "the reservation was released");
    for space in [0, 3 * MIB] {
        let error = CudaBackend::builder(&device).descending_addresses(space).build().expect_err("no such space");
        assert_eq!(error, CudaError::AddressSpace { size_bytes: space, granularity_bytes: 2 * MIB });
    }
});

stub_test!(memory_that_the_driver_keeps_after_a_failed_map_is_reused, {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device).chunk_bytes(2 * MIB));
    let range = backend.reserve(64 * MIB).expect("reserve");
    fail("cuMemCreate", 3, 2);
    fail("cuMemUnmap", 1, 999);
    backend.map(range, 0, 8 * MIB).expect_err("out of memory");
    assert_eq!((live().device_bytes, backend.idle_bytes()), (4 * MIB, 4 * MIB));
    heal();
    backend.map(range, 0, 8 * MIB).expect("map");
    assert_eq!((live().device_bytes, backend.idle_bytes()), (8 * MIB, 0));
});

/// Creates a folder with one channel, which is a plain file here.
fn imex_channels() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("channel0"), []).expect("written");
    folder
}

stub_test!(fabric_handles_are_omitted_if_the_system_refuses_them, ["STUB_FABRIC_REFUSED" = "1"], {
    let (device, channels) = (device(), imex_channels());
    assert!(device.features().fabric);
    let traits =
        CudaBackend::builder(&device).imex_channels(channels.path()).build().expect("fabric is optional").traits();
    assert!(traits.virtual_memory && traits.posix_fd && !traits.fabric && traits.gpu_direct_rdma, "{traits:?}");
});

stub_test!(fabric_handles_are_not_tried_without_an_imex_channel, {
    let (device, none) = (device(), tempfile::tempdir().expect("a temporary folder"));
    for (builds, folder) in (1..).zip([none.path().to_owned(), none.path().join("missing")]) {
        let traits = CudaBackend::builder(&device).imex_channels(folder).build().expect("supported").traits();
        assert!(traits.posix_fd && !traits.fabric && traits.gpu_direct_rdma, "{traits:?}");
        assert_eq!(calls("cuMemCreate"), builds, "one granule, at the first attempt");
    }
});

stub_test!(memory_has_all_properties_that_the_device_supports, {
    let channels = imex_channels();
    let traits = CudaBackend::builder(&device()).imex_channels(channels.path()).build().expect("supported").traits();
    assert!(traits.virtual_memory && traits.posix_fd && traits.fabric && traits.gpu_direct_rdma, "{traits:?}");
});

stub_test!(peers_get_access_and_invalid_peers_are_refused, ["STUB_DEVICES" = "2"], {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device).peers([0, 1]));
    let range = backend.reserve(2 * MIB).expect("reserve");
    backend.map(range, 0, 2 * MIB).expect("map for two devices");
    let error = CudaBackend::builder(&device).peers([7]).build().expect_err("no such peer");
    assert_eq!(error, CudaError::NoPeerAccess { ordinal: 0, peer: 7 });
});

stub_test!(a_peer_that_is_added_later_gets_access_to_existing_memory, ["STUB_DEVICES" = "2"], {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    let (one, other) = (backend.reserve(8 * MIB).expect("reserve"), backend.reserve(2 * MIB).expect("reserve"));
    backend.map(one, 0, 2 * MIB).expect("map");
    backend.map(one, 4 * MIB, 4 * MIB).expect("map");
    let before = calls("cuMemSetAccess");
    backend.grant_access(1).expect("granted");
    assert_eq!(calls("cuMemSetAccess") - before, 2, "a call for each run of chunks");
    backend.grant_access(1).expect("a repeated grant succeeds");
    backend.grant_access(0).expect("the device itself is accepted");
    assert_eq!(calls("cuMemSetAccess") - before, 2);
    backend.map(other, 0, 2 * MIB).expect("map for both");
    assert_eq!(backend.grant_access(7), Err(CudaError::NoPeerAccess { ordinal: 0, peer: 7 }));
});

stub_test!(access_that_the_driver_refuses_is_granted_to_no_peer, ["STUB_DEVICES" = "2"], {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    let range = backend.reserve(8 * MIB).expect("reserve");
    backend.map(range, 0, 2 * MIB).expect("map");
    fail("cuMemSetAccess", 1, 999);
    backend.grant_access(1).expect_err("refused");
    let before = calls("cuMemSetAccess");
    backend.grant_access(1).expect("tried again");
    assert_eq!(calls("cuMemSetAccess") - before, 1);
});

stub_test!(chunks_must_be_granules, {
    for chunk_bytes in [0, MIB, 3 * MIB] {
        let error = CudaBackend::builder(&device())
            .chunk_bytes(chunk_bytes)
            .build()
            .expect_err("not a multiple of the granularity");
        assert_eq!(error, CudaError::ChunkSize { chunk_bytes, granularity_bytes: 2 * MIB });
    }
});

stub_test!(the_current_context_is_preserved, ["STUB_DEVICES" = "2"], {
    let (device, other) = (device(), CudaDevice::new(1).expect("the second device"));
    let current = || ctx::get_current().expect("queried").map_or(0, |context| context as usize);
    assert_eq!(current(), 0, "creating devices leaves the thread without a context");
    let backend = with_streams(&device, CudaBackend::builder(&device));
    for context in [std::ptr::null_mut(), other.context().cu_ctx(), device.context().cu_ctx()] {
        let context: CUcontext = context;
        // SAFETY: null, or a live context.
        unsafe { ctx::set_current(context) }.expect("set");
        let range = backend.reserve(2 * MIB).expect("reserve");
        backend.map(range, 0, 2 * MIB).expect("map");
        let event = backend.record(StreamId(0)).expect("record");
        backend.wait(StreamId(1), event).expect("wait");
        backend.query(event).expect("query");
        backend.recycle(event);
        backend.synchronize(StreamId(1)).expect("synchronize");
        fail("cuMemUnmap", 1, 999);
        backend.unmap(range, 0, 2 * MIB).expect_err("the driver call fails");
        backend.unmap(range, 0, 2 * MIB).expect("unmap");
        backend.release(range).expect("release");
        device.memory_info().expect("queried");
        assert_eq!(current(), context as usize);
    }
    // Regression test: the drop of a device made its context current.
    drop(other);
    assert_eq!(current(), device.context().cu_ctx() as usize);
});

stub_test!(a_stream_that_is_not_registered_is_refused_without_a_call, {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    let before = CudaDevice::driver_calls();
    let error = backend.record(StreamId(9)).expect_err("unknown");
    assert_eq!((error.call, error.reason), ("cuEventRecord", Reason::Refused));
    assert_eq!(backend.synchronize(StreamId(9)).expect_err("unknown").call, "cuStreamSynchronize");
    assert_eq!(CudaDevice::driver_calls(), before);
});

stub_test!(without_virtual_memory_segments_are_whole_allocations, ["STUB_NO_VMM" = "1"], {
    let device = device();
    let backend = with_streams(&device, CudaBackend::builder(&device));
    assert!(!backend.traits().virtual_memory && !backend.is_expandable());
    // The stub's second allocation is not aligned.
    for _ in 0..3 {
        let range = backend.reserve(4 * MIB).expect("reserve");
        assert!(range.base.0.is_multiple_of(backend.granularity_bytes()));
        backend.map(range, 0, 4 * MIB).expect("map");
    }
    assert_eq!(calls("cuMemAddressReserve"), 0);
    assert!(live().device_bytes >= 12 * MIB);
});
