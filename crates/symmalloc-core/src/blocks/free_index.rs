//! The free index holds every free block of a heap, by size class in the order of rule D2.
//!
//! A free block's position in the order is its [`FreeKey`]: (size, sequence, offset), most significant first. The
//! stream, D2's first criterion, is constant within a heap. The best fit is the block with the least key whose size is
//! at least that of the request. The result therefore depends on the set of free blocks and not on the order in which
//! they became free: the index is canonical.
//!
//! ```text
//!  size in units   1 2 3 ... 15 │ 16-17 18-19 ... │ 32-35 ...           8 bins per power of two, 256 per size class
//!                  └─ one size ─┘ └─ 2 sizes a bin ┘ └─ 4 ...
//!  occupied        one bit per bin: four words per size class
//!  bin             short: a sorted list through the blocks themselves     long: a tree of their keys
//!                  sentinel ◄─► 32 ◄─► 32 ◄─► 35 ◄─► sentinel
//! ```
//!
//! Finding the bin takes a shift and a mask; finding the next occupied bin takes a bit scan or two. In most programs a
//! bin holds one to three blocks. For so few blocks, a linked list costs a dozen instructions and touches only blocks
//! that are accessed in any case. In a program with 100,000 free blocks of one size, walking that list would take far
//! too long, so a long bin turns into a tree with logarithmic cost.
//!
//! A list is a ring that begins and ends with the bin's *sentinel*, a slot of the block table that holds no block and
//! compares greater than all blocks ([`SENTINELS`]). A block therefore always has a neighbor on both sides, and no code
//! tests for an empty bin or for the first or last block. Such branches are hard to predict.

use crate::blocks::table::{Block, NONE, SENTINELS, Slot};
use crate::config::size_rules::SizeClass;
use crate::types::units::Units;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Every power of two is divided into 2^MANTISSA_BITS bins.
const MANTISSA_BITS: u32 = 3;
/// Number of bins of one size class: one more than the bin number of the largest size.
const BIN_COUNT: usize = 256;
/// Number of bitmap words for one size class.
const WORD_COUNT: usize = BIN_COUNT / 64;
const _: () = assert!(SENTINELS == 2 * BIN_COUNT);

/// Maximum number of blocks that an insertion passes in a list. An insertion that would pass more blocks turns the list
/// into a tree.
const WALK_MAX: u32 = 16;
/// Minimum number of keys in a tree. A smaller tree turns back into a list. The distance to [`WALK_MAX`] prevents a bin
/// from switching back and forth between list and tree.
const TREE_MIN: usize = 4;

/// Index of the link to the previous block.
const PREV: usize = 0;
const NEXT: usize = 1;
/// The links of a block that is in no list, and of the sentinel of a long bin.
const UNLINKED: [Slot; 2] = [NONE, NONE];

/// A bin, identified by the slot of its sentinel.
type Bin = Slot;

/// Returns the bin of a size within its class. The smallest sizes leave some bins unused.
#[inline]
fn bin_in_class(size: Units) -> Bin {
    // With three more low bits, even the smallest size has a leading one and three bits after it.
    let wide = u64::from(size) << MANTISSA_BITS | ((1 << MANTISSA_BITS) - 1);
    let shift = wide.ilog2() - MANTISSA_BITS;
    // The exponent selects the power of two, and the bits after the leading one select the bin in it.
    ((shift << MANTISSA_BITS) + (wide >> shift) as Bin - (1 << MANTISSA_BITS)) % BIN_COUNT as Bin
}

/// Returns the first bin of a size class. Most heaps have large blocks only, so those come first.
#[inline]
fn first_of(class: SizeClass) -> Bin {
    match class {
        SizeClass::Large => 0,
        SizeClass::Small => BIN_COUNT as Bin,
    }
}

#[inline]
fn bin_of(class: SizeClass, size: Units) -> Bin {
    first_of(class) + bin_in_class(size)
}

/// A free block's position in the order of rule D2, with its slot: size, sequence, offset and slot, 32 bits each. The
/// first of the two words decides most comparisons.
///
/// The slot never decides a comparison, because no two free blocks of a heap have the same (sequence, offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeKey(u64, u64);

