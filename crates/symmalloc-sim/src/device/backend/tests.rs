//! Tests of the simulated device through its public interface.

use super::*;
use crate::device::Delays;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symmalloc_core::backend::Reason;
use symmalloc_core::units::{GIB, MIB};

const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);
const GRANULE: u64 = 2 * MIB;

fn device() -> SimBackend {
    SimBackend::builder().seed(7).build()
}

fn mapped(device: &SimBackend) -> Range {
    let range = device.reserve(4 * GRANULE).unwrap();
    device.map(range, 0, 4 * GRANULE).unwrap();
    range
}

/// Runs an action that must violate `rule`: the message must name the rule, and the state must be unchanged.
#[track_caller]
fn violates(device: &SimBackend, rule: &str, act: impl FnOnce(&SimBackend)) {
    let before = (device.leaks(), device.calls());
    let payload = catch_unwind(AssertUnwindSafe(|| act(device))).expect_err("no violation was detected");
    let message = payload.downcast_ref::<String>().expect("a message");
    assert!(message.contains(rule), "{message}");
    assert_eq!((device.leaks(), device.calls()), before);
}

#[test]
fn is_send_and_sync_and_small() {
    fn shared<T: Send + Sync>() {}
    shared::<SimBackend>();
    let bytes = size_of::<SimBackend>();
    assert!(bytes <= SimBackend::FRESH_BYTES_MAX, "{bytes}");
}

#[test]
fn thousands_of_ranks_coexist() {
    let ranks: Vec<SimBackend> = (0..4096).map(|rank| SimBackend::builder().rank(rank).build()).collect();
    let bases: BTreeSet<u64> = ranks.iter().map(|device| device.reserve(512 * GIB).unwrap().base.0).collect();
    assert!(bases.len() > 4000, "{}", bases.len());
}

#[test]
fn mapping_twice_is_a_violation() {
    let device = device();
    let range = mapped(&device);
    violates(&device, MAPPED_ONCE, |d| drop(d.map(range, 3 * GRANULE, GRANULE)));
}

#[test]
fn unmapping_partially_mapped_bytes_is_a_violation() {
    let device = device();
    let range = mapped(&device);
    device.unmap(range, GRANULE, GRANULE).unwrap();
    violates(&device, MAPPED, |d| drop(d.unmap(range, 0, 2 * GRANULE)));
}

#[test]
fn releasing_a_mapped_range_is_a_violation() {
    let device = device();
    let range = mapped(&device);
    device.unmap(range, 0, 3 * GRANULE).unwrap();
    violates(&device, UNMAPPED_FIRST, |d| drop(d.release(range)));
}

#[test]
fn using_an_unknown_or_released_range_is_a_violation() {
    let device = device();
    let range = device.reserve(GRANULE).unwrap();
    let cut = Range { base: range.base, size_bytes: 2 * GRANULE };
    violates(&device, RESERVED, |d| drop(d.map(cut, 0, GRANULE)));
    device.release(range).unwrap();
    violates(&device, RESERVED, |d| drop(d.map(range, 0, GRANULE)));
    violates(&device, RESERVED, |d| drop(d.release(range)));
}

#[test]
fn unaligned_and_empty_sizes_are_violations() {
    let device = device();
    let range = device.reserve(4 * GRANULE).unwrap();
    violates(&device, ALIGNED, |d| drop(d.reserve(GRANULE + 512)));
    violates(&device, ALIGNED, |d| drop(d.reserve(0)));
    violates(&device, ALIGNED, |d| drop(d.map(range, 512, GRANULE)));
    violates(&device, ALIGNED, |d| drop(d.map(range, 0, 512)));
    violates(&device, ALIGNED, |d| drop(d.map(range, 0, 0)));
}

#[test]
fn mapping_beyond_the_range_is_a_violation() {
    let device = device();
    let range = device.reserve(4 * GRANULE).unwrap();
    violates(&device, INSIDE, |d| drop(d.map(range, 3 * GRANULE, 2 * GRANULE)));
    violates(&device, INSIDE, |d| drop(d.map(range, 1 << 62, GRANULE)));
}

#[test]
fn an_event_is_invalid_after_recycling() {
    let device = device();
    let event = device.record(S0).unwrap();
    device.recycle(event);
    violates(&device, LIVE_EVENT, |d| drop(d.wait(S1, event)));
    violates(&device, LIVE_EVENT, |d| drop(d.query(event)));
    violates(&device, LIVE_EVENT, |d| d.recycle(event));
    violates(&device, LIVE_EVENT, |d| drop(d.query(Event(1))));
}

