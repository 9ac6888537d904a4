//! Pointers: from the address that `free` is given to the handle of the allocation.
//!
//! Many small maps with a lock each, chosen by the address, so that threads seldom meet. An address is in the map from before
//! `allocate` returns it until its `free` begins, and nobody else can be given it in between: each entry has one thread that
//! puts it in and one that takes it out.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::{Handle, PoolId};

const SHARD_BITS: u32 = 6;

/// A live allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) handle: Handle,
    pub(crate) pool: PoolId,
    pub(crate) requested_bytes: u64,
}

/// The live allocations of one allocator, by address.
pub(crate) struct Pointers {
    shards: Box<[Shard; 1 << SHARD_BITS]>,
}

/// In a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Shard {
    /// Looked up only, so its order matters to nobody.
    live: Mutex<HashMap<u64, Live, BuildHasherDefault<AddressHasher>>>,
}

impl Pointers {
    pub(crate) fn new() -> Self {
        Pointers { shards: Box::new(std::array::from_fn(|_| Shard::default())) }
    }

    #[inline]
    fn shard(&self, address: u64) -> MutexGuard<'_, HashMap<u64, Live, BuildHasherDefault<AddressHasher>>> {
        let shard = (mixed(address) >> (u64::BITS - SHARD_BITS)) as usize;
        self.shards[shard].live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn insert(&self, address: u64, live: Live) {
        self.shard(address).insert(address, live);
    }

    #[inline]
    pub(crate) fn remove(&self, address: u64) -> Option<Live> {
        self.shard(address).remove(&address)
    }

    #[inline]
    pub(crate) fn find(&self, address: u64) -> Option<Live> {
        self.shard(address).get(&address).copied()
    }
}

/// Spreads addresses, which are multiples of 512, over all bits.
#[inline]
fn mixed(address: u64) -> u64 {
    (address >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    #[inline]
    fn write_u64(&mut self, address: u64) {
        // The upper bits chose the shard, and the map looks at the uppermost ones, too.
        self.0 = mixed(address).rotate_left(SHARD_BITS);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mixed(self.0 ^ (u64::from(*byte) << 9));
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
