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
//! Search: two binary searches, O(log n). Insert and remove: one search and at most one page moved, plus, once in
//! PAGE_MAX / 2 inserts, a move of the bounds. A best fit is searched for and then taken out, so the run remembers where
//! it was found last, and a removal looks there first.

use crate::free_key::FreeKey;
use std::cell::Cell;
use std::collections::VecDeque;

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

/// A page, 0 for the head, and a place in it.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    page: usize,
    at: usize,
}

/// The pages after the first, and what separates all pages. Best fits are taken from the front, where a deque moves little.
#[derive(Debug, Default)]
struct Tail {
    /// `bounds[i]` is the least key that page i of `pages` may hold: every key before that page is less.
    bounds: VecDeque<FreeKey>,
    /// None is empty.
    pages: VecDeque<Vec<FreeKey>>,
}

impl SortedRun {
    /// The least key that is not less than `bound`.
    #[inline]
    pub(crate) fn first_at_least(&self, bound: FreeKey) -> Option<FreeKey> {
        let mut found = self.search(bound);
        if found.at == self.page(found.page)?.len() {
            // A page may end before `bound` although the bound of the next one lies behind it.
            found = Position { page: found.page + 1, at: 0 };
        }
        self.found.set(found);
        self.page(found.page)?.get(found.at).copied()
    }

    /// Where a key lies, or belongs.
    #[inline]
    fn search(&self, key: FreeKey) -> Position {
        let page = self.tail.as_ref().map_or(0, |tail| tail.page_of(key).map_or(0, |page| page + 1));
        Position { page, at: self.page(page).map_or(0, |keys| position(keys, key)) }
    }

    #[inline]
    fn page(&self, page: usize) -> Option<&Vec<FreeKey>> {
        match page.checked_sub(1) {
            None => Some(&self.head),
            Some(page) => self.tail.as_ref()?.pages.get(page),
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey) {
        let page = match &mut self.tail {
            None => &mut self.head,
            Some(tail) => match tail.page_of(key) {
                None => &mut self.head,
                Some(page) => &mut tail.pages[page],
            },
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
        let holds = |place: &Position| self.page(place.page).and_then(|keys| keys.get(place.at)) == Some(&key);
        let found = Some(self.found.get()).filter(holds).or_else(|| Some(self.search(key)).filter(holds));
        let Position { page, at } = found.expect("the free index lacks a block that the table calls free");
        match (page.checked_sub(1), &mut self.tail) {
            (Some(page), Some(tail)) => {
                tail.pages[page].remove(at);
                self.join(page);
            }
            (_, tail) => {
                let is_paged = tail.is_some();
                self.head.remove(at);
                if is_paged {
                    self.refill_head();
                }
            }
        }
    }

    pub(crate) fn is_shorter_than(&self, len: usize) -> bool {
        self.tail.is_none() && self.head.len() < len
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeKey> + '_ {
        let tail = self.tail.iter().flat_map(|tail| tail.pages.iter().flatten());
        self.head.iter().chain(tail).copied()
    }

    /// Cuts the full page that holds `key` in two.
    #[cold]
    fn cut(&mut self, key: FreeKey) {
        let tail = self.tail.get_or_insert_default();
        let (page, next) = match tail.page_of(key) {
            None => (&mut self.head, 0),
            Some(page) => (&mut tail.pages[page], page + 1),
        };
        let mut upper = Vec::with_capacity(PAGE_MAX);
        upper.extend(page.drain(PAGE_MAX / 2..));
        tail.bounds.insert(next, upper[0]);
        tail.pages.insert(next, upper);
    }

    /// Joins a page that lost a key with the one before it if they have few keys.
    fn join(&mut self, page: usize) {
        let tail = self.tail.as_mut().expect("a paged run has a tail");
        let len = tail.pages[page].len();
        let before = if page == 0 { &mut self.head } else { &mut tail.pages[page - 1] };
        if len + before.len() < PAGE_JOIN || len == 0 {
            let mut moved = tail.remove(page);
            let before = if page == 0 { &mut self.head } else { &mut tail.pages[page - 1] };
            before.append(&mut moved);
            self.drop_empty_tail();
        }
    }

    /// The head may be empty only when the run is: refills it from the page behind it.
    fn refill_head(&mut self) {
        let tail = self.tail.as_mut().expect("a paged run has a tail");
        if self.head.len() + tail.pages[0].len() < PAGE_JOIN || self.head.is_empty() {
            self.head.append(&mut tail.remove(0));
            self.drop_empty_tail();
        }
    }

    fn drop_empty_tail(&mut self) {
        if self.tail.as_ref().is_some_and(|tail| tail.pages.is_empty()) {
            self.tail = None;
        }
    }
}

impl Tail {
    /// The page of `pages` that may hold the key; `None` is the head.
    #[inline]
    fn page_of(&self, key: FreeKey) -> Option<usize> {
        self.bounds.partition_point(|bound| *bound <= key).checked_sub(1)
    }

    fn remove(&mut self, page: usize) -> Vec<FreeKey> {
        self.bounds.remove(page);
        self.pages.remove(page).expect("the page is there")
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
