//! A pointer table: from the address of a live allocation to the slot of its block. Part of one heap, behind its lock.
//!
//! ```text
//!  address ── multiplied ──► the highest bits: bucket     the next 8: print, which is odd
//!
//!  bucket   prints [ p │ p │ 0 │ p │ 0 │ 0 │ - │ - ]      one word: 0 is vacant, the last two are never used
//!           slots  [ s │ s │   │ s │   │   ]
//!  spill    slot ...                                      what found no room in its bucket
//! ```
//! No address is kept: whoever searches looks at the block in a slot, which it needs anyway, and says whether it begins there.
//! The prints of a bucket are compared as one word, and no step depends on how many there are: a chain of places that ends
//! sooner or later costs a mispredicted branch on most calls, and a vector that is read after one of its parts was written waits
//! for the cache. Few slots spill. When there are more, the table doubles.

use crate::backend::DeviceAddress;
use crate::block_table::Slot;
use crate::units::UNIT_BYTES;

/// Slots of a bucket.
const BUCKET: usize = 6;
/// Slots that may spill before the table doubles.
const SPILL_MAX: usize = 8;
/// The prints of an empty bucket. Those behind the slots are neither vacant nor any address's.
const NO_PRINTS: u64 = 0x0202 << (8 * BUCKET);

/// Half a cache line, and none of it another heap's.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Bucket {
    prints: u64,
    slots: [Slot; BUCKET],
}

/// Two buckets.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([Bucket; 2]);

impl Line {
    const EMPTY: Line = Line([Bucket { prints: NO_PRINTS, slots: [0; BUCKET] }; 2]);
}

/// The highest bit of each byte that is zero.
#[inline(always)]
fn zero_bytes(word: u64) -> u64 {
    const REST: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    !(((word & REST) + REST) | word | REST)
}

#[inline(always)]
fn in_all_bytes(print: u8) -> u64 {
    u64::from(print) * 0x0101_0101_0101_0101
}

#[derive(Debug)]
pub(crate) struct PointerTable {
    /// A power of two of them.
    lines: Box<[Line]>,
    spill: Vec<Slot>,
    len: usize,
    /// Bits that the highest bits of a product are shifted down by to be a bucket's number.
    shift: u32,
}

/// Where an address stands.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Bucket { bucket: usize, bit: u32 },
    Spill { index: usize },
}

impl PointerTable {
    pub(crate) fn new() -> Self {
        Self::of_lines(1)
    }

