//! Tests of which kernels NCCL selects, according to its log.

use crate::job::{Calls, MIB, again, devices, ranks, reserved};
use symmalloc_core::{PoolConfig, PoolId};
use symmalloc_nccl::{ReduceOp, Registration, UniqueId};

const CHILD: &str = "SYMMALLOC_KERNELS_CHILD";
const COLLECTIVES: usize = 20;

/// Returns the number of lines about symmetric kernels in NCCL's log. Only rank 0 writes them.
fn symmetric_kernels(is_registered: bool) -> usize {
    let log = tempfile::NamedTempFile::new().expect("the file should be accessible");
    let status = again("kernels::collectives_on_windows_run_the_symmetric_kernels")
        .env(CHILD, if is_registered { "windows" } else { "plain" })
        .envs([("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "TUNING")])
        .env("NCCL_DEBUG_FILE", log.path())
        .status()
        .expect("the process should start again");
    assert!(status.success());
    let log = std::fs::read_to_string(log.path()).expect("NCCL wrote it");
    log.lines().filter(|line| line.contains("AllReduce [Symmetric]")).count()
}

#[test]
fn collectives_on_windows_run_the_symmetric_kernels() {
    if let Some(kind) = std::env::var_os(CHILD) {
        return reduce(kind == "windows");
    }
    let Some(ranks) = devices() else { return };
    let (registered, plain) = (symmetric_kernels(true), symmetric_kernels(false));
    println!(
        "symmetric kernels in {COLLECTIVES} collectives of {ranks} ranks: {registered} on windows, {plain} on plain buffers"
    );
    assert_eq!((registered, plain), (COLLECTIVES, 0));
}

fn reduce(is_registered: bool) {
    let id = UniqueId::new().expect("NCCL creates an id");
    ranks(devices().expect("the devices are still available"), |rank| {
        let comm = rank.connect(id, Calls::Blocking);
        let pool = if is_registered { reserved(8 * MIB) } else { PoolConfig::default() };
        let allocator = rank.allocator(pool);
        let registrar = rank.registrar(&allocator);
        let mut buffer = allocator.alloc_zeroed::<f32>(&rank.stream, 1 << 18).expect("the allocation should succeed");
        if is_registered {
            registrar.attach(&comm, &[PoolId::DEFAULT], Registration::Windows).expect("the pool should be attachable");
            registrar.sync(&[&comm]).expect("the registration should succeed");
        }
        for round in 0..COLLECTIVES as u64 {
            rank.write(&mut buffer, round);
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
            assert_eq!(rank.wrong_sums(&buffer, round), 0);
        }
    });
}
