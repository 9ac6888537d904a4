//! The simulated virtual address space: the reserved ranges, the mapped bytes, and the choice of the next address.
//!
//! Drivers make no promise about the order of addresses, and in a real job addresses differ between ranks. Each
//! simulated rank therefore draws its own order from its seed:
//!
//! ```text
//! LOW                                                                     HIGH = 2^47
//!  │      ┌─B─┐┌─C─┐          ┌─A─┐                       ┌─D─┐            │
//!                │              first anywhere;  B anywhere;  C directly after B: adjacent in address but
//!                                                             not in order of creation;  D: in the hole left by a
//!                                                             released range, immediately or much later
//! ```

use super::interval::IntervalMap;
use super::random::SplitMix64;
use std::collections::BTreeMap;
use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES, SLOT_COUNT};
use symmalloc_core::ids::PoolId;
use symmalloc_core::work;

/// The lowest address handed out. The first 8 GiB are left to the host, as real drivers do.
const LOW: u64 = 1 << 33;
/// The end of 47-bit user addresses.
const HIGH: u64 = 1 << 47;
/// Number of random positions to try before searching the space from its start.
const DRAWS: u32 = 32;
/// Maximum number of released ranges whose addresses are remembered for reuse.
const HOLES: usize = 8;

/// The order in which a simulated driver hands out addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Addresses {
    /// Each range directly follows the previous one, and no address is reused. All ranks see the same order, as in a
    /// program in which only the allocator calls the driver.
    Ascending,
    /// Ranges are placed at random, sometimes next to another range and sometimes at the address of a released one. The
    /// rate of reuse is drawn from the seed.
    #[default]
    Scattered,
    /// Like [`Scattered`](Self::Scattered), but with the given rate of reuse.
    Reused {
        /// Rate, per million, at which a range reuses the addresses of a released range, if a released range is large
        /// enough.
        per_million: u32,
    },
}

/// The reserved ranges and mapped bytes of one rank.
#[derive(Clone, Debug)]
pub(crate) struct AddressSpace {
    random: SplitMix64,
    granularity_bytes: u64,
    /// Base of the next range if addresses ascend; `None` if they are scattered or exhausted.
    next: Option<u64>,
    reuse_per_million: u32,
    /// The smallest size for which a search found no place. Such a size is too large until a range is released.
    too_large: Option<u64>,
    /// Base → size. Ranges do not overlap and lie within `LOW..HIGH`.
    ranges: BTreeMap<u64, u64>,
    /// The addresses of pools with a base: base → pool. Only carved ranges overlap them.
    spaces: BTreeMap<u64, PoolId>,
    /// Bases of released ranges, most recent last; at most `HOLES`. They may have been reserved again since.
    holes: Vec<u64>,
    /// Bytes that are backed by memory. Each byte lies in a range.
    mapped: IntervalMap<()>,
    /// Aliased pieces: start → (end, address at which their memory was mapped first).
    aliases: BTreeMap<u64, (u64, u64)>,
    /// The aliases by the start of their memory, and their own start: the end of their memory.
    sources: BTreeMap<(u64, u64), u64>,
    /// Size of the largest alias so far.
    largest_alias: u64,
}

impl AddressSpace {
    pub(crate) fn new(mut random: SplitMix64, granularity_bytes: u64, addresses: Addresses) -> Self {
        let (next, reuse_per_million) = match addresses {
            Addresses::Ascending => (Some(LOW), 0),
            Addresses::Scattered => (None, random.below(1_000_001) as u32),
            Addresses::Reused { per_million } => (None, per_million),
        };
        AddressSpace {
            random,
            granularity_bytes,
            next,
            reuse_per_million,
            too_large: None,
            ranges: BTreeMap::new(),
            spaces: BTreeMap::new(),
            holes: Vec::new(),
            mapped: IntervalMap::default(),
            aliases: BTreeMap::new(),
            sources: BTreeMap::new(),
            largest_alias: 0,
        }
    }

