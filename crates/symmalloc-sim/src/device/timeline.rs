//! Simulated time: the pending work of each stream, the completion of events, and the ordering of memory uses.
//!
//! The timeline answers two separate questions:
//!
//! ```text
//! is it done?      now ≥ done_at,  or the host has waited for it      answers `query`; random, differs between ranks
//! is it ordered?   by a wait, a synchronize, or a query that returned  answers `submit` and `unmap`; determined by the
//!                  done: the vector clock of the later work covers    program, the same on each rank
//!                  (stream, epoch) of the earlier work
//! ```
//!
//! A race is reported whenever uses are not *ordered*, even if the earlier use happens to be done. Every run therefore
//! detects a missing wait, not only the runs in which the timing is unlucky.
//!
//! The host is modeled as a single thread. Everything that one call established (a `synchronize`, or a `query` that
//! returned done) precedes everything that the host does later, on any stream.

use super::clock::VectorClock;
use super::interval::{Interval, IntervalMap};
use super::random::{SplitMix64, mix};
use std::collections::BTreeMap;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::ids::StreamId;
use symmalloc_core::units::UNIT_BYTES;
use symmalloc_core::work;

/// Completion time of work that completes only when the host waits for it.
const NEVER: u64 = u64::MAX;
/// Minimum number of recorded uses before a sweep removes the uses that no later work can race with.
const SWEEP_MIN: usize = 64;

/// The duration of simulated work, in ticks. Each backend call takes one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Delays {
    /// Work is done as soon as it is submitted.
    Immediate,
    /// Each piece of work is done 0 to `ticks` ticks after its submission, but not before earlier work of its stream.
    /// The number of ticks is drawn from the seed.
    UpTo {
        /// Maximum number of ticks.
        ticks: u32,
    },
    /// Work is done only when the host synchronizes with it.
    UntilSynchronized,
    /// Each stream of each rank draws its own delay from the seed, so that events complete in different orders on
    /// different ranks.
    #[default]
    FromSeed,
}

/// Two uses of the same bytes on different streams, neither of which is ordered after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "work on {stream} uses {size_bytes} bytes at {:#x} that earlier work on {earlier_stream} may still use: let \
     {stream} wait for an event recorded on {earlier_stream} after that work",
    address.0
)]
#[non_exhaustive]
pub struct Race {
    /// First byte that both streams use, rounded down to a multiple of 512.
    pub address: DeviceAddress,
    /// Number of bytes, starting at `address`, whose last use is the earlier work.
    pub size_bytes: u64,
    /// The stream of the later work, which was not submitted.
    pub stream: StreamId,
    /// The stream of the earlier work.
    pub earlier_stream: StreamId,
}

/// The last use of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    stream: StreamId,
    epoch: u64,
}

#[derive(Clone, Debug)]
struct Stream {
    /// Epoch of the next submitted work; starts at 1.
    epoch: u64,
    /// `true` if anything was submitted or waited for in this epoch.
    open: bool,
    /// Work that precedes the next submitted work.
    clock: VectorClock,
    /// Tick at which everything submitted so far is done; `NEVER` if it completes only when the host waits for it.
    busy_until: u64,
    /// Maximum number of ticks from submission until work is done; `NEVER` if work waits for the host.
    delay_max: u64,
    random: SplitMix64,
}

impl Stream {
    fn new(stream: StreamId, delays: Delays, random: &SplitMix64) -> Self {
        let mut random = random.split(u64::from(stream.0));
        let delay_max = match delays {
            Delays::Immediate => 0,
            Delays::UpTo { ticks } => u64::from(ticks),
            Delays::UntilSynchronized => NEVER,
            Delays::FromSeed => [0, 1, 4, 16, 64, 256, 4096, NEVER][random.below(8) as usize],
        };
        Stream { epoch: 1, open: false, clock: VectorClock::default(), busy_until: 0, delay_max, random }
    }

    /// Submits one piece of work and returns the tick at which it is done.
    fn work(&mut self, now: u64) -> u64 {
        let delay = if self.delay_max == NEVER { NEVER } else { self.random.below(self.delay_max + 1) };
        self.busy_until = self.busy_until.max(now.saturating_add(delay));
        self.busy_until
    }

    /// Closes the current epoch and returns it. Later work belongs to the next epoch.
    fn observe(&mut self, stream: StreamId) -> u64 {
        let epoch = self.epoch;
        self.clock.raise(stream, epoch);
        self.epoch += 1;
        self.open = false;
        epoch
    }
}

/// The work that an event represents.
#[derive(Clone, Debug)]
struct EventState {
    at: Use,
    done_at: u64,
    clock: VectorClock,
}

