//! Mail: frees that other threads leave for a heap instead of waiting for it.
//!
//! A thread that frees what lies in a heap where another one is inside, mapping memory perhaps, need not wait: nothing comes
//! back from a free. It leaves a letter in the heap's mailbox. Whoever enters the heap next, that thread itself included,
//! carries out what the letters say before anything else. So memory is free for everybody who comes after the thread that
//! left the letter, and the heap's ops have the order in which threads synchronise, as if each had waited (rule D8).
//!
//! ```text
//!  owner        enter ──────── map memory ──────── leave         enter ─ carry out ─ allocate ─ leave
//!  another                 drop ─ letter                           ▲
//!                                   └──────────────────────────────┘
//! ```
//!
//! A letter holds what came with the allocation, which keeps the allocator alive, and the allocator has the heap with its
//! mailbox. So mail is taken in only from [`open`](Mail::open) to [`close`](Mail::close), between which something else keeps
//! the allocator alive. What is closed stays closed.

use crate::handle::Handle;
use crate::sync::{AtomicBool, Mutex};
use std::mem;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

/// The mailbox of a heap.
///
/// Threads that leave letters write to other lines than the one that the heap's owner looks at, but for the first letter.
#[repr(C, align(128))]
pub(crate) struct Mail<H> {
    /// Letters are there. Written under the lock of the box.
    is_waiting: AtomicBool,
    /// For good. Written under the lock of the box.
    is_closed: AtomicBool,
    letters: Apart<Mutex<Letters<H>>>,
}

#[repr(align(128))]
struct Apart<T>(T);

struct Letters<H> {
    is_open: bool,
    letters: Vec<Letter<H>>,
}

/// The free of an allocation of the heap, and what came with it.
pub(crate) struct Letter<H> {
    pub(crate) handle: Handle,
    pub(crate) held: H,
}

impl<H> Mail<H> {
    /// Takes no letters yet.
    pub(crate) fn new() -> Self {
        let letters = Apart(Mutex::new(Letters { is_open: false, letters: Vec::new() }));
        Mail { is_waiting: AtomicBool::new(false), is_closed: AtomicBool::new(false), letters }
    }

    /// Takes letters from now on, if it was never closed.
    pub(crate) fn open(&self) {
        self.with(|letters| letters.is_open = true);
    }

    /// Takes no letters from now on. Those that are there wait for who enters the heap next.
    pub(crate) fn close(&self) {
        if !self.is_closed.load(Relaxed) {
            self.with(|_| self.is_closed.store(true, Relaxed));
        }
    }

    /// For the next heap: as new.
    pub(crate) fn renew(&self) {
        self.with(|letters| {
            assert!(letters.letters.is_empty(), "letters for a heap that is gone");
            letters.is_open = false;
            self.is_closed.store(false, Relaxed);
        });
    }

    /// Whether letters are there. Letters of a thread that synchronised with this one since it left them are seen.
    #[inline(always)]
    pub(crate) fn is_waiting(&self) -> bool {
        self.is_waiting.load(Relaxed)
    }

    /// Leaves a letter, or returns what was to be in it if none are taken.
    pub(crate) fn leave(&self, handle: Handle, held: H) -> Result<(), H> {
        self.with(|letters| {
            if !letters.is_open || self.is_closed.load(Relaxed) {
                return Err(held);
            }
            letters.letters.push(Letter { handle, held });
            if letters.letters.len() == 1 {
                self.is_waiting.store(true, Relaxed);
            }
            Ok(())
        })
    }

    /// Takes the letters out, in the order in which they came.
    pub(crate) fn take(&self) -> Vec<Letter<H>> {
        self.with(|letters| {
            self.is_waiting.store(false, Relaxed);
            mem::take(&mut letters.letters)
        })
    }

