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

/// The other streams that a stream has waited for, each up to a tick, in the order of the first wait.
type Waits = SmallVec<[(StreamId, Tick); 4]>;

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
        self.streams.push(StreamClock { now: 1, synchronized: 0, waits: Waits::new() });
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
        let waits = &self.streams[taker.index()].waits;
        taker == stream
            || tick <= self.streams[stream.index()].synchronized
            || waits.iter().any(|(on, waited)| *on == stream && tick <= *waited)
    }

    /// Records that `stream` waits for an event that covers `on` up to `tick`.
    pub(crate) fn waits_for_tick(&mut self, stream: StreamId, on: StreamId, tick: Tick) {
        let waits = &mut self.streams[stream.index()].waits;
        if let Some((_, waited)) = waits.iter_mut().find(|(known, _)| *known == on) {
            *waited = (*waited).max(tick);
            return;
        }
        if waits.len() == WAITS_MAX {
            waits.remove(0);
        }
        waits.push((on, tick));
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
        for (on, tick) in moment.waits.iter().filter(|(on, _)| *on != stream) {
            self.waits_for_tick(stream, *on, *tick);
        }
        self.waits_for_tick(stream, moment.stream, moment.tick);
    }

    /// Records that the host has waited for a stream up to a moment, and therefore for everything that the stream has
    /// waited for.
    pub(crate) fn synchronized(&mut self, moment: &Moment) {
        for (stream, tick) in moment.waits.iter().copied().chain([(moment.stream, moment.tick)]) {
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
