//! A conformance suite for implementations of symmalloc's [`Backend`]: checks for every promise of its contract.
//!
//! Call [`check`] in a test of your backend. It knows nothing about the implementation and submits no device work, so it runs on a simulated
//! device, on a stub of a driver and on a real device. The name of each check is a sentence. Each check gets a separate backend. A failed
//! check panics, and its sentence is the last line printed before.
//!
//! ```
//! use symmalloc_conformance::check;
//! use symmalloc_sim::SimBackend;
//!
//! let lacking = check(|| SimBackend::builder().build());
//! assert_eq!(lacking, []); // a simulated device has every capability
//! ```
//!
//! The suite cannot check that kernels can read and write mapped bytes, or that a *caller* keeps its promises. Test the former on the
//! device. For the latter, the simulator (the crate `symmalloc-sim`) panics.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use symmalloc_core::backend::{Backend, BackendError, Bytes, Compared, DeviceAddress, Event, Part, Range, Reason};
use symmalloc_core::base::{Base, BaseError, SLOT_BYTES};
use symmalloc_core::{PoolId, StreamId};

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);
const S2: StreamId = StreamId(2);

/// A part of the contract that a backend may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// [`Backend::alias`]: pools can stitch.
    Alias,
    /// [`Backend::save`] and [`Backend::load`]: pools can sleep and keep their contents.
    Save,
    /// [`Backend::zero`]: pools can sleep, and be zero when they wake.
    Zero,
    /// [`Backend::reserve_at`]: pools can have a base.
    Base,
}

/// Runs each check on a new backend, printing the sentence first.
macro_rules! run {
    ($make:expr, $($check:ident),+ $(,)?) => {
        $(
            println!("a backend keeps its contract: {}", stringify!($check).replace('_', " "));
            $check(&$make());
        )+
    };
}

/// Checks the contract on backends created by `make`, and returns the capabilities that they lack, whose checks it skips.
///
/// A backend lacks [`Capability::Alias`] if [`Backend::can_alias`] returns `false`, [`Capability::Base`] if [`Backend::reserve_at`] returns
/// [`BaseError::Unsupported`], and one of the others if the call returns
/// [`Reason::Refused`], as its default implementation does. Assert that the result is what you expect: otherwise a defect that makes a call
/// fail would skip its checks. Needs a few dozen granules of device memory.
///
/// # Panics
/// Panics if the implementation violates its contract.
pub fn check<B: Backend + Send + Sync>(make: impl Fn() -> B) -> Vec<Capability> {
    run!(
        make,
        the_granularity_is_a_power_of_two_of_at_least_512_bytes_and_stays,
        ranges_are_aligned_and_as_long_as_asked,
        ranges_do_not_overlap,
        a_large_range_costs_no_memory,
        memory_is_mapped_at_the_end_and_into_holes,
        one_unmap_covers_several_maps,
        one_unmap_cuts_a_map_in_the_middle,
        unmapped_granules_can_be_mapped_again,
        a_range_that_was_never_mapped_can_be_released,
        a_range_that_was_unmapped_can_be_released,
        neighboring_ranges_are_mapped_and_unmapped_independently,
        a_piece_is_mapped_at_several_addresses_if_the_backend_can,
        live_events_are_told_apart,
        one_event_is_waited_for_any_number_of_times,
        a_stream_may_wait_for_its_own_event,
        an_event_outlives_a_wait_and_is_recycled_while_a_stream_waits,
        events_are_recycled_in_any_order,
        an_event_that_is_done_stays_done,
        synchronize_completes_the_events_of_its_stream,
        synchronize_completes_what_the_stream_waited_for,
        an_idle_or_unused_stream_can_be_synchronized,
        ten_thousand_events_come_and_go,
        calls_come_from_any_thread,
        filled_bytes_hold_the_pattern_if_the_backend_can_compare,
    );
    let lacking = lacking(&make());
    if !lacking.contains(&Capability::Alias) {
        run!(make, an_alias_is_unmapped_and_its_addresses_are_used_again);
    }
    if !lacking.contains(&Capability::Save) {
        run!(make, what_is_saved_outlives_its_memory, some_of_what_was_saved_can_be_copied_back);
    }
    if !lacking.contains(&Capability::Zero) {
        run!(make, parts_can_be_made_zero);
    }
    if !lacking.contains(&Capability::Base) {
        run!(make, a_space_begins_at_its_base_and_its_parts_are_ranges);
    }
    lacking
}

