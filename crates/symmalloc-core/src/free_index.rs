//! The free index: every free block of one size class of a heap, in the order of rule D2.
//!
//! A free block's place in the order is its [`FreeKey`]: (size, sequence, offset), most significant first. The stream, D2's
//! first criterion, is constant within a heap. Best fit is the least key whose size is at least the request, so the
//! answer depends on the set of free blocks and not on the order in which they became free: the index is canonical.
//!
//! ```text
//!  size in units   0 1 2 ... 7 │ 8 9 ... 15 │ 16-17 18-19 ... │ 32-35 ...           8 bins per power of two
//!                  └─ one size a bin ───────┘ └─ 2 sizes a bin ┘ └─ 4 ...
//!  occupied        one bit per bin: four words
//!  bin             short: a sorted list, linked through the blocks themselves     long: a SortedRun of their keys
//! ```
//!
//! Finding the bin is a shift and a mask; finding the next occupied one is a bit scan or two. Most bins of most programs hold
//! one to three blocks, where a linked list costs a dozen instructions and touches only blocks that are touched anyway. A
//! program that keeps 100,000 free blocks of one size would walk that list for ever, so a bin that grows long turns into
//! a [`SortedRun`], which is logarithmic.

use crate::block_table::{Block, NONE, Place, Slot};
use crate::free_key::FreeKey;
use crate::sorted_run::SortedRun;
use crate::units::Units;

/// Sizes below 2^MANTISSA_BITS have a bin each; above, every power of two is cut into that many bins.
const MANTISSA_BITS: u32 = 3;
/// One more than the bin of the largest size, rounded up to a power of two.
const BIN_COUNT: usize = 256;
const WORD_COUNT: usize = BIN_COUNT / 64;

/// An insert that has to pass more blocks than this in a list turns the list into a run ...
const WALK_MAX: u32 = 16;
/// ... and a run that has fewer keys than this turns back. The distance keeps a bin from turning back and forth.
const RUN_MIN: usize = 4;

/// In place of the first slot of a long bin, and of the links of its blocks: neither a slot nor "none".
const RUN: Slot = NONE - 1;

/// Which of a block's links is which.
const PREV: usize = 0;
const NEXT: usize = 1;
/// The links of a block that is the only one of its bin.
const ALONE: [Slot; 2] = [NONE, NONE];

/// A bin's number. There are just as many as a byte has values, so a look-up needs no bounds check.
type Bin = u8;

#[inline(always)]
fn bin_of(size: Units) -> Bin {
    // Sizes below 2^MANTISSA_BITS have the exponent of 2^MANTISSA_BITS, and no shift.
    let exponent = (size | 1 << MANTISSA_BITS).ilog2();
    let shift = exponent - MANTISSA_BITS;
    // The leading one bit of the mantissa adds one to the exponent's part: bins are contiguous.
    ((shift << MANTISSA_BITS) + (size >> shift)) as Bin
}

/// The word and the bit of a bin in the bitmap.
#[inline(always)]
fn place_of(bin: Bin) -> (usize, u32) {
    (usize::from(bin) / 64, u32::from(bin) % 64)
}

/// The free blocks of one size class of a heap.
#[derive(Debug)]
pub(crate) struct FreeIndex {
    /// Bit b of word w is set when bin 64 w + b is not empty.
    occupied: [u64; WORD_COUNT],
    /// The least block of each bin's list; `NONE` when the bin is empty, `RUN` when it is long.
    first: [Slot; BIN_COUNT],
    /// The keys of long bins, by bin. Empty until there is one.
    runs: Vec<Option<Box<SortedRun>>>,
}

impl Default for FreeIndex {
    fn default() -> Self {
        FreeIndex { occupied: [0; WORD_COUNT], first: [NONE; BIN_COUNT], runs: Vec::new() }
    }
}

impl Block {
    /// Neither link names a block, and together they do not say "alone".
    fn mark_in_run(&mut self) {
        self.links = [RUN, RUN];
    }

    /// What two free blocks of a heap are ordered by.
    #[inline(always)]
    fn rank(&self) -> (Units, Place) {
        (self.size, self.place)
    }
}

impl FreeIndex {
    /// The least block of at least `size`: the smallest, of the oldest backing memory, at the lowest offset.
    #[inline(always)]
    pub(crate) fn best_fit(&mut self, blocks: &[Block], size: Units) -> Option<Slot> {
        let bin = self.occupied_from(bin_of(size))?;
        let mut slot = self.first[usize::from(bin)];
        // Every block of a later bin than the size's own is large enough.
        loop {
            if blocks.get(slot as usize).is_some_and(|block| block.size >= size) {
                return Some(slot);
            }
            slot = self.best_fit_behind(blocks, bin, size)?;
        }
    }

