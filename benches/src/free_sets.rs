//! Designs of a free index. The queries of each job are recorded once and run on all designs.
//!
//! An index holds the free blocks in the order (size, segment, offset) and answers best-fit queries: the smallest block
//! of at least a given size. The rest of an allocator does not depend on the index and is omitted here.
//!
//! | design | representation of the order | insert, remove | best fit |
//! |---|---|---|---|
//! | [`Tree`] | a `BTreeSet` of keys | search, move within nodes | search |
//! | [`Vector`] | one sorted vector | search, move half of all keys | search |
//! | [`BinVectors`] | a sorted vector for each of 256 size bins, and a bitmap of used bins | search and move within a bin | bit scan, search |
//! | [`Fronts`] | a map from exact size to a sorted vector | search, twice | search |
//! | [`BinLists`] | a list through the blocks of each bin, and a bitmap | walk within a bin | bit scan, walk |
//!
//! `symmalloc-core` uses the last design, and turns long bins into trees.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// (size in units, segment, offset in units) of a free block, most significant first, and the slot of the block.
pub type Key = (u32, u32, u32, u32);

/// A query of an allocator to its free index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// A block with this key became free.
    Insert(Key),
    /// The block with this key is no longer free.
    Remove(Key),
    /// Requests the best fit for a size.
    BestFit(u32),
}

/// A design of a free index.
pub trait FreeSet: Default + Debug {
    /// Inserts a key that is not present.
    fn insert(&mut self, key: Key);
    /// Removes a key that is present.
    fn remove(&mut self, key: Key);
    /// Returns the slot of the smallest key of at least this size.
    fn best_fit(&self, size: u32) -> Option<u32>;

    /// Runs all queries and returns a digest of the answers, which allows comparing designs.
    fn answer(&mut self, questions: &[Question]) -> u64 {
        let mut sum = 0_u64;
        for question in questions {
            match *question {
                Question::Insert(key) => self.insert(key),
                Question::Remove(key) => self.remove(key),
                Question::BestFit(size) => {
                    sum = sum.wrapping_mul(31) + u64::from(self.best_fit(size).map_or(0, |slot| slot + 1));
                }
            }
        }
        sum
    }
}

/// A single ordered set.
#[derive(Debug, Default)]
pub struct Tree(BTreeSet<Key>);

impl FreeSet for Tree {
    fn insert(&mut self, key: Key) {
        self.0.insert(key);
    }

    fn remove(&mut self, key: Key) {
        assert!(self.0.remove(&key));
    }

    fn best_fit(&self, size: u32) -> Option<u32> {
        self.0.range((size, 0, 0, 0)..).next().map(|key| key.3)
    }
}

/// A single sorted vector.
#[derive(Debug, Default)]
pub struct Vector(Vec<Key>);

impl FreeSet for Vector {
    fn insert(&mut self, key: Key) {
        let at = self.0.partition_point(|there| *there < key);
        self.0.insert(at, key);
    }

    fn remove(&mut self, key: Key) {
        let at = self.0.partition_point(|there| *there < key);
        assert!(self.0.remove(at) == key);
    }

    fn best_fit(&self, size: u32) -> Option<u32> {
        let at = self.0.partition_point(|there| there.0 < size);
        self.0.get(at).map(|key| key.3)
    }
}

/// Returns the bin of a size. There are eight bins per power of two, as in the core.
fn bin_of(size: u32) -> usize {
    let shift = (size | 8).ilog2() - 3;
    ((shift << 3) + (size >> shift)) as usize
}

/// A bitmap of the used bins.
#[derive(Debug, Default)]
struct Bitmap([u64; 4]);

impl Bitmap {
    fn set(&mut self, bin: usize) {
        self.0[bin / 64] |= 1 << (bin % 64);
    }

    fn clear(&mut self, bin: usize) {
        self.0[bin / 64] &= !(1 << (bin % 64));
    }

    /// Returns the first used bin at or after this one.
    fn from(&self, bin: usize) -> Option<usize> {
        let mut word = bin / 64;
        let mut bits = self.0.get(word)? & (!0 << (bin % 64));
        while bits == 0 {
            word += 1;
            bits = *self.0.get(word)?;
        }
        Some(64 * word + bits.trailing_zeros() as usize)
    }
}

/// One sorted vector per bin.
#[derive(Debug)]
pub struct BinVectors {
    used: Bitmap,
    bins: Vec<Vector>,
}

impl Default for BinVectors {
    fn default() -> Self {
        BinVectors { used: Bitmap::default(), bins: (0..256).map(|_| Vector::default()).collect() }
    }
}