#[test]
fn unmapping_before_synchronizing_is_a_violation_even_if_the_work_happens_to_be_done() {
    let device = SimBackend::builder().delays(Delays::Immediate).build();
    let range = mapped(&device);
    device.submit(S1, DeviceAddress(range.base.0 + GRANULE), 512).unwrap();
    device.unmap(range, 0, GRANULE).unwrap();
    violates(&device, SYNCHRONIZED_FIRST, |d| drop(d.unmap(range, GRANULE, GRANULE)));
    device.synchronize(S0).unwrap();
    violates(&device, SYNCHRONIZED_FIRST, |d| drop(d.unmap(range, GRANULE, GRANULE)));
    device.synchronize(S1).unwrap();
    device.unmap(range, GRANULE, 3 * GRANULE).unwrap();
}

#[test]
fn using_unmapped_memory_is_a_violation() {
    let device = device();
    let range = mapped(&device);
    let end = DeviceAddress(range.base.0 + 4 * GRANULE - 512);
    device.submit(S0, end, 512).unwrap();
    violates(&device, MAPPED, |d| assert!(d.submit(S0, end, 513).is_ok()));
    device.submit(S1, DeviceAddress(0), 0).unwrap();
}

#[test]
fn a_violation_during_unwinding_is_an_error_and_does_not_hide_the_first_panic() {
    struct Careless<'a>(&'a SimBackend, Range);
    impl Drop for Careless<'_> {
        fn drop(&mut self) {
            assert_eq!(self.0.release(self.1).unwrap_err().reason, Reason::Refused);
        }
    }
    let device = device();
    let range = mapped(&device);
    let payload = catch_unwind(AssertUnwindSafe(|| {
        let _careless = Careless(&device, range);
        panic!("the first");
    }));
    assert_eq!(payload.unwrap_err().downcast_ref::<&str>(), Some(&"the first"));
    assert_eq!(device.leaks().ranges, 1);
}

#[test]
fn memory_is_limited_and_its_peak_is_reported() {
    let device = SimBackend::builder().memory_bytes(5 * GRANULE).build();
    let range = device.reserve(GIB).unwrap();
    device.map(range, 0, 4 * GRANULE).unwrap();
    let error = device.map(range, 4 * GRANULE, 2 * GRANULE).unwrap_err();
    assert_eq!((error.call, error.reason), ("map", Reason::OutOfMemory));
    assert_eq!((device.free_bytes(), device.mapped_bytes()), (GRANULE, 4 * GRANULE));
    device.unmap(range, GRANULE, 2 * GRANULE).unwrap();
    device.map(range, 8 * GRANULE, 3 * GRANULE).unwrap();
    assert_eq!((device.free_bytes(), device.mapped_bytes_peak()), (0, 5 * GRANULE));
}

#[test]
fn a_failed_call_changes_nothing() {
    let device = device();
    let (range, spare) = (device.reserve(2 * GRANULE).unwrap(), device.reserve(GRANULE).unwrap());
    device.map(range, 0, GRANULE).unwrap();
    let event = device.record(S0).unwrap();
    device.submit(S0, range.base, 512).unwrap();
    let before = device.leaks();
    device.inject(None, FaultRule::Every { calls: 1 }, Fault::Refused);
    assert!(device.reserve(GRANULE).is_err());
    assert!(device.map(range, GRANULE, GRANULE).is_err());
    assert!(device.release(spare).is_err());
    assert!(device.record(S0).is_err());
    assert!(device.query(event).is_err());
    assert!(device.wait(S1, event).is_err());
    assert!(device.synchronize(S0).is_err());
    assert_eq!(device.leaks(), before);
    assert_eq!(device.calls().failed(), 7);
    device.heal();
    assert!(device.submit(S1, range.base, 512).is_err(), "the failed wait and synchronize order nothing");
    violates(&device, SYNCHRONIZED_FIRST, |d| drop(d.unmap(range, 0, GRANULE)));
    device.synchronize(S0).unwrap();
    device.unmap(range, 0, GRANULE).unwrap();
}