    /// The best fit when the least block of the bin is too small, or the bin is long: of this bin, or of those behind it.
    #[cold]
    #[inline(never)]
    fn best_fit_behind(&mut self, blocks: &[Block], mut bin: Bin, size: Units) -> Option<Slot> {
        loop {
            let mut slot = self.first[usize::from(bin)];
            while let Some(block) = blocks.get(slot as usize) {
                if block.size >= size {
                    return Some(slot);
                }
                slot = block.links[NEXT];
            }
            if slot == RUN {
                return self.best_fit_in_run(blocks, bin, size);
            }
            bin = self.occupied_from(bin.checked_add(1)?)?;
        }
    }

    /// The best fit when the bin is long: of this bin, or of those behind it.
    #[cold]
    #[inline(never)]
    fn best_fit_in_run(&mut self, blocks: &[Block], bin: Bin, size: Units) -> Option<Slot> {
        let run = self.runs[usize::from(bin)].as_mut()?;
        if let Some(key) = run.first_at_least(FreeKey::least_of(size)) {
            return Some(key.slot());
        }
        let behind = self.occupied_from(bin.checked_add(1)?)?;
        self.best_fit_behind(blocks, behind, size)
    }

    /// The first bin from this one on that is not empty.
    #[inline(always)]
    fn occupied_from(&self, bin: Bin) -> Option<Bin> {
        let (mut word, bit) = place_of(bin);
        let mut from = self.occupied[word] & (!0 << bit);
        while from == 0 {
            word += 1;
            from = *self.occupied.get(word)?;
        }
        Some((64 * word) as Bin + from.trailing_zeros() as Bin)
    }

    /// Makes a block the only one of an empty bin.
    #[inline(always)]
    fn open_bin(&mut self, bin: Bin, slot: Slot) {
        self.first[usize::from(bin)] = slot;
        let (word, bit) = place_of(bin);
        self.occupied[word] |= 1 << bit;
    }

    #[inline(always)]
    fn close_bin(&mut self, bin: Bin) {
        self.first[usize::from(bin)] = NONE;
        let (word, bit) = place_of(bin);
        self.occupied[word] &= !(1 << bit);
    }

    /// Puts a free block in. Its size, sequence and offset must not change while it is here, but through
    /// [`resize`](Self::resize).
    #[inline(always)]
    pub(crate) fn insert(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = &mut blocks[slot as usize];
        let bin = bin_of(block.size);
        block.links = ALONE;
        self.insert_into(blocks, slot, bin);
    }

    /// Puts a block in whose links say that it is alone.
    #[inline(always)]
    fn insert_into(&mut self, blocks: &mut [Block], slot: Slot, bin: Bin) {
        blocks[slot as usize].bin = bin;
        if self.first[usize::from(bin)] == NONE {
            self.open_bin(bin, slot);
        } else {
            self.insert_in_order(blocks, slot, bin);
        }
    }

    /// Takes a free block out.
    ///
    /// # Panics
    /// When the block is not in the index: the block table and the index disagree.
    #[inline(always)]
    pub(crate) fn remove(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = &blocks[slot as usize];
        let ([prev, next], bin) = (block.links, block.bin);
        if block.links == ALONE {
            assert!(self.first[usize::from(bin)] == slot, "the free index lacks a block that the table calls free");
            return self.close_bin(bin);
        }
        if let Some(after) = blocks.get_mut(next as usize) {
            after.links[PREV] = prev;
        }
        match blocks.get_mut(prev as usize) {
            Some(before) => before.links[NEXT] = next,
            None if prev == RUN => self.remove_from_run(blocks, slot),
            None => {
                assert!(self.first[usize::from(bin)] == slot, "the free index lacks a block that the table calls free");
                self.first[usize::from(bin)] = next;
            }
        }
    }

    /// Changes a free block's size.
    #[inline(always)]
    pub(crate) fn resize(&mut self, blocks: &mut [Block], slot: Slot, size: Units) {
        self.reshape(blocks, slot, size, |block| block.size = size);
    }

    /// Changes a free block's place and size.
    #[inline(always)]
    pub(crate) fn resize_from(&mut self, blocks: &mut [Block], slot: Slot, place: Place, size: Units) {
        self.reshape(blocks, slot, size, |block| (block.place, block.size) = (place, size));
    }

