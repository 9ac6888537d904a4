//! A small number for each live thread.
//!
//! A thread that ends gives its number back, and a later thread gets it. Whoever has a number comes after all that was done
//! under that number before: the list of returned numbers is behind a mutex.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

/// Numbers are multiples of this. What is free below may say something else beside a number.
pub(crate) const STEP: u32 = 8;
/// Of a thread that has no number: not yet, or not any more.
pub(crate) const NONE: u32 = 0;
/// Every number is less. More threads do not live at a time; those that do have no number.
const MAX: u32 = u32::MAX / STEP * STEP - STEP;

thread_local! {
    static NUMBER: Cell<u32> = const { Cell::new(NONE) };
    static HELD: Held = Held::take();
}

/// This thread's number, or [`NONE`].
#[inline(always)]
pub(crate) fn known() -> u32 {
    NUMBER.get()
}

/// This thread's number. It is given one the first time; a thread that is ending gets [`NONE`].
pub(crate) fn get() -> u32 {
    let _is_ending = HELD.try_with(|_| ()).is_err();
    NUMBER.get()
}

/// Numbers that are free, and the last one that was given.
static FREE: Mutex<(Vec<u32>, u32)> = Mutex::new((Vec::new(), 0));

/// A number that is given back when the thread ends.
struct Held;

impl Held {
    fn take() -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = free.0.pop().unwrap_or_else(|| {
            free.1 = MAX.min(free.1 + STEP);
            if free.1 < MAX { free.1 } else { NONE }
        });
        NUMBER.set(number);
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let number = NUMBER.replace(NONE);
        if number != NONE {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).0.push(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn live_threads_have_numbers_of_their_own() {
        let mine = get();
        assert!(mine != NONE && mine.is_multiple_of(STEP) && mine == get() && mine == known());
        thread::scope(|scope| {
            let theirs = scope.spawn(|| (known(), get(), known())).join().expect("no panic");
            assert_eq!(theirs.0, NONE, "not before somebody asks");
            assert_eq!(theirs.1, theirs.2);
            assert_ne!(theirs.1, mine);
        });
    }

    #[test]
    fn a_thread_that_is_ending_has_no_number() {
        struct Late;
        impl Drop for Late {
            fn drop(&mut self) {
                // Destroyed after HELD, which was made later.
                assert_eq!((known(), get()), (NONE, NONE));
            }
        }
        thread_local! {
            static LATE: Late = const { Late };
        }
        let ended = thread::spawn(|| {
            LATE.with(|_| ());
            assert_ne!(get(), NONE);
        });
        ended.join().expect("no panic");
    }
}
