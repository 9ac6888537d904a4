//! A page of free keys: what a [sorted run](crate::sorted_run) keeps its keys in.
//!
//! ```text
//!  keys   [ 11 │ 30 │ 41 │ MAX │ MAX ... MAX ]        len 3; sorted as a whole, PAGE_MAX places
//! ```
//! Behind its keys a page is filled up with a key that is greater than all. So a search always halves PAGE_MAX places:
//! the compiler knows every step, and no step depends on how many keys there are.

use crate::free_key::FreeKey;

/// A page of this many keys is full: 1 KiB, which one `memmove` shifts in a few dozen instructions. A power of two.
pub(crate) const PAGE_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct KeyPage {
    keys: Box<Keys>,
    /// Less than `PAGE_MAX` between two calls of the run.
    len: usize,
}

/// The places of a page: whole cache lines, none of them another heap's.
#[derive(Debug)]
#[repr(align(64))]
struct Keys([FreeKey; PAGE_MAX]);

impl Default for KeyPage {
    fn default() -> Self {
        KeyPage { keys: Box::new(Keys([FreeKey::MAX; PAGE_MAX])), len: 0 }
    }
}

impl KeyPage {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn keys(&self) -> &[FreeKey] {
        &self.keys.0[..self.len]
    }

    /// The key in a place; `MAX` when there is none.
    #[inline(always)]
    pub(crate) fn key(&self, at: usize) -> FreeKey {
        self.keys.0[at % PAGE_MAX]
    }

    /// Where a key lies, or belongs, in a page that is not full.
    #[inline(always)]
    pub(crate) fn position(&self, key: FreeKey) -> usize {
        let (mut at, mut half) = (0, PAGE_MAX / 2);
        while half > 0 {
            if self.key(at + half - 1) < key {
                at += half;
            }
            half /= 2;
        }
        at
    }

    /// Puts a key into its place.
    #[inline]
    pub(crate) fn insert(&mut self, at: usize, key: FreeKey) {
        self.keys.0.copy_within(at..self.len, at + 1);
        self.keys.0[at] = key;
        self.len += 1;
    }

    /// Takes the key in a place out.
    #[inline]
    pub(crate) fn remove(&mut self, at: usize) {
        self.keys.0.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.keys.0[self.len] = FreeKey::MAX;
    }

    /// Cuts a page in two. Returns the upper half.
    pub(crate) fn split_off(&mut self) -> KeyPage {
        let mut upper = KeyPage::default();
        let half = self.len / 2;
        upper.len = self.len - half;
        upper.keys.0[..upper.len].copy_from_slice(&self.keys.0[half..self.len]);
        self.keys.0[half..].fill(FreeKey::MAX);
        self.len = half;
        upper
    }

    /// Adds the keys of the page behind this one, which fit.
    pub(crate) fn append(&mut self, behind: &KeyPage) {
        let len = self.len + behind.len;
        self.keys.0[self.len..len].copy_from_slice(behind.keys());
        self.len = len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(size: u32) -> FreeKey {
        FreeKey::least_of(size)
    }

    /// Every other size, put in from both ends to the middle.
    fn nearly_full_page() -> (KeyPage, Vec<FreeKey>) {
        let (mut page, mut oracle) = (KeyPage::default(), Vec::new());
        for number in 1..PAGE_MAX as u32 {
            let new = key(if number % 2 == 0 { number } else { 1000 - number });
            page.insert(page.position(new), new);
            oracle.push(new);
            oracle.sort_unstable();
            assert_eq!(page.keys(), oracle);
        }
        (page, oracle)
    }

    #[test]
    fn a_key_belongs_before_the_first_greater_one() {
        let (page, oracle) = nearly_full_page();
        for size in 0..1010 {
            assert_eq!(page.position(key(size)), oracle.partition_point(|there| *there < key(size)));
        }
        assert_eq!(page.key(page.len()), FreeKey::MAX);
    }

    #[test]
    fn a_page_that_is_cut_and_joined_again_holds_the_same_keys() {
        let (mut page, mut oracle) = nearly_full_page();
        let at = page.position(oracle[20]);
        page.remove(at);
        oracle.remove(20);
        let upper = page.split_off();
        assert_eq!((page.len(), upper.len()), (31, 31));
        assert_eq!((page.keys(), upper.keys()), oracle.split_at(31));
        assert_eq!(page.position(upper.key(0)), 31);
        page.append(&upper);
        assert_eq!(page.keys(), oracle);
    }
}