#[test]
fn any_single_call_can_fail() {
    let run = |device: &SimBackend| -> Result<(), BackendError> {
        let range = device.reserve(GRANULE)?;
        device.map(range, 0, GRANULE)?;
        let event = device.record(S0)?;
        device.wait(S1, event)?;
        device.query(event)?;
        let bytes = Bytes { address: range.base, size_bytes: 512 };
        device.fill(S0, bytes, 1)?;
        let comparison = device.compare(S0, bytes, 1)?;
        device.synchronize(S0)?;
        comparison.map(|comparison| device.compared(comparison)).transpose()?;
        let parts = [Part { address: range.base, size_bytes: GRANULE, image_offset_bytes: 0 }];
        let image = device.save(PoolId::DEFAULT, &parts)?;
        let filled = device.load(image, &parts).and_then(|()| device.zero(&parts));
        device.discard(image);
        filled?;
        device.unmap(range, 0, GRANULE)?;
        device.release(range)
    };
    let plain = device();
    run(&plain).unwrap();
    let names: Vec<&str> = (0..plain.calls().fallible())
        .map(|k| {
            let device = SimBackend::builder().seed(7).fail_at(k, Fault::OutOfMemory).build();
            let error = run(&device).unwrap_err();
            assert_eq!(error.reason, Reason::OutOfMemory);
            error.call
        })
        .collect();
    assert_eq!(
        names,
        [
            "reserve",
            "map",
            "record",
            "wait",
            "query",
            "fill",
            "compare",
            "synchronize",
            "save",
            "load",
            "zero",
            "unmap",
            "release"
        ]
    );
    assert!(Call::ALL.iter().all(|&call| plain.calls().of(call) == 1));
}

#[test]
fn a_lost_device_refuses_every_call_but_recycles_events() {
    let device = SimBackend::builder().fail_at(2, Fault::DeviceLost).build();
    let range = device.reserve(GRANULE).unwrap();
    let event = device.record(S0).unwrap();
    for _ in 0..3 {
        assert_eq!(device.map(range, 0, GRANULE).unwrap_err().reason, Reason::DeviceLost);
    }
    assert_eq!(device.query(event).unwrap_err().reason, Reason::DeviceLost);
    device.recycle(event);
    assert_eq!(device.leaks(), Leaks { ranges: 1, ..Leaks::default() });
}

#[test]
fn leaks_report_unreleased_resources() {
    let device = device();
    assert!(device.leaks().is_empty());
    let range = mapped(&device);
    let event = device.record(S0).unwrap();
    assert_eq!(device.leaks().to_string(), "8388608 bytes mapped, 1 ranges reserved, 1 events live, 0 images kept");
    device.recycle(event);
    device.unmap(range, 0, 4 * GRANULE).unwrap();
    device.release(range).unwrap();
    assert!(device.leaks().is_empty());
}

#[test]
fn raw_streams_differ_between_streams_and_ranks_and_follow_no_order() {
    let ranks: Vec<SimBackend> = (0..8).map(|rank| SimBackend::builder().rank(rank).build()).collect();
    let raw = |device: &SimBackend| [0, 1, 2, 3].map(|s| device.raw_stream(StreamId(s)));
    let all: BTreeSet<u64> = ranks.iter().flat_map(raw).collect();
    assert_eq!(all.len(), 32);
    let orders: BTreeSet<[usize; 4]> = ranks
        .iter()
        .map(|device| {
            let raw = raw(device);
            let mut order = [0, 1, 2, 3];
            order.sort_by_key(|&s| raw[s]);
            order
        })
        .collect();
    assert!(orders.len() > 3, "{orders:?}");
}

#[test]
fn the_same_seed_and_rank_behave_identically() {
    let run = |seed, rank| {
        let device = SimBackend::builder().seed(seed).rank(rank).build();
        let bases: Vec<u64> = (0..8).map(|_| device.reserve(GRANULE).unwrap().base.0).collect();
        let events: Vec<Event> = (0..8).map(|s| device.record(StreamId(s)).unwrap()).collect();
        let done: Vec<bool> = events.iter().map(|&event| device.query(event).unwrap()).collect();
        (bases, events.iter().map(|event| event.0).collect::<Vec<_>>(), done, device.raw_stream(S1))
    };
    assert_eq!(run(1, 2), run(1, 2));
    assert_ne!(run(1, 2), run(1, 3));
    assert_ne!(run(1, 2), run(2, 2));
}

#[test]
fn delays_on_one_device_range_from_immediate_to_never() {
    let device = device();
    let events: Vec<(StreamId, Event)> =
        (0..100).map(StreamId).map(|stream| (stream, device.record(stream).unwrap())).collect();
    let now = events.iter().filter(|(_, event)| device.query(*event).unwrap()).count();
    device.tick(1 << 40);
    let later = events.iter().filter(|(_, event)| device.query(*event).unwrap()).count();
    assert!(0 < now && now < later && later < 100, "{now} {later}");
    for (stream, event) in events {
        device.synchronize(stream).unwrap();
        assert!(device.query(event).unwrap());
    }
}

#[test]
#[should_panic(expected = "granularity is 3000 bytes")]
fn the_granularity_must_be_a_power_of_two() {
    drop(SimBackend::builder().granularity_bytes(3000).build());
}
