//! A system that creates no more threads.

use stub_process::{nccl_test, refuse_threads};
use symmalloc_cuda::CudaDevice;
use symmalloc_nccl::{CommError, Communicator, UniqueId, WatchdogMode};

nccl_test!(a_communicator_without_a_watchdog_is_an_error_with_a_remedy, {
    let (device, id) =
        (CudaDevice::new(0).expect("the stub should have a device"), UniqueId::new().expect("the stub creates an id"));
    refuse_threads();
    let connect = |mode| Communicator::builder(&device).watchdog(mode).connect(id, 0, 1).map(drop);
    for mode in [WatchdogMode::Exit, WatchdogMode::Abort] {
        let error = connect(mode).expect_err("no thread can watch it");
        assert!(matches!(error, CommError::Watchdog { .. }), "{error}");
        assert!(error.to_string().contains("ulimit -u"), "{error}");
    }
    let error = connect(WatchdogMode::Off).expect_err("no thread can connect");
    assert!(matches!(error, CommError::Thread { .. }), "{error}");
    assert!(error.to_string().contains("ulimit -u"), "{error}");
});
