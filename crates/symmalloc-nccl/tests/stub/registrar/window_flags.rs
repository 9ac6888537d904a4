//! Tests of the flags of windows.

use super::support::{Job, MIB, nothing_is_left};
use stub_process::nccl_test;
use symmalloc_nccl::{Attachment, Capability, CommError, CommState, NcclVersion, SyncError, SyncField, WindowFlags};

nccl_test!(windows_get_the_flags_that_the_library_has, ["STUB_NCCL_VERSION" = "23203"], {
    Job::new(2).run(|it| {
        for flags in [WindowFlags::STRICT_ORDERING, WindowFlags::GIN_ONLY | WindowFlags::STRICT_ORDERING] {
            let pool = it.pool();
            let mut tensor = it.take(&pool, 8 * MIB);
            it.registrar.attach(&it.world, &[pool.id()], with_flags(flags)).expect("the library has the flags");
            it.registrar.sync(&[&it.world]).expect("all ranks should sync");
            it.reduce_right(&it.world, &mut tensor);
            it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should be attached");
            it.registrar.sync(&[&it.world]).expect("all ranks should sync");
        }
    });
    nothing_is_left();
});

nccl_test!(an_old_library_refuses_window_flags, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        let pool = it.pool();
        let refused = it.registrar.attach(&it.world, &[pool.id()], with_flags(WindowFlags::GIN_ONLY));
        let error = refused.expect_err("the library is too old").to_string();
        assert!(error.starts_with("NCCL 2.32.3 is required for the window flag NCCL_WIN_GIN_ONLY"), "{error}");
        let unsupported =
            CommError::Unsupported { capability: Capability::NetworkOnlyWindows, version: NcclVersion::new(2, 30, 7) };
        let refused = it.world.register_window_with(4096, 4096, WindowFlags::GIN_ONLY).map(drop);
        assert_eq!(refused, Err(unsupported));
        assert_eq!(it.registrar.registration(&it.world, pool.id()), None);
    });
    nothing_is_left();
});

nccl_test!(ranks_with_different_window_flags_disagree, ["STUB_NCCL_VERSION" = "23203"], {
    Job::new(2).run(|it| {
        let pool = it.pool();
        let _tensor = it.take(&pool, 8 * MIB);
        let flags = if it.rank == 0 { WindowFlags::NONE } else { WindowFlags::STRICT_ORDERING };
        it.registrar.attach(&it.world, &[pool.id()], with_flags(flags)).expect("the library has the flags");
        let error = it.registrar.sync(&[&it.world]).expect_err("the flags differ");
        let SyncError::Differ { difference, .. } = &error else { panic!("{error}") };
        assert_eq!(difference.field, SyncField::Attached);
        assert_eq!(it.world.state(), CommState::Ready);
    });
    nothing_is_left();
});

/// An attachment for windows with flags.
fn with_flags(flags: WindowFlags) -> Attachment {
    Attachment { flags, ..Attachment::default() }
}