    /// A block that is alone in its bin and stays in it does not move.
    #[inline(always)]
    fn reshape(&mut self, blocks: &mut [Block], slot: Slot, size: Units, change: impl Fn(&mut Block)) {
        let bin = bin_of(size);
        let block = &mut blocks[slot as usize];
        if block.links == ALONE {
            change(block);
            if block.bin == bin {
                return;
            }
            self.close_bin(block.bin);
        } else {
            self.remove(blocks, slot);
            let block = &mut blocks[slot as usize];
            change(block);
            block.links = ALONE;
        }
        self.insert_into(blocks, slot, bin);
    }

    /// Size of the largest free block.
    pub(crate) fn largest(&self, blocks: &[Block]) -> Option<Units> {
        let word = self.occupied.iter().rposition(|word| *word != 0)?;
        let bin = 64 * word + self.occupied[word].ilog2() as usize;
        self.keys_of(blocks, bin as Bin).last().map(FreeKey::size)
    }

    /// All keys in ascending order, for the invariants.
    pub(crate) fn keys(&self, blocks: &[Block]) -> impl Iterator<Item = FreeKey> {
        let used = (0..=Bin::MAX).filter(|bin| self.first[usize::from(*bin)] != NONE);
        used.flat_map(|bin| self.keys_of(blocks, bin))
    }

    /// Puts a block into a bin that is not empty.
    #[inline(never)]
    fn insert_in_order(&mut self, blocks: &mut [Block], slot: Slot, bin: Bin) {
        let (mut prev, mut next) = (NONE, self.first[usize::from(bin)]);
        if next == RUN {
            return self.insert_into_run(blocks, slot, bin);
        }
        let rank = blocks[slot as usize].rank();
        let mut walk_left = WALK_MAX;
        while let Some(block) = blocks.get_mut(next as usize) {
            if block.rank() > rank {
                block.links[PREV] = slot;
                break;
            }
            if walk_left == 0 {
                return self.insert_into_run(blocks, slot, bin);
            }
            walk_left -= 1;
            (prev, next) = (next, block.links[NEXT]);
        }
        blocks[slot as usize].links = [prev, next];
        match blocks.get_mut(prev as usize) {
            Some(before) => before.links[NEXT] = slot,
            None => self.first[usize::from(bin)] = slot,
        }
    }

    fn run_of(&self, bin: Bin) -> Option<&SortedRun> {
        self.runs.get(usize::from(bin))?.as_deref()
    }

    #[cold]
    #[inline(never)]
    fn insert_into_run(&mut self, blocks: &mut [Block], slot: Slot, bin: Bin) {
        if self.first[usize::from(bin)] != RUN {
            self.turn_into_run(blocks, bin);
        }
        let run = self.runs[usize::from(bin)].as_mut().expect("a long bin has a run");
        let block = &mut blocks[slot as usize];
        run.insert(FreeKey::of(block, slot));
        block.mark_in_run();
    }

    /// Makes a list a run.
    #[cold]
    #[inline(never)]
    fn turn_into_run(&mut self, blocks: &mut [Block], bin: Bin) {
        let keys: Vec<FreeKey> = self.keys_of(blocks, bin).collect();
        let mut run = Box::<SortedRun>::default();
        for key in keys {
            run.insert(key);
            blocks[key.slot() as usize].mark_in_run();
        }
        self.runs.resize_with(BIN_COUNT, || None);
        self.runs[usize::from(bin)] = Some(run);
        self.first[usize::from(bin)] = RUN;
    }

    #[cold]
    #[inline(never)]
    fn remove_from_run(&mut self, blocks: &mut [Block], slot: Slot) {
        let block = &blocks[slot as usize];
        let (key, bin) = (FreeKey::of(block, slot), block.bin);
        let run = self.runs[usize::from(bin)].as_mut();
        let run = run.expect("a block is marked as part of a run that does not exist");
        run.remove(key);
        if run.is_shorter_than(RUN_MIN) {
            self.turn_into_list(blocks, bin);
        }
    }

    /// Makes a run a list again.
    #[cold]
    #[inline(never)]
    fn turn_into_list(&mut self, blocks: &mut [Block], bin: Bin) {
        let keys: Vec<FreeKey> = self.keys_of(blocks, bin).collect();
        self.runs[usize::from(bin)] = None;
        self.close_bin(bin);
        keys.into_iter().for_each(|key| self.insert(blocks, key.slot()));
    }

