//! Long runs, compared with a model: progress after more collectives than a flight record keeps.

use std::sync::Arc;
use std::time::Duration;
use stub_process::{Barrier, cuda, nccl, nccl_test, until};
use symmalloc_core::Config;
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{Communicator, ReduceOp, UniqueId, flight_record};
use symmalloc_sim::SplitMix64;
use symmalloc_watchdog::Progress;

const STREAMS: u64 = 3;
/// More than a thousand collectives: some rounds have more than the 256 that a flight record keeps, and some fewer.
const ROUNDS: u64 = 8;
const COLLECTIVES_MAX: u64 = 600;

/// Returns the progress of each rank's communicator.
fn progress(ranks: u32) -> Vec<Progress> {
    let record = flight_record("asked for");
    let of =
        |rank| record.communicators.iter().find(|it| it.rank == rank).expect("the allocation should be live").progress;
    (0..ranks).map(of).collect()
}

// Work of one stream blocks all later collectives of the communicator.
nccl_test!(a_thousand_collectives_finish_only_when_the_device_has_run_them, {
    const RANKS: u32 = 2;
    let id = UniqueId::new().expect("NCCL should create an id");
    let barrier = Barrier::new(RANKS as usize);
    stub_process::threads(RANKS as usize, |rank| {
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let builder = Communicator::builder(&device).deadline(Duration::from_secs(60));
        let comm = builder.connect(id, rank as u32, RANKS).expect("all ranks should connect");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator should be created");
        let streams: Vec<_> =
            (0..STREAMS).map(|_| device.context().new_stream().expect("the driver should create a stream")).collect();
        let mut buffer = allocator.alloc_zeroed::<f32>(&streams[0], 8).expect("memory should suffice");
        streams[0].synchronize().expect("the work should complete");
        // All ranks draw the same numbers.
        let (mut random, mut submitted) = (SplitMix64::new(67), 0);
        for round in 0..ROUNDS {
            let blocked = Arc::clone(&streams[random.below(STREAMS) as usize]);
            let work = cuda::hold(blocked.cu_stream() as u64);
            let before = submitted;
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &blocked).expect("the work should be submitted");
            let more = if round % 2 == 0 { 300 + random.below(COLLECTIVES_MAX - 300) } else { random.below(40) };
            for _ in 0..more {
                let stream = &streams[random.below(STREAMS) as usize];
                comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, stream).expect("the work should be submitted");
            }
            submitted += 1 + more;
            // The watchdog marks all streams meanwhile.
            std::thread::sleep(Duration::from_millis(150));
            barrier.wait();
            for rank in progress(RANKS) {
                // A stream whose entries were dropped counts as unfinished from its last mark on.
                assert!(rank.submitted == submitted && rank.finished <= before, "round {round}: {rank:?}, {before}");
            }
            barrier.wait();
            drop(work);
            streams.iter().for_each(|stream| comm.synchronize(stream).expect("all ranks should take part"));
            let expected = Progress { submitted, finished: submitted, is_destroying: false };
            until(|| progress(RANKS)[rank] == expected);
            barrier.wait();
        }
        assert!(submitted > 1000, "{submitted} collectives");
        barrier.wait();
        comm.destroy().expect("the communicator should be idle");
    });
    nccl::assert_clean();
});