/// Tries each capability, and returns those that the backend refuses.
fn lacking(backend: &impl Backend) -> Vec<Capability> {
    let (range, parts) = two_parts(backend);
    let saved = backend.save(PoolId::DEFAULT, &parts);
    let answers = [
        (Capability::Alias, backend.can_alias()),
        (Capability::Save, is_served(&saved)),
        (Capability::Zero, is_served(&backend.zero(&parts))),
        (Capability::Base, has_bases(backend)),
    ];
    if let Ok(image) = saved {
        backend.discard(image);
    }
    give_back(backend, range);
    answers.into_iter().filter(|(_, has)| !has).map(|(capability, _)| capability).collect()
}

/// Returns the base at which the checks reserve a space.
fn base() -> Base {
    Base::slot(11).expect("it exists")
}

fn has_bases(backend: &impl Backend) -> bool {
    match backend.reserve_at(base(), PoolId::DEFAULT) {
        Ok(space) => {
            backend.release_space(space).expect("release a space");
            true
        }
        Err(error) => error != BaseError::Unsupported,
    }
}

/// Returns `true` unless the call was refused. Another error is a failure of the call, which its checks report.
fn is_served<T>(answer: &Result<T, BackendError>) -> bool {
    !matches!(answer, Err(BackendError { reason: Reason::Refused, .. }))
}

fn reserve(backend: &impl Backend, granules: u64) -> Range {
    backend.reserve(granules * backend.granularity_bytes()).expect("the backend should reserve addresses")
}

fn map(backend: &impl Backend, range: Range, granules: std::ops::Range<u64>) {
    let granularity = backend.granularity_bytes();
    let size = (granules.end - granules.start) * granularity;
    backend
        .map(range, granules.start * granularity, size)
        .expect("the backend should map memory into a reserved range");
}

fn unmap(backend: &impl Backend, range: Range, granules: std::ops::Range<u64>) {
    let granularity = backend.granularity_bytes();
    let size = (granules.end - granules.start) * granularity;
    backend.unmap(range, granules.start * granularity, size).expect("the backend should unmap mapped memory");
}

fn record(backend: &impl Backend, stream: StreamId) -> Event {
    backend.record(stream).expect("the backend should record an event")
}

fn is_done(backend: &impl Backend, event: Event) -> bool {
    backend.query(event).expect("the backend should answer a query of an event")
}

/// Releases a range that has no memory.
fn release(backend: &impl Backend, range: Range) {
    backend.release(range).expect("the backend should release a range without memory");
}

/// Makes a stream wait for an event.
fn wait(backend: &impl Backend, stream: StreamId, event: Event) {
    backend.wait(stream, event).expect("the backend should make a stream wait for an event");
}

/// Blocks until the work of a stream is done.
fn synchronize(backend: &impl Backend, stream: StreamId) {
    backend.synchronize(stream).expect("the backend should wait for a stream");
}

fn the_granularity_is_a_power_of_two_of_at_least_512_bytes_and_stays(backend: &impl Backend) {
    let granularity = backend.granularity_bytes();
    assert!(granularity.is_power_of_two() && granularity >= 512, "{granularity}");
    let range = reserve(backend, 1);
    map(backend, range, 0..1);
    assert_eq!(backend.granularity_bytes(), granularity);
    unmap(backend, range, 0..1);
    release(backend, range);
}

