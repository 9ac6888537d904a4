//! Several devices in one process, and memory with peer access.

use crate::kernels::Worker;
use crate::two_devices;
use cudarc::driver::result::ctx;
use cudarc::driver::{DevicePtr, sys};
use std::sync::Arc;
use symmalloc_core::PoolId;
use symmalloc_core::config::Config;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer};

const MIB: usize = 1 << 20;

/// Allocates, fills and checks buffers with mixed sizes and lifetimes.
fn job(allocator: &CudaAllocator, worker: &Worker, rounds: u32) {
    let mut live: Vec<(DeviceBuffer<u32>, u32)> = Vec::new();
    for round in 0..rounds {
        let count = MIB / 4 * (1 + (round as usize * 7) % 13) + round as usize;
        // SAFETY: written before it is read.
        let mut buffer = unsafe { allocator.alloc::<u32>(&worker.stream, count) }.expect("allocated");
        let value = round + 1000 * allocator.device().ordinal() as u32;
        worker.fill(&mut buffer, value);
        live.push((buffer, value));
        if live.len() > 5 {
            let (buffer, value) = live.swap_remove(round as usize % 5);
            worker.expect(&buffer, value);
        }
    }
    live.iter().for_each(|(buffer, value)| worker.expect(buffer, *value));
}

