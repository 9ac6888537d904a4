//! A page of free keys: what a [sorted run](crate::blocks::sorted_run) keeps its keys in.
//!
//! ```text
//!  keys   [ 41 │ 30 │ 11 │ 17 │ 39 │ MIN │ MIN ... MIN ]        sorted 3, len 5; PAGE_MAX places
//!           in order       newcomers
//! ```
//! A new key goes behind the others, which touches one cache line of a page that is in no cache. The newcomers are
//! sorted when a key is searched for. In a long run few pages are ever searched, those that best fits take from, and each
//! gets most of its keys before.
//!
//! The greatest key comes first: best fits take the least, which moves no other. Behind its keys a page is filled up with a
//! key that is less than all. So a search always halves PAGE_MAX places: the compiler knows every step, and no step depends
//! on how many keys there are.

use crate::blocks::free_key::FreeKey;
use std::mem;

/// A page of this many keys is full: 512 bytes. A power of two.
pub(crate) const PAGE_MAX: usize = 32;

#[derive(Debug)]
pub(crate) struct KeyPage {
    keys: Box<Keys>,
    /// Less than `PAGE_MAX` between two calls of the run.
    len: u32,
    /// So many keys from the first on are in descending order.
    sorted: u32,
}

/// The places of a page: whole cache lines, none of them another heap's.
#[derive(Debug)]
#[repr(align(64))]
struct Keys([FreeKey; PAGE_MAX]);

impl Default for KeyPage {
    fn default() -> Self {
        KeyPage { keys: Box::new(Keys([FreeKey::MIN; PAGE_MAX])), len: 0, sorted: 0 }
    }
}

impl KeyPage {
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// The keys, the newcomers last.
    fn keys(&self) -> &[FreeKey] {
        &self.keys.0[..self.len as usize]
    }

    /// The keys in ascending order.
    pub(crate) fn keys_in_order(&self) -> impl Iterator<Item = FreeKey> + use<> {
        let mut keys = self.keys().to_vec();
        keys.sort_unstable();
        keys.into_iter()
    }

    /// The key in a place; `MIN` when there is none.
    #[inline(always)]
    pub(crate) fn key(&self, at: usize) -> FreeKey {
        self.keys.0[at % PAGE_MAX]
    }

    /// Adds a key to a page that is not full.
    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey) {
        self.keys.0[self.len as usize] = key;
        self.len += 1;
    }

    /// Puts the newcomers in order.
    #[inline]
    pub(crate) fn sort(&mut self) {
        if self.sorted < self.len {
            self.sort_newcomers();
        }
    }

    #[inline(never)]
    fn sort_newcomers(&mut self) {
        let last = self.len() - 1;
        for newcomer in self.sorted as usize..last {
            let to = self.keys.0[..newcomer].partition_point(|other| *other > self.keys.0[newcomer]);
            self.keys.0[to..=newcomer].rotate_right(1);
        }
        // Where pages are searched often there is rarely another. Nothing but `MIN` lies behind the keys in order now, as
        // in a sorted page.
        let key = mem::replace(&mut self.keys.0[last], FreeKey::MIN);
        let to = self.count_sorted_at_least(key);
        self.keys.0.copy_within(to..last, to + 1);
        self.keys.0[to] = key;
        self.sorted = self.len;
    }

    /// How many keys of a sorted page are at least `bound`: the last of them is in the place before.
    #[inline(always)]
    pub(crate) fn count_at_least(&self, bound: FreeKey) -> usize {
        debug_assert_eq!(self.sorted, self.len);
        self.count_sorted_at_least(bound)
    }

    /// As [`count_at_least`](Self::count_at_least), of the keys in order. Behind them lies nothing but `MIN`.
    #[inline(always)]
    fn count_sorted_at_least(&self, bound: FreeKey) -> usize {
        let (mut at, mut half) = (0, PAGE_MAX / 2);
        while half > 0 {
            if self.key(at + half - 1) >= bound {
                at += half;
            }
            half /= 2;
        }
        at
    }

    /// Takes the key in a place out.
    #[inline]
    pub(crate) fn remove(&mut self, at: usize) {
        let len = self.len();
        self.keys.0.copy_within(at + 1..len, at);
        self.keys.0[len - 1] = FreeKey::MIN;
        self.len -= 1;
        self.sorted -= u32::from(at < self.sorted as usize);
    }

    /// Cuts a page in two. Returns the half with the greater keys.
    pub(crate) fn split_off(&mut self) -> KeyPage {
        self.sort();
        let mut upper = KeyPage::default();
        let (half, len) = (self.len() / 2, self.len());
        upper.keys.0[..half].copy_from_slice(&self.keys.0[..half]);
        self.keys.0.copy_within(half..len, 0);
        self.keys.0[len - half..].fill(FreeKey::MIN);
        (upper.len, upper.sorted) = (half as u32, half as u32);
        (self.len, self.sorted) = ((len - half) as u32, (len - half) as u32);
        upper
    }

    /// Adds the keys of the page behind this one, which fit.
    pub(crate) fn append(&mut self, behind: &KeyPage) {
        behind.keys().iter().for_each(|key| self.insert(*key));
    }
}

#[cfg(test)]
#[path = "../../tests/unit/key_page.rs"]
mod tests;
