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
        let free = arena.best_fit(GRANULE).expect("memory is free");
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
fn stitch(stitched: &mut StitchedRanges, arena: &mut Arena, count: usize) -> Slot {
    let granules: Vec<_> = free_granules(arena).take(count).collect();
    assert_eq!(granules.len(), count);
    stitched.leave_home(arena, &granules);
    let range = Range { base: DeviceAddress(1 << 41), size_bytes: count as u64 * 2 * MIB };
    stitched.add(arena, range, granules, fresh(S0))
}

#[test]
fn free_pieces_form_one_block_and_are_marked_in_their_own_segments() {
    let (mut arena, _) = arena();
    let mut stitched = StitchedRanges::default();
    let home = stitched.look_home(&arena);
    assert_eq!((home.largest, home.free.count()), (GRANULE, 4));
    let block = stitch(&mut stitched, &mut arena, 3);
    assert_eq!((arena.block(block).size, arena.best_fit(3 * GRANULE)), (3 * GRANULE, Some(block)));
    assert_eq!((stitched.aliases(), free_granules(&arena).count()), (3, 1));
    let elsewhere = arena.all_blocks().into_iter().filter(|slot| arena.block(*slot).is_elsewhere()).count();
    assert_eq!(elsewhere, 3);
}

#[test]
fn gathered_granules_return_to_their_segments_and_their_range_is_reusable() {
    let (mut arena, slots) = arena();
    let mut stitched = StitchedRanges::default();
    let block = stitch(&mut stitched, &mut arena, 3);
    let segment = arena.block(block).segment;
    assert_eq!(stitched.look_home(&arena).free.count(), 4, "as if all were at home");
    stitched.gather(&mut arena);
    assert_eq!((free_granules(&arena).count(), arena.best_fit(2 * GRANULE)), (4, None));
    assert_eq!(stitched.ranges()[0].users(), [S0], "the addresses were used");

    let (found, home) = stitched.find_again(3, &stitched.look_home(&arena).free).expect("all three are free at home");
    assert_eq!(found, segment);
    stitched.leave_home(&mut arena, &home);
    let again = stitched.reuse(&mut arena, segment, 3, fresh(S0));
    assert_eq!((arena.block(again).segment, arena.block(again).size), (segment, 3 * GRANULE));

    // With a granule in use at home, the range cannot be used again.
    stitched.gather(&mut arena);
    let taken = arena.best_fit(GRANULE).expect("four are free");
    arena.take_front(taken, GRANULE, BlockState::Allocated { stream: S0, requested: 1, serial: NonZeroU64::MIN });
    assert_eq!(stitched.find_again(3, &stitched.look_home(&arena).free), None);
    free(&mut arena, slots[0]);
}

#[test]
fn a_range_is_unused_once_no_block_of_it_is_in_use() {
    let (mut arena, _) = arena();
    let mut stitched = StitchedRanges::default();
    let block = stitch(&mut stitched, &mut arena, 3);
    let segment = arena.block(block).segment;
    assert_eq!(stitched.unused(&arena), [(segment, 3)]);
    let state = BlockState::Allocated { stream: S0, requested: 1, serial: NonZeroU64::MIN };
    let (live, _) = arena.take_front(block, GRANULE, state);
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
        |range, offset| {
            unmapped.push((range.base, offset));
            Ok(())
        },
    );
    let base = DeviceAddress(1 << 41);
    assert_eq!((outcome, waited, unmapped), (Ok(()), vec![S0], vec![(base, GRANULE), (base, 2 * GRANULE)]));
    assert_eq!((stitched.aliases(), stitched.ranges()[0].granules()[1]), (1, None));

    free(&mut arena, live);
    stitched.gather(&mut arena);
    let removed = stitched.remove(segment).expect("it is stitched");
    assert_eq!((removed.mapped(GRANULE).to_vec(), stitched.is_empty()), (vec![(0, 2 * MIB)], true));
    arena.remove_segment(segment);
    assert_eq!(free_granules(&arena).count(), 4);
}
