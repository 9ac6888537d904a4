//! Unit tests of `arena.rs`.

use super::*;
use crate::config::PoolConfig;
use crate::types::backend::DeviceAddress;
use crate::types::units::MIB;

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Returns an arena with one segment of 8 MiB, for one stream or for all.
fn arena(stream: Option<StreamId>) -> Arena {
    let mut arena = Arena::new(SizeRules::new(&PoolConfig::default(), 2 * MIB), stream);
    let range = Range { base: DeviceAddress(1 << 40), size_bytes: 64 * MIB };
    arena.add_segment(range, SizeClass::Large, units(8), fresh(S0));
    arena
}

/// Returns a number of MiB in units.
fn units(mib: u64) -> Units {
    crate::types::units::units(mib * MIB)
}

fn allocate(arena: &mut Arena, mib: u64, stream: StreamId) -> Slot {
    let free = arena.best_fit(units(mib)).expect("a free block should be large enough");
    let state = BlockState::Allocated { stream, requested: mib * MIB, serial: NonZeroU64::MIN };
    arena.take_front(free, units(mib), state).0
}

/// Returns the size in MiB of each block, and `true` if it is free.
fn tiling(arena: &Arena) -> Vec<(u64, bool)> {
    let blocks = arena.all_blocks().into_iter().map(|slot| arena.block(slot));
    blocks.map(|block| (bytes(block.size) / MIB, block.is_free())).collect()
}

#[test]
fn released_blocks_merge_with_both_neighbors() {
    let mut arena = arena(Some(S0));
    let [a, b, c] = [1, 2, 3].map(|mib| allocate(&mut arena, mib, S0));
    assert_eq!(tiling(&arena), [(1, false), (2, false), (3, false), (2, true)]);
    for slot in [a, c, b] {
        arena.mark_free(slot, S0, 0);
        arena.coalesce(slot);
    }
    assert_eq!(tiling(&arena), [(8, true)]);
    assert_eq!((arena.mapped_bytes(), arena.fence_sets()), (8 * MIB, 0));
}

#[test]
fn a_hole_has_no_memory_until_it_is_filled() {
    let mut arena = arena(Some(S0));
    let slots = [(); 4].map(|()| allocate(&mut arena, 2, S0));
    arena.mark_free(slots[1], S0, 0);
    let free = arena.coalesce(slots[1]);
    arena.cut_hole(free, units(2), units(4));
    assert_eq!((arena.mapped_bytes(), arena.best_fit(units(2))), (6 * MIB, None));
    let segment = arena.block(slots[0]).segment;
    assert_eq!(arena.extents_of(segment).to_vec(), [(0, 2 * MIB), (4 * MIB, 4 * MIB)]);
    let (hole, _) = arena.find_hole(|block| block.size == units(2)).expect("one hole");
    let filled = arena.fill_hole(hole, units(2), fresh(S0));
    assert_eq!((arena.mapped_bytes(), arena.best_fit(units(2))), (8 * MIB, Some(filled)));
}

#[test]
fn a_hole_at_the_end_shortens_the_segment() {
    let mut arena = arena(Some(S0));
    let kept = allocate(&mut arena, 3, S0);
    let free = arena.best_fit(units(5)).expect("the rest");
    arena.cut_hole(free, units(4), units(8));
    let segment = arena.block(kept).segment;
    assert_eq!((arena.segment(segment).end, arena.mapped_bytes()), (units(4), 4 * MIB));
    assert_eq!(tiling(&arena), [(3, false), (1, true)]);
    arena.extend(segment, units(2), fresh(S0));
    assert_eq!((tiling(&arena), arena.free_at_end()), (vec![(3, false), (3, true)], units(3)));
}

#[test]
fn the_next_user_of_merged_blocks_waits_for_the_users_of_both() {
    let mut arena = arena(None);
    let [a, b] = [S0, S1].map(|stream| allocate(&mut arena, 4, stream));
    for (slot, stream, since) in [(a, S0, 5), (b, S1, 7)] {
        arena.mark_free(slot, stream, since);
        arena.coalesce(slot);
    }
    let merged = arena.best_fit(units(8)).expect("both");
    let mut users = arena.streams_of(merged);
    users.sort_unstable();
    assert_eq!(users.to_vec(), [S0, S1]);
    assert!(!arena.block(merged).is_ready_for(S0) && !arena.block(merged).is_ready_for(S1));
}

#[test]
fn carved_remainders_keep_the_users_of_the_block() {
    let mut arena = arena(None);
    let slot = allocate(&mut arena, 8, S0);
    arena.add_use(slot, S1);
    arena.mark_free(slot, S0, 3);
    let whole = arena.coalesce(slot);
    let state = BlockState::Allocated { stream: S0, requested: 1, serial: NonZeroU64::MIN };
    let carved = arena.carve(whole, units(2), units(5), state);
    assert_eq!((tiling(&arena), arena.fences_of(carved)), (vec![(2, true), (3, false), (3, true)], &[][..]));
    for slot in arena.all_blocks().into_iter().filter(|slot| arena.block(*slot).is_free()) {
        assert_eq!(arena.streams_of(slot).to_vec(), [S1, S0]);
    }
}
