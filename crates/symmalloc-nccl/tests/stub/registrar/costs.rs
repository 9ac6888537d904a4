//! The host time of a sync without changes.

use super::support::{Job, MIB};
use std::hint::black_box;
use std::time::{Duration, Instant};
use stub_process::nccl_test;
use symmalloc_cuda::Pool;

const CALLS: u32 = 100_000;

nccl_test!(a_sync_with_nothing_new_takes_nanoseconds, {
    Job::new(1).quiet().run(|it| {
        // Set up two pools on two communicators, with heaps and windows.
        let other = it.world.split(Some(0), 0).expect("one rank should suffice").expect("the rank should be in a part");
        let pools = [it.attached_pool(), it.attached_pool()];
        let ids = pools.each_ref().map(Pool::id);
        it.registrar.attach(&other, &ids, it.windows()).expect("the pool should be symmetric and registrable");
        let kept: Vec<_> = (0..32).map(|index| it.take(&pools[index % 2], 30 * MIB)).collect();
        for comms in [&[&it.world] as &[_], &[&it.world, &other]] {
            it.registrar.sync(comms).expect("one rank agrees with itself");
            // Use the minimum of several rounds, because other tests run at the same time.
            let round = |_| {
                let begun = Instant::now();
                (0..CALLS).for_each(|_| drop(black_box(it.registrar.sync(black_box(comms)))));
                begun.elapsed() / CALLS
            };
            let least = (0..5).map(round).min().expect("at least one round");
            println!("sync of {} communicators with nothing new: {least:?}", comms.len());
            assert!(least < Duration::from_micros(10), "{least:?}");
        }
        assert_eq!(it.registrar.stats().quiet_syncs, 2 * 5 * u64::from(CALLS));
        drop(kept);
    });
});
