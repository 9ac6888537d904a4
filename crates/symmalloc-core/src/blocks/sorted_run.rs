//! A sorted run of free keys: the content of a long bin of the free index.
//!
//! A program that frees 100,000 blocks of one size fills one bin with all of them. A run keeps their keys in
//! [pages](KeyPage), so that a search is two binary searches and a change moves at most one page:
//!
//! ```text
//!  head     [ 2 5 9 ]
//!  pages    [ 11 ][ 30 41 57 ]   1 to PAGE_MAX - 1 keys each, put in order when they are looked into
//!  bounds   [ 10  │ 28 ]         every key of page i is at least bounds[i], every key before it is less
//! ```
//!
//! The pages after the head lie in descending order: best fits empty the first ones, and the end of a `Vec` is where one
//! goes without moving the others.
//!
//! Search: two binary searches, O(log n). Insert: one, and the key goes to the end of its page. Remove: one search and at most
//! one page moved. Once in PAGE_MAX / 2 inserts the bounds move. A best fit is searched for and then taken out, so the run
//! remembers where it was found last, and a removal looks there first.

use crate::blocks::free_key::FreeKey;
use crate::blocks::key_page::{KeyPage, PAGE_MAX};

/// Two neighbouring pages with fewer keys than this together are joined.
const PAGE_JOIN: usize = PAGE_MAX / 4;

/// Alone on its cache lines, as whatever a heap changes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct SortedRun {
    /// The first page; the only one of a short run. Empty only when the run is empty.
    head: KeyPage,
    /// The pages after the first. `None` in a short run.
    tail: Option<Box<Tail>>,
    /// Where the last search ended. Need not be true any more.
    found: Position,
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
    pages: Vec<KeyPage>,
}

impl SortedRun {
    /// The least key that is not less than `bound`.
    #[inline]
    pub(crate) fn first_at_least(&mut self, bound: FreeKey) -> Option<FreeKey> {
        let mut page = self.page_of(bound);
        let mut keys = self.page_mut(page);
        keys.sort();
        let mut count = keys.count_at_least(bound);
        if count == 0 {
            // A page may end before `bound` although the bound of the next one lies behind it.
            page = page.checked_sub(1)?;
            keys = self.page_mut(page);
            keys.sort();
            count = keys.len();
        }
        let (at, key) = (count - 1, keys.key(count - 1));
        self.found = Position { page, at };
        Some(key)
    }

    /// The page that a key lies in, or belongs to.
    #[inline]
    fn page_of(&self, key: FreeKey) -> usize {
        self.tail.as_ref().map_or(0, |tail| tail.page_of(key))
    }

    #[inline]
    fn page_mut(&mut self, page: usize) -> &mut KeyPage {
        self.tail.as_mut().and_then(|tail| tail.pages.get_mut(page)).unwrap_or(&mut self.head)
    }

    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey) {
        let page = self.page_of(key);
        let keys = self.page_mut(page);
        keys.insert(key);
        if keys.len() == PAGE_MAX {
            self.cut(page);
        }
    }

    /// Takes a key out.
    ///
    /// # Panics
    /// When the run does not hold the key.
    #[inline]
    pub(crate) fn remove(&mut self, key: FreeKey) {
        let Position { mut page, mut at } = self.found;
        let mut keys = self.page_mut(page);
        if keys.key(at) != key {
            page = self.page_of(key);
            keys = self.page_mut(page);
            keys.sort();
            at = keys.count_at_least(key).saturating_sub(1);
            assert!(keys.key(at) == key, "the free index lacks a block that the table calls free");
        }
        keys.remove(at);
        if keys.len() < PAGE_JOIN {
            self.join(page);
        }
    }

    pub(crate) fn is_shorter_than(&self, len: usize) -> bool {
        self.tail.is_none() && self.head.len() < len
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeKey> + '_ {
        let tail = self.tail.iter().flat_map(|tail| tail.pages.iter().rev());
        std::iter::once(&self.head).chain(tail).flat_map(KeyPage::keys_in_order)
    }

    /// Cuts a full page in two.
    #[cold]
    fn cut(&mut self, page: usize) {
        let tail = self.tail.get_or_insert_default();
        let lower = tail.pages.get_mut(page).unwrap_or(&mut self.head);
        let upper = lower.split_off();
        tail.bounds.insert(page, upper.key(upper.len() - 1));
        tail.pages.insert(page, upper);
    }

    /// Joins a page that lost a key with the one before it, the head with the one behind it, if they have few keys, or if
    /// one of them has none.
    #[cold]
    fn join(&mut self, page: usize) {
        let Some(tail) = &mut self.tail else { return };
        let page = page.min(tail.pages.len() - 1);
        let len = tail.pages[page].len();
        let before = tail.pages.get(page + 1).unwrap_or(&self.head).len();
        if len + before >= PAGE_JOIN && len > 0 && before > 0 {
            return;
        }
        tail.bounds.remove(page);
        let moved = tail.pages.remove(page);
        tail.pages.get_mut(page).unwrap_or(&mut self.head).append(&moved);
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