    /// Reserves a range and returns its base, or `None` if no free space is large enough.
    pub(crate) fn reserve(&mut self, size_bytes: u64) -> Option<u64> {
        let base = self.place(size_bytes)?;
        self.ranges.insert(base, size_bytes);
        Some(base)
    }

    fn place(&mut self, size_bytes: u64) -> Option<u64> {
        let slots = (HIGH - LOW).checked_sub(size_bytes)? / self.granularity_bytes + 1;
        if let Some(mut base) = self.next {
            while let Some(space) = self.space_around(base, size_bytes) {
                base = space + SLOT_BYTES;
            }
            self.next = base.checked_add(size_bytes).filter(|&end| end <= HIGH);
            return self.next.map(|_| base);
        }
        if self.random.chance(self.reuse_per_million)
            && let Some(index) = self.holes.iter().rposition(|&base| self.is_free(base, size_bytes))
        {
            return Some(self.holes.remove(index));
        }
        for _ in 0..DRAWS {
            let drawn = LOW + self.random.below(slots) * self.granularity_bytes;
            let neighbor = self.ranges.range(drawn..).next().map(|(&base, &size)| (base, size));
            let base = match (self.random.below(4), neighbor) {
                (0, Some((base, size))) => base + size,
                (1, Some((base, _))) => base.saturating_sub(size_bytes),
                _ => drawn,
            };
            if self.is_free(base, size_bytes) {
                return Some(base);
            }
        }
        if self.too_large.is_some_and(|too_large| size_bytes >= too_large) {
            return None;
        }
        work::count(self.ranges.len());
        let ends = self.ranges.iter().map(|(&base, &size)| base + size);
        let found = std::iter::once(LOW).chain(ends).find(|&base| self.is_free(base, size_bytes));
        if found.is_none() {
            self.too_large = Some(size_bytes);
        }
        found
    }

    fn is_free(&self, base: u64, size_bytes: u64) -> bool {
        let Some(end) = base.checked_add(size_bytes).filter(|&end| base >= LOW && end <= HIGH) else { return false };
        self.ranges.range(..end).next_back().is_none_or(|(&other, &size)| other + size <= base)
            && self.space_around(base, size_bytes).is_none()
    }

    /// Returns the base of a space that overlaps these addresses.
    fn space_around(&self, base: u64, size_bytes: u64) -> Option<u64> {
        let (&space, _) = self.spaces.range(..base.saturating_add(size_bytes)).next_back()?;
        (space + SLOT_BYTES > base).then_some(space)
    }

    /// Reserves the addresses of a pool with a base.
    pub(crate) fn reserve_at(&mut self, base: Base, pool: PoolId) -> Result<(), BaseError> {
        let address = base.address();
        if !self.is_free(address, SLOT_BYTES) {
            return Err(BaseError::Occupied { base, occupant: self.occupant(address), free_slot: self.free_slot() });
        }
        self.spaces.insert(address, pool);
        Ok(())
    }

    fn occupant(&self, address: u64) -> Occupant {
        if let Some(space) = self.space_around(address, SLOT_BYTES) {
            let base = Base::at(space).expect("it was a base before");
            return Occupant::Pool { pool: self.spaces[&space], device: 0, base };
        }
        let other = self.ranges.range(..address + SLOT_BYTES).next_back();
        let (start, size_bytes) = other.map_or((0, LOW), |(&start, &size_bytes)| (start, size_bytes));
        Occupant::Mapping { start, end: start + size_bytes, name: "a simulated range".into() }
    }

    fn free_slot(&self) -> Option<u32> {
        (0..SLOT_COUNT).find(|slot| Base::slot(*slot).is_ok_and(|base| self.is_free(base.address(), SLOT_BYTES)))
    }

    /// Makes a part of a space a range.
    pub(crate) fn carve(&mut self, base: u64, size_bytes: u64) {
        self.ranges.insert(base, size_bytes);
    }