    /// Nothing that is called under the box's lock waits.
    fn with<R>(&self, visit: impl FnOnce(&mut Letters<H>) -> R) -> R {
        visit(&mut self.letters.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bound::Binding;
    use crate::entrance::tests::{Kept, Owner, binding, free, owner};
    use crate::errors::{FreeError, HandleError};
    use crate::lock::Shared;
    use crate::recording::{Sink, SinkError};
    use crate::{Allocation, PoolId, StreamId, op};
    use std::sync::{Arc, mpsc};
    use std::thread;

    const STREAM: StreamId = StreamId(0);
    const OTHER: StreamId = StreamId(1);

    fn open(owner: &Owner) -> Binding<Shared<Kept>> {
        let heap = binding(owner, 0);
        owner.core.open_mail(&heap);
        heap
    }

    fn allocate(owner: &Owner, size_bytes: u64) -> Allocation {
        owner.core.allocate(PoolId::DEFAULT, STREAM, size_bytes).expect("memory")
    }

    /// Another thread frees while this one is inside, and is done before this one leaves.
    fn leave(owner: &Arc<Owner>, heap: &Binding<Shared<Kept>>, handles: &[Handle]) {
        owner.core.with_keepsake(heap, |_| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    for handle in handles {
                        let (freed, left) = free(heap, *handle, owner);
                        assert!(freed.is_ok() && left.is_none());
                    }
                });
            });
        });
        assert!(heap.heap.mail.is_waiting());
    }

    /// Whether a thread would have to wait.
    fn is_refused(owner: &Arc<Owner>, heap: &Binding<Shared<Kept>>) -> bool {
        let nobody = Handle::from_raw((u64::MAX, u64::MAX));
        heap.heap.mail.leave(nobody, Arc::clone(owner)).is_err()
    }

    /// Lets go of what lies beside the heap, and so of the allocator.
    fn close(owner: &Owner, heap: &Binding<Shared<Kept>>) {
        owner.core.close_mail(heap);
        drop(owner.core.with_keepsake(heap, mem::take));
    }

    #[test]
    fn frees_that_are_left_come_before_whatever_comes_next_in_their_order() {
        let (alone, owner) = (owner(), owner());
        let heap = open(&owner);
        for round in 0..3 {
            let [expected, made] =
                [&alone, &owner].map(|owner| [700, 4096, 3 << 20, 512].map(|size| allocate(owner, size)));
            assert_eq!(expected.map(|it| it.placement), made.map(|it| it.placement));
            [2, 0, 1].into_iter().for_each(|at: usize| alone.core.free(expected[at].handle).expect("live"));
            leave(&owner, &heap, &[2, 0, 1].map(|at: usize| made[at].handle));
            match round {
                0 => {
                    let again = [&alone, &owner].map(|owner| allocate(owner, 2 << 20));
                    assert_eq!(again[1].placement, made[0].placement, "the memory is free, in one piece");
                    assert_eq!(again[0].placement, again[1].placement);
                }
                1 => assert!(owner.core.allocation(made[0].handle).is_err(), "it was freed"),
                _ => {
                    // Another thread's free that waits for nobody comes behind those that were left.
                    alone.core.free(expected[3].handle).expect("live");
                    assert!(free(&heap, made[3].handle, &owner).0.is_ok());
                }
            }
            assert!(!heap.heap.mail.is_waiting());
            assert_eq!(alone.core.digest(PoolId::DEFAULT), owner.core.digest(PoolId::DEFAULT));
        }
        assert_eq!(alone.core.stats(), owner.core.stats());
        owner.core.check().expect("sane");
        assert_eq!(owner.late.lock().expect("no panic").len(), 0, "all were at hand");
        close(&owner, &heap);
    }

    #[test]
    fn a_thread_waits_where_no_mail_is_taken() {
        let owner = owner();
        let heap = binding(&owner, 0);
        let made = allocate(&owner, 512);
        let (freed, is_freed) = mpsc::channel();
        thread::scope(|scope| {
            owner.core.with_keepsake(&heap, |_| {
                scope.spawn(|| {
                    freed.send(free(&heap, made.handle, &owner).0).expect("it listens");
                });
                let early = is_freed.recv_timeout(std::time::Duration::from_millis(20));
                assert!(early.is_err(), "it waits");
            });
            assert_eq!(is_freed.recv(), Ok(Ok(())));
        });
        assert_eq!(owner.core.stats().usage.all.allocations.current, 0);
        close(&owner, &heap);
    }

    #[test]
    fn a_box_opens_once_and_only_of_a_heap_without_books() {
        let owner = owner();
        let heap = binding(&owner, 0);
        assert!(is_refused(&owner, &heap), "not yet");
        let named = owner.core.allocate_named(PoolId::DEFAULT, STREAM, 512, "named").expect("memory");
        owner.core.open_mail(&heap);
        assert!(is_refused(&owner, &heap), "names are books");
        owner.core.free(named.handle).expect("live");
        let made = allocate(&owner, 512);
        owner.core.open_mail(&heap);
        leave(&owner, &heap, &[made.handle]);
        close(&owner, &heap);
        owner.core.open_mail(&heap);
        assert!(is_refused(&owner, &heap), "once");
    }

    #[test]
    fn a_heap_that_keeps_books_by_now_finds_them_kept() {
        let owner = owner();
        let heap = open(&owner);
        let [one, named] =
            ["", "named"].map(|name| owner.core.allocate_named(PoolId::DEFAULT, STREAM, 512, name).expect("memory"));
        leave(&owner, &heap, &[one.handle, named.handle]);
        assert_eq!(owner.core.leak_report().leaks.len(), 0);
        assert_eq!(*owner.late.lock().expect("no panic"), [Ok(()), Ok(())]);
        let again = allocate(&owner, 512);
        assert_eq!(again.placement, one.placement);
        owner.core.check().expect("sane");
        close(&owner, &heap);
    }

    #[test]
    fn an_allocation_of_no_bytes_and_one_that_was_freed_before_are_no_mail_of_a_block() {
        let owner = owner();
        let heap = open(&owner);
        let (nothing, freed) = (allocate(&owner, 0), allocate(&owner, 512));
        owner.core.free(freed.handle).expect("live");
        leave(&owner, &heap, &[nothing.handle, freed.handle]);
        let stale = FreeError::Handle(HandleError::Stale { handle: freed.handle });
        owner.core.check().expect("sane");
        assert_eq!(*owner.late.lock().expect("no panic"), [Ok(()), Err(stale)]);
        close(&owner, &heap);
    }

    #[test]
    fn mail_of_another_allocator_is_refused() {
        let [owner, other] = [owner(), owner()];
        let heap = open(&owner);
        let [made, theirs] = [&owner, &other].map(|owner| allocate(owner, 512));
        for handle in [made.handle, theirs.handle] {
            heap.heap.mail.leave(handle, Arc::clone(&other)).expect("taken");
        }
        let theirs = FreeError::Handle(HandleError::Foreign { handle: theirs.handle });
        owner.core.check().expect("sane");
        assert_eq!(*other.late.lock().expect("no panic"), [Err(theirs)], "a block is freed without the allocator");
        close(&owner, &heap);
    }

    #[test]
    fn a_use_that_who_frees_may_not_know_of_is_not_left_to_others() {
        let owner = owner();
        let heap = open(&owner);
        let [known, unknown] = [512, 512].map(|size| allocate(&owner, size));
        owner.core.record_use_by_owner(known.handle, OTHER).expect("live");
        assert!(!is_refused(&owner, &heap), "who frees it knows");
        // What was left by now is of nobody, and refused when it is done.
        owner.core.record_use(unknown.handle, OTHER).expect("live");
        assert!(is_refused(&owner, &heap));
        assert_eq!(owner.late.lock().expect("no panic").len(), 1);
        close(&owner, &heap);
    }

    struct Nowhere;

    impl Sink for Nowhere {
        fn begin(&mut self, _: &crate::Config) -> Result<(), SinkError> {
            Ok(())
        }

        fn record(&mut self, _: op::Record) -> Result<(), SinkError> {
            Ok(())
        }

        fn finish(&mut self) -> Result<(), SinkError> {
            Ok(())
        }
    }

    #[test]
    fn a_heap_that_is_recorded_has_no_mail() {
        let owner = owner();
        let heap = open(&owner);
        owner.core.start_recording(Nowhere).expect("nothing happened yet");
        assert!(is_refused(&owner, &heap));
        owner.core.stop_recording().expect("whole");
        assert!(is_refused(&owner, &heap), "nor afterwards");
    }

    #[test]
    fn mail_keeps_the_allocator_alive_until_it_is_closed() {
        let owner = owner();
        let heap = open(&owner);
        let made = [512, 700].map(|size| allocate(&owner, size).handle);
        owner.core.with_keepsake(&heap, |kept| kept.room = 1);
        leave(&owner, &heap, &made);
        assert_eq!(Arc::strong_count(&owner), 3);
        owner.core.close_mail(&heap);
        assert!(heap.heap.mail.is_waiting(), "who comes next does it");
        let kept = owner.core.with_keepsake(&heap, mem::take);
        assert_eq!((kept.owners.len(), Arc::strong_count(&owner)), (1, 2), "there was room for one");
        drop(kept);
        let gone = Arc::downgrade(&owner);
        drop(owner);
        assert!(gone.upgrade().is_none());
    }

    #[test]
    fn the_next_heap_behind_a_lock_has_mail_of_its_own() {
        for _ in 0..3 {
            let owner = owner();
            let heap = binding(&owner, 0);
            assert!(is_refused(&owner, &heap), "not yet");
            owner.core.open_mail(&heap);
            let made = allocate(&owner, 512);
            leave(&owner, &heap, &[made.handle]);
            close(&owner, &heap);
            assert_eq!(Arc::strong_count(&owner), 1);
        }
    }
}
