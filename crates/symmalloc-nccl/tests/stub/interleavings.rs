//! Two threads of one rank: what one of them submits while the other one is inside a call.

use std::sync::Arc;
use std::thread;
use std::time::Duration;
use stub_process::{cuda, nccl, nccl_test, until};
use symmalloc_core::Config;
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{Communicator, Group, ReduceOp, UniqueId, WatchdogMode, flight_record};
use symmalloc_watchdog::Progress;

/// Connects a communicator of one rank.
fn connect(device: &Arc<CudaDevice>, name: &str) -> Communicator {
    let builder = Communicator::builder(device).deadline(Duration::from_secs(60)).watchdog(WatchdogMode::Off);
    builder
        .name(name)
        .connect(UniqueId::new().expect("NCCL should create an id"), 0, 1)
        .expect("one rank should suffice")
}

nccl_test!(a_wait_covers_only_what_was_submitted_before_it, {
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator should be created");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let mut buffer = allocator.alloc_zeroed::<f32>(&stream, 8).expect("memory should suffice");
    let comm = connect(&device, "one");
    let progress = || flight_record("asked for").communicators[0].progress;
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &stream).expect("the work should be submitted");
    comm.synchronize(&stream).expect("the work should complete");
    let mut submitted = progress().submitted;
    // The thread that waits stops after each of its driver calls that matter to the order.
    for call in ["cuEventCreate", "cuEventRecord"] {
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &stream).expect("the work should be submitted");
        submitted += 1;
        cuda::pause(call, 1);
        let work = thread::scope(|scope| {
            let waiting = scope.spawn(|| comm.synchronize(&stream));
            until(|| cuda::is_paused() || waiting.is_finished());
            assert!(cuda::is_paused(), "the wait makes no call of {call}");
            let before = call == "cuEventCreate";
            // Before the wait records its event, what is submitted belongs to the wait, which therefore does not end while it runs.
            let work = (!before).then(|| cuda::hold(stream.cu_stream() as u64));
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &stream).expect("the work should be submitted");
            submitted += 1;
            cuda::resume();
            waiting.join().expect("the thread should not panic").expect("the work should complete");
            work
        });
        let finished = submitted - u64::from(work.is_some());
        let Progress { submitted: seen, finished: ended, .. } = progress();
        assert_eq!((seen, ended), (submitted, finished), "stopped after {call}");
        drop(work);
        comm.synchronize(&stream).expect("the work should complete");
        assert_eq!(progress().finished, submitted);
    }
    drop(buffer);
    comm.destroy().expect("the communicator should be idle");
    nccl::assert_clean();
});

nccl_test!(groups_of_the_same_communicators_in_any_order_never_wait_for_each_other_in_a_circle, {
    const GROUPS: usize = 3000;
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator should be created");
    let comms = ["a", "b", "c"].map(|name| connect(&device, name));
    let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
    let threads = orders.map(|order| {
        let (comms, allocator) = (comms.clone(), allocator.clone());
        thread::spawn(move || {
            let stream = allocator.device().context().new_stream().expect("the driver should create a stream");
            let memory = || allocator.alloc_zeroed::<f32>(&stream, 8).expect("memory should suffice");
            let mut buffers = [(); 3].map(|()| (memory(), memory()));
            for _ in 0..GROUPS {
                // Each communicator occurs once: a group that uses one twice must order them anyway.
                let mut group = Group::new();
                for (at, (from, to)) in order.into_iter().zip(&mut buffers) {
                    group.all_reduce(&comms[at], from, to, ReduceOp::Sum, &stream).expect("the input should be valid");
                }
                group.submit().expect("the work should be submitted");
            }
            stream.synchronize().expect("the work should complete");
        })
    });
    until(|| threads.iter().all(thread::JoinHandle::is_finished));
    threads.into_iter().for_each(|thread| thread.join().expect("the thread should not panic"));
    comms.into_iter().for_each(|comm| comm.destroy().expect("the communicator should be idle"));
    nccl::assert_clean();
});