/// The streams, events and memory uses of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    now: u64,
    delays: Delays,
    random: SplitMix64,
    streams: BTreeMap<StreamId, Stream>,
    /// State by raw event, for events that are not recycled.
    events: BTreeMap<u64, EventState>,
    /// Number of events ever recorded. Raw events are a bijection of this number, so they are unique.
    events_recorded: u64,
    /// Work that the host knows to be done.
    host: VectorClock,
    /// The last use of each byte. Every earlier use of a byte precedes the last one, because `submit` rejects unordered
    /// uses.
    uses: IntervalMap<Use>,
    /// Number of recorded uses at which the next sweep takes place.
    sweep_at: usize,
    /// `false` if the program submits no work, so that the order of work is irrelevant.
    tracks_order: bool,
}

impl Timeline {
    pub(crate) fn new(random: SplitMix64, delays: Delays) -> Self {
        Timeline {
            now: 0,
            delays,
            random,
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            events_recorded: 0,
            host: VectorClock::default(),
            uses: IntervalMap::default(),
            sweep_at: SWEEP_MIN,
            tracks_order: true,
        }
    }

    /// Stops tracking the order of work, because the program submits none.
    pub(crate) fn without_order(mut self) -> Self {
        self.tracks_order = false;
        self
    }

    pub(crate) fn tracks_order(&self) -> bool {
        self.tracks_order
    }

    /// Advances time.
    pub(crate) fn tick(&mut self, ticks: u64) {
        self.now = self.now.saturating_add(ticks).min(NEVER - 1);
    }

    fn stream(&mut self, stream: StreamId) -> &mut Stream {
        let (delays, random) = (self.delays, &self.random);
        self.streams.entry(stream).or_insert_with(|| Stream::new(stream, delays, random))
    }

    /// Records an event after all work submitted to `stream`.
    pub(crate) fn record(&mut self, stream: StreamId) -> u64 {
        let (now, tracks_order) = (self.now, self.tracks_order);
        let state = self.stream(stream);
        let done_at = state.work(now);
        let epoch = state.observe(stream);
        let clock = if tracks_order { state.clock.clone() } else { VectorClock::default() };
        work::count(clock.len());
        let event = EventState { at: Use { stream, epoch }, done_at, clock };
        let raw = mix(mix(self.random.clone().next_u64()).wrapping_add(self.events_recorded));
        self.events_recorded += 1;
        self.events.insert(raw, event);
        raw
    }

    /// Returns `true` if the event is recorded and not recycled.
    pub(crate) fn is_event(&self, raw: u64) -> bool {
        self.events.contains_key(&raw)
    }

    /// Returns the number of live events.
    pub(crate) fn events(&self) -> usize {
        self.events.len()
    }

    /// Orders later work on `stream` after the event.
    pub(crate) fn wait(&mut self, stream: StreamId, raw: u64) {
        let Some(event) = self.events.get(&raw).cloned() else { return };
        let done = self.is_done(&event);
        work::count(event.clock.len());
        let state = self.stream(stream);
        state.clock.join(&event.clock);
        if !done {
            state.busy_until = state.busy_until.max(event.done_at);
            state.open = true;
        }
    }

    fn is_done(&self, event: &EventState) -> bool {
        self.now >= event.done_at || self.host.covers(event.at.stream, event.at.epoch)
    }

    /// Returns `true` if the event is done. From then on, the host knows that the work it represents is done.
    pub(crate) fn query(&mut self, raw: u64) -> bool {
        let Some(event) = self.events.get(&raw) else { return false };
        let done = self.is_done(event);
        if done {
            let clock = event.clock.clone();
            self.learn(&clock);
        }
        done
    }

    /// Removes the event.
    pub(crate) fn recycle(&mut self, raw: u64) {
        self.events.remove(&raw);
    }

    /// Waits on the host for all work on `stream`, and therefore for everything that `stream` has waited for.
    pub(crate) fn synchronize(&mut self, stream: StreamId) {
        let state = self.stream(stream);
        state.observe(stream);
        let clock = state.clock.clone();
        if !self.tracks_order {
            self.stream(stream).busy_until = 0;
        }
        self.learn(&clock);
    }

    fn learn(&mut self, clock: &VectorClock) {
        self.host.join(clock);
        if !self.tracks_order {
            return;
        }
        work::count(clock.len());
        // The host has learned nothing about any other stream.
        for (stream, epoch) in clock.iter() {
            if let Some(state) = self.streams.get_mut(&stream)
                && !state.open
                && epoch >= state.epoch - 1
            {
                state.busy_until = 0;
            }
        }
    }

