//! Processor time of a thread, which excludes time that other programs use on a busy machine.

/// Returns the processor time of this thread that `work` takes, in nanoseconds.
///
/// # Panics
/// Panics if the system has no such clock.
pub fn nanoseconds(work: impl FnOnce()) -> f64 {
    let start = now();
    work();
    now() - start
}

/// Returns the median.
///
/// # Panics
/// Panics if there are no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "the system has no clock for the processor time of threads");
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
