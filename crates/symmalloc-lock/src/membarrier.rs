//! The two halves of an asymmetric fence: one that costs nothing, and one that makes up for it.
//!
//! Two threads that each store and then look what the other stored need a fence between the two, both of them; else both
//! may see nothing. `membarrier` runs such a fence on all threads of the process at once. So whoever calls it spares all
//! others theirs: [`light`] only keeps the compiler from changing the order.
//!
//! ```text
//!  one thread, always          another, seldom
//!   store a                     store b
//!   light()                     heavy()
//!   look at b                   look at a          at least one sees what the other stored
//! ```

#[cfg(all(symmalloc_loom, test))]
pub(crate) use modelled::{heavy, is_supported, light};
#[cfg(not(all(symmalloc_loom, test)))]
pub(crate) use real::{heavy, is_supported, light};

#[cfg(not(all(symmalloc_loom, test)))]
mod real {
    use once_cell::race::OnceBool;
    #[cfg(target_os = "linux")]
    use rustix::thread::{MembarrierCommand, membarrier};
    use std::sync::atomic::{Ordering, compiler_fence, fence};
    use std::thread;
    use std::time::Duration;

    #[inline(always)]
    pub(crate) fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    /// Whether [`heavy`] is a system call here. Asks the system the first time. Threads that come at once all ask: none waits for
    /// another, which would be for ever in a child that was forked meanwhile.
    pub(crate) fn is_supported() -> bool {
        static IS_SUPPORTED: OnceBool = OnceBool::new();
        IS_SUPPORTED.get_or_init(call)
    }

    /// Whether the system ran a fence on every thread of the process. A process registers for that once.
    #[cfg(target_os = "linux")]
    fn call() -> bool {
        let run = || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
        run() || (membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() && run())
    }

    #[cfg(not(target_os = "linux"))]
    fn call() -> bool {
        false
    }

    /// Returns when every thread of the process has passed a fence since this was called.
    ///
    /// A system that took the call at first may refuse it later, when a filter of system calls was set since. Then this waits
    /// until each thread's stores must have been seen: no processor keeps one for itself for a thousandth of that time, and
    /// a thread that lost its processor passed a fence.
    #[allow(clippy::disallowed_methods, reason = "time decides how long another thread waits, and nothing else")]
    pub(crate) fn heavy() {
        if !call() {
            fence(Ordering::SeqCst);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Loom knows no asymmetric fences. Two whole ones allow the same outcomes.
#[cfg(all(symmalloc_loom, test))]
mod modelled {
    use loom::sync::atomic::{Ordering, fence};

    pub(crate) fn light() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn is_supported() -> bool {
        true
    }
}