fn ranges_are_aligned_and_as_long_as_asked(backend: &impl Backend) {
    for granules in [1, 2, 3, 10, 17] {
        let range = reserve(backend, granules);
        assert!(range.base.0.is_multiple_of(backend.granularity_bytes()), "{range:?}");
        assert_ne!(range.base.0, 0);
        assert_eq!(range.size_bytes, granules * backend.granularity_bytes());
        release(backend, range);
    }
}

fn ranges_do_not_overlap(backend: &impl Backend) {
    let mut ranges: Vec<Range> = (0..40).map(|i| reserve(backend, 1 + i % 5)).collect();
    for index in [33, 20, 12, 3] {
        release(backend, ranges.swap_remove(index));
    }
    ranges.extend((0..20).map(|i| reserve(backend, 1 + i % 3)));
    ranges.sort_by_key(|range| range.base);
    for pair in ranges.windows(2) {
        assert!(pair[0].base.0 + pair[0].size_bytes <= pair[1].base.0, "{pair:?}");
    }
    for range in ranges {
        release(backend, range);
    }
}

fn a_space_begins_at_its_base_and_its_parts_are_ranges(backend: &impl Backend) {
    let granularity = backend.granularity_bytes();
    for round in 0..2 {
        let space = backend.reserve_at(base(), PoolId(7)).expect("the addresses are free");
        assert_eq!(space, Range { base: DeviceAddress(base().address()), size_bytes: SLOT_BYTES }, "round {round}");
        let again = backend.reserve_at(base(), PoolId(8)).map(drop);
        assert!(matches!(again, Err(BaseError::Occupied { .. })), "{again:?}");
        let part = |first: u64, granules: u64| Range {
            base: DeviceAddress(space.base.0 + first * granularity),
            size_bytes: granules * granularity,
        };
        let parts = [part(4, 2), part(0, 4), part(SLOT_BYTES / granularity - 1, 1)];
        for range in parts {
            backend.carve(space, range).expect("carve");
            map(backend, range, 0..1);
        }
        let other = reserve(backend, 3);
        assert!(
            other.base.0 + other.size_bytes <= space.base.0 || other.base.0 >= space.base.0 + SLOT_BYTES,
            "{other:?}"
        );
        backend.release(other).expect("release");
        unmap(backend, parts[1], 0..1);
        backend.release(parts[1]).expect("release");
        backend.carve(space, part(1, 3)).expect("the addresses of a released part are used again");
        map(backend, part(1, 3), 1..3);
        unmap(backend, part(1, 3), 1..3);
        backend.release(part(1, 3)).expect("release");
        for range in [parts[0], parts[2]] {
            unmap(backend, range, 0..1);
            backend.release(range).expect("release");
        }
        backend.release_space(space).expect("release a space");
    }
}

fn a_large_range_costs_no_memory(backend: &impl Backend) {
    // 1 TiB: more than any device has.
    let range = backend.reserve(1 << 40).expect("the backend should reserve addresses");
    map(backend, range, 0..1);
    unmap(backend, range, 0..1);
    release(backend, range);
}

fn memory_is_mapped_at_the_end_and_into_holes(backend: &impl Backend) {
    let range = reserve(backend, 8);
    map(backend, range, 0..2);
    map(backend, range, 2..3);
    map(backend, range, 6..8);
    map(backend, range, 3..6);
    unmap(backend, range, 0..8);
    release(backend, range);
}

fn one_unmap_covers_several_maps(backend: &impl Backend) {
    let range = reserve(backend, 4);
    for granule in 0..4 {
        map(backend, range, granule..granule + 1);
    }
    unmap(backend, range, 0..4);
    release(backend, range);
}

fn one_unmap_cuts_a_map_in_the_middle(backend: &impl Backend) {
    let range = reserve(backend, 6);
    map(backend, range, 0..6);
    unmap(backend, range, 2..4);
    unmap(backend, range, 0..1);
    unmap(backend, range, 5..6);
    unmap(backend, range, 4..5);
    unmap(backend, range, 1..2);
    release(backend, range);
}