#[test]
fn two_devices_in_two_threads_place_alike() {
    let Some(devices) = two_devices() else { return };
    let digests = std::thread::scope(|scope| {
        let ranks = devices.each_ref().map(|device| {
            scope.spawn(move || {
                let allocator = CudaAllocator::new(device, Config::default()).expect("made");
                let worker = Worker::on_new_stream(device.context());
                job(&allocator, &worker, 500);
                assert_eq!((worker.wrong_elements(), allocator.drop_errors().count), (0, 0));
                allocator.digest(PoolId::DEFAULT).expect("known")
            })
        });
        ranks.map(|rank| rank.join().expect("the rank passed"))
    });
    println!("digests {digests:?}");
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn two_devices_in_one_thread_are_independent() {
    let Some(devices) = two_devices() else { return };
    let allocators = devices.each_ref().map(|device| CudaAllocator::new(device, Config::default()).expect("made"));
    let streams = devices.each_ref().map(|device| device.context().new_stream().expect("a stream"));
    let free = || devices.each_ref().map(|device| device.memory_info().expect("queried").free_bytes);
    // The first work of a context allocates additional memory.
    for (allocator, stream) in allocators.iter().zip(&streams) {
        drop(allocator.alloc_zeroed::<u8>(stream, MIB).expect("allocated"));
        allocator.trim_all().expect("trimmed");
    }
    let (current, before) = (|| ctx::get_current().expect("queried"), free());
    for (here, there) in [(0, 1), (1, 0)] {
        devices[there].context().bind_to_thread().expect("current");
        let context = current();
        let buffer = allocators[here].alloc_zeroed::<u8>(&streams[here], 512 * MIB).expect("allocated");
        let during = free();
        println!(
            "device {here}: {} bytes held, device {there}: {}",
            before[here] - during[here],
            before[there] - during[there]
        );
        assert_eq!((before[here] - during[here], during[there]), (512 << 20, before[there]));
        drop(buffer);
        assert_eq!(allocators[here].trim_all().expect("trimmed"), 512 << 20);
        assert_eq!(current(), context, "the other device's context is still current");
        let error =
            allocators[here].register_stream(&streams[there]).expect_err("the stream belongs to the other device");
        assert_eq!(error, CudaError::ForeignStream);
    }
    assert_eq!(free(), before);
}

/// For such a copy, cudarc takes the source's pointer without naming the stream, so the program must order the source's stream.
#[test]
fn buffers_are_copied_from_device_to_device() {
    let Some(devices) = two_devices() else { return };
    let allocators = devices.each_ref().map(|device| CudaAllocator::new(device, Config::default()).expect("made"));
    let [source, target] = devices.each_ref().map(|device| Worker::on_new_stream(device.context()));
    for round in 0..200 {
        // SAFETY: written before it is read.
        let mut from = unsafe { allocators[0].alloc::<u32>(&source.stream, MIB) }.expect("allocated");
        source.delay();
        source.fill(&mut from, round);
        // Delayed so that the next round's writer would run before the copy if the source's stream were not ordered.
        target.delay();
        target.delay();
        // SAFETY: as above.
        let mut to = unsafe { allocators[1].alloc::<u32>(&target.stream, MIB) }.expect("allocated");
        target.stream.memcpy_dtod(&from, &mut to).expect("copied after the writer");
        source.stream.join(&target.stream).expect("ordered");
        drop(from);
        target.expect(&to, round);
    }
    assert_eq!((source.wrong_elements(), target.wrong_elements()), (0, 0));
    assert_eq!(allocators.each_ref().map(|allocator| allocator.drop_errors().count), [0, 0]);
}

/// Returns the driver's access flags of a device for an address: 0 for none, 3 for reading and writing.
fn access(device: &CudaDevice, pointer: sys::CUdeviceptr) -> u64 {
    let (device_kind, mut flags) = (1, 0);
    // Passed as words, because the type differs between versions of the headers.
    let location = [device_kind, device.context().cu_device()];
    // SAFETY: `flags` is valid for writing and the location for reading.
    unsafe { sys::cuMemGetAccess(&raw mut flags, location.as_ptr().cast(), pointer) }.result().expect("mapped");
    flags
}

fn with_peers(device: &Arc<CudaDevice>, peers: &[usize]) -> Result<CudaAllocator, CudaError> {
    let backend = CudaBackend::builder(device).peers(peers.iter().copied()).build()?;
    CudaAllocator::with_backend(backend, Config::default())
}

#[test]
fn a_peer_uses_memory_that_was_mapped_for_it_and_no_other() {
    let Some(devices) = two_devices() else { return };
    let error = with_peers(&devices[0], &[99]).expect_err("no peer");
    assert_eq!(error, CudaError::NoPeerAccess { ordinal: 0, peer: 99 });
    with_peers(&devices[0], &[0]).expect("a device reaches its own memory");
    for (here, there) in [(0, 1), (1, 0)] {
        let allocator = match with_peers(&devices[here], &[there]) {
            Ok(allocator) => allocator,
            Err(error @ CudaError::NoPeerAccess { .. }) => return println!("skipped, no peers: {error}"),
            Err(error) => panic!("{error}"),
        };
        let (owner, peer) =
            (Worker::on_new_stream(devices[here].context()), Worker::on_new_stream(devices[there].context()));
        let alone = CudaAllocator::new(&devices[here], Config::default()).expect("made");
        let private = alone.alloc_zeroed::<u32>(&owner.stream, MIB).expect("allocated");
        let pointer = private.device_ptr(&owner.stream).0;
        assert_eq!([here, there].map(|ordinal| access(&devices[ordinal], pointer)), [3, 0]);
        for round in 0..100 {
            // Grows the range, so that memory of later chunks is also mapped for the peer.
            let count = MIB * (1 + round as usize % 40);
            // SAFETY: written before it is read.
            let mut buffer = unsafe { allocator.alloc::<u32>(&owner.stream, count) }.expect("allocated");
            let pointer = buffer.device_ptr(&owner.stream).0;
            assert_eq!([here, there].map(|ordinal| access(&devices[ordinal], pointer)), [3, 3]);
            owner.delay();
            owner.fill(&mut buffer, round);
            peer.expect(&buffer, round);
            peer.delay();
            peer.fill(&mut buffer, round + 1);
            owner.expect(&buffer, round + 1);
        }
        assert_eq!((owner.wrong_elements(), peer.wrong_elements(), allocator.drop_errors().count), (0, 0, 0));
        println!("device {there} read and wrote {} bytes of device {here}", allocator.stats().reserved_bytes.peak);
    }
}