/// The order is the derived one, but takes only one comparison if the first words differ.
impl Ord for FreeKey {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        if self.0 == other.0 {
            self.1.cmp(&other.1)
        } else if self.0 < other.0 {
            Ordering::Less
        } else {
            Ordering::Greater
        }
    }
}

impl PartialOrd for FreeKey {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl FreeKey {
    #[inline]
    pub(crate) fn of(block: &Block, slot: Slot) -> Self {
        let location = block.location.word();
        FreeKey(u64::from(block.size) << 32 | location >> 32, location << 32 | u64::from(slot))
    }

    /// Returns the least key that a block of this size can have.
    #[inline]
    pub(crate) fn least_of(size: Units) -> Self {
        FreeKey(u64::from(size) << 32, 0)
    }

    pub(crate) fn size(self) -> Units {
        (self.0 >> 32) as Units
    }

    #[inline]
    pub(crate) fn slot(self) -> Slot {
        self.1 as Slot
    }
}

/// The free blocks of a heap.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    /// Bit b of word w is set if bin 64 w + b is not empty. The last word has no bins. It exists so that a reader can
    /// always load two adjacent words.
    occupied: [u64; 2 * WORD_COUNT + 1],
    /// The keys of long bins, by bin; an empty set for every other bin. The vector is empty until the first bin becomes
    /// long.
    trees: Vec<BTreeSet<FreeKey>>,
}

impl Block {
    /// Returns the key by which the free blocks of a heap are ordered.
    #[inline(always)]
    fn rank(&self) -> u128 {
        (u128::from(self.size) << 64) | u128::from(self.location.word())
    }
}

impl FreeIndex {
    /// Returns the best fit for `size` in this class: the smallest block that is large enough, and among equal sizes
    /// the one with the oldest memory and the lowest offset.
    #[inline(always)]
    pub(crate) fn best_fit(&self, blocks: &[Block], class: SizeClass, size: Units) -> Option<Slot> {
        let bin = self.occupied_from(class, bin_in_class(size))?;
        let first = blocks[bin as usize].links[NEXT];
        // Every block of a later bin is large enough.
        match blocks.get(first as usize) {
            Some(block) if block.size >= size => Some(first),
            Some(_) => self.best_fit_from(blocks, class, bin, size),
            None => self.best_fit_beyond(blocks, class, bin, size),
        }
    }

    /// Returns the best fit in this bin, whose first block is too small, or in a later bin.
    #[cold]
    #[inline(never)]
    fn best_fit_from(&self, blocks: &[Block], class: SizeClass, bin: Bin, size: Units) -> Option<Slot> {
        let mut slot = blocks[bin as usize].links[NEXT];
        // The sentinel is large enough for every size.
        while let Some(block) = blocks.get(slot as usize) {
            if block.size < size {
                slot = block.links[NEXT];
            } else if slot != bin {
                return Some(slot);
            } else {
                break;
            }
        }
        self.best_fit_beyond(blocks, class, bin, size)
    }

    /// Returns the best fit in this bin if the bin is long, or in a later bin.
    #[inline(never)]
    fn best_fit_beyond(&self, blocks: &[Block], class: SizeClass, mut bin: Bin, size: Units) -> Option<Slot> {
        let last = first_of(class) + BIN_COUNT as Bin - 1;
        while bin <= last {
            let tree = self.trees.get(bin as usize);
            if let Some(key) = tree.and_then(|tree| tree.range(FreeKey::least_of(size)..).next()) {
                return Some(key.slot());
            }
            if bin == last {
                break;
            }
            bin = self.occupied_from(class, bin + 1 - first_of(class))?;
            // Every block of a later bin is large enough.
            let first = blocks[bin as usize].links[NEXT];
            if bin <= last && first != NONE {
                return Some(first);
            }
        }
        None
    }