fn unmapped_granules_can_be_mapped_again(backend: &impl Backend) {
    let range = reserve(backend, 4);
    map(backend, range, 0..4);
    for _ in 0..5 {
        unmap(backend, range, 1..3);
        map(backend, range, 1..2);
        map(backend, range, 2..3);
    }
    unmap(backend, range, 0..4);
    release(backend, range);
}

fn a_range_that_was_never_mapped_can_be_released(backend: &impl Backend) {
    for _ in 0..100 {
        release(backend, reserve(backend, 3));
    }
}

fn a_range_that_was_unmapped_can_be_released(backend: &impl Backend) {
    for _ in 0..20 {
        let range = reserve(backend, 2);
        map(backend, range, 0..2);
        unmap(backend, range, 0..2);
        release(backend, range);
    }
}

fn neighboring_ranges_are_mapped_and_unmapped_independently(backend: &impl Backend) {
    let ranges: Vec<Range> = (0..10).map(|_| reserve(backend, 2)).collect();
    for &range in &ranges {
        map(backend, range, 0..2);
    }
    for &range in ranges.iter().step_by(2) {
        unmap(backend, range, 0..2);
        release(backend, range);
    }
    for &range in ranges.iter().skip(1).step_by(2) {
        unmap(backend, range, 1..2);
        map(backend, range, 1..2);
        unmap(backend, range, 0..2);
        release(backend, range);
    }
}

fn a_piece_is_mapped_at_several_addresses_if_the_backend_can(backend: &impl Backend) {
    let granularity = backend.granularity_bytes();
    let (home, first, second) = (reserve(backend, 16), reserve(backend, 4), reserve(backend, 4));
    backend.map_pieces((home, 0), 8 * granularity, 2 * granularity).expect("the backend should map memory in pieces");
    if !backend.can_alias() {
        backend.alias((first, 0), (home, 0), 2 * granularity).expect_err("it cannot");
        unmap(backend, home, 0..8);
        return [home, first, second].into_iter().for_each(|range| release(backend, range));
    }
    // The last piece may be smaller, or the only one.
    let small = reserve(backend, 4);
    backend.map_pieces((small, 0), granularity, 2 * granularity).expect("the backend should map a part of a piece");
    backend
        .map_pieces((small, granularity), 3 * granularity, 2 * granularity)
        .expect("the backend should map a smaller last piece");
    unmap(backend, small, 0..1);
    unmap(backend, small, 1..4);
    release(backend, small);
    // In a different order, twice, and with one of them in two ranges.
    for (range, to, from) in [(first, 0, 6), (first, 2, 2), (second, 2, 6), (second, 0, 0)] {
        let alias = backend.alias((range, to * granularity), (home, from * granularity), 2 * granularity);
        alias.expect("the backend should map memory a second time");
    }
    unmap(backend, first, 0..4);
    unmap(backend, second, 2..4);
    unmap(backend, second, 0..2);
    unmap(backend, home, 0..8);
    [home, first, second].into_iter().for_each(|range| release(backend, range));
}

fn an_alias_is_unmapped_and_its_addresses_are_used_again(backend: &impl Backend) {
    let granularity = backend.granularity_bytes();
    let (home, range) = (reserve(backend, 4), reserve(backend, 2));
    backend.map_pieces((home, 0), 4 * granularity, granularity).expect("the backend should map memory in pieces");
    for from in 0..4 {
        backend
            .alias((range, granularity), (home, from * granularity), granularity)
            .expect("the backend should map memory a second time");
        unmap(backend, range, 1..2);
    }
    // The addresses of a former alias can be mapped to separate memory, which is unmapped before the memory of the
    // alias.
    backend.map_pieces((range, 0), 2 * granularity, granularity).expect("the backend should map memory in pieces");
    unmap(backend, range, 0..2);
    unmap(backend, home, 0..4);
    [home, range].into_iter().for_each(|range| release(backend, range));
}

