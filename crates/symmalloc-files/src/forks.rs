//! Detection of forked children, and the treatment of their connections, for programs with threads.
//!
//! A forked child has a copy of all objects but none of the other threads, and it cannot use CUDA. Its copies share descriptors and shared
//! memory with the parent. Releasing these objects in the child could block on a lock that a missing thread holds, or change memory that
//! belongs to the parent.
//!
//! ```text
//!  parent          fork ──► continues; a release has its effect
//!  child                └─► is_forked(): a release has no effect
//!                           KeptFromChildren: the descriptor no longer refers to the parent's connection
//! ```
//!
//! A child that executes another program keeps no descriptor, because all are opened with `O_CLOEXEC`.

use std::os::fd::{AsRawFd, BorrowedFd};
#[cfg(target_os = "linux")]
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Returns `true` in a child that was forked after [`watch_forks`]. Costs a load.
#[inline]
pub fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Relaxed)
}

/// Makes [`is_forked`] return `true` in children that are forked from now on. Later calls have no effect.
pub fn watch_forks() {
    #[cfg(target_os = "linux")]
    {
        static WATCHING: Once = Once::new();
        WATCHING.call_once(handler::install);
    }
}

/// Keeps a connection from forked children until this value is dropped.
///
/// Peers notice the end of a process when its connection closes. A connection stays open while any process has a descriptor of it. Without
/// this type, a child that outlives its parent would hide the parent's death. In a child, the descriptor is replaced by an unconnected one,
/// so that closing its number later does not close an unrelated descriptor.
#[derive(Debug)]
pub struct KeptFromChildren(#[cfg(target_os = "linux")] &'static slots::Slot);

impl KeptFromChildren {
    /// Keeps a descriptor from forked children. Drop the returned value before the descriptor is closed.
    pub fn new(descriptor: BorrowedFd<'_>) -> Self {
        watch_forks();
        let number = descriptor.as_raw_fd();
        #[cfg(target_os = "linux")]
        return KeptFromChildren(slots::take(number));
        #[cfg(not(target_os = "linux"))]
        {
            let _unused = number;
            KeptFromChildren()
        }
    }
}

#[cfg(target_os = "linux")]
impl Drop for KeptFromChildren {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

/// A list of descriptor numbers that a fork handler can read at any moment: it only grows, and takes no lock.
#[cfg(target_os = "linux")]
mod slots {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI32, Ordering};

    /// Value of a slot without a descriptor.
    const NONE: i32 = -1;

    /// A slot for a descriptor, with a link to the next slot.
    #[derive(Debug)]
    pub(super) struct Slot {
        number: AtomicI32,
        next: OnceLock<&'static Slot>,
    }

    static FIRST: Slot = Slot { number: AtomicI32::new(NONE), next: OnceLock::new() };

    impl Slot {
        fn try_take(&self, number: i32) -> bool {
            self.number.compare_exchange(NONE, number, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }

        pub(super) fn give_back(&self) {
            self.number.store(NONE, Ordering::Release);
        }
    }

    /// Stores `number` in the first free slot, and returns the slot. The list never shrinks, and has at most as many slots as the process
    /// had descriptors at once.
    pub(super) fn take(number: i32) -> &'static Slot {
        let mut slot = &FIRST;
        while !slot.try_take(number) {
            let add = || &*Box::leak(Box::new(Slot { number: AtomicI32::new(NONE), next: OnceLock::new() }));
            slot = slot.next.get_or_init(add);
        }
        slot
    }

    /// Empties the list, and returns its descriptors. Takes no lock and allocates nothing.
    pub(super) fn take_all() -> impl Iterator<Item = i32> {
        std::iter::successors(Some(&FIRST), |slot| slot.next.get().copied())
            .map(|slot| slot.number.swap(NONE, Ordering::AcqRel))
            .filter(|number| *number != NONE)
    }
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod handler {
    use super::{IS_FORKED, slots};
    use std::sync::atomic::Ordering;

    /// Installs the fork handler. Must be called only once.
    pub(super) fn install() {
        // SAFETY: the handler stores to atomics and makes system calls, which a child of a process with threads may do.
        let is_refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0;
        if is_refused {
            tracing::warn!(name: "fork.unwatched", target: "symmalloc", "out of memory: forked processes are not detected");
        }
    }

    /// Runs in a child, before `fork` returns there. Empties the list, because the child may reuse the numbers for other descriptors. A
    /// grandchild then has nothing left to do.
    unsafe extern "C" fn in_child() {
        IS_FORKED.store(true, Ordering::Relaxed);
        let mut unconnected = -1;
        let mut is_replacement = false;
        for number in slots::take_all() {
            if unconnected < 0 {
                unconnected = open_unconnected();
            }
            if unconnected < 0 {
                // The process has reached its limit of descriptors, so close this one to be able to open another.
                // SAFETY: takes no pointers. The owner of the descriptor in this process closes whatever has its number next.
                let _closed = unsafe { libc::close(number) };
                unconnected = open_unconnected();
                is_replacement = unconnected == number;
            }
            if unconnected >= 0 && unconnected != number {
                // SAFETY: takes no pointers. The descriptor is one of the list, whose owner in this process keeps it open.
                let _replaced = unsafe { libc::dup3(unconnected, number, libc::O_CLOEXEC) };
            }
        }
        if unconnected >= 0 && !is_replacement {
            // SAFETY: opened above.
            let _closed = unsafe { libc::close(unconnected) };
        }
    }

    /// Opens a descriptor that is connected to nothing. Returns a negative number if the process has reached its limit of descriptors.
    fn open_unconnected() -> i32 {
        // SAFETY: takes no pointers.
        unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }
    }
}