    /// Returns the first nonempty bin of this class, starting at `bin`. The result may be a bin beyond the class's last
    /// one. This does no harm, because the blocks of the other class are too small for the request.
    #[inline(always)]
    fn occupied_from(&self, class: SizeClass, bin: Bin) -> Option<Bin> {
        let first = first_of(class);
        let (words, _) = self.occupied[first as usize / 64..].split_first_chunk::<{ WORD_COUNT + 1 }>()?;
        let word = bin as usize / 64 % WORD_COUNT;
        // The bin's bit and the 63 bits after it. Nearly every request finds its bin there, without a branch on the
        // word.
        let window = ((u128::from(words[word + 1]) << 64) | u128::from(words[word])) >> (bin % 64);
        let window = window as u64;
        if window != 0 {
            return Some(first + bin + window.trailing_zeros());
        }
        let word = (word + 1..WORD_COUNT).find(|word| words[*word] != 0)?;
        Some(first + 64 * word as Bin + words[word].trailing_zeros())
    }

    fn is_occupied(&self, bin: Bin) -> bool {
        self.occupied[bin as usize / 64] >> (bin % 64) & 1 == 1
    }

    /// Returns the word of the bitmap that contains a bin's bit. The bit's number is the bin's, modulo 64. For a slot
    /// that is not a bin, it returns an arbitrary word.
    #[inline(always)]
    fn word_mut(&mut self, bin: Bin) -> &mut u64 {
        &mut self.occupied[bin as usize / 64 % (2 * WORD_COUNT)]
    }

    /// Adds a free block. Its size and location must not change while it is in the index.
    #[inline(always)]
    pub(crate) fn insert(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = &blocks[slot as usize];
        let (bin, rank) = (bin_of(block.class, block.size), block.rank());
        let first = blocks[bin as usize].links[NEXT];
        match blocks.get_mut(first as usize) {
            // The sentinel is greater than every block, so this also covers an empty bin.
            Some(after) if after.rank() > rank => {
                after.links[PREV] = slot;
                blocks[slot as usize].links = [bin, first];
                blocks[bin as usize].links[NEXT] = slot;
                *self.word_mut(bin) |= 1 << (bin % 64);
            }
            Some(_) => self.insert_behind(blocks, slot, bin),
            None => self.insert_into_tree(blocks, slot, bin),
        }
    }

    /// Removes a free block from the index.
    #[inline(always)]
    pub(crate) fn remove(&mut self, blocks: &mut [Block], slot: Slot) {
        let [prev, next] = blocks[slot as usize].links;
        let Some(before) = blocks.get_mut(prev as usize) else { return self.remove_from_tree(blocks, slot) };
        before.links[NEXT] = next;
        blocks[next as usize].links[PREV] = prev;
        // A block with the same neighbor on both sides is the last block in its bin, and this neighbor is the sentinel.
        *self.word_mut(prev) ^= u64::from(prev == next) << (prev % 64);
    }

    /// Returns the size of the largest free block.
    pub(crate) fn largest(&self, blocks: &[Block]) -> Option<Units> {
        let last_of = |first: usize| {
            let word = (first..first + WORD_COUNT).rev().find(|word| self.occupied[*word] != 0)?;
            let bin = 64 * word as Bin + self.occupied[word].ilog2();
            self.keys_of(blocks, bin).last().map(FreeKey::size)
        };
        last_of(0).max(last_of(WORD_COUNT))
    }

    /// Returns `true` if every list is closed in both directions and the bitmap matches the bins. For the invariants.
    pub(crate) fn is_linked(&self, blocks: &[Block]) -> bool {
        let links = |slot: Slot| blocks[slot as usize].links;
        (0..SENTINELS as Bin).all(|bin| {
            let is_long = self.trees.get(bin as usize).is_some_and(|tree| !tree.is_empty());
            let is_occupied = self.is_occupied(bin);
            if is_long {
                return is_occupied && links(bin) == UNLINKED;
            }
            let behind = |slot: &Slot| Some(links(*slot)[NEXT]).filter(|next| *next != bin);
            let mut list = std::iter::successors(Some(bin), behind);
            is_occupied == (links(bin) != [bin, bin]) && list.all(|slot| links(links(slot)[NEXT])[PREV] == slot)
        })
    }

