//! Waits: a stream waits only for work that it has not waited for yet (rule D3). Its earlier waits follow from the ops alone: its own,
//! those through another stream, and those of the host.

use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, PoolId, StreamId};
use symmalloc_sim::{Call, SimBackend};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);
const S2: StreamId = StreamId(2);

struct Rank {
    allocator: Allocator<SimBackend>,
}

impl Rank {
    fn new(streams: StreamPolicy) -> Self {
        let pool = PoolConfig::builder().streams(streams).build().expect("the configuration should be valid");
        let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
        let allocator = Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
        (0..4).for_each(|_| _ = allocator.register_stream().expect("a stream id is available"));
        Rank { allocator }
    }

    fn allocate(&self, stream: StreamId) -> Allocation {
        let made = self.allocator.allocate(POOL, stream, MIB).expect("memory should suffice");
        self.allocator.backend().submit(stream, made.address, made.size_bytes).expect("a wait is missing");
        made
    }

    /// Frees an allocation that `user` used as well.
    fn free_used_by(&self, made: &Allocation, owner: StreamId, user: StreamId) {
        self.waits_on_device(user, owner);
        self.allocator.backend().submit(user, made.address, made.size_bytes).expect("the stream waited for the owner");
        self.allocator.record_use(made.handle, user).expect("the allocation should be live");
        self.allocator.free(made.handle).expect("the allocation should be live");
    }

    /// Makes a stream wait on the device without notifying the allocator.
    fn waits_on_device(&self, stream: StreamId, on: StreamId) {
        let device = self.allocator.backend();
        let event = device.record(on).expect("no fault should be injected");
        device.wait(stream, event).expect("no fault should be injected");
        device.recycle(event);
    }

    /// Makes a stream wait on the device and notifies the allocator.
    fn waits(&self, stream: StreamId, on: StreamId) {
        self.waits_on_device(stream, on);
        self.allocator.note_stream_wait(stream, on).expect("both exist");
    }

    /// Returns the number of waits for an allocation.
    fn waits_to_allocate(&self, stream: StreamId) -> u64 {
        let before = self.allocator.backend().calls().of(Call::Wait);
        let _live = self.allocate(stream);
        self.allocator.backend().calls().of(Call::Wait) - before
    }
}

#[test]
fn a_block_used_by_another_stream_needs_exactly_one_wait() {
    let rank = Rank::new(StreamPolicy::Separate);
    let blocks = [(); 2].map(|()| rank.allocate(S0));
    blocks.iter().for_each(|made| rank.free_used_by(made, S0, S1));
    // The two blocks are now one.
    assert_eq!(rank.waits_to_allocate(S0), 1);
    assert_eq!(rank.waits_to_allocate(S0), 0);
}

/// The remainder of a block keeps the fence that the taker of the block has already waited for.
#[test]
fn the_remainder_of_a_block_needs_no_second_wait() {
    let rank = Rank::new(StreamPolicy::Shared);
    let large = rank.allocator.allocate(POOL, S0, 2 * MIB).expect("memory should suffice");
    rank.free_used_by(&large, S0, S1);
    assert_eq!(rank.waits_to_allocate(S2), 2, "for the user and for the owner");
    assert_eq!(rank.waits_to_allocate(S2), 0);
}

#[test]
fn a_wait_before_the_use_covers_nothing() {
    let rank = Rank::new(StreamPolicy::Separate);
    let made = rank.allocate(S0);
    rank.waits(S0, S1);
    rank.free_used_by(&made, S0, S1);
    assert_eq!(rank.waits_to_allocate(S0), 1);
}

#[test]
fn a_stream_that_has_waited_for_the_user_does_not_wait_again() {
    let rank = Rank::new(StreamPolicy::Separate);
    let made = rank.allocate(S0);
    rank.free_used_by(&made, S0, S1);
    rank.waits(S0, S1);
    assert_eq!(rank.waits_to_allocate(S0), 0);
}

#[test]
fn a_transitive_wait_for_the_user_is_sufficient() {
    let rank = Rank::new(StreamPolicy::Separate);
    let made = rank.allocate(S0);
    rank.free_used_by(&made, S0, S1);
    rank.waits(S2, S1);
    rank.waits(S0, S2);
    assert_eq!(rank.waits_to_allocate(S0), 0);
}

#[test]
fn a_transitive_wait_in_the_wrong_order_is_not_sufficient() {
    let rank = Rank::new(StreamPolicy::Separate);
    let made = rank.allocate(S0);
    rank.free_used_by(&made, S0, S1);
    rank.waits(S0, S2);
    rank.waits(S2, S1);
    assert_eq!(rank.waits_to_allocate(S0), 1);
}

#[test]
fn a_host_wait_covers_the_earlier_waits_of_its_stream() {
    let rank = Rank::new(StreamPolicy::Separate);
    let made = rank.allocate(S0);
    rank.free_used_by(&made, S0, S1);
    rank.waits(S2, S1);
    rank.allocator.backend().synchronize(S2).expect("no fault should be injected");
    rank.allocator.note_synchronized(S2).expect("the stream should exist");
    assert_eq!(rank.waits_to_allocate(S0), 0);
}

/// The allocator makes a stream wait for the last owner of a block, which had waited for the user of another one.
#[test]
fn a_wait_by_the_allocator_covers_the_earlier_waits_of_the_other_stream() {
    let rank = Rank::new(StreamPolicy::Shared);
    let used = rank.allocate(S0);
    // Fills the granule, so that the two do not become one block.
    let _live = rank.allocate(S0);
    let owned = rank.allocate(S1);
    rank.free_used_by(&used, S0, S2);
    rank.waits(S1, S2);
    rank.allocator.free(owned.handle).expect("the allocation should be live");
    let stream = StreamId(3);
    let before = rank.allocator.backend().calls().of(Call::Wait);
    let large = rank.allocator.allocate(POOL, stream, 2 * MIB).expect("memory should suffice");
    assert_eq!(large.placement, owned.placement);
    assert_eq!(rank.allocator.backend().calls().of(Call::Wait) - before, 1, "for the block's owner");
    assert_eq!(rank.waits_to_allocate(stream), 1, "for the block's owner, and not for its user");
}
