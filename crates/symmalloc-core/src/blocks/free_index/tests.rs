//! Unit tests of `blocks/free_index.rs`.

use super::*;
use crate::blocks::table::{BlockState, BlockTable, Location};
use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::{SegmentId, StreamId};
use proptest::prelude::*;
use std::collections::BTreeSet;

const CLASS: SizeClass = SizeClass::Large;

#[test]
fn bins_ascend() {
    let mut last = bin_in_class(1);
    for size in (2..1 << 19).chain((19..32).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1])).chain([u32::MAX]) {
        let bin = bin_in_class(size);
        assert!(bin >= last, "size {size} lies in bin {bin}, after bin {last}");
        assert!(!(9..=1 << 19).contains(&size) || bin <= last + 1);
        assert!(size > 15 || bin > last, "each of the smallest sizes has its own bin");
        last = bin;
    }
    assert_eq!(last as usize, BIN_COUNT - 1);
}

/// Returns a table with blocks of the given (size, sequence, offset), which need not tile a segment.
fn table_of(blocks: &[(Units, u32, Units)]) -> (BlockTable, Vec<Slot>) {
    let mut table = BlockTable::default();
    let range = Range { base: DeviceAddress(0), size_bytes: 1 << 40 };
    let free = BlockState::Free { stream: StreamId(0), since: 0 };
    let slots = blocks.iter().map(|&(size, sequence, offset)| {
        let slot = table.add_segment(SegmentId(sequence), range, CLASS, size, free);
        table.block_mut(slot).location = Location::new(SegmentId(sequence), offset);
        slot
    });
    let slots = slots.collect();
    (table, slots)
}

#[test]
fn equal_sizes_are_ordered_by_age_of_memory_and_then_by_offset() {
    let (mut table, slots) = table_of(&[(40, 7, 0), (40, 3, 9), (40, 3, 2), (40, 5, 1)]);
    let mut index = FreeIndex::default();
    slots.iter().for_each(|slot| index.insert(table.tiling().blocks(), *slot));
    assert_eq!(index.best_fit(table.blocks(), CLASS, 33), Some(slots[2]));
}

#[test]
fn the_largest_requests_get_no_block_of_the_other_class() {
    let (mut table, slots) = table_of(&[(1, 0, 0), (2, 0, 7), (700, 0, 9), (1 << 30, 1, 0)]);
    let mut index = FreeIndex::default();
    for slot in &slots[..3] {
        table.block_mut(*slot).class = SizeClass::Small;
    }
    slots[..3].iter().for_each(|slot| index.insert(table.tiling().blocks(), *slot));
    // The bitmap words of these bins are followed by those of the other class.
    let sizes = [1 << 24, 1 << 29, (1 << 30) + 1, 1 << 31, u32::MAX];
    let fits =
        |index: &mut FreeIndex, table: &BlockTable| sizes.map(|size| index.best_fit(table.blocks(), CLASS, size));
    assert_eq!(fits(&mut index, &table), [None; 5]);
    index.insert(table.tiling().blocks(), slots[3]);
    assert_eq!(fits(&mut index, &table), [Some(slots[3]), Some(slots[3]), None, None, None]);
}

fn blocks() -> impl Strategy<Value = Vec<(Units, u32, Units)>> {
    // Sizes both far apart and close together: short and long bins, and every word of the bitmap.
    let size = prop_oneof![1..40u32, 1000..1100u32, (0..31u32).prop_map(|e| 1 << e), Just(77)];
    let blocks = prop::collection::vec((size, 0..3u32, 0..5000u32), 0..700);
    blocks.prop_map(|mut blocks| {
        // As in a heap, no two blocks share a location.
        let mut places = BTreeSet::new();
        blocks.retain(|&(_, sequence, offset)| places.insert((sequence, offset)));
        blocks
    })
}

proptest! {
    #[test]
    fn the_index_agrees_with_an_ordered_set(blocks in blocks(), requests in prop::collection::vec(1..2000u32, 20),
                                  removals in prop::collection::vec(any::<prop::sample::Index>(), 0..700)) {
        let (mut table, slots) = table_of(&blocks);
        let (mut index, mut oracle) = (FreeIndex::default(), BTreeSet::new());
        let check = |index: &mut FreeIndex, table: &BlockTable, oracle: &BTreeSet<FreeKey>| {
            for &size in requests.iter().chain(&[1 << 20, 1 << 30, u32::MAX]) {
                let expected = oracle.range(FreeKey::least_of(size)..).next().map(|key| key.slot());
                assert_eq!(index.best_fit(table.blocks(), CLASS, size), expected);
            }
            let largest = oracle.last().map(|key| table.block(key.slot()).size);
            assert_eq!(index.largest(table.blocks()), largest);
            assert_eq!(index.keys(table.blocks(), CLASS).count(), oracle.len());
            assert!(index.is_linked(table.blocks()));
        };
        for slot in slots {
            index.insert(table.tiling().blocks(), slot);
            oracle.insert(FreeKey::of(table.block(slot), slot));
        }
        check(&mut index, &table, &oracle);
        for removal in removals {
            if oracle.is_empty() {
                break;
            }
            let key = *removal.get(&oracle.iter().copied().collect::<Vec<_>>());
            index.remove(table.tiling().blocks(), key.slot());
            oracle.remove(&key);
        }
        check(&mut index, &table, &oracle);
        prop_assert!(index.keys(table.blocks(), CLASS).eq(oracle.iter().copied()));
    }
}
