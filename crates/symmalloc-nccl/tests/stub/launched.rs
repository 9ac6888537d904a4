//! Ranks that a launcher starts as processes, and that have nothing in common but its variables.

use std::time::Duration;
use stub_process::{RankOutput, nccl_test, ranks};
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{CommError, Communicator, ReduceOp, RendezvousError};

const DEADLINE: Duration = Duration::from_secs(20);

/// Sets what torchrun would set for this rank.
fn as_torchrun(rank: usize, ranks: usize, job: &str) {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("TORCHELASTIC_RUN_ID", job.to_owned()),
    ];
    for (name, value) in variables {
        // SAFETY: the process has one thread.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Connects, and adds up 1 over all ranks.
fn connect_and_sum(rank: usize) -> f32 {
    let device = CudaDevice::new(rank).expect("a stub device");
    let comm = Communicator::builder(&device).deadline(DEADLINE).connect_env().expect("all come");
    let allocator = CudaAllocator::new(&device, symmalloc_core::Config::default()).expect("an allocator");
    let stream = device.context().new_stream().expect("a stream");
    let mut sum = allocator.alloc_zeroed::<f32>(&stream, 1).expect("memory");
    stream.memcpy_htod(&[1.0], &mut sum).expect("copied");
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum, &stream).expect("submitted");
    let sum = stream.clone_dtoh(&sum).expect("copied")[0];
    comm.destroy().expect("idle");
    sum
}

fn assert_all_well(outputs: &[RankOutput]) {
    for output in outputs {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
    }
}

nccl_test!(processes_of_one_machine_find_each_other_by_their_job, {
    let job = format!("job-{}", std::process::id());
    let outputs = ranks(3, &[("TEST_JOB", &job)], |rank| {
        as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("set"));
        // Twice: the second meeting of each is the second of all.
        assert_eq!([connect_and_sum(rank), connect_and_sum(rank)], [3.0; 2]);
    });
    assert_all_well(&outputs);
});

nccl_test!(a_named_place_brings_them_together, {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound").port();
    let place = format!("127.0.0.1:{port}");
    let outputs = ranks(2, &[("SYMMALLOC_RENDEZVOUS", &place)], |rank| {
        as_torchrun(rank, 2, "job");
        assert_eq!(connect_and_sum(rank), 2.0);
    });
    assert_all_well(&outputs);
});

nccl_test!(a_process_that_is_never_started_is_named, {
    let job = format!("short-{}", std::process::id());
    let outputs = ranks(2, &[("TEST_JOB", &job)], |rank| {
        // Three ranks are said to be; two are.
        as_torchrun(rank, 3, &std::env::var("TEST_JOB").expect("set"));
        let device = CudaDevice::new(rank).expect("a stub device");
        let builder = Communicator::builder(&device).deadline(Duration::from_millis(800));
        match builder.connect_env().map(|_| ()) {
            Err(CommError::Rendezvous(RendezvousError::Missing { missing, .. })) => {
                assert_eq!((rank, missing), (0, vec![2]));
            }
            Err(CommError::Deadline { .. }) => assert_eq!(rank, 1),
            other => panic!("{other:?}"),
        }
    });
    assert_all_well(&outputs);
});