    /// Returns `true` if these addresses are free addresses of a space.
    pub(crate) fn is_carvable(&self, base: u64, size_bytes: u64) -> bool {
        let Some(end) = base.checked_add(size_bytes) else { return false };
        let space = self.spaces.range(..=base).next_back().filter(|(space, _)| end <= **space + SLOT_BYTES);
        space.is_some() && self.ranges.range(..end).next_back().is_none_or(|(&other, &size)| other + size <= base)
    }

    /// Returns `true` if a space begins here and none of its parts is a range.
    pub(crate) fn is_unused_space(&self, base: u64) -> bool {
        self.spaces.contains_key(&base) && self.ranges.range(base..base + SLOT_BYTES).next().is_none()
    }

    /// Releases a space.
    pub(crate) fn release_space(&mut self, base: u64) {
        self.spaces.remove(&base);
        self.too_large = None;
    }

    /// Releases a range. The caller has checked that it is reserved and unmapped.
    pub(crate) fn release(&mut self, base: u64) {
        self.ranges.remove(&base);
        self.too_large = None;
        if self.space_around(base, 1).is_some() {
            return;
        }
        if self.holes.len() == HOLES {
            self.holes.remove(0);
        }
        self.holes.push(base);
    }

    /// Returns `true` if exactly this range is reserved.
    pub(crate) fn is_reserved(&self, base: u64, size_bytes: u64) -> bool {
        self.ranges.get(&base) == Some(&size_bytes)
    }

    /// Returns the number of reserved ranges, including the addresses of pools with a base.
    pub(crate) fn ranges(&self) -> usize {
        self.ranges.len() + self.spaces.len()
    }

    /// Returns `true` if every byte is backed by memory.
    pub(crate) fn is_mapped(&self, start: u64, end: u64) -> bool {
        self.mapped.covers(start, end)
    }

    /// Returns `true` if any byte is backed by memory.
    pub(crate) fn is_any_mapped(&self, start: u64, end: u64) -> bool {
        self.mapped.overlapping(start, end).next().is_some()
    }

    /// Backs the bytes with memory.
    pub(crate) fn map(&mut self, start: u64, end: u64) {
        self.mapped.insert(start, end, ());
    }

    /// Backs the bytes with the memory that is mapped at `source`.
    pub(crate) fn alias(&mut self, start: u64, end: u64, source: u64) {
        self.mapped.insert(start, end, ());
        self.aliases.insert(start, (end, source));
        self.sources.insert((source, start), source + (end - start));
        self.largest_alias = self.largest_alias.max(end - start);
    }

    /// Returns `true` if any byte is an alias: its memory is also mapped elsewhere and was mapped there first.
    pub(crate) fn is_alias(&self, start: u64, end: u64) -> bool {
        self.pieces(start, end).next().is_some()
    }

    /// Returns `true` if the memory of any byte has an alias elsewhere.
    pub(crate) fn has_alias(&self, start: u64, end: u64) -> bool {
        let near = self.sources.range((start.saturating_sub(self.largest_alias), 0)..(end, 0));
        near.inspect(|_| work::count(1)).any(|(_, &source_end)| start < source_end)
    }

    fn pieces(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let before = self.aliases.range(..start).next_back();
        let all = before.into_iter().chain(self.aliases.range(start..end));
        all.map(|(&from, &(to, source))| (from, to, source)).filter(move |(from, to, _)| *from < end && start < *to)
    }

    /// Returns, part by part, the addresses at which the memory of the mapped bytes was first mapped.
    pub(crate) fn memory_of(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        let mut at = start;
        for (from, to, source) in self.pieces(start, end) {
            if at < from {
                parts.push((at, from));
            }
            let (first, last) = (from.max(start), to.min(end));
            parts.push((source + (first - from), source + (last - from)));
            at = last;
        }
        if at < end {
            parts.push((at, end));
        }
        parts
    }

