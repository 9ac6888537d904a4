//! The private work of one rank: in its own pools, on its own and the program's streams, and at its own times.
//!
//! A rank that logs, keeps a cache or runs an evaluation still runs the same program, so this work must not affect any
//! symmetric heap. A rank creates its private pools and streams after all pools and streams of the program, so that the
//! program's ids are the same on all ranks.

use super::swarm::small_stitching;
use crate::device::{Race, SimBackend, SplitMix64};
use crate::job::device_work;
use symmalloc_core::config::{PoolConfig, StreamPolicy};
use symmalloc_core::lock::Lock;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, PoolId, StreamId, generic};

/// Maximum number of private pools of a rank, and of its private streams.
const PRIVATE_MAX: usize = 2;
/// Maximum number of live private allocations.
const LIVE_MAX: usize = 40;
const SIZES: [u64; 6] = [512, 100 * KIB, MIB + 1, 3 * MIB, 12 * MIB, 40 * MIB];

/// A rank's private work.
#[derive(Clone, Debug)]
pub(crate) struct PrivateWork {
    random: SplitMix64,
    pools: Vec<PoolId>,
    /// Streams of the private work: all streams of the program, followed by private ones.
    streams: Vec<StreamId>,
    private_streams: usize,
    live: Vec<PrivateAllocation>,
    /// Number of private ops so far.
    pub(crate) ops: u64,
}

/// A live private allocation.
#[derive(Clone, Copy, Debug)]
struct PrivateAllocation {
    allocation: Allocation,
    stream: StreamId,
    is_shared: bool,
}

impl PrivateWork {
    /// Creates private work that uses the first `streams` streams, without any ops yet.
    pub(crate) fn new(random: SplitMix64, streams: usize) -> Self {
        let streams = (0..streams as u16).map(StreamId).collect();
        PrivateWork { random, pools: Vec::new(), streams, private_streams: 0, live: Vec::new(), ops: 0 }
    }

    /// Performs one random op. An op whose driver call fails has no effect.
    pub(crate) fn work<L: Lock>(&mut self, allocator: &generic::Allocator<SimBackend, L>) -> Result<(), Race> {
        self.ops += 1;
        if self.pools.is_empty() || self.pools.len() < PRIVATE_MAX && self.random.below(50) == 0 {
            let policies = [StreamPolicy::Separate, StreamPolicy::Grouped, StreamPolicy::Shared];
            let streams = policies[self.random.below(3) as usize];
            let builder = PoolConfig::builder().streams(streams);
            let is_fixed = self.random.below(2) == 0;
            let builder = if is_fixed { builder.fixed() } else { builder.stitching(Some(small_stitching())) };
            self.pools.extend(builder.build().ok().and_then(|config| allocator.create_pool(config).ok()));
            return Ok(());
        }
        if self.private_streams < PRIVATE_MAX && self.random.below(20) == 0 {
            self.private_streams += 1;
            // A private stream may join one of the program's groups.
            let member = self.any_stream();
            let group = allocator.group_of(member).ok().filter(|_| self.random.below(2) == 0);
            let registered =
                group.map_or_else(|| allocator.register_stream(), |group| allocator.register_stream_in(group));
            self.streams.extend(registered);
            return Ok(());
        }
        let (pool, stream) = (self.any_pool(), self.any_stream());
        match self.random.below(16) {
            0..7 if self.live.len() < LIVE_MAX => {
                let size_bytes = SIZES[self.random.below(SIZES.len() as u64) as usize];
                if let Ok(allocation) = allocator.allocate(pool, stream, size_bytes) {
                    allocator.backend().submit(stream, allocation.address, allocation.size_bytes)?;
                    self.live.push(PrivateAllocation { allocation, stream, is_shared: false });
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
            _ => drop(allocator.trim_pool(pool)),
        }
        Ok(())
    }

    fn any_pool(&mut self) -> PoolId {
        self.pools[self.random.below(self.pools.len() as u64) as usize]
    }

    fn any_stream(&mut self) -> StreamId {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    /// Lets another stream use one private allocation, at most once.
    fn share<L: Lock>(&mut self, allocator: &generic::Allocator<SimBackend, L>, stream: StreamId) -> Result<(), Race> {
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

    /// Frees all private allocations and destroys all private pools. The caller must have removed all faults.
    pub(crate) fn end<L: Lock>(&mut self, allocator: &generic::Allocator<SimBackend, L>) {
        for own in self.live.drain(..) {
            allocator.free(own.allocation.handle).expect("the allocation is live and the driver works");
        }
        for pool in self.pools.drain(..) {
            allocator.destroy_pool(pool).expect("the pool is empty and the driver works");
        }
    }
}