    /// Submits work that reads and writes the bytes.
    #[cfg(test)]
    fn submit(&mut self, stream: StreamId, start: u64, end: u64) -> Result<(), Race> {
        self.submit_parts(stream, &[(start, end)], None)
    }

    /// Submits work that reads and writes memory, part by part. A use through an alias is recorded both at the alias
    /// and at the address where the memory was first mapped.
    pub(crate) fn submit_parts(
        &mut self,
        stream: StreamId,
        parts: &[(u64, u64)],
        name: Option<(u64, u64)>,
    ) -> Result<(), Race> {
        assert!(self.tracks_order, "a device without kernels cannot run work");
        self.stream(stream);
        let units = |&(start, end): &(u64, u64)| (start & !(UNIT_BYTES - 1), end.next_multiple_of(UNIT_BYTES));
        for (start, end) in parts.iter().map(units) {
            self.check(stream, start, end)?;
        }
        let now = self.now;
        let state = self.stream(stream);
        state.work(now);
        state.open = true;
        let epoch = state.epoch;
        for (start, end) in parts.iter().chain(&name).map(units) {
            self.uses.insert(start, end, Use { stream, epoch });
        }
        if self.uses.len() >= self.sweep_at {
            let host = &self.host;
            self.uses.retain(|last| !host.covers(last.stream, last.epoch));
            self.sweep_at = SWEEP_MIN.max(2 * self.uses.len());
        }
        Ok(())
    }

    fn check(&self, stream: StreamId, start: u64, end: u64) -> Result<(), Race> {
        let clock = &self.streams[&stream].clock;
        let ordered = |earlier: Use| {
            earlier.stream == stream
                || clock.covers(earlier.stream, earlier.epoch)
                || self.host.covers(earlier.stream, earlier.epoch)
        };
        if let Some(part) = self.uses.overlapping(start, end).find(|part| !ordered(part.value)) {
            return Err(Race {
                address: DeviceAddress(part.start),
                size_bytes: part.end - part.start,
                stream,
                earlier_stream: part.value.stream,
            });
        }
        Ok(())
    }

    /// Returns the first use of the bytes that the host does not know to be done, as (address, stream).
    pub(crate) fn pending_use(&self, start: u64, end: u64) -> Option<(u64, StreamId)> {
        let pending = |part: &Interval<Use>| !self.host.covers(part.value.stream, part.value.epoch);
        self.uses.overlapping(start, end).find(pending).map(|part| (part.start, part.value.stream))
    }