    /// Returns all keys of a class in ascending order, for the invariants.
    pub(crate) fn keys(&self, blocks: &[Block], class: SizeClass) -> impl Iterator<Item = FreeKey> {
        let bins = first_of(class)..first_of(class) + BIN_COUNT as Bin;
        let used = bins.filter(|bin| self.is_occupied(*bin));
        used.flat_map(|bin| self.keys_of(blocks, bin))
    }

    /// Returns the slots of all blocks of a class with at least `size`, in ascending order of their keys.
    pub(crate) fn at_least(&self, blocks: &[Block], class: SizeClass, size: Units) -> impl Iterator<Item = Slot> {
        let bins = bin_of(class, size)..first_of(class) + BIN_COUNT as Bin;
        let used = bins.filter(|bin| self.is_occupied(*bin));
        used.flat_map(|bin| self.keys_of(blocks, bin)).filter(move |key| key.size() >= size).map(FreeKey::slot)
    }

    /// Adds a block to a list whose first block compares less than this block.
    #[inline(never)]
    fn insert_behind(&mut self, blocks: &mut [Block], slot: Slot, bin: Bin) {
        let rank = blocks[slot as usize].rank();
        let (mut prev, mut walk_left) = (blocks[bin as usize].links[NEXT], WALK_MAX);
        while let Some(block) = blocks.get(prev as usize) {
            let next = block.links[NEXT];
            let after = &mut blocks[next as usize];
            if after.rank() > rank {
                after.links[PREV] = slot;
                blocks[slot as usize].links = [prev, next];
                blocks[prev as usize].links[NEXT] = slot;
                return;
            }
            if walk_left == 0 {
                break;
            }
            walk_left -= 1;
            prev = next;
        }
        self.insert_into_tree(blocks, slot, bin);
    }

    #[cold]
    #[inline(never)]
    fn insert_into_tree(&mut self, blocks: &mut [Block], slot: Slot, bin: Bin) {
        if blocks[bin as usize].links != UNLINKED {
            self.turn_into_tree(blocks, bin);
        }
        let block = &mut blocks[slot as usize];
        self.trees[bin as usize].insert(FreeKey::of(block, slot));
        block.links = UNLINKED;
    }

    /// Turns a list into a tree.
    fn turn_into_tree(&mut self, blocks: &mut [Block], bin: Bin) {
        let tree: BTreeSet<FreeKey> = self.keys_of(blocks, bin).collect();
        tree.iter().for_each(|key| blocks[key.slot() as usize].links = UNLINKED);
        self.trees.resize_with(SENTINELS, BTreeSet::new);
        self.trees[bin as usize] = tree;
        blocks[bin as usize].links = UNLINKED;
    }

    #[cold]
    #[inline(never)]
    fn remove_from_tree(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = &blocks[slot as usize];
        let (key, bin) = (FreeKey::of(block, slot), bin_of(block.class, block.size));
        let tree = &mut self.trees[bin as usize];
        assert!(tree.remove(&key), "the free index lacks a block that the table calls free");
        if tree.len() < TREE_MIN {
            self.turn_into_list(blocks, bin);
        }
    }

    /// Turns a tree back into a list.
    fn turn_into_list(&mut self, blocks: &mut [Block], bin: Bin) {
        let tree = std::mem::take(&mut self.trees[bin as usize]);
        blocks[bin as usize].links = [bin, bin];
        *self.word_mut(bin) &= !(1 << (bin % 64));
        tree.into_iter().for_each(|key| self.insert(blocks, key.slot()));
    }

    fn keys_of(&self, blocks: &[Block], bin: Bin) -> impl Iterator<Item = FreeKey> {
        let behind =
            move |slot: Slot| Some(blocks[slot as usize].links[NEXT]).filter(|next| *next != bin && *next != NONE);
        let list = std::iter::successors(behind(bin), move |slot| behind(*slot));
        let list = list.map(|slot| FreeKey::of(&blocks[slot as usize], slot));
        list.chain(self.trees.get(bin as usize).into_iter().flatten().copied())
    }
}

#[cfg(test)]
mod tests;
