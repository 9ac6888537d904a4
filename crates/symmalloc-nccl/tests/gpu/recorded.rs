//! A replay of a recorded training job with real memory and real collectives, in which nothing is registered after the warm-up.
//!
//! The job is FSDP1 on 2 GPUs, with sequence lengths that vary from step to step. Each of its 16 steps begins with the shard that the
//! network gathers: 65,537,024 bytes on the network's stream. That buffer is reduced over all ranks. The recording is replayed repeatedly,
//! and the blocks that it left allocated are freed in between. All ranks replay rank 0's recording: both ranks ran the same program, and
//! their recordings differ only in when PyTorch's event polling noticed completed uses.

use crate::job::{Calls, Rank, devices, ranks};
use cudarc::driver::{CudaSlice, CudaStream};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::op::Op;
use symmalloc_core::{Allocation, Digest, PoolConfig, PoolId, StreamId};
use symmalloc_harness::jobs;
use symmalloc_nccl::{Communicator, ReduceOp, Registration, UniqueId};
use symmalloc_trace::replay::{Program, Replay};

const JOB: &str = "fsdp1_train_rank0";
const STEPS_PER_PASS: u64 = 16;
const SHARD_BYTES: u64 = 65_537_024;
const NETWORK: StreamId = StreamId(1);
/// Size of the segment in bytes. It suffices for the job's peak of 5,314,183,168 bytes.
const SEGMENT_BYTES: u64 = 6 << 30;
const CHECK_EVERY: u64 = 100;

/// Returns `SYMMALLOC_STEPS`, by default 10,000.
fn steps() -> u64 {
    std::env::var("SYMMALLOC_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(10_000)
}

fn begins_step(op: &Op) -> bool {
    matches!(op, Op::Allocate { stream, size_bytes, .. } if (*stream, *size_bytes) == (NETWORK, SHARD_BYTES))
}

/// The result of one rank's run.
struct Run {
    steps: u64,
    ops: u64,
    seconds: f64,
    digest: Digest,
}

#[test]
fn a_training_job_registers_nothing_after_its_warm_up() {
    let Some(count) = devices() else { return };
    let program = jobs::program(JOB);
    let recorded_steps = program.ops().iter().filter(|op| begins_step(op)).count() as u64;
    assert_eq!(recorded_steps, STEPS_PER_PASS);
    let id = UniqueId::new().expect("NCCL creates an id");
    let runs = ranks(count, |rank| train(rank, &program, &rank.connect(id, Calls::Blocking)));
    let Run { steps, ops, seconds, digest } = runs[0];
    println!(
        "{JOB}: {steps} steps on {count} ranks, {ops} ops, {seconds:.1} s ({:.0} ns per op with the step's all-reduce of \
         {SHARD_BYTES} bytes), digest {digest}; registrations after the warm-up: 0",
        seconds * 1e9 / ops as f64
    );
    assert!(runs.iter().all(|run| run.digest == digest));
}

fn train(rank: &Rank<'_>, program: &Program, comm: &Communicator) -> Run {
    let pool = PoolConfig::builder().reserved(SEGMENT_BYTES).symmetric(true).streams(StreamPolicy::Shared);
    let allocator = rank.allocator(pool.build().expect("the configuration should be valid"));
    let mut streams = vec![Arc::clone(&rank.stream)];
    for _ in program.ops().iter().filter(|op| matches!(op, Op::RegisterStream { .. })).skip(1) {
        streams.push(rank.device.context().new_stream().expect("the driver should create a stream"));
        allocator
            .register_stream(streams.last().expect("a stream was just created"))
            .expect("the stream should be registered");
    }
    let registrar = rank.registrar(&allocator);
    registrar.attach(comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");

    let mut replay = Replay::new(allocator.core(), program);
    let mut warm: Option<(u64, u64)> = None;
    let (mut begun, mut step, mut ops) = (Instant::now(), 0, 0);
    // The first pass is the warm-up.
    'passes: for pass in 0.. {
        for op in program.ops() {
            let made = replay.step(op).expect("the memory holds the job");
            ops += u64::from(pass > 0);
            let Some(allocation) = made.filter(|_| begins_step(op)) else { continue };
            registrar.sync(&[comm]).expect("the ranks should agree");
            reduce(rank, comm, &streams[NETWORK.index()], &allocation, step);
            if pass > 0 {
                step += 1;
            }
            if pass > 0 && step == steps() {
                break 'passes;
            }
        }
        replay.free_all().expect("the memory should be freed");
        if pass == 0 {
            let stats = registrar.stats();
            warm = Some((stats.registrations, stats.deregistrations));
            (begun, ops) = (Instant::now(), 0);
        }
    }
    rank.device.synchronize().expect("all work is done");
    let seconds = begun.elapsed().as_secs_f64();
    let stats = registrar.stats();
    assert_eq!(Some((stats.registrations, stats.deregistrations)), warm, "after the warm-up");
    assert_eq!(warm, Some((1, 0)), "one segment, one window");
    replay.free_all().expect("the memory should be freed");
    Run { steps: step, ops, seconds, digest: allocator.digest(PoolId::DEFAULT).expect("the pool should exist") }
}

/// Reduces the step's buffer on the network's stream. Every [`CHECK_EVERY`] steps, writes known values first and checks the sums.
fn reduce(rank: &Rank<'_>, comm: &Communicator, network: &Arc<CudaStream>, allocation: &Allocation, step: u64) {
    let length = (SHARD_BYTES / 4) as usize;
    // SAFETY: the allocation has this size and was created on this stream, and the slice is never dropped.
    let shard = unsafe { network.upgrade_device_ptr::<f32>(allocation.address.0, length) };
    let mut shard: ManuallyDrop<CudaSlice<f32>> = ManuallyDrop::new(shard);
    let is_checked = step.is_multiple_of(CHECK_EVERY);
    if is_checked {
        rank.write_on(network, &mut *shard, step);
    }
    comm.all_reduce_in_place(&mut *shard, ReduceOp::Sum, network).expect("the work should be submitted");
    if is_checked {
        assert_eq!(rank.wrong_sums_on(network, &*shard, step), 0, "step {step}");
    }
}
