//! An append-only table that is read without a lock while it grows.
//!
//! Every `allocate` and `free` looks up pools and heaps, which are rarely created. Access to one of the first few
//! entries costs one comparison and one load, and most programs never have more entries. Further entries are in pages,
//! which a [`boxcar::Vec`] lists. A page is allocated when its first entry is added, so one large index costs one page.
//! Entries should be small, such as a box or a counted pointer, because the first ones are stored in the registry
//! itself.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Number of entries stored in the registry itself.
const NEAR: usize = 8;
/// Number of entries in a page.
const PAGE: usize = 64;

type Page<T> = Box<[OnceLock<T>; PAGE]>;

#[derive(Debug)]
pub(crate) struct Registry<T> {
    /// One more than the largest index in use.
    len: AtomicUsize,
    near: [OnceLock<T>; NEAR],
    /// The entries from index `NEAR` on.
    far: boxcar::Vec<OnceLock<Page<T>>>,
    /// Held while `far` grows. Without it, a thread that waits for another thread's page would keep adding pages.
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
        let far = index - NEAR;
        self.far.get(far / PAGE)?.get()?[far % PAGE].get()
    }

    /// Returns the entry, and creates it first if necessary.
    pub(crate) fn get_or_make(&self, index: usize, make: impl FnOnce() -> T) -> &T {
        let entry = match self.near.get(index) {
            Some(entry) => entry,
            None => {
                let far = index - NEAR;
                let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
                while self.far.get(far / PAGE).is_none() {
                    self.far.push(OnceLock::new());
                }
                let page = self.far[far / PAGE].get_or_init(|| Box::new(std::array::from_fn(|_| OnceLock::new())));
                &page[far % PAGE]
            }
        };
        self.len.fetch_max(index + 1, Ordering::AcqRel);
        entry.get_or_init(make)
    }

    /// Adds an entry. `make` receives its index.
    pub(crate) fn push(&self, make: impl FnOnce(usize) -> T) -> usize {
        let index = self.len.fetch_add(1, Ordering::AcqRel);
        self.get_or_make(index, || make(index));
        index
    }

    /// Returns the number of indices in use, including that of an entry under construction.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Iterates over the existing entries by index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let len = self.len();
        let pages = self.far.iter().filter_map(|(page, entries)| Some((NEAR + page * PAGE, entries.get()?)));
        let far = pages.flat_map(|(first, entries)| (first..).zip(&**entries));
        let entries = self.near.iter().enumerate().chain(far).take_while(move |(index, _)| *index < len);
        entries.filter_map(|(index, entry)| Some((index, entry.get()?)))
    }
}

#[cfg(test)]
mod tests;
