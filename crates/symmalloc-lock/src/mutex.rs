//! The mutex: a value behind the lock.

use crate::bias::Bias;
use crate::thread_number;
use lock_api::{GuardNoSend, RawMutex};

/// How many times in a row a thread comes before it gets the bias: what a locked instruction costs each time is then what it
/// costs to take the bias away.
const PATIENCE: u32 = 1 << 10;

/// A `T` behind a [`RawBiasedMutex`]. A panic inside leaves it free, and nobody is promised to be next.
pub type BiasedMutex<T> = lock_api::Mutex<RawBiasedMutex, T>;

/// Access to the value of a [`BiasedMutex`] for as long as it lives.
pub type BiasedMutexGuard<'a, T> = lock_api::MutexGuard<'a, RawBiasedMutex, T>;

/// The lock of a [`BiasedMutex`], see the [crate](crate).
#[derive(Debug)]
pub struct RawBiasedMutex(Bias);

// SAFETY: at most one thread is inside between `lock`, or a successful `try_lock`, and `unlock`: `bias.rs` says why, and
// `interleavings.rs` tries every order. The guard cannot go to another thread, which would leave by the wrong flag.
unsafe impl RawMutex for RawBiasedMutex {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait asks for it")]
    const INIT: Self = RawBiasedMutex(Bias::new(PATIENCE));
    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.0.enter_by_bias(thread_number::known()) {
            self.lock_by_all_means();
        }
    }

    /// Fails as well while the lock is biased to another thread: to take the bias away is to wait.
    #[inline]
    fn try_lock(&self) -> bool {
        self.0.enter_by_bias(thread_number::known()) || self.try_lock_unbiased()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.leave();
    }
}

impl RawBiasedMutex {
    #[inline(never)]
    fn lock_by_all_means(&self) {
        self.0.enter(thread_number::get());
    }

    #[inline(never)]
    fn try_lock_unbiased(&self) -> bool {
        self.0.try_enter(thread_number::get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membarrier;
    use std::sync::mpsc;
    use std::thread;

    fn is_biased<T>(lock: &BiasedMutex<T>) -> bool {
        // SAFETY: only looks.
        unsafe { lock.raw() }.0.is_biased()
    }

    /// Comes so often that the bias is given, if it is a thread of its own that comes.
    fn come_often(lock: &BiasedMutex<(u64, u64)>) {
        (0..=PATIENCE).for_each(|_| bump(lock));
        assert_eq!(is_biased(lock), membarrier::is_supported());
    }

    fn bump(lock: &BiasedMutex<(u64, u64)>) {
        let mut inside = lock.lock();
        inside.0 += 1;
        inside.1 += 1;
        assert_eq!(inside.0, inside.1);
    }

    #[test]
    fn a_lock_is_biased_to_a_thread_that_comes_often_until_another_comes() {
        let lock = BiasedMutex::new((0, 0));
        come_often(&lock);
        thread::scope(|scope| scope.spawn(|| bump(&lock)).join().expect("no panic"));
        assert!(!is_biased(&lock));
        bump(&lock);
        assert!(!is_biased(&lock), "it is patient now");
        (0..2 * PATIENCE).for_each(|_| bump(&lock));
        assert_eq!(is_biased(&lock), membarrier::is_supported());
        assert_eq!(lock.lock().0, u64::from(3 * PATIENCE + 3));
    }

    #[test]
    fn whoever_takes_the_bias_away_waits_until_the_owner_is_out() {
        let lock = BiasedMutex::new((0, 0));
        come_often(&lock);
        let (came, comes) = mpsc::channel();
        thread::scope(|scope| {
            let mut inside = lock.lock();
            scope.spawn(|| {
                came.send(()).expect("waited for");
                bump(&lock);
            });
            comes.recv().expect("sent");
            for _ in 0..1000 {
                inside.0 += 1;
                thread::yield_now();
                inside.1 += 1;
            }
        });
        assert_eq!(lock.lock().0, u64::from(PATIENCE) + 1002);
    }

    #[test]
    fn threads_that_come_in_bursts_meet_nobody_inside() {
        let lock = BiasedMutex::new((0, 0));
        thread::scope(|scope| {
            for thread in 0..4 {
                let lock = &lock;
                scope.spawn(move || {
                    for burst in 0..20 {
                        (0..3000).for_each(|_| bump(lock));
                        if (burst + thread) % 3 == 0 {
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (240_000, 240_000));
    }

    #[test]
    fn more_threads_than_flags_come_often_one_after_another() {
        let lock = BiasedMutex::new((0, 0));
        let (stay, held) = mpsc::channel::<()>();
        let held = std::sync::Mutex::new(held);
        thread::scope(|scope| {
            for _ in 0..20 {
                let (done, wait) = mpsc::channel();
                let (lock, held) = (&lock, &held);
                scope.spawn(move || {
                    (0..3 * PATIENCE).for_each(|_| bump(lock));
                    done.send(()).expect("waited for");
                    // Alive, so that its number is its own.
                    let _ended = held.lock().map(|held| held.recv());
                });
                wait.recv().expect("sent");
            }
            drop(stay);
        });
        assert_eq!(lock.lock().0, u64::from(60 * PATIENCE));
    }

    #[test]
    fn who_would_have_to_wait_does_not_enter() {
        let lock = BiasedMutex::new((0, 0));
        for is_biased in [false, membarrier::is_supported()] {
            let inside = lock.lock();
            assert!(lock.try_lock().is_none(), "not even the same thread");
            thread::scope(|scope| {
                assert!(scope.spawn(|| lock.try_lock().is_none()).join().expect("no panic"));
            });
            drop(inside);
            assert!(lock.try_lock().is_some());
            thread::scope(|scope| {
                let other = scope.spawn(|| lock.try_lock().is_some()).join().expect("no panic");
                assert_eq!(other, !is_biased, "it does not take a bias away");
            });
            (0..=PATIENCE).for_each(|_| bump(&lock));
        }
    }

    #[test]
    fn a_panic_inside_leaves_a_lock_free() {
        let lock = BiasedMutex::new((0, 0));
        for _ in 0..2 {
            thread::scope(|scope| {
                let panicked = scope.spawn(|| {
                    (0..4 * PATIENCE).for_each(|_| bump(&lock));
                    let _inside = lock.lock();
                    panic!("on purpose");
                });
                assert!(panicked.join().is_err());
            });
            bump(&lock);
        }
    }
}
