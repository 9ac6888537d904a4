//! Buffers in NCCL's collectives, with cudarc's communicators.

use crate::kernels::Worker;
use crate::two_devices;
use cudarc::nccl::{self, Comm, Id, ReduceOp};
use std::sync::Arc;
use symmalloc_core::config::Config;
use symmalloc_core::{Digest, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer};

/// Returns `true` if NCCL is available, and prints the reason otherwise.
fn has_nccl() -> bool {
    // SAFETY: opens and closes a library.
    let is_there = unsafe { libloading::Library::new("libnccl.so") }.is_ok();
    if !is_there {
        println!("skipped, no NCCL: no libnccl.so on the library path");
    }
    is_there
}

/// Returns a rank's value before the reduction.
fn given(rank: usize, round: u32) -> u32 {
    round + 10 * rank as u32
}

/// Runs collectives on one stream with buffers of another stream, and drops each buffer immediately after it is submitted. The values are
/// written late, so a collective that did not wait would reduce the previous contents.
fn rank(device: &Arc<CudaDevice>, rank: usize, id: Id, is_registered: bool) -> Digest {
    let allocator = CudaAllocator::new(device, Config::default()).expect("made");
    let compute = Worker::on_new_stream(device.context());
    let network = device.context().new_stream().expect("a stream");
    allocator.register_stream(&compute.stream).expect("registered");
    if is_registered {
        allocator.register_stream(&network).expect("registered");
    }
    device.context().bind_to_thread().expect("current");
    let comm = Comm::from_rank(network, rank, 2, id).expect("both ranks join");
    // SAFETY: written before it is read, as are all buffers below.
    let alloc = |count| unsafe { allocator.alloc::<u32>(&compute.stream, count) }.expect("allocated");
    for round in 0..100_u32 {
        let count = 100_000 + 1_000 * round as usize;
        let (mut input, mut output) = (alloc(count), alloc(count));
        compute.delay();
        compute.fill(&mut input, given(rank, round));
        comm.all_reduce(&input, &mut output, &ReduceOp::Sum).expect("submitted");
        drop(input);
        let sum = given(0, round) + given(1, round);
        compute.expect(&output, sum);
        comm.all_reduce_in_place(&mut output, &ReduceOp::Max).expect("submitted");
        compute.expect(&output, sum);
        compute.fill(&mut output, given(rank, round));
        // Views are also accepted.
        let mut gathered: DeviceBuffer<u32> = alloc(count / 2 * 2);
        comm.all_gather(&output.slice(..count / 2), &mut gathered.slice_mut(..)).expect("submitted");
        drop(output);
        if round % 20 == 0 {
            let host = compute.stream.clone_dtoh(&gathered).expect("copied after the collective");
            let (first, second) = host.split_at(count / 2);
            assert!(first.iter().all(|value| *value == given(0, round)));
            assert!(second.iter().all(|value| *value == given(1, round)));
        }
    }
    assert_eq!((compute.wrong_elements(), allocator.drop_errors().count), (0, 0));
    allocator.digest(PoolId::DEFAULT).expect("known")
}

#[test]
fn collectives_of_two_threads_accept_buffers() {
    let Some(devices) = two_devices() else { return };
    if !has_nccl() {
        return;
    }
    for is_registered in [true, false] {
        let id = Id::new().expect("NCCL creates an id");
        let digests = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|index| {
                let device = &devices[index];
                scope.spawn(move || rank(device, index, id, is_registered))
            });
            ranks.map(|rank| rank.join().expect("the rank passed"))
        });
        println!("registered: {is_registered}, 300 collectives, digests {digests:?}");
        assert_eq!(digests[0], digests[1]);
    }
}

#[test]
fn a_group_of_one_thread_accepts_buffers() {
    let Some(devices) = two_devices() else { return };
    if !has_nccl() {
        return;
    }
    let allocators = devices.each_ref().map(|device| CudaAllocator::new(device, Config::default()).expect("made"));
    let workers = devices.each_ref().map(|device| Worker::on_new_stream(device.context()));
    let streams = devices.each_ref().map(|device| device.context().new_stream().expect("a stream"));
    for (allocator, stream) in allocators.iter().zip(&streams) {
        allocator.register_stream(stream).expect("registered");
    }
    let comms = Comm::from_devices(streams.to_vec()).expect("joined");
    for round in 0..100 {
        let mut buffers = [0, 1].map(|rank| {
            // SAFETY: written before it is read.
            let mut buffer =
                unsafe { allocators[rank].alloc::<u32>(&workers[rank].stream, 1 << 18) }.expect("allocated");
            workers[rank].delay();
            workers[rank].fill(&mut buffer, given(rank, round));
            buffer
        });
        nccl::group_start().expect("begun");
        for (comm, buffer) in comms.iter().zip(&mut buffers) {
            comm.all_reduce_in_place(buffer, &ReduceOp::Sum).expect("submitted");
        }
        nccl::group_end().expect("submitted");
        for (worker, buffer) in workers.iter().zip(buffers) {
            worker.expect(&buffer, given(0, round) + given(1, round));
        }
    }
    assert_eq!(workers.each_ref().map(Worker::wrong_elements), [0, 0]);
    assert_eq!(allocators.each_ref().map(|allocator| allocator.drop_errors().count), [0, 0]);
}
