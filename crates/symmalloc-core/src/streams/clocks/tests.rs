//! Unit tests of `streams/clocks.rs`.

use super::*;

fn clocks(streams: u16) -> StreamClocks {
    let mut clocks = StreamClocks::default();
    (0..streams).for_each(|_| clocks.register());
    clocks
}

fn waits(clocks: &mut StreamClocks, stream: u16, on: u16) -> Tick {
    let moment = clocks.moment(StreamId(on));
    clocks.waits_for(StreamId(stream), &moment);
    moment.tick
}

#[test]
fn a_wait_covers_earlier_waits_of_the_other_stream_and_nothing_later() {
    let mut clocks = clocks(3);
    let first = waits(&mut clocks, 1, 0);
    waits(&mut clocks, 2, 1);
    assert!(clocks.covers(StreamId(2), StreamId(0), first));
    assert!(!clocks.covers(StreamId(2), StreamId(0), first + 1));
    let second = waits(&mut clocks, 1, 0);
    assert!(!clocks.covers(StreamId(2), StreamId(0), second));
}

#[test]
fn a_host_wait_covers_earlier_waits_of_the_stream() {
    let mut clocks = clocks(3);
    let tick = waits(&mut clocks, 1, 0);
    let moment = clocks.moment(StreamId(1));
    clocks.synchronized(&moment);
    assert!(clocks.covers(StreamId(2), StreamId(0), tick));
    assert!(!clocks.covers(StreamId(2), StreamId(0), tick + 1));
}

#[test]
fn the_oldest_wait_is_forgotten_when_there_are_too_many() {
    let others = WAITS_MAX as u16 + 1;
    let mut clocks = clocks(others + 1);
    let ticks: Vec<Tick> = (1..=others).map(|on| waits(&mut clocks, 0, on)).collect();
    assert!(!clocks.covers(StreamId(0), StreamId(1), ticks[0]));
    for on in 2..=others {
        assert!(clocks.covers(StreamId(0), StreamId(on), ticks[on as usize - 1]), "{on}");
    }
}

/// Each new wait beyond the maximum evicts the oldest of the remaining ones, and moments list waits in the order of the first wait.
#[test]
fn waits_are_forgotten_in_the_order_of_the_first_wait() {
    let others = 3 * WAITS_MAX as u16 + 5;
    let mut clocks = clocks(others + 1);
    let mut known: Vec<(StreamId, Tick)> = Vec::new();
    for on in 1..=others {
        let tick = waits(&mut clocks, 0, on);
        known.push((StreamId(on), tick));
        // A second wait for a known stream does not make it younger.
        let again = known[known.len().saturating_sub(WAITS_MAX)].0;
        let tick = waits(&mut clocks, 0, again.0);
        known.iter_mut().filter(|(stream, _)| *stream == again).for_each(|(_, known)| *known = tick);
        let expected = &known[known.len().saturating_sub(WAITS_MAX)..];
        assert_eq!(clocks.moment(StreamId(0)).waits.iter().collect::<Vec<_>>(), expected);
    }
    // A wait for a forgotten stream is a first wait again, and evicts the oldest one.
    let tick = waits(&mut clocks, 0, 1);
    known.push((StreamId(1), tick));
    let expected = &known[known.len() - WAITS_MAX..];
    let moment = clocks.moment(StreamId(0));
    assert_eq!(moment.waits.iter().collect::<Vec<_>>(), expected);
    // A moment is merged from its oldest wait on, so the wait for its own stream is the newest.
    clocks.waits_for(StreamId(others), &moment);
    let merged: Vec<_> = expected.iter().copied().filter(|(on, _)| *on != StreamId(others)).collect();
    let own = (StreamId(0), moment.tick);
    let merged: Vec<_> = merged.into_iter().chain([own]).collect();
    let merged = &merged[merged.len().saturating_sub(WAITS_MAX)..];
    assert_eq!(clocks.moment(StreamId(others)).waits.iter().collect::<Vec<_>>(), merged);
}

#[test]
fn a_host_wait_never_replaces_a_later_wait_by_an_older_one() {
    let mut clocks = clocks(3);
    waits(&mut clocks, 1, 0);
    let later = clocks.moment(StreamId(0));
    clocks.synchronized(&later);
    let with_the_older_one = clocks.moment(StreamId(1));
    clocks.synchronized(&with_the_older_one);
    assert!(clocks.covers(StreamId(2), StreamId(0), later.tick));
}

#[test]
fn a_device_wait_never_replaces_a_later_wait_by_an_older_one() {
    let mut clocks = clocks(3);
    waits(&mut clocks, 1, 0);
    let later = waits(&mut clocks, 2, 0);
    waits(&mut clocks, 2, 1);
    assert!(clocks.covers(StreamId(2), StreamId(0), later));
}

#[test]
fn a_stream_stores_no_wait_for_itself_after_a_mutual_wait() {
    let others = WAITS_MAX as u16;
    let mut clocks = clocks(others + 1);
    let first = waits(&mut clocks, 0, 2);
    waits(&mut clocks, 1, 0);
    waits(&mut clocks, 0, 1);
    for on in 3..=others {
        waits(&mut clocks, 0, on);
    }
    assert!(clocks.covers(StreamId(0), StreamId(2), first), "the wait is remembered after {others} others");
}
