//! Unit tests of `stitching.rs`.

use super::*;
use crate::arena::fresh;
use crate::config::PoolConfig;
use crate::config::size_rules::SizeRules;
use crate::types::backend::DeviceAddress;
use crate::types::units::{MIB, units};
use std::num::NonZeroU64;

const S0: StreamId = StreamId(0);
const GRANULE: Units = units_of(2);

const fn units_of(mib: u64) -> Units {
    (mib * MIB / 512) as Units
}

/// Returns an arena of eight granules at home, of which every second one, from the second on, is free.
fn arena() -> (Arena, Vec<Slot>) {
    let mut arena = Arena::new(SizeRules::new(&PoolConfig::default(), 2 * MIB), Some(S0));
    let range = Range { base: DeviceAddress(1 << 40), size_bytes: 16 * MIB };
    arena.add_segment(range, SizeClass::Large, units(16 * MIB), fresh(S0));
    let state = BlockState::Allocated { stream: S0, requested: 2 * MIB, serial: NonZeroU64::MIN };
    let mut slots = Vec::new();
    for _ in 0..8 {
        let free = arena.best_fit(GRANULE).expect("a free block should be large enough");
        slots.push(arena.take_front(free, GRANULE, state).0);
    }
    for slot in slots.iter().skip(1).step_by(2) {
        free(&mut arena, *slot);
    }
    (arena, slots)
}

fn free(arena: &mut Arena, slot: Slot) {
    arena.mark_free(slot, S0, 0);
    arena.coalesce(slot);
}

/// Stitches the first free granules into a new range, as a heap does. Returns its free block.
fn stitch(stitched: &mut StitchedRanges, arena: &mut Arena, count: Units) -> Slot {
    let runs = first_free(arena, count * GRANULE);
    assert_eq!(runs.iter().map(|run| run.size).sum::<Units>(), count * GRANULE);
    let home = FreeAtHome::new(arena);
    let range = Range { base: DeviceAddress(1 << 41), size_bytes: u64::from(count) * 2 * MIB };
    stitched.add(arena, &home, range, &runs, fresh(S0))
}

fn allocate(arena: &mut Arena, block: Slot) -> Slot {
    let state = BlockState::Allocated { stream: S0, requested: 1, serial: NonZeroU64::MIN };
    arena.take_front(block, GRANULE, state).0
}

fn free_granules(arena: &Arena) -> Units {
    free_blocks_at_home(arena).map(|(run, _)| run.size).sum::<Units>() / GRANULE
}

#[test]
fn free_pieces_form_one_block_and_are_covered_in_their_own_segments() {
    let (mut arena, _) = arena();
    let mut stitched = StitchedRanges::default();
    let home = stitched.look_home(&arena);
    assert_eq!((home.largest_joined, home.free.size()), (0, u64::from(4 * GRANULE)));
    let block = stitch(&mut stitched, &mut arena, 3);
    assert_eq!((arena.block(block).size, arena.best_fit(3 * GRANULE)), (3 * GRANULE, Some(block)));
    assert_eq!((stitched.aliases(&arena), free_granules(&arena)), (3, 1));
    let elsewhere = arena.all_blocks().into_iter().filter(|slot| arena.block(*slot).is_elsewhere()).count();
    assert_eq!(elsewhere, 3);
}

