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
