//! Tests of each rule of the model.

use super::*;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::units::KIB;
use symmalloc_core::units::MIB;
use symmalloc_sim::Addresses;

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// Returns a predictable device: addresses ascend, and events complete when they are recorded.
fn calm(delays: Delays) -> SimBackend {
    SimBackend::builder().addresses(Addresses::Ascending).delays(delays).build()
}

fn fixed() -> AddressOrder {
    AddressOrder::on(calm(Delays::Immediate), ModelSegments::Fixed)
}

fn expandable() -> AddressOrder {
    AddressOrder::on(calm(Delays::Immediate), ModelSegments::Expandable)
}

impl AddressOrder {
    fn take(&mut self, id: u64, size_bytes: u64) -> (u32, u64) {
        self.take_on(id, S0, size_bytes)
    }

    fn take_on(&mut self, id: u64, stream: StreamId, size_bytes: u64) -> (u32, u64) {
        let op = Op::Allocate { id: AllocationId(id), pool: PoolId::DEFAULT, stream, size_bytes };
        let placement = self.step(&op).unwrap().expect("the allocation should have a placement");
        (placement.segment.0, placement.offset_bytes)
    }

    fn give(&mut self, id: u64) {
        assert_eq!(self.step(&Op::Free { id: AllocationId(id) }), Ok(None));
    }

    fn record_use(&mut self, id: u64, stream: StreamId) {
        assert_eq!(self.step(&Op::RecordUse { id: AllocationId(id), stream }), Ok(None));
    }

    fn trim(&mut self) {
        assert_eq!(self.step(&Op::Trim { pool: None }), Ok(None));
    }
}

#[test]
fn fixed_segments_have_pytorchs_sizes() {
    for (size, segment) in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ] {
        let mut old = fixed();
        assert_eq!(old.take(0, size), (0, 0));
        assert_eq!(old.reserved_bytes(), segment, "{size}");
    }
}

#[test]
fn sizes_are_rounded_to_512() {
    let mut old = fixed();
    let sizes = [1, 512, 513, 1];
    let places: Vec<_> = (0..).zip(sizes).map(|(id, size)| old.take(id, size)).collect();
    assert_eq!(places, [(0, 0), (0, 512), (0, 1024), (0, 2048)]);
}

#[test]
fn a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() {
    let mut old = fixed();
    assert_eq!(old.take(0, 20 * MIB), (0, 0));
    old.give(0);
    assert_eq!(old.take(1, 19 * MIB), (0, 0));
    assert_eq!(old.take(2, 2 * MIB), (1, 0), "the remaining mebibyte belongs to the first block");
    old.give(1);
    assert_eq!(old.take(3, 18 * MIB + 512 * KIB), (0, 0));
    assert_eq!(old.take(4, MIB + 512 * KIB), (0, 18 * MIB + 512 * KIB));
}

#[test]
fn best_fit_takes_the_lowest_address_among_equal_sizes() {
    let mut old = fixed();
    for id in 0..4 {
        old.take(id, 256 * KIB);
    }
    old.take(4, 128 * KIB);
    old.take(5, 896 * KIB);
    for id in [0, 2, 4] {
        old.give(id);
    }
    assert_eq!(old.take(6, 100 * KIB), (0, 1024 * KIB));
    assert_eq!(old.take(7, 100 * KIB), (0, 0));
}

#[test]
fn neighbors_merge_and_an_unused_segment_is_released() {
    let mut old = fixed();
    for id in 0..3 {
        old.take(id, 512 * KIB);
    }
    old.give(0);
    old.give(2);
    old.trim();
    assert_eq!(old.segment_count(), 1);
    old.give(1);
    assert_eq!(old.reserved_bytes(), 2 * MIB);
    old.trim();
    assert_eq!((old.segment_count(), old.reserved_bytes(), old.reserved_bytes_peak()), (0, 0, 2 * MIB));
    assert_eq!(old.take(3, 512), (1, 0), "birth ordinals are unique");
}

#[test]
fn neighboring_segments_do_not_merge() {
    let mut old = fixed();
    for id in 0..2 {
        old.take(id, 20 * MIB);
    }
    old.give(0);
    old.give(1);
    assert_eq!(old.take(2, 40 * MIB), (2, 0));
}

#[test]
fn streams_and_pools_share_nothing() {
    let mut old = fixed();
    old.take_on(0, S0, 512);
    old.give(0);
    assert_eq!(old.take_on(1, S1, 512), (1, 0));
    let pool = PoolId(1);
    let config = Box::new(PoolConfig::builder().build().unwrap());
    old.step(&Op::CreatePool { pool, config }).unwrap();
    let op = Op::Allocate { id: AllocationId(2), pool, stream: S0, size_bytes: 512 };
    assert_eq!(old.step(&op).unwrap().unwrap().segment, SegmentId(2));
    old.give(2);
    old.step(&Op::DestroyPool { pool }).unwrap();
    assert_eq!(old.segment_count(), 2);
}

#[test]
fn a_block_used_by_another_stream_is_free_once_a_poll_finds_its_event_complete() {
    let mut old = AddressOrder::on(calm(Delays::UntilSynchronized), ModelSegments::Fixed);
    assert_eq!(old.take(0, MIB), (0, 0));
    old.record_use(0, S0);
    old.record_use(0, S1);
    old.record_use(0, StreamId(2));
    old.give(0);
    assert_eq!(old.take(1, MIB), (0, MIB));
    old.step(&Op::Synchronize { stream: S1 }).unwrap();
    assert_eq!(old.take(2, MIB), (1, 0), "only one of two events is done");
    old.step(&Op::Synchronize { stream: StreamId(2) }).unwrap();
    assert_eq!(old.take(3, MIB), (0, 0));
}

