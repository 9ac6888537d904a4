//! The clocks of this process. The system's time of day can jump.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::SystemTime;

/// Seconds by which the time of day differs from the system's.
static OFFSET: AtomicI64 = AtomicI64::new(0);

/// Makes the time of day jump by this number of seconds.
///
/// # Panics
/// Panics if the standard library does not see the jump.
pub(crate) fn jump(seconds: i64) {
    let now = || {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
        since.as_secs() as i64
    };
    let before = now();
    OFFSET.fetch_add(seconds, Ordering::Relaxed);
    let jumped = now() - before;
    assert!((seconds..seconds + 60).contains(&jumped), "the time of day jumped by {jumped} s instead of {seconds}");
}

/// Returns the seconds of the monotonic clock, which are the same in all processes of the machine.
pub(crate) fn seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) }, 0, "Linux has this clock");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Replaces the C library's function in this executable, and so in the standard library.
///
/// # Safety
/// `time` must be valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: guaranteed by the caller.
    let outcome = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as c_int;
    if outcome == 0 && clock == libc::CLOCK_REALTIME {
        // SAFETY: guaranteed by the caller.
        unsafe { (*time).tv_sec += OFFSET.load(Ordering::Relaxed) };
    }
    outcome
}
