//! Tests of registrations and graph captures: memory must be registered before a capture, and a registration during a capture fails with an
//! error that states what to do.

use super::support::{Job, MIB, nothing_is_left};
use stub_process::nccl_test;
use symmalloc_core::config::PoolConfig;
use symmalloc_cuda::GraphPool;
use symmalloc_nccl::{LookupError, SyncError};

nccl_test!(memory_that_was_synced_before_a_capture_has_windows_during_it, {
    Job::new(2).quiet().run(|it| {
        let config = PoolConfig::builder()
            .symmetric(true)
            .reserved(64 * MIB)
            .build()
            .expect("the configuration should be valid");
        let graphs = GraphPool::new(&it.allocator, config).expect("the pool should fit into the device");
        it.registrar
            .attach(&it.world, &[graphs.id()], it.windows())
            .expect("the pool should be symmetric and registrable");
        let stream = it.allocator.register_stream(&it.stream).expect("the stream should be registered");
        it.allocator.core().reserve(graphs.id(), stream, 64 * MIB).expect("the memory should fit");
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").registrations, 1);
        let capture = graphs.begin(&it.stream).expect("no other capture is active");
        // SAFETY: the memory is never read.
        let tensor = unsafe { it.allocator.alloc::<f32>(&it.stream, 1 << 20) }.expect("the reservation should succeed");
        assert_eq!(it.offset_of(&it.world, &tensor), 0);
        it.registrar.sync(&[&it.world]).expect("there is nothing new");
        drop(capture);
        drop(tensor);
    });
    nothing_is_left();
});

nccl_test!(memory_without_a_window_is_an_error_during_a_capture, {
    Job::new(2).run(|it| {
        let config = PoolConfig::builder().symmetric(true).fixed().build().expect("the configuration should be valid");
        let graphs = GraphPool::new(&it.allocator, config).expect("the pool should fit into the device");
        it.registrar
            .attach(&it.world, &[graphs.id()], it.windows())
            .expect("the pool should be symmetric and registrable");
        let capture = graphs.begin(&it.stream).expect("no other capture is active");
        // SAFETY: the memory is never read.
        let tensor = unsafe { it.allocator.alloc::<f32>(&it.stream, 1 << 20) }.expect("the allocation should fit");
        let error = it.registrar.window_of(&it.world, &tensor).expect_err("it has no window");
        assert!(matches!(error, LookupError::Capturing { .. }) && error.to_string().contains("before the capture"));
        let error = it.registrar.sync(&[&it.world]).expect_err("not during a capture");
        assert!(matches!(error, SyncError::Capturing) && error.to_string().contains("before the capture"));
        drop(capture);
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").registrations, 1);
        it.registrar.window_of(&it.world, &tensor).expect("it has a window now");
    });
    nothing_is_left();
});
