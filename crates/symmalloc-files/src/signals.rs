//! Writes that return an error in cases where the system would otherwise end the process.
//!
//! A write beyond the limit on file sizes (`ulimit -f`) raises SIGXFSZ, and a write to a closed pipe or socket raises SIGPIPE. Both end a
//! program that does not handle them, although the write would also return `EFBIG` or `EPIPE`. Rust programs ignore SIGPIPE and Python
//! programs ignore both, but a library is also loaded into programs in C and C++. A lost recording must not end such a program.
//!
//! ```text
//!  program's mask ──► block both ──► write ──► take the signal that the write raised ──► program's mask
//! ```
//!
//! The system sends both signals to the thread that writes. It is therefore enough to block the signals on this thread. The program's
//! handlers, its ignored signals and its other threads stay as they are. Changing the handler instead would affect all threads.

/// Runs writes that return an error where they would raise SIGXFSZ or SIGPIPE. Affects only this thread, and only until `write` returns.
///
/// A signal that the program itself had blocked, and that was pending before, stays pending. Threads that `write` starts also block both
/// signals.
///
/// # Examples
/// ```
/// use std::io::Write;
///
/// let mut file = tempfile::tempfile()?;
/// symmalloc_files::without_signals(|| file.write_all(b"fails with EFBIG at the limit of `ulimit -f`"))?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn without_signals<T>(write: impl FnOnce() -> T) -> T {
    #[cfg(target_os = "linux")]
    let _blocked = blocked::Blocked::new();
    write()
}

/// Like [`without_signals`], but for all further writes of this thread and of threads that it starts, until the process ends. Intended for
/// programs, because they write buffered output even after `main` returns. Programs that the process executes inherit the blocked signals.
pub fn block_write_signals() {
    #[cfg(target_os = "linux")]
    std::mem::forget(blocked::Blocked::new());
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod blocked {
    use libc::{SIG_BLOCK, SIG_SETMASK, SIGPIPE, SIGXFSZ, c_int, sigset_t};
    use std::io;
    use std::marker::PhantomData;
    use std::mem::MaybeUninit;
    use std::ptr;

    const RAISED_BY_WRITES: [c_int; 2] = [SIGPIPE, SIGXFSZ];

    /// A guard that blocks the signals on this thread.
    pub(super) struct Blocked {
        /// The thread's signal mask before the signals were blocked.
        mask: sigset_t,
        /// For each signal, `true` if it was already pending before the signals were blocked.
        pending: [bool; 2],
        /// Makes the guard `!Send`, because the mask belongs to the thread.
        _not_send: PhantomData<*const ()>,
    }

    impl Blocked {
        pub(super) fn new() -> Self {
            let (blocked, mut mask) = (set_of(&RAISED_BY_WRITES), set_of(&[]));
            // SAFETY: both sets are initialized.
            unsafe { libc::pthread_sigmask(SIG_BLOCK, &raw const blocked, &raw mut mask) };
            Blocked { mask, pending: pending(), _not_send: PhantomData }
        }
    }

    impl Drop for Blocked {
        fn drop(&mut self) {
            let before = self.pending;
            for ((signal, now), before) in RAISED_BY_WRITES.into_iter().zip(pending()).zip(before) {
                if now && !before {
                    take(signal);
                }
            }
            // SAFETY: the set is initialized.
            unsafe { libc::pthread_sigmask(SIG_SETMASK, &raw const self.mask, ptr::null_mut()) };
        }
    }

    fn set_of(signals: &[c_int]) -> sigset_t {
        let mut set = MaybeUninit::uninit();
        // SAFETY: the pointer is valid for writes.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for signal in signals {
            // SAFETY: the set was initialized above, and the signal exists.
            unsafe { libc::sigaddset(set.as_mut_ptr(), *signal) };
        }
        // SAFETY: initialized above.
        unsafe { set.assume_init() }
    }

    /// Returns the signals that are pending for this thread or its process.
    fn pending() -> [bool; 2] {
        let mut set = set_of(&[]);
        // SAFETY: the pointer is valid for writes.
        unsafe { libc::sigpending(&raw mut set) };
        // SAFETY: the set is initialized, and the signal exists.
        RAISED_BY_WRITES.map(|signal| unsafe { libc::sigismember(&raw const set, signal) } == 1)
    }

    /// Discards a pending signal.
    fn take(signal: c_int) {
        let (set, now) = (set_of(&[signal]), libc::timespec { tv_sec: 0, tv_nsec: 0 });
        loop {
            // SAFETY: the set and the time are initialized, and the call accepts a null pointer for information that is not needed.
            let taken = unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const now) };
            if taken != -1 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return;
            }
        }
    }
}