    /// Unmaps the bytes. Returns the number of bytes of memory that are no longer mapped anywhere.
    pub(crate) fn unmap(&mut self, start: u64, end: u64) -> u64 {
        self.mapped.remove(start, end);
        let aliases: Vec<(u64, u64, u64)> = self.pieces(start, end).collect();
        let mut own_bytes = end - start;
        for (from, to, source) in aliases {
            self.aliases.remove(&from);
            self.sources.remove(&(source, from));
            own_bytes -= to - from;
        }
        own_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::units::{GIB, MIB};

    fn space(seed: u64, reuse_per_million: u32) -> AddressSpace {
        AddressSpace::new(SplitMix64::new(seed), 2 * MIB, Addresses::Reused { per_million: reuse_per_million })
    }

    #[test]
    fn ranges_are_aligned_and_never_overlap_while_some_are_released() {
        for seed in 0..20 {
            let mut space = space(seed, 500_000);
            let mut random = SplitMix64::new(seed);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for _ in 0..400 {
                if !live.is_empty() && random.below(3) == 0 {
                    let (base, _) = live.swap_remove(random.below(live.len() as u64) as usize);
                    space.release(base);
                } else {
                    let scale = 1 << random.below(19);
                    let size = (1 + random.below(scale)) * 2 * MIB;
                    let Some(base) = space.reserve(size) else { continue };
                    assert!(base.is_multiple_of(2 * MIB) && base >= LOW && base + size <= HIGH);
                    assert!(live.iter().all(|&(other, other_size)| base + size <= other || other + other_size <= base));
                    live.push((base, size));
                }
            }
        }
    }

    #[test]
    fn addresses_do_not_ascend_and_differ_between_seeds() {
        let bases = |seed| (0..16).map(|_| 0).scan(space(seed, 0), |s, _: i32| s.reserve(20 * MIB)).collect::<Vec<_>>();
        for seed in 0..20 {
            let bases = bases(seed);
            assert!(!bases.is_sorted() && !bases.iter().rev().is_sorted());
        }
        assert_ne!(bases(1), bases(2));
        assert_eq!(bases(1), bases(1));
    }

    #[test]
    fn ascending_addresses_have_no_gaps_and_are_never_reused() {
        let mut space = AddressSpace::new(SplitMix64::new(1), 2 * MIB, Addresses::Ascending);
        let first = space.reserve(20 * MIB).unwrap();
        space.release(first);
        assert_eq!([2, 4].map(|mib| space.reserve(mib * MIB)), [Some(first + 20 * MIB), Some(first + 22 * MIB)]);
        assert_eq!(space.reserve(HIGH - LOW), None);
    }

    #[test]
    fn some_ranges_are_adjacent() {
        let mut space = space(3, 0);
        let bases: Vec<u64> = (0..50).map(|_| space.reserve(2 * MIB).unwrap()).collect();
        assert!(bases.iter().any(|base| bases.contains(&(base + 2 * MIB))));
    }

    #[test]
    fn a_released_range_is_reused_at_the_configured_rate() {
        for (rate, reused) in [(1_000_000, true), (0, false)] {
            let mut space = space(1, rate);
            let base = space.reserve(64 * MIB).unwrap();
            space.release(base);
            assert_eq!(space.reserve(20 * MIB) == Some(base), reused);
        }
    }

    #[test]
    fn a_full_space_is_reported_and_the_last_free_range_is_found() {
        let mut space = space(5, 0);
        let mut bases: Vec<u64> = std::iter::from_fn(|| space.reserve(4096 * GIB)).collect();
        assert!(space.reserve(HIGH).is_none());
        while let Some(base) = space.reserve(2048 * GIB) {
            bases.push(base);
        }
        let hole = bases.swap_remove(bases.len() / 2);
        space.release(hole);
        assert_eq!(space.reserve(2048 * GIB).map(|base| space.is_reserved(base, 2048 * GIB)), Some(true));
    }
}