    fn keys_of(&self, blocks: &[Block], bin: Bin) -> impl Iterator<Item = FreeKey> {
        let first = self.first[usize::from(bin)];
        let run = if first == RUN { self.run_of(bin) } else { None };
        let list = std::iter::successors((first < RUN).then_some(first), |slot| {
            let next = blocks[*slot as usize].links[NEXT];
            (next != NONE).then_some(next)
        });
        list.map(|slot| FreeKey::of(&blocks[slot as usize], slot)).chain(run.into_iter().flat_map(SortedRun::iter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{DeviceAddress, Range};
    use crate::block_table::{BlockState, BlockTable};
    use crate::ids::{SegmentId, StreamId};
    use crate::size_rules::SizeClass;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn bins_are_contiguous_and_ascending() {
        let mut last = bin_of(1);
        for size in (2..1 << 19).chain((19..32).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1])).chain([u32::MAX]) {
            let bin = bin_of(size);
            assert!(bin >= last, "size {size} lies in bin {bin}, after bin {last}");
            assert!(size > 1 << 19 || bin <= last + 1);
            last = bin;
        }
    }

    /// A table with blocks of the given (size, sequence, offset), which need not tile anything.
    fn table_of(blocks: &[(Units, u32, Units)]) -> (BlockTable, Vec<Slot>) {
        let mut table = BlockTable::default();
        let range = Range { base: DeviceAddress(0), size_bytes: 1 << 40 };
        let free = BlockState::Free { stream: StreamId(0), since: 0 };
        let slots = blocks.iter().map(|&(size, sequence, offset)| {
            let slot = table.add_segment(SegmentId(sequence), range, SizeClass::Large, size, free);
            table.block_mut(slot).place = Place::new(SegmentId(sequence), offset);
            slot
        });
        let slots = slots.collect();
        (table, slots)
    }

    #[test]
    fn an_equal_size_goes_to_the_oldest_memory_then_to_the_lowest_offset() {
        let (mut table, slots) = table_of(&[(40, 7, 0), (40, 3, 9), (40, 3, 2), (40, 5, 1)]);
        let mut index = FreeIndex::default();
        slots.iter().for_each(|slot| index.insert(table.blocks_mut(), *slot));
        assert_eq!(index.best_fit(table.blocks(), 33), Some(slots[2]));
    }

    fn blocks() -> impl Strategy<Value = Vec<(Units, u32, Units)>> {
        // Few sizes far apart and many near each other: short and long bins, and every word of the bitmap.
        let size = prop_oneof![1..40u32, 1000..1100u32, (0..31u32).prop_map(|e| 1 << e), Just(77)];
        let blocks = prop::collection::vec((size, 0..3u32, 0..5000u32), 0..700);
        blocks.prop_map(|mut blocks| {
            // As in a heap: no two blocks lie in one place.
            let mut places = BTreeSet::new();
            blocks.retain(|&(_, sequence, offset)| places.insert((sequence, offset)));
            blocks
        })
    }

    proptest! {
        #[test]
        fn agrees_with_an_ordered_set(blocks in blocks(), requests in prop::collection::vec(1..2000u32, 20),
                                      removals in prop::collection::vec(any::<prop::sample::Index>(), 0..700)) {
            let (mut table, slots) = table_of(&blocks);
            let (mut index, mut oracle) = (FreeIndex::default(), BTreeSet::new());
            let check = |index: &mut FreeIndex, table: &BlockTable, oracle: &BTreeSet<FreeKey>| {
                for &size in requests.iter().chain(&[1 << 20, 1 << 30, u32::MAX]) {
                    let expected = oracle.range(FreeKey::least_of(size)..).next().map(|key| key.slot());
                    assert_eq!(index.best_fit(table.blocks(), size), expected);
                }
                let largest = oracle.last().map(|key| table.block(key.slot()).size);
                assert_eq!(index.largest(table.blocks()), largest);
                assert_eq!(index.keys(table.blocks()).count(), oracle.len());
            };
            for slot in slots {
                index.insert(table.blocks_mut(), slot);
                oracle.insert(FreeKey::of(table.block(slot), slot));
            }
            check(&mut index, &table, &oracle);
            for removal in removals {
                if oracle.is_empty() {
                    break;
                }
                let key = *removal.get(&oracle.iter().copied().collect::<Vec<_>>());
                index.remove(table.blocks_mut(), key.slot());
                oracle.remove(&key);
            }
            check(&mut index, &table, &oracle);
            prop_assert!(index.keys(table.blocks()).eq(oracle.iter().copied()));
            // Every block changes its size, so that it goes to another bin, or to another place in its own.
            for key in oracle {
                let block = table.block(key.slot());
                let (place, size) = (block.place.plus(1), if block.size > 50 { block.size - 50 } else { block.size + 1 });
                index.resize_from(table.blocks_mut(), key.slot(), place, size);
            }
            prop_assert!(index.keys(table.blocks()).is_sorted());
            prop_assert!(index.keys(table.blocks()).all(|key| key == FreeKey::of(table.block(key.slot()), key.slot())));
        }
    }
}