#[test]
fn the_memory_of_an_unused_range_returns_home_and_the_range_is_reusable() {
    let (mut arena, _slots) = arena();
    let mut stitched = StitchedRanges::default();
    let block = stitch(&mut stitched, &mut arena, 3);
    let segment = arena.block(block).segment;
    let home = stitched.look_home(&arena);
    assert_eq!((home.largest_joined, home.free.size()), (GRANULE, u64::from(4 * GRANULE)), "as if all were at home");
    stitched.empty_if_unused(&mut arena, segment);
    assert_eq!((free_granules(&arena), arena.best_fit(2 * GRANULE)), (4, None));
    assert_eq!(stitched.ranges()[0].users(), [S0], "the addresses were used");

    // A shorter block leaves the rest of the memory at home.
    for count in [2, 3] {
        let found = stitched.find_again(count * GRANULE, &stitched.look_home(&arena).free);
        assert_eq!(found, Some(segment), "all are free at home");
        let home = FreeAtHome::new(&arena);
        let again = stitched.reuse(&mut arena, &home, segment, count * GRANULE, fresh(S0));
        assert_eq!((arena.block(again).segment, arena.block(again).size), (segment, count * GRANULE));
        assert_eq!(free_granules(&arena), 4 - count);
        stitched.empty_if_unused(&mut arena, segment);
        assert_eq!((free_granules(&arena), arena.blocks_of(segment).count()), (4, 1), "one block is elsewhere");
    }

    // With a granule in use at home, the range cannot be used again.
    let block = arena.best_fit(GRANULE).expect("four are free");
    allocate(&mut arena, block);
    assert_eq!(stitched.find_again(3 * GRANULE, &stitched.look_home(&arena).free), None);
}

#[test]
fn a_range_is_unused_once_no_block_of_it_is_in_use() {
    let (mut arena, _) = arena();
    let mut stitched = StitchedRanges::default();
    let block = stitch(&mut stitched, &mut arena, 3);
    let segment = arena.block(block).segment;
    assert_eq!(stitched.unused(&arena), [(segment, 3)]);
    let live = allocate(&mut arena, block);
    assert_eq!(stitched.unused(&arena), []);

    // The rest of the range goes home and is unmapped, after its users.
    stitched.gather(&mut arena);
    let (mut waited, mut unmapped) = (Vec::new(), Vec::new());
    let outcome: Result<(), ()> = stitched.unmap_unused(
        &arena,
        |stream| {
            waited.push(stream);
            Ok(())
        },
        |range, offset, size| {
            unmapped.push((range.base, offset, size));
            Ok(())
        },
    );
    let base = DeviceAddress(1 << 41);
    let expected = vec![(base, GRANULE, GRANULE), (base, 2 * GRANULE, GRANULE)];
    assert_eq!((outcome, waited, unmapped), (Ok(()), vec![S0], expected));
    assert_eq!((stitched.aliases(&arena), stitched.ranges()[0].mapped().to_vec()), (1, vec![(0, 2 * MIB)]));

    free(&mut arena, live);
    stitched.gather(&mut arena);
    let removed = stitched.remove(segment).expect("it is stitched");
    assert_eq!((removed.mapped().to_vec(), stitched.is_empty()), (vec![(0, 2 * MIB)], true));
    arena.remove_segment(segment);
    assert_eq!(free_granules(&arena), 4);
}

#[test]
fn a_part_of_a_range_in_use_returns_home_and_joins_its_neighbors() {
    let (mut arena, slots) = arena();
    let mut stitched = StitchedRanges::default();
    // The range has two pieces of three granules, and the second granule of the first stays in use.
    free(&mut arena, slots[2]);
    free(&mut arena, slots[6]);
    let block = stitch(&mut stitched, &mut arena, 6);
    let lower = allocate(&mut arena, block);
    let middle = allocate(&mut arena, block);
    free(&mut arena, lower);
    let home = stitched.look_home(&arena);
    assert_eq!((home.largest_joined, home.free.size()), (3 * GRANULE, u64::from(5 * GRANULE)));
    stitched.gather(&mut arena);
    assert_eq!((arena.largest_free(), free_granules(&arena)), (Some(3 * GRANULE), 5));
    assert_eq!(arena.block(middle).offset(), GRANULE);
    let segment = arena.block(middle).segment;
    stitched.empty_if_unused(&mut arena, segment);
    assert_eq!(free_granules(&arena), 5, "a block is in use");
    free(&mut arena, middle);
    stitched.empty_if_unused(&mut arena, segment);
    assert_eq!((arena.largest_free(), free_granules(&arena)), (Some(3 * GRANULE), 6));
}
