//! A registration ends after the work that was submitted before, whatever ends it.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stub_process::{cuda, nccl_test};
use symmalloc_agreement::Mode;
use symmalloc_core::op::Contents;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{ReduceOp, Registration};

/// A call that ends a registration. The last step is the one that must wait.
type End = fn(&Rank, &Pool<CudaBackend>, DeviceBuffer<f32>);

const ENDS: &[(&str, End)] = &[
    ("a sync after the death of the segment", |it, pool, tensor| {
        drop(tensor);
        it.allocator.core().trim_pool(pool.id()).expect("no fault should be injected");
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
    }),
    ("a sync after the pool was detached", |it, pool, _tensor| {
        it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should be attached");
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
    }),
    ("a sync with other changes after the pool was detached", |it, pool, _tensor| {
        let other = it.attached_pool();
        let _new = it.take(&other, 30 * MIB);
        it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should be attached");
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
    }),
];

fn check(what: &str, registration: Registration, end: End) {
    Job::new(2).run(|it| {
        let pool = match registration {
            Registration::Windows => it.pool(),
            _ => it
                .allocator
                .create_pool("segments:fixed".parse().expect("the text should be valid"))
                .expect("the pool should be created"),
        };
        it.registrar.attach(&it.world, &[pool.id()], registration).expect("the pool should not be attached yet");
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let is_done = Arc::new(AtomicBool::new(false));
        let work = cuda::hold(it.stream.cu_stream() as u64);
        it.stream.memset_zeros(&mut tensor).expect("the work should be submitted");
        let release = thread::spawn({
            let is_done = Arc::clone(&is_done);
            move || {
                thread::sleep(Duration::from_millis(50));
                is_done.store(true, Ordering::Release);
                drop(work);
            }
        });
        end(it, &pool, tensor);
        assert!(is_done.load(Ordering::Acquire), "{registration:?}, {what}: it did not wait");
        release.join().expect("the thread should not panic");
        it.stream.synchronize().expect("the work should complete");
    });
    nothing_is_left();
}

nccl_test!(registrations_end_after_the_work_that_was_submitted, {
    for (what, end) in ENDS {
        for registration in [Registration::Windows, Registration::Buffers] {
            check(what, registration, *end);
        }
    }
});

nccl_test!(a_first_sync_does_not_wait_for_a_collective_that_never_completes, {
    for registration in [Registration::Windows, Registration::Buffers] {
        for mode in [Mode::AtSync, Mode::Off] {
            let job = Job { mode, ..Job::new(2).on_default_stream() };
            job.run(|it| {
                let other =
                    it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
                let pool = it.pool();
                it.registrar
                    .attach(&it.world, &[pool.id()], registration)
                    .expect("the pool should not be attached yet");
                let mut tensor = it.take(&pool, 30 * MIB);
                it.meet();
                let reduce = |tensor: &mut DeviceBuffer<f32>| {
                    other.all_reduce_in_place(tensor, ReduceOp::Sum, &it.stream).expect("the work should be submitted");
                };
                if it.rank == 0 {
                    reduce(&mut tensor);
                }
                it.registrar.sync(&[&it.world]).expect("the ranks should agree");
                it.meet();
                if it.rank == 1 {
                    reduce(&mut tensor);
                }
                it.stream.synchronize().expect("the work should complete");
            });
            nothing_is_left();
        }
    }
});

nccl_test!(a_first_sync_behind_a_collective_that_never_completes_ends_at_the_deadline, {
    Job::new(2).impatient().on_default_stream().run(|it| {
        let part = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        let pool = it.pool();
        it.registrar.attach(&part, &[pool.id()], Registration::Windows).expect("the pool should not be attached yet");
        let mut tensor = it.take(&pool, 30 * MIB);
        it.meet();
        if it.rank == 0 {
            part.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &it.stream).expect("the work should be submitted");
            let begun = Instant::now();
            it.registrar.sync(&[&part]).expect_err("the other rank does not sync");
            assert!(begun.elapsed() < 4 * it.deadline, "{:?}", begun.elapsed());
        }
        it.meet();
        let _aborted = part.abort();
        it.registrar.sweep();
    });
    nothing_is_left();
});

nccl_test!(a_sleep_begins_after_the_work_that_was_submitted, {
    for contents in [Contents::Keep, Contents::Drop, Contents::Zero] {
        Job::new(2).run(|it| {
            let pool = it.attached_pool();
            let mut tensor = it.take(&pool, 30 * MIB);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            let is_done = Arc::new(AtomicBool::new(false));
            let work = cuda::hold(it.stream.cu_stream() as u64);
            it.stream.memset_zeros(&mut tensor).expect("the work should be submitted");
            let release = thread::spawn({
                let is_done = Arc::clone(&is_done);
                move || {
                    thread::sleep(Duration::from_millis(50));
                    is_done.store(true, Ordering::Release);
                    drop(work);
                }
            });
            it.registrar.sleep(&it.world, pool.id(), contents).expect("all ranks should sleep together");
            assert!(is_done.load(Ordering::Acquire), "{contents:?}: it did not wait");
            release.join().expect("the thread should not panic");
            it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        });
        nothing_is_left();
    }
});
