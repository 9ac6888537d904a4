//! How a thread waits for another one to leave.

/// Waits until `is_over`: looks again at once, then lets others run in between, then sleeps.
///
/// Most stays last some tens of nanoseconds, and to move what they touch from one processor to another takes longer. So
/// a waiter pauses twice as long after each look, up to some microseconds: a crowd then does not stop the one that is
/// inside, and that one comes again a few hundred times before everything moves.
#[cfg(not(all(symmalloc_loom, test)))]
#[allow(clippy::disallowed_methods, reason = "time decides when a waiting thread looks again, and nothing else")]
pub(crate) fn until(mut is_over: impl FnMut() -> bool) {
    use std::time::Duration;
    use std::{hint, thread};

    /// Whoever is inside for longer than these looks calls the driver, or lost its processor.
    const LOOKS: u32 = 20;
    const PAUSES_MAX: u32 = 256;
    const YIELDS: u32 = 20;
    /// Mapping memory takes tens of microseconds.
    const SLEEP: Duration = Duration::from_micros(20);
    const SLEEP_MAX: Duration = Duration::from_millis(1);

    let (mut pauses, mut sleep) = (1, SLEEP);
    for look in 0_u64.. {
        if is_over() {
            return;
        }
        if look < LOOKS.into() {
            (0..pauses).for_each(|_| hint::spin_loop());
            pauses = PAUSES_MAX.min(2 * pauses);
        } else if look < (LOOKS + YIELDS).into() {
            thread::yield_now();
        } else {
            thread::sleep(sleep);
            sleep = SLEEP_MAX.min(2 * sleep);
        }
    }
}

#[cfg(all(symmalloc_loom, test))]
pub(crate) fn until(mut is_over: impl FnMut() -> bool) {
    while !is_over() {
        loom::thread::yield_now();
    }
}
