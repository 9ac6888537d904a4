//! Forked children of ranks: workers that load data, for example.

use super::Rank;
use std::mem::ManuallyDrop;
use std::ptr;
use std::time::{Duration, SystemTime};
use stub_process::{RankOutput, in_child, nccl, nccl_test, ranks};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice};
use symmalloc_nccl::{Communicator, Registrar, Registration, UniqueId};

/// Deadline long enough that a death must be detected before it.
const LONG: Duration = Duration::from_secs(100);
/// Time for which a child outlives its parent.
const OUTLIVES: libc::c_uint = 60;
/// Time within which the others end. Without a child, they do immediately.
const IMMEDIATELY: Duration = Duration::from_secs(20);

/// Forks a child that keeps all descriptors except for those of the test, and then dies.
fn die_before_a_child() -> ! {
    // SAFETY: the child makes only system calls, and closes descriptors that nothing in it uses.
    unsafe {
        if libc::fork() == 0 {
            (0..3).for_each(|descriptor| _ = libc::close(descriptor));
            libc::sleep(OUTLIVES);
            libc::_exit(0);
        }
        libc::raise(libc::SIGKILL);
    }
    unreachable!("the signal ends the process")
}

/// Runs three ranks, one of which dies while its child lives.
fn deaths_before_children(victim: usize) {
    let records = tempfile::tempdir().expect("a folder should be created");
    let outputs = ranks(3, &[("SYMMALLOC_FLIGHT_RECORDS", &records.path().to_string_lossy())], |rank| {
        let mut own = Rank::new(rank, 3, LONG);
        own.reduce().expect("all ranks are alive");
        if rank == victim {
            die_before_a_child();
        }
        let (error, _) = own.reduce_until_failure();
        println!("{error}");
        std::process::exit(0);
    });
    let ended_of = |output: &&RankOutput| output.rank == victim;
    let died: SystemTime = outputs.iter().find(ended_of).expect("the victim").ended;
    for output in outputs.iter().filter(|output| output.rank != victim) {
        let late = output.ended.duration_since(died).unwrap_or_default();
        assert!(late < IMMEDIATELY, "rank {} ended {late:?} after the death: {}", output.rank, output.text);
        assert!(output.text.contains(&format!("rank {victim} is gone")), "{}", output.text);
    }
}

nccl_test!(the_death_of_rank_0_is_noticed_while_its_child_lives, ["STUB_DEVICES" = "3"], {
    deaths_before_children(0);
});

nccl_test!(the_death_of_another_rank_is_noticed_while_its_child_lives, ["STUB_DEVICES" = "3"], {
    deaths_before_children(2);
});

// Regression test: a child waited for NCCL's threads, which it does not have, and destroyed what the parent uses.
nccl_test!(a_child_that_ends_communicators_makes_no_call_of_nccl, {
    let device = CudaDevice::new(0).expect("the stub should have a device");
    let comm = Communicator::builder(&device).deadline(LONG);
    let comm =
        comm.connect(UniqueId::new().expect("NCCL should create an id"), 0, 1).expect("the connection should succeed");
    let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator should be created");
    let config =
        "segments:reserved,segment_mb:2,symmetric:true".parse::<PoolConfig>().expect("the text should be valid");
    let pool = allocator.create_pool(config).expect("the pool should be created");
    let registrar = Registrar::builder(&allocator).build().expect("the registrar should be created");
    registrar.attach(&comm, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
    let stream = device.context().new_stream().expect("the driver should create a stream");
    let buffer = allocator.with_pool(&pool).alloc_zeroed::<f32>(&stream, 1024).expect("memory should suffice");
    registrar.sync(&[&comm]).expect("the registration should succeed");
    let announcement = comm.announcement("step", None, &stream).expect("the work should be announced");
    let owned = ManuallyDrop::new((announcement, registrar, buffer, pool, allocator, comm));
    let code = in_child(|| {
        let calls = nccl::all_calls();
        owned.5.destroy().expect("the call should have nothing to do");
        owned.5.abort().expect("the call should have nothing to do");
        // SAFETY: the child does not use the original.
        drop(unsafe { ptr::read(&raw const *owned) });
        assert_eq!(nccl::all_calls(), calls);
    });
    assert_eq!(code, Some(0), "the child returns");
    let (announcement, registrar, buffer, pool, allocator, comm) = ManuallyDrop::into_inner(owned);
    drop(announcement);
    registrar.sync(&[&comm]).expect("the parent's communicator works");
    drop((registrar, buffer, pool, allocator));
    comm.destroy().expect("destroyed by the parent");
    nccl::assert_clean();
});
