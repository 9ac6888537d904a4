//! A sorted run of free keys: the content of a long bin of the free index.
//!
//! A program that frees 100,000 blocks of one size fills one bin with all of them. A run keeps their keys in pages, so
//! that a search is two binary searches and a change moves at most one page:
//!
//! ```text
//!  head     [ 2 5 9 ]
//!  pages    [ 11 ][ 30 41 57 ]   1 to PAGE_MAX keys each, sorted
//!  bounds   [ 10  │ 28 ]         every key of page i is at least bounds[i], every key before it is less
//! ```
//!
//! The pages after the head lie in descending order: best fits empty the first ones, and the end of a `Vec` is where one
//! goes without moving the others.
//!
//! Search: two binary searches, O(log n). Insert and remove: one search and at most one page moved, plus, once in
//! PAGE_MAX / 2 inserts, a move of the bounds. A best fit is searched for and then taken out, so the run remembers where
//! it was found last, and a removal looks there first.

use crate::free_key::FreeKey;
use std::cell::Cell;

/// A page of this many keys is cut in two: 1 KiB, which one `memmove` shifts in a few dozen instructions.
const PAGE_MAX: usize = 64;
/// Two neighbouring pages with fewer keys than this together are joined.
const PAGE_JOIN: usize = PAGE_MAX / 4;
/// Up to this many keys a walk is cheaper than a binary search.
const WALK_MAX: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct SortedRun {
    /// The first page; the only one of a short run. Empty only when the run is empty.
    head: Vec<FreeKey>,
    /// The pages after the first. `None` in a short run.
    tail: Option<Box<Tail>>,
    /// Where the last search ended. Need not be true any more.
    found: Cell<Position>,
}

/// A page and a place in it.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    /// In `pages` of the tail; their number is the head.
    page: usize,
    at: usize,
}

/// The pages after the first, and what separates all pages, in descending order.
#[derive(Debug, Default)]
struct Tail {
    /// `bounds[i]` is the least key that page i of `pages` may hold: every key of the pages behind it, and of the head, is
    /// less.
    bounds: Vec<FreeKey>,
    /// None is empty.
    pages: Vec<Vec<FreeKey>>,
}

impl SortedRun {
    /// The least key that is not less than `bound`.
    #[inline]
    pub(crate) fn first_at_least(&self, bound: FreeKey) -> Option<FreeKey> {
        let mut found = self.search(bound);
        if found.at == self.page(found.page).len() {
            // A page may end before `bound` although the bound of the next one lies behind it.
            found = Position { page: found.page.checked_sub(1)?, at: 0 };
        }
        self.found.set(found);
        self.page(found.page).get(found.at).copied()
    }

    /// Where a key lies, or belongs.
    #[inline]
    fn search(&self, key: FreeKey) -> Position {
        let (page, keys) = match &self.tail {
            None => (0, &self.head),
            Some(tail) => {
                let page = tail.page_of(key);
                (page, tail.pages.get(page).unwrap_or(&self.head))
            }
        };
        Position { page, at: position(keys, key) }
    }

    #[inline]
    fn page(&self, page: usize) -> &Vec<FreeKey> {
        self.tail.as_ref().and_then(|tail| tail.pages.get(page)).unwrap_or(&self.head)
    }

    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey) {
        let page = match &mut self.tail {
            None => &mut self.head,
            Some(tail) => {
                let page = tail.page_of(key);
                tail.pages.get_mut(page).unwrap_or(&mut self.head)
            }
        };
        let at = position(page, key);
        page.insert(at, key);
        if page.len() == PAGE_MAX {
            self.cut(key);
        }
    }

    /// Takes a key out.
    ///
    /// # Panics
    /// When the run does not hold the key.
    #[inline]
    pub(crate) fn remove(&mut self, key: FreeKey) {
        let holds = |place: &Position| self.page(place.page).get(place.at) == Some(&key);
        let found = Some(self.found.get()).filter(holds).or_else(|| Some(self.search(key)).filter(holds));
        let Position { page, at } = found.expect("the free index lacks a block that the table calls free");
        let Some(tail) = &mut self.tail else {
            self.head.remove(at);
            return;
        };
        // A page that lost a key is joined with the one before it, the head with the one behind it.
        let (len, upper) = match tail.pages.get_mut(page) {
            Some(keys) => {
                keys.remove(at);
                (keys.len(), page)
            }
            None => {
                self.head.remove(at);
                (self.head.len(), tail.pages.len() - 1)
            }
        };
        if len < PAGE_JOIN {
            self.join(upper);
        }
    }

    pub(crate) fn is_shorter_than(&self, len: usize) -> bool {
        self.tail.is_none() && self.head.len() < len
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeKey> + '_ {
        let tail = self.tail.iter().flat_map(|tail| tail.pages.iter().rev().flatten());
        self.head.iter().chain(tail).copied()
    }

    /// Cuts the full page that holds `key` in two.
    #[cold]
    fn cut(&mut self, key: FreeKey) {
        let tail = self.tail.get_or_insert_default();
        let at = tail.page_of(key);
        let page = tail.pages.get_mut(at).unwrap_or(&mut self.head);
        let mut upper = Vec::with_capacity(PAGE_MAX);
        upper.extend(page.drain(PAGE_MAX / 2..));
        tail.bounds.insert(at, upper[0]);
        tail.pages.insert(at, upper);
    }

    /// Joins a page of the tail with the one before it if they have few keys, or if one of them has none.
    #[cold]
    fn join(&mut self, page: usize) {
        let tail = self.tail.as_mut().expect("a paged run has a tail");
        let len = tail.pages[page].len();
        let before = tail.pages.get(page + 1).unwrap_or(&self.head).len();
        if len + before >= PAGE_JOIN && len > 0 && before > 0 {
            return;
        }
        tail.bounds.remove(page);
        let mut moved = tail.pages.remove(page);
        tail.pages.get_mut(page).unwrap_or(&mut self.head).append(&mut moved);
        if tail.pages.is_empty() {
            self.tail = None;
        }
    }
}

impl Tail {
    /// The page that may hold the key: one of `pages`, or the head if it is none of them.
    #[inline]
    fn page_of(&self, key: FreeKey) -> usize {
        self.bounds.partition_point(|bound| *bound > key)
    }
}

/// Where `key` lies, or belongs, in a sorted page.
#[inline]
fn position(page: &[FreeKey], key: FreeKey) -> usize {
    if page.len() <= WALK_MAX {
        return page.iter().take_while(|k| **k < key).count();
    }
    page.partition_point(|k| *k < key)
}