fn live_events_are_told_apart(backend: &impl Backend) {
    let events: Vec<Event> = (0..64).map(|i| record(backend, StreamId(i % 3))).collect();
    assert_eq!(events.iter().map(|event| event.0).collect::<BTreeSet<_>>().len(), events.len());
    for event in events {
        backend.recycle(event);
    }
}

fn one_event_is_waited_for_any_number_of_times(backend: &impl Backend) {
    let event = record(backend, S0);
    for stream in [S1, S2, S1, S1, S2] {
        wait(backend, stream, event);
    }
    backend.recycle(event);
    synchronize(backend, S1);
}

fn a_stream_may_wait_for_its_own_event(backend: &impl Backend) {
    let event = record(backend, S0);
    wait(backend, S0, event);
    synchronize(backend, S0);
    assert!(is_done(backend, event));
    backend.recycle(event);
}

fn an_event_outlives_a_wait_and_is_recycled_while_a_stream_waits(backend: &impl Backend) {
    let first = record(backend, S0);
    wait(backend, S1, first);
    let second = record(backend, S1);
    backend.recycle(first);
    // If the implementation reuses the first event, the wait for it must not be lost or reversed.
    let third = record(backend, S2);
    wait(backend, S0, third);
    backend.recycle(third);
    for stream in [S0, S1, S2] {
        synchronize(backend, stream);
    }
    assert!(is_done(backend, second));
    backend.recycle(second);
}

fn events_are_recycled_in_any_order(backend: &impl Backend) {
    let mut events: Vec<Event> = (0..16).map(|_| record(backend, S0)).collect();
    for index in [15, 0, 7, 3, 3] {
        backend.recycle(events.swap_remove(index));
    }
    synchronize(backend, S0);
    for event in events {
        assert!(is_done(backend, event));
        backend.recycle(event);
    }
}

fn an_event_that_is_done_stays_done(backend: &impl Backend) {
    let event = record(backend, S0);
    synchronize(backend, S0);
    assert!(is_done(backend, event));
    for _ in 0..10 {
        let later = record(backend, S0);
        assert!(is_done(backend, event));
        backend.recycle(later);
    }
    backend.recycle(event);
}

fn synchronize_completes_the_events_of_its_stream(backend: &impl Backend) {
    let events: Vec<Event> = (0..20).map(|_| record(backend, S1)).collect();
    synchronize(backend, S1);
    for event in events {
        assert!(is_done(backend, event));
        backend.recycle(event);
    }
}

fn synchronize_completes_what_the_stream_waited_for(backend: &impl Backend) {
    let first = record(backend, S0);
    wait(backend, S1, first);
    let second = record(backend, S1);
    wait(backend, S2, second);
    synchronize(backend, S2);
    for event in [first, second] {
        assert!(is_done(backend, event));
        backend.recycle(event);
    }
}

fn an_idle_or_unused_stream_can_be_synchronized(backend: &impl Backend) {
    synchronize(backend, S2);
    synchronize(backend, S2);
    let event = record(backend, S2);
    synchronize(backend, S2);
    synchronize(backend, S2);
    backend.recycle(event);
}

fn ten_thousand_events_come_and_go(backend: &impl Backend) {
    for i in 0..10_000u16 {
        let event = record(backend, StreamId(i % 3));
        if i % 7 == 0 {
            wait(backend, StreamId((i + 1) % 3), event);
        }
        backend.recycle(event);
    }
    for stream in [S0, S1, S2] {
        synchronize(backend, stream);
    }
}

fn calls_come_from_any_thread(backend: &(impl Backend + Sync)) {
    std::thread::scope(|scope| {
        for thread in 0..4u16 {
            scope.spawn(move || {
                let (own, next) = (StreamId(thread), StreamId((thread + 1) % 4));
                for _ in 0..20 {
                    let range = reserve(backend, 2);
                    map(backend, range, 0..2);
                    let event = record(backend, own);
                    wait(backend, next, event);
                    synchronize(backend, own);
                    assert!(is_done(backend, event));
                    backend.recycle(event);
                    unmap(backend, range, 0..2);
                    release(backend, range);
                }
            });
        }
    });
}

