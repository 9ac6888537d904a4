//! Time that a thread spends on a processor: what other programs take in between on a busy machine does not count.

/// Nanoseconds of processor time of this thread that the work takes.
///
/// # Panics
/// Where the system has no such clock.
pub fn nanoseconds(work: impl FnOnce()) -> f64 {
    let start = now();
    work();
    now() - start
}

/// The middle one.
///
/// # Panics
/// When there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "threads have clocks");
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}
