//! Pointers: from the address that `free` is given to the handle of the allocation.
//!
//! ```text
//!  address ── the upper bits of its hash ──► shard 0 ... 63 ── the rest ──► entry { address, handle, .. }
//! ```
//!
//! Many small tables with a lock and cache lines of their own, so that threads seldom meet. An address is in its table from before `allocate` returns it
//! until its `free` begins, and nobody else can be given it in between: each entry has one thread that puts it in and one that
//! takes it out. So an address that is put in is never there already, and need not be looked for.

use hashbrown::HashTable;
use symmalloc_core::lock::{LockCell, SpinLock};
use symmalloc_core::{Handle, PoolId};

const SHARD_BITS: u32 = 6;

/// A live allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) handle: Handle,
    pub(crate) requested_bytes: u64,
    /// Of its block.
    pub(crate) size_bytes: u64,
    pub(crate) pool: PoolId,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    address: u64,
    live: Live,
}

type Shard = SpinLock<HashTable<Entry>>;

/// The live allocations of one allocator, by address.
pub(crate) struct Pointers {
    shards: Box<[Shard; 1 << SHARD_BITS]>,
}

impl Pointers {
    pub(crate) fn new() -> Self {
        Pointers { shards: Box::new(std::array::from_fn(|_| Shard::new(HashTable::new()))) }
    }

    #[inline]
    fn shard(&self, hash: u64) -> &Shard {
        &self.shards[(hash >> (u64::BITS - SHARD_BITS)) as usize]
    }

    /// The address is in no table yet.
    #[inline]
    pub(crate) fn insert(&self, address: u64, live: Live) {
        let hash = hash_of(address);
        let mut table = self.shard(hash).lock();
        table.insert_unique(in_shard(hash), Entry { address, live }, |entry| in_shard(hash_of(entry.address)));
    }

    #[inline]
    pub(crate) fn remove(&self, address: u64) -> Option<Live> {
        let hash = hash_of(address);
        let mut table = self.shard(hash).lock();
        let entry = table.find_entry(in_shard(hash), |entry| entry.address == address).ok()?;
        Some(entry.remove().0.live)
    }

    #[inline]
    pub(crate) fn find(&self, address: u64) -> Option<Live> {
        let hash = hash_of(address);
        let table = self.shard(hash).lock();
        table.find(in_shard(hash), |entry| entry.address == address).map(|entry| entry.live)
    }
}

/// Spreads addresses, which are multiples of 512, over the upper bits.
#[inline]
fn hash_of(address: u64) -> u64 {
    (address >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The uppermost bits, which chose the shard, are equal for all of it: a table looks at the uppermost and the lowest.
#[inline]
fn in_shard(hash: u64) -> u64 {
    hash.rotate_left(SHARD_BITS + 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn live(number: u64) -> Live {
        Live {
            handle: Handle::from_raw((number, number)),
            requested_bytes: number,
            size_bytes: number,
            pool: PoolId(1),
        }
    }

    #[test]
    fn what_was_put_in_is_found_until_it_is_taken_out() {
        let pointers = Pointers::new();
        let address = |number: u64| 0x7f00_0000_0000 + number * 512;
        (0..10_000).for_each(|number| pointers.insert(address(number), live(number)));
        for number in (0..10_000).rev() {
            assert_eq!(pointers.find(address(number)).map(|live| live.requested_bytes), Some(number));
            assert_eq!(pointers.remove(address(number)).map(|live| live.handle), Some(live(number).handle));
            assert!(pointers.remove(address(number)).is_none() && pointers.find(address(number)).is_none());
        }
    }

    #[test]
    fn neighbours_lie_in_many_shards() {
        for step in [512, 2 << 20, 20 << 20] {
            let shard = |number: u64| hash_of(0x7f00_0000_0000 + number * step) >> (u64::BITS - SHARD_BITS);
            let shards: BTreeSet<u64> = (0..256).map(shard).collect();
            assert!(shards.len() > 48, "{step} bytes: {} shards", shards.len());
        }
    }
}
