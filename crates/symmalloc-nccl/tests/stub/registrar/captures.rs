//! Another thread captures in the global mode, in which the driver forbids every thread what is no work of a stream. Ranks go on, and the
//! capture is not spoilt.

use super::support::{Job, MIB, Rank, nothing_is_left};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use std::sync::Arc;
use std::sync::mpsc::channel;
use stub_process::nccl_test;
use symmalloc_core::op::Contents;
use symmalloc_cuda::CudaDevice;

/// Runs `body` while another thread captures a stream of the device that the allocator does not know.
fn while_captured<R>(device: &Arc<CudaDevice>, body: impl FnOnce() -> R) -> R {
    let (begun, has_begun) = channel();
    let (end, is_over) = channel::<()>();
    std::thread::scope(|scope| {
        let capture = scope.spawn(move || {
            let stream = device.context().new_stream().expect("a stream");
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
            begun.send(()).expect("somebody waits");
            // Also when the body panics, which drops the other end.
            let _over = is_over.recv();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            stream.end_capture(flags).map(drop)
        });
        has_begun.recv().expect("it captures");
        let answer = body();
        drop(end);
        assert_eq!(capture.join().expect("no panic"), Ok(()), "the capture is spoilt");
        answer
    })
}

/// As [`while_captured`], on all ranks while rank 0's device has the capture: ranks are threads of one process.
fn all_while_captured(it: &Rank, body: impl FnOnce()) {
    let body = || {
        it.meet();
        body();
        it.meet();
    };
    if it.rank == 0 {
        while_captured(&it.device, body)
    } else {
        body()
    }
    it.meet();
}

nccl_test!(a_sync_registers_and_deregisters, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let large = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("all ranks did the same");
        all_while_captured(it, || {
            let _other = it.take(&pool, 20 * MIB);
            drop(large);
            it.trim(&pool);
            let synced = it.registrar.sync(&[&it.world]).expect("all ranks did the same");
            assert_eq!((synced.registrations, synced.deregistrations, synced.released_bytes), (1, 1, 30 * MIB));
        });
    });
    nothing_is_left();
});

nccl_test!(a_pool_sleeps_and_wakes, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("all ranks did the same");
        all_while_captured(it, || {
            for contents in [Contents::Keep, Contents::Drop] {
                it.registrar.sleep(&it.world, pool.id(), contents).expect("all ranks sleep");
                it.registrar.wake(&it.world, pool.id()).expect("all ranks wake");
            }
        });
        it.reduce_right(&it.world, &mut tensor);
    });
    nothing_is_left();
});

nccl_test!(communicators_are_made_waited_for_and_destroyed, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let tensor = it.take(&pool, MIB);
        all_while_captured(it, || {
            let part = it.world.split(Some(0), 0).expect("all ranks come").expect("with a color");
            it.registrar.attach(&part, &[pool.id()], symmalloc_nccl::Registration::Windows).expect("shareable");
            it.registrar.sync(&[&part]).expect("all ranks did the same");
            part.synchronize(&it.stream).expect("nothing runs");
            part.destroy().expect("ready");
        });
        it.registrar.sweep();
        drop(tensor);
    });
    nothing_is_left();
});