    /// Removes the uses of the bytes, which are being unmapped.
    pub(crate) fn forget(&mut self, start: u64, end: u64) {
        self.uses.remove(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: [StreamId; 4] = [StreamId(0), StreamId(1), StreamId(2), StreamId(3)];

    fn timeline(delays: Delays) -> Timeline {
        Timeline::new(SplitMix64::new(1), delays)
    }

    #[test]
    fn unordered_uses_are_a_race_and_a_wait_orders_them() {
        let mut time = timeline(Delays::Immediate);
        time.submit(S[0], 0, 4096).unwrap();
        let race = time.submit(S[1], 1024, 2048).unwrap_err();
        assert_eq!((race.address.0, race.size_bytes), (1024, 1024));
        assert_eq!((race.stream, race.earlier_stream), (S[1], S[0]));
        let event = time.record(S[0]);
        time.wait(S[1], event);
        time.submit(S[1], 1024, 2048).unwrap();
        assert!(time.submit(S[0], 0, 4096).is_err(), "the wait orders one direction only");
    }

    #[test]
    fn an_event_orders_only_work_submitted_before_it() {
        let mut time = timeline(Delays::Immediate);
        time.submit(S[0], 0, 512).unwrap();
        let event = time.record(S[0]);
        time.submit(S[0], 512, 1024).unwrap();
        time.wait(S[1], event);
        time.submit(S[1], 0, 512).unwrap();
        assert!(time.submit(S[1], 512, 1024).is_err());
    }

    #[test]
    fn order_is_transitive_through_a_third_stream() {
        let mut time = timeline(Delays::Immediate);
        time.submit(S[0], 0, 512).unwrap();
        let first = time.record(S[0]);
        time.wait(S[1], first);
        let second = time.record(S[1]);
        time.recycle(first);
        time.wait(S[2], second);
        time.submit(S[2], 0, 512).unwrap();
        assert!(time.submit(S[3], 0, 512).is_err());
    }

    #[test]
    fn a_synchronized_stream_and_its_waits_precede_all_later_work() {
        let mut time = timeline(Delays::UntilSynchronized);
        time.submit(S[0], 0, 512).unwrap();
        let event = time.record(S[0]);
        time.wait(S[1], event);
        assert!(!time.query(event));
        assert_eq!(time.pending_use(0, 512), Some((0, S[0])));
        time.synchronize(S[1]);
        assert!(time.query(event));
        assert_eq!(time.pending_use(0, 512), None);
        time.submit(S[2], 0, 512).unwrap();
    }

    #[test]
    fn a_query_that_returned_done_establishes_order_and_elapsed_time_does_not() {
        let mut time = timeline(Delays::Immediate);
        time.submit(S[0], 0, 512).unwrap();
        let event = time.record(S[0]);
        time.tick(1000);
        assert!(time.submit(S[1], 0, 512).is_err());
        assert!(time.query(event));
        time.submit(S[1], 0, 512).unwrap();
    }

    #[test]
    fn events_of_a_stream_are_done_in_order() {
        for seed in 0..50 {
            let mut time = Timeline::new(SplitMix64::new(seed), Delays::FromSeed);
            let events: Vec<u64> = (0..20).map(|_| time.record(S[0])).collect();
            for _ in 0..100 {
                time.tick(seed);
                let done: Vec<bool> = events.iter().map(|&event| time.is_done(&time.events[&event])).collect();
                assert!(done.is_sorted_by(|earlier, later| earlier >= later), "{done:?}");
            }
        }
    }

    #[test]
    fn a_stream_that_waits_is_not_done_before_what_it_waits_for() {
        for seed in 0..50 {
            let mut time = Timeline::new(SplitMix64::new(seed), Delays::FromSeed);
            for _ in 0..10 {
                time.submit(S[0], 0, 512).unwrap();
            }
            let first = time.record(S[0]);
            time.wait(S[1], first);
            let second = time.record(S[1]);
            for _ in 0..300 {
                time.tick(1);
                assert!(time.is_done(&time.events[&first]) || !time.is_done(&time.events[&second]));
            }
        }
    }

    #[test]
    fn events_are_done_within_their_delay() {
        let mut time = timeline(Delays::UpTo { ticks: 10 });
        let event = time.record(S[0]);
        time.tick(10);
        assert!(time.query(event));
        let mut seen = [false; 2];
        for _ in 0..100 {
            let event = time.record(S[0]);
            seen[usize::from(time.query(event))] = true;
            time.synchronize(S[0]);
        }
        assert_eq!(seen, [true, true], "some are done immediately and some are not");
    }

    #[test]
    fn a_synchronized_stream_is_idle_and_one_with_later_work_is_not() {
        let mut time = timeline(Delays::UntilSynchronized);
        let first = time.record(S[0]);
        time.wait(S[1], first);
        time.submit(S[0], 0, 512).unwrap();
        time.synchronize(S[1]);
        assert_eq!(S.map(|s| time.streams.get(&s).map(|stream| stream.busy_until))[..2], [Some(NEVER), Some(0)]);
        time.synchronize(S[0]);
        assert_eq!(time.streams[&S[0]].busy_until, 0);
    }

    #[test]
    fn ranks_see_events_done_in_different_orders() {
        let done = |seed| {
            let mut time = Timeline::new(SplitMix64::new(seed), Delays::FromSeed);
            let events: Vec<u64> = S.map(|stream| time.record(stream)).to_vec();
            time.tick(8);
            events.into_iter().map(|event| time.query(event)).collect::<Vec<_>>()
        };
        let distinct: std::collections::BTreeSet<_> = (0..32).map(done).collect();
        assert!(distinct.len() >= 8, "{}", distinct.len());
    }

    #[test]
    fn raw_events_are_distinct_and_not_dense() {
        let mut time = timeline(Delays::Immediate);
        let mut raw: Vec<u64> = (0..1000).map(|_| time.record(S[0])).collect();
        assert!(!raw.is_sorted());
        raw.sort_unstable();
        assert!(raw.windows(2).all(|pair| pair[1] - pair[0] > 1));
    }

    #[test]
    fn uses_that_cannot_race_are_swept() {
        let mut time = timeline(Delays::Immediate);
        for block in 0..100_000 {
            time.submit(S[0], block * 1024, block * 1024 + 512).unwrap();
            time.synchronize(S[0]);
        }
        assert!(time.uses.len() <= SWEEP_MIN, "{}", time.uses.len());
    }

    #[test]
    fn uses_of_one_epoch_merge() {
        let mut time = timeline(Delays::Immediate);
        for block in 0..1000 {
            time.submit(S[0], block * 512, block * 512 + 512).unwrap();
        }
        assert_eq!(time.uses.len(), 1);
    }
}
