//! Private work: what one rank does for itself, in pools and on streams of its own, at moments of its own.
//!
//! A rank that logs, keeps a cache, or runs an evaluation is no other program: no symmetric heap may notice. What a rank
//! makes for itself comes after everything that the program makes, so that the program's ids are the same everywhere.

use super::swarm::small_stitching;
use crate::device::{Race, SimBackend, SplitMix64};
use crate::job::device_work;
use symmalloc_core::config::{PoolConfig, StreamPolicy};
use symmalloc_core::lock::Lock;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, Allocator, PoolId, StreamId};

/// The most pools and the most streams that a rank has for itself.
const OWN_MAX: usize = 2;
/// The most allocations that it has at once.
const LIVE_MAX: usize = 40;
const SIZES: [u64; 6] = [512, 100 * KIB, MIB + 1, 3 * MIB, 12 * MIB, 40 * MIB];

/// A rank's private work.
#[derive(Clone, Debug)]
pub(crate) struct PrivateWork {
    random: SplitMix64,
    pools: Vec<PoolId>,
    /// Streams that it works on: some of the program's, and its own.
    streams: Vec<StreamId>,
    own_streams: usize,
    live: Vec<Own>,
    /// How much it did.
    pub(crate) ops: u64,
}

/// An allocation of its own.
#[derive(Clone, Copy, Debug)]
struct Own {
    allocation: Allocation,
    stream: StreamId,
    is_shared: bool,
}

impl PrivateWork {
    /// Nothing done yet, on the first `streams` streams.
    pub(crate) fn new(random: SplitMix64, streams: usize) -> Self {
        let streams = (0..streams as u16).map(StreamId).collect();
        PrivateWork { random, pools: Vec::new(), streams, own_streams: 0, live: Vec::new(), ops: 0 }
    }

    /// Does something. What the driver refuses is not done.
    pub(crate) fn work<L: Lock>(&mut self, allocator: &Allocator<SimBackend, L>) -> Result<(), Race> {
        self.ops += 1;
        if self.pools.is_empty() || self.pools.len() < OWN_MAX && self.random.below(50) == 0 {
            let streams = if self.random.below(2) == 0 { StreamPolicy::Separate } else { StreamPolicy::Shared };
            let builder = PoolConfig::builder().streams(streams);
            let is_fixed = self.random.below(2) == 0;
            let builder = if is_fixed { builder.fixed() } else { builder.stitching(Some(small_stitching())) };
            self.pools.extend(builder.build().ok().and_then(|config| allocator.create_pool(config).ok()));
            return Ok(());
        }
        if self.own_streams < OWN_MAX && self.random.below(20) == 0 {
            self.own_streams += 1;
            self.streams.extend(allocator.register_stream());
            return Ok(());
        }
        let (pool, stream) = (self.any_pool(), self.any_stream());
        match self.random.below(16) {
            0..7 if self.live.len() < LIVE_MAX => {
                let size_bytes = SIZES[self.random.below(SIZES.len() as u64) as usize];
                if let Ok(allocation) = allocator.allocate(pool, stream, size_bytes) {
                    allocator.backend().submit(stream, allocation.address, allocation.size_bytes)?;
                    self.live.push(Own { allocation, stream, is_shared: false });
                }
            }
            0..12 => {
                if !self.live.is_empty() {
                    let index = self.random.below(self.live.len() as u64) as usize;
                    if allocator.free(self.live[index].allocation.handle).is_ok() {
                        self.live.swap_remove(index);
                    }
                }
            }
            12..14 => self.share(allocator, stream)?,
            14 => drop(allocator.reserve(pool, stream, SIZES[self.random.below(6) as usize])),
            _ => drop(allocator.trim(Some(pool))),
        }
        Ok(())
    }

    fn any_pool(&mut self) -> PoolId {
        self.pools[self.random.below(self.pools.len() as u64) as usize]
    }

    fn any_stream(&mut self) -> StreamId {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    /// Lets another stream use one of its allocations, once.
    fn share<L: Lock>(&mut self, allocator: &Allocator<SimBackend, L>, stream: StreamId) -> Result<(), Race> {
        let count = self.live.len() as u64;
        let Some(own) = self.live.get_mut(self.random.below(count) as usize).filter(|own| !own.is_shared) else {
            return Ok(());
        };
        let Allocation { handle, address, size_bytes, .. } = own.allocation;
        if allocator.record_use(handle, stream).is_ok() {
            own.is_shared = true;
            if stream == own.stream || device_work::waits(allocator.backend(), stream, own.stream) {
                allocator.backend().submit(stream, address, size_bytes)?;
            }
        }
        Ok(())
    }

    /// Frees everything and gives its pools up. The driver works again.
    pub(crate) fn end<L: Lock>(&mut self, allocator: &Allocator<SimBackend, L>) {
        for own in self.live.drain(..) {
            allocator.free(own.allocation.handle).expect("it is live, and the driver works");
        }
        for pool in self.pools.drain(..) {
            allocator.destroy_pool(pool).expect("it is empty, and the driver works");
        }
    }
}