/// Returns a range of four granules, of which the first and the third are mapped, and these two parts.
fn two_parts(backend: &impl Backend) -> (Range, [Part; 2]) {
    let granule = backend.granularity_bytes();
    let range = reserve(backend, 4);
    map(backend, range, 0..1);
    map(backend, range, 2..3);
    let part = |at: u64| Part {
        address: DeviceAddress(range.base.0 + 2 * at * granule),
        size_bytes: granule,
        image_offset_bytes: at * granule,
    };
    (range, [part(0), part(1)])
}

fn give_back(backend: &impl Backend, range: Range) {
    unmap(backend, range, 0..1);
    unmap(backend, range, 2..3);
    release(backend, range);
}

fn what_is_saved_outlives_its_memory(backend: &impl Backend) {
    let (range, parts) = two_parts(backend);
    let (first, second) = (
        backend.save(PoolId::DEFAULT, &parts).expect("the backend should save contents"),
        backend.save(PoolId::DEFAULT, &parts[..1]).expect("the backend should save contents"),
    );
    assert_ne!(first, second);
    unmap(backend, range, 0..1);
    unmap(backend, range, 2..3);
    map(backend, range, 0..1);
    map(backend, range, 2..3);
    for _ in 0..2 {
        backend.load(first, &parts).expect("the backend should load saved contents");
    }
    backend.discard(first);
    backend.load(second, &parts[..1]).expect("the backend should load saved contents");
    backend.discard(second);
    give_back(backend, range);
}

fn some_of_what_was_saved_can_be_copied_back(backend: &impl Backend) {
    let (range, parts) = two_parts(backend);
    let image = backend.save(PoolId::DEFAULT, &parts).expect("the backend should save contents");
    backend.load(image, &parts[1..]).expect("the backend should load saved contents");
    let half = Part { size_bytes: parts[0].size_bytes / 2 / 512 * 512, ..parts[0] };
    if half.size_bytes > 0 {
        backend.load(image, &[half, parts[1]]).expect("the backend should load saved contents");
    }
    backend.load(image, &[]).expect("the backend should load saved contents");
    backend.discard(image);
    give_back(backend, range);
}

/// Bytes that are not aligned, next to others with a different pattern.
fn filled_bytes_hold_the_pattern_if_the_backend_can_compare(backend: &impl Backend) {
    let range = reserve(backend, 1);
    map(backend, range, 0..1);
    let whole = Bytes { address: range.base, size_bytes: 512 };
    let part = Bytes { address: DeviceAddress(range.base.0 + 3), size_bytes: 262 };
    let (pattern, other) = (0x0403_0201, 0x1413_1211);
    backend.fill(S0, whole, other).expect("fill");
    backend.fill(S0, part, pattern).expect("fill");
    let equal = Compared::Equal;
    let first_differs = Compared::Different { offset_bytes: 0 };
    let later_differs = Compared::Different { offset_bytes: 3 };
    for (bytes, pattern, expected) in
        [(part, pattern, equal), (part, other, first_differs), (whole, other, later_differs)]
    {
        let Some(comparison) = backend.compare(S0, bytes, pattern).expect("compare") else { continue };
        backend.synchronize(S0).expect("synchronize");
        assert_eq!(backend.compared(comparison).expect("compared"), expected);
    }
    backend.synchronize(S0).expect("synchronize");
    unmap(backend, range, 0..1);
    backend.release(range).expect("release");
}

fn parts_can_be_made_zero(backend: &impl Backend) {
    let (range, parts) = two_parts(backend);
    backend.zero(&parts).expect("the backend should zero memory");
    give_back(backend, range);
}