    fn of_lines(lines: usize) -> Self {
        PointerTable {
            lines: vec![Line::EMPTY; lines].into_boxed_slice(),
            spill: Vec::new(),
            len: 0,
            shift: u64::BITS - (2 * lines).ilog2(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bucket and the print of an address. Fibonacci hashing: the multiplication carries all bits to the highest ones.
    #[inline(always)]
    fn home(&self, address: DeviceAddress) -> (usize, u8) {
        let product = (address.0 / UNIT_BYTES).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((product >> self.shift) as usize, (product >> (self.shift - 8)) as u8 | 1)
    }

    #[inline(always)]
    fn bucket(&self, bucket: usize) -> &Bucket {
        &self.lines[bucket / 2].0[bucket % 2]
    }

    #[inline(always)]
    fn bucket_mut(&mut self, bucket: usize) -> &mut Bucket {
        &mut self.lines[bucket / 2].0[bucket % 2]
    }

    /// Puts in an address that is not there. `address_of` says where the block in a slot begins.
    #[inline(always)]
    pub(crate) fn insert(&mut self, address: DeviceAddress, slot: Slot, address_of: impl Fn(Slot) -> DeviceAddress) {
        self.len += 1;
        if !self.put(address, slot) {
            self.put_aside(slot, address_of);
        }
    }

    /// Whether there was room.
    #[inline(always)]
    fn put(&mut self, address: DeviceAddress, slot: Slot) -> bool {
        let (home, print) = self.home(address);
        let bucket = self.bucket_mut(home);
        let vacant = zero_bytes(bucket.prints);
        if vacant == 0 {
            return false;
        }
        let bit = vacant.trailing_zeros() & !7;
        bucket.prints |= u64::from(print) << bit;
        bucket.slots[bit as usize / 8 % BUCKET] = slot;
        true
    }

    #[cold]
    #[inline(never)]
    fn put_aside(&mut self, slot: Slot, address_of: impl Fn(Slot) -> DeviceAddress) {
        self.spill.push(slot);
        if self.spill.len() <= SPILL_MAX {
            return;
        }
        let old = std::mem::replace(self, Self::of_lines(2 * self.lines.len()));
        self.len = old.len;
        let slots = old.lines.iter().flat_map(|line| line.0).flat_map(|bucket| {
            let is_taken = move |place: &usize| (bucket.prints >> (8 * place)) as u8 != 0;
            (0..BUCKET).filter(is_taken).map(move |place| bucket.slots[place])
        });
        for slot in slots.chain(old.spill) {
            if !self.put(address_of(slot), slot) {
                self.spill.push(slot);
            }
        }
    }

    /// The place and the slot of an address. `is_at` says whether the block in a slot begins there.
    #[inline(always)]
    pub(crate) fn find(&self, address: DeviceAddress, is_at: impl Fn(Slot) -> bool) -> Option<(Place, Slot)> {
        let (home, print) = self.home(address);
        let bucket = self.bucket(home);
        let mut places = zero_bytes(bucket.prints ^ in_all_bytes(print));
        while places != 0 {
            let bit = places.trailing_zeros() & !7;
            let slot = bucket.slots[bit as usize / 8 % BUCKET];
            if is_at(slot) {
                return Some((Place::Bucket { bucket: home, bit }, slot));
            }
            places &= places - 1;
        }
        self.find_aside(is_at)
    }

    #[cold]
    #[inline(never)]
    fn find_aside(&self, is_at: impl Fn(Slot) -> bool) -> Option<(Place, Slot)> {
        let index = self.spill.iter().position(|slot| is_at(*slot))?;
        Some((Place::Spill { index }, self.spill[index]))
    }

    /// Takes out what [`find`](Self::find) found in a place.
    #[inline(always)]
    pub(crate) fn remove(&mut self, place: Place) {
        self.len -= 1;
        match place {
            Place::Bucket { bucket, bit } => self.bucket_mut(bucket).prints &= !(0xff << bit),
            Place::Spill { index } => drop(self.spill.swap_remove(index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const BASE: u64 = 0x7f00_0000_0000;

    #[test]
    fn the_table_finds_what_a_map_finds_whatever_comes_and_goes() {
        let (mut table, mut oracle, mut blocks) = (PointerTable::new(), BTreeMap::new(), Vec::new());
        let mut vacant: Vec<Slot> = (0..700).rev().collect();
        blocks.resize(vacant.len(), DeviceAddress(0));
        let mut random = 88_172_645_463_325_252_u64;
        for _ in 0..100_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let address = DeviceAddress(BASE + random % 600 * UNIT_BYTES);
            match table.find(address, |slot| blocks[slot as usize] == address) {
                Some((place, slot)) => {
                    assert_eq!(oracle.remove(&address.0), Some(slot));
                    // The block stays where it was, as one that is merged into may.
                    table.remove(place);
                    vacant.push(slot);
                }
                None => {
                    let slot = vacant.pop().expect("fewer addresses than slots");
                    blocks[slot as usize] = address;
                    assert_eq!(oracle.insert(address.0, slot), None);
                    table.insert(address, slot, |slot| blocks[slot as usize]);
                }
            }
            assert_eq!(table.len(), oracle.len());
        }
        for (address, slot) in oracle {
            let found = table.find(DeviceAddress(address), |slot| blocks[slot as usize].0 == address);
            assert_eq!(found.map(|(_, slot)| slot), Some(slot));
        }
        assert!(table.lines.len() <= 256, "{} lines", table.lines.len());
    }

    #[test]
    fn few_slots_spill_whatever_lies_between_their_addresses() {
        for step in [UNIT_BYTES, 3 * UNIT_BYTES, 2 << 20, 20 << 20, 1 << 30, UNIT_BYTES << 32] {
            let address = |slot| DeviceAddress(BASE + u64::from(slot) * step);
            let mut table = PointerTable::new();
            (0..2000).for_each(|slot| table.insert(address(slot), slot, address));
            assert!(table.spill.len() <= SPILL_MAX, "{step} bytes: {} spilled", table.spill.len());
            assert!(table.lines.len() <= 1024, "{step} bytes: {} lines", table.lines.len());
            for slot in 0..2000 {
                let (place, found) = table.find(address(slot), |there| there == slot).expect("it was put in");
                assert_eq!(found, slot);
                table.remove(place);
            }
            assert!(table.len() == 0 && table.spill.is_empty());
        }
    }

    #[test]
    fn a_zero_byte_is_found_and_no_other() {
        for (word, zeros) in [(0x0101_8000_ff00_0110, 0x80_0080_0000), (u64::MAX, 0), (1, 0x8080_8080_8080_8000)] {
            assert_eq!(zero_bytes(word), zeros, "{word:#x}");
        }
    }

    #[test]
    fn two_buckets_take_one_cache_line() {
        assert_eq!((size_of::<Bucket>(), size_of::<Line>(), align_of::<Line>()), (32, 64, 64));
    }
}