impl FreeSet for BinVectors {
    fn insert(&mut self, key: Key) {
        let bin = bin_of(key.0);
        self.bins[bin].insert(key);
        self.used.set(bin);
    }

    fn remove(&mut self, key: Key) {
        let bin = bin_of(key.0);
        self.bins[bin].remove(key);
        if self.bins[bin].0.is_empty() {
            self.used.clear(bin);
        }
    }

    fn best_fit(&self, size: u32) -> Option<u32> {
        let bin = self.used.from(bin_of(size))?;
        self.bins[bin].best_fit(size).or_else(|| Some(self.bins[self.used.from(bin + 1)?].0[0].3))
    }
}

/// One sorted vector per exact size.
#[derive(Debug, Default)]
pub struct Fronts(BTreeMap<u32, Vector>);

impl FreeSet for Fronts {
    fn insert(&mut self, key: Key) {
        self.0.entry(key.0).or_default().insert(key);
    }

    fn remove(&mut self, key: Key) {
        let front = self.0.get_mut(&key.0).expect("the size is present");
        front.remove(key);
        if front.0.is_empty() {
            self.0.remove(&key.0);
        }
    }

    fn best_fit(&self, size: u32) -> Option<u32> {
        self.0.range(size..).next().map(|(_, front)| front.0[0].3)
    }
}

const NONE: u32 = u32::MAX;

/// A free block of [`BinLists`].
#[derive(Clone, Copy, Debug)]
struct Node {
    key: Key,
    prev: u32,
    next: u32,
}

/// One list per bin, linked through the blocks.
#[derive(Debug)]
pub struct BinLists {
    used: Bitmap,
    first: [u32; 256],
    /// Nodes by slot.
    nodes: Vec<Node>,
}

impl Default for BinLists {
    fn default() -> Self {
        BinLists { used: Bitmap::default(), first: [NONE; 256], nodes: Vec::new() }
    }
}

impl FreeSet for BinLists {
    fn insert(&mut self, key: Key) {
        let (bin, slot) = (bin_of(key.0), key.3);
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Node { key, prev: NONE, next: NONE });
        }
        let (mut prev, mut next) = (NONE, self.first[bin]);
        while next != NONE && self.nodes[next as usize].key < key {
            (prev, next) = (next, self.nodes[next as usize].next);
        }
        self.nodes[slot as usize] = Node { key, prev, next };
        match prev {
            NONE => self.first[bin] = slot,
            prev => self.nodes[prev as usize].next = slot,
        }
        if next != NONE {
            self.nodes[next as usize].prev = slot;
        }
        self.used.set(bin);
    }

    fn remove(&mut self, key: Key) {
        let Node { prev, next, .. } = self.nodes[key.3 as usize];
        let bin = bin_of(key.0);
        match prev {
            NONE => self.first[bin] = next,
            prev => self.nodes[prev as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        if self.first[bin] == NONE {
            self.used.clear(bin);
        }
    }

    fn best_fit(&self, size: u32) -> Option<u32> {
        let bin = self.used.from(bin_of(size))?;
        let mut slot = self.first[bin];
        while let Some(node) = self.nodes.get(slot as usize) {
            if node.key.0 >= size {
                return Some(slot);
            }
            slot = node.next;
        }
        Some(self.first[self.used.from(bin + 1)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_sim::SplitMix64;

    /// Returns random queries with few distinct sizes, so that bins hold many keys and some keys share a size.
    fn questions() -> Vec<Question> {
        let mut random = SplitMix64::new(3);
        let (mut live, mut vacant) = (Vec::new(), (0..300).collect::<Vec<u32>>());
        let mut questions = Vec::new();
        for _ in 0..20_000 {
            match random.below(3) {
                0 if !vacant.is_empty() => {
                    let slot = vacant.swap_remove(random.below(vacant.len() as u64) as usize);
                    let most = 1 << random.below(12);
                    let size = 1 + random.below(most) as u32;
                    let key = (size, random.below(3) as u32, slot, slot);
                    live.push(key);
                    questions.push(Question::Insert(key));
                }
                1 if !live.is_empty() => {
                    let key = live.swap_remove(random.below(live.len() as u64) as usize);
                    vacant.push(key.3);
                    questions.push(Question::Remove(key));
                }
                _ => questions.push(Question::BestFit(1 + random.below(3000) as u32)),
            }
        }
        questions
    }

    #[test]
    fn all_designs_give_the_same_answers() {
        let questions = questions();
        let expected = Tree::default().answer(&questions);
        assert_eq!(Vector::default().answer(&questions), expected);
        assert_eq!(BinVectors::default().answer(&questions), expected);
        assert_eq!(Fronts::default().answer(&questions), expected);
        assert_eq!(BinLists::default().answer(&questions), expected);
    }
}
