//! Stream clocks record how much of each other stream's work a stream has waited for (rule D3).
//!
//! The clocks are logical and follow from the program's ops alone, so all ranks agree. A fence whose tick is covered is
//! void; see [`crate::streams::fences`].
//!
//! A stream remembers its waits for at most [`WAITS_MAX`] other streams and evicts the oldest entry. An evicted wait
//! costs at most one more wait on the device. The clocks of N streams therefore take O(N) memory and one wait takes
//! constant time, whatever the program does.

use crate::types::ids::StreamId;
use smallvec::SmallVec;

/// A moment of a stream's logical clock. 0 precedes everything.
pub(crate) type Tick = u64;

/// Maximum number of streams that one stream remembers having waited for.
pub(crate) const WAITS_MAX: usize = 32;

/// The other streams that a stream has waited for, each up to a tick.
#[derive(Clone, Debug, Default)]
struct Waits {
    /// In the order of the first wait, as a ring once there are [`WAITS_MAX`].
    streams: SmallVec<[StreamId; 4]>,
    /// The tick of each stream in `streams`.
    ticks: SmallVec<[Tick; 4]>,
    /// Index of the oldest entry.
    oldest: usize,
}

impl Waits {
    /// Iterates over the entries in the order of the first wait.
    fn iter(&self) -> impl Iterator<Item = (StreamId, Tick)> {
        let entry = |index: usize| (self.streams[index], self.ticks[index]);
        (self.oldest..self.streams.len()).chain(0..self.oldest).map(entry)
    }

    fn index_of(&self, on: StreamId) -> Option<usize> {
        // Without an early exit, this compares several entries at once. `i16`, because the smallest vector instructions
        // have its maximum.
        let last = self.streams.iter().zip(0_i16..).fold(-1, |last, (known, index)| {
            let found: i16 = if *known == on { index } else { -1 };
            found.max(last)
        });
        usize::try_from(last).ok()
    }

    fn covers(&self, stream: StreamId, tick: Tick) -> bool {
        self.index_of(stream).is_some_and(|index| tick <= self.ticks[index])
    }

    fn wait_for(&mut self, on: StreamId, tick: Tick) {
        if let Some(index) = self.index_of(on) {
            self.ticks[index] = self.ticks[index].max(tick);
        } else if self.streams.len() < WAITS_MAX {
            self.streams.push(on);
            self.ticks.push(tick);
        } else {
            (self.streams[self.oldest], self.ticks[self.oldest]) = (on, tick);
            self.oldest = (self.oldest + 1) % WAITS_MAX;
        }
    }
}

/// The clocks of all streams of an allocator.
#[derive(Debug, Default)]
pub(crate) struct StreamClocks {
    streams: Vec<StreamClock>,
}

#[derive(Debug)]
struct StreamClock {
    /// The tick of work that is submitted now. It advances whenever another stream, or the host, may wait for the
    /// present moment.
    now: Tick,
    /// Tick up to which the host has waited for the stream's work.
    synchronized: Tick,
    /// The streams that this one has waited for. At most [`WAITS_MAX`].
    waits: Waits,
}

impl StreamClocks {
    pub(crate) fn register(&mut self) {
        self.streams.push(StreamClock { now: 1, synchronized: 0, waits: Waits::default() });
    }

    /// Returns the tick of the work that was last submitted to the stream.
    pub(crate) fn now(&self, stream: StreamId) -> Tick {
        self.streams[stream.index()].now
    }

    /// Ends the current tick of a stream and returns it. An event that is recorded later covers this tick.
    pub(crate) fn advance(&mut self, stream: StreamId) -> Tick {
        let clock = &mut self.streams[stream.index()];
        clock.now += 1;
        clock.now - 1
    }

    /// Returns `true` if work of `stream` up to `tick` completes before any later work of `taker` begins.
    pub(crate) fn covers(&self, taker: StreamId, stream: StreamId, tick: Tick) -> bool {
        taker == stream
            || tick <= self.streams[stream.index()].synchronized
            || self.streams[taker.index()].waits.covers(stream, tick)
    }

    /// Records that `stream` waits for an event that covers `on` up to `tick`.
    pub(crate) fn waits_for_tick(&mut self, stream: StreamId, on: StreamId, tick: Tick) {
        self.streams[stream.index()].waits.wait_for(on, tick);
    }

    /// Returns the present moment of a stream. Work that any thread submits later is not part of it.
    ///
    /// Take the moment *before* the driver call that waits for the stream. Work that another thread submits in the
    /// meantime may or may not be covered by that wait, so it must not count as covered.
    pub(crate) fn moment(&mut self, stream: StreamId) -> Moment {
        Moment { stream, tick: self.advance(stream), waits: self.streams[stream.index()].waits.clone() }
    }

    /// Records that `stream` waits for another stream up to a moment, and therefore for everything that the other
    /// stream has waited for.
    pub(crate) fn waits_for(&mut self, stream: StreamId, moment: &Moment) {
        let waits = &mut self.streams[stream.index()].waits;
        for (on, tick) in moment.waits.iter().filter(|(on, _)| *on != stream) {
            waits.wait_for(on, tick);
        }
        waits.wait_for(moment.stream, moment.tick);
    }

    /// Records that the host has waited for a stream up to a moment, and therefore for everything that the stream has
    /// waited for.
    pub(crate) fn synchronized(&mut self, moment: &Moment) {
        for (stream, tick) in moment.waits.iter().chain([(moment.stream, moment.tick)]) {
            let clock = &mut self.streams[stream.index()];
            clock.synchronized = clock.synchronized.max(tick);
        }
    }
}

/// A tick of a stream, and the ticks of other streams that it had waited for by then.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    stream: StreamId,
    tick: Tick,
    waits: Waits,
}

#[cfg(test)]
mod tests;
