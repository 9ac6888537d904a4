//! A registry: an append-only table that is read without a lock while it grows.
//!
//! Every `allocate` and `free` looks pools and heaps up; they are made rarely. The first few entries, all that most programs
//! have, take a comparison and a load; the rest is in a [`boxcar::Vec`]. Entries should be small, a box or a counted pointer,
//! because the first ones lie in the registry itself.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Entries that are found the short way.
const NEAR: usize = 8;

#[derive(Debug)]
pub(crate) struct Registry<T> {
    /// One more than the largest index that was made.
    len: AtomicUsize,
    near: [OnceLock<T>; NEAR],
    far: boxcar::Vec<OnceLock<T>>,
    /// Held while `far` grows: without it, a thread that needs another thread's entry would add entries until that one is there.
    growing: Mutex<()>,
}

impl<T> Registry<T> {
    pub(crate) fn new() -> Self {
        Registry {
            len: AtomicUsize::new(0),
            near: std::array::from_fn(|_| OnceLock::new()),
            far: boxcar::Vec::new(),
            growing: Mutex::new(()),
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        match self.near.get(index) {
            Some(entry) => entry.get(),
            None => self.get_far(index),
        }
    }

    #[inline(never)]
    fn get_far(&self, index: usize) -> Option<&T> {
        self.far.get(index - NEAR)?.get()
    }

    /// The entry, made now if it was not made before.
    pub(crate) fn get_or_make(&self, index: usize, make: impl FnOnce() -> T) -> &T {
        let entry = match self.near.get(index) {
            Some(entry) => entry,
            None => {
                let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
                while self.far.get(index - NEAR).is_none() {
                    self.far.push(OnceLock::new());
                }
                &self.far[index - NEAR]
            }
        };
        self.len.fetch_max(index + 1, Ordering::AcqRel);
        entry.get_or_init(make)
    }

    /// Adds an entry, which is told its index.
    pub(crate) fn push(&self, make: impl FnOnce(usize) -> T) -> usize {
        let index = self.len.fetch_add(1, Ordering::AcqRel);
        self.get_or_make(index, || make(index));
        index
    }

    /// Number of indices that are taken; an entry that is just being made counts.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// The entries that were made, by index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        (0..self.len()).filter_map(|index| Some((index, self.get(index)?)))
    }
}

#[cfg(test)]
#[path = "../../tests/unit/registry.rs"]
mod tests;