#[test]
fn a_trim_waits_for_the_events() {
    let mut old = AddressOrder::on(calm(Delays::UntilSynchronized), ModelSegments::Fixed);
    old.take(0, MIB);
    old.record_use(0, S1);
    old.give(0);
    old.step(&Op::Trim { pool: Some(PoolId(1)) }).unwrap();
    assert_eq!(old.segment_count(), 1);
    old.step(&Op::Trim { pool: Some(PoolId::DEFAULT) }).unwrap();
    assert_eq!(old.segment_count(), 0);
    assert!(old.device.leaks().is_empty(), "{}", old.device.leaks());
}

#[test]
fn an_expandable_segment_grows_by_pages_at_its_end() {
    let mut old = expandable();
    assert_eq!(old.take(0, 30 * MIB), (0, 0));
    assert_eq!(old.reserved_bytes(), 40 * MIB);
    assert_eq!(old.take(1, 25 * MIB), (0, 30 * MIB));
    assert_eq!(old.reserved_bytes(), 60 * MIB);
    assert_eq!(old.take(2, 512), (1, 0), "small requests have a separate range");
    assert_eq!(old.reserved_bytes(), 62 * MIB);
    assert_eq!(old.take_on(3, S1, 512), (2, 0));
}

#[test]
fn an_expandable_segment_releases_whole_pages_and_fills_its_holes() {
    let mut old = expandable();
    for id in 0..4 {
        old.take(id, 20 * MIB);
    }
    old.take(4, 30 * MIB);
    old.give(1);
    old.give(2);
    old.trim();
    assert_eq!(old.reserved_bytes(), 80 * MIB);
    assert_eq!(old.take(5, 10 * MIB), (0, 110 * MIB), "mapped memory is preferred");
    assert_eq!(old.take(6, 30 * MIB), (0, 20 * MIB));
    assert_eq!(old.reserved_bytes(), 120 * MIB);
    for id in [0, 3, 4, 5, 6] {
        old.give(id);
    }
    old.trim();
    assert_eq!((old.reserved_bytes(), old.segment_count()), (0, 0));
    assert!(old.device.leaks().is_empty(), "{}", old.device.leaks());
}

#[test]
fn a_page_with_a_live_block_stays_mapped_and_the_rest_of_it_stays_free() {
    let mut old = expandable();
    old.take(0, 30 * MIB);
    old.take(1, 2 * MIB);
    old.take(2, 48 * MIB);
    old.give(0);
    old.give(2);
    old.trim();
    assert_eq!(old.reserved_bytes(), 20 * MIB);
    assert_eq!(old.take(3, 8 * MIB), (0, 20 * MIB), "the block that cannot grow is preferred");
    assert_eq!(old.take(4, 8 * MIB), (0, 32 * MIB));
    assert_eq!(old.reserved_bytes(), 20 * MIB);
}

#[test]
fn a_block_that_can_grow_is_used_last() {
    let mut old = expandable();
    old.take(0, 6 * MIB);
    old.take(1, 4 * MIB);
    old.take(2, 6 * MIB);
    old.give(0);
    // Free: 6 MiB at the start, and 4 MiB at the end that can grow.
    assert_eq!(old.take(3, 3 * MIB), (0, 0));
}

#[test]
fn oversized_requests_are_refused_and_empty_ones_have_no_placement() {
    for mut old in [fixed(), expandable()] {
        for size_bytes in [1 << 50, u64::MAX] {
            let op = Op::Allocate { id: AllocationId(0), pool: PoolId::DEFAULT, stream: S0, size_bytes };
            assert_eq!(old.step(&op).unwrap_err().reason, Reason::OutOfMemory);
        }
        let op = Op::Allocate { id: AllocationId(0), pool: PoolId::DEFAULT, stream: S0, size_bytes: 0 };
        assert_eq!(old.step(&op), Ok(None));
        old.give(0);
        old.give(77);
    }
}

#[test]
fn requested_bytes_are_counted_unrounded() {
    let mut old = fixed();
    old.take(0, 100);
    old.take(1, 1000);
    old.give(0);
    assert_eq!((old.requested_bytes(), old.requested_bytes_peak()), (1000, 1100));
}

/// The case that breaks symmetric windows: eight tensors in eight segments, freed and reallocated.
#[test]
fn ranks_place_alike_only_in_the_first_round() {
    let run = |rank| {
        let mut old = AddressOrder::new(7, ModelSegments::Fixed, rank);
        let first: Vec<_> = (0..8).map(|id| old.take(id, 12 * MIB)).collect();
        (0..8).for_each(|id| old.give(id));
        let second: Vec<_> = (8..16).map(|id| old.take(id, 12 * MIB)).collect();
        (first, second)
    };
    let (first, second) = run(0);
    let others: Vec<_> = (1..8).map(run).collect();
    assert!(others.iter().all(|(other, _)| *other == first));
    assert!(others.iter().all(|(_, other)| *other != second));
    assert_eq!(run(0), (first, second));
}

#[test]
fn ranks_poll_their_events_at_different_times() {
    let run = |rank| {
        let mut old = AddressOrder::new(7, ModelSegments::Expandable, rank);
        (0..200)
            .map(|id| {
                let place = old.take(id, MIB);
                old.record_use(id, S1);
                old.give(id);
                place
            })
            .collect::<Vec<_>>()
    };
    let distinct: BTreeSet<_> = (0..8).map(run).collect();
    assert!(distinct.len() >= 6, "{}", distinct.len());
}
