//! Stream clocks: which stream has waited for how much of which other one (rule D3).
//!
//! Logical clocks that follow from the program's ops alone, so all ranks agree. A fence whose tick is covered is void, see
//! [`crate::streams::fences`].
//!
//! A stream remembers its waits for at most [`WAITS_MAX`] other streams and forgets the one that it learned of first. A
//! forgotten wait costs at most another wait on the device. So the clocks of N streams take O(N) memory, and one wait takes
//! constant time, whatever a program does.

use crate::types::ids::StreamId;
use smallvec::SmallVec;

/// A moment of a stream's logical clock. 0 is before everything.
pub(crate) type Tick = u64;

/// Streams that one stream remembers to have waited for.
pub(crate) const WAITS_MAX: usize = 32;

/// What a stream has waited for: other streams, each up to a tick. In the order in which they came.
type Waits = SmallVec<[(StreamId, Tick); 4]>;

/// The clocks of all streams of an allocator.
#[derive(Debug, Default)]
pub(crate) struct StreamClocks {
    streams: Vec<StreamClock>,
}

#[derive(Debug)]
struct StreamClock {
    /// The moment that work submitted now belongs to. Advances whenever a stream may wait for "now".
    now: Tick,
    /// The host has waited for the stream's work up to this tick.
    synchronized: Tick,
    /// This stream has waited for these. At most [`WAITS_MAX`].
    waits: Waits,
}

impl StreamClocks {
    pub(crate) fn register(&mut self) {
        self.streams.push(StreamClock { now: 1, synchronized: 0, waits: Waits::new() });
    }

    /// The tick of work that the stream was given last.
    pub(crate) fn now(&self, stream: StreamId) -> Tick {
        self.streams[stream.index()].now
    }

    /// Ends the current tick of a stream and returns it: an event recorded from now on covers it.
    pub(crate) fn advance(&mut self, stream: StreamId) -> Tick {
        let clock = &mut self.streams[stream.index()];
        clock.now += 1;
        clock.now - 1
    }

    /// Whether work of `stream` up to `tick` is over, or waited for, before any later work of `taker`.
    pub(crate) fn covers(&self, taker: StreamId, stream: StreamId, tick: Tick) -> bool {
        let waits = &self.streams[taker.index()].waits;
        taker == stream
            || tick <= self.streams[stream.index()].synchronized
            || waits.iter().any(|(on, waited)| *on == stream && tick <= *waited)
    }

    /// `stream` has been told to wait for an event that covers `on` up to `tick`.
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

    /// The present moment of a stream. Work that is given to it later, by whichever thread, is not part of it.
    ///
    /// Take the moment *before* the driver call that waits for the stream: what another thread gives to the stream meanwhile
    /// may or may not be waited for, and must not be taken to be.
    pub(crate) fn moment(&mut self, stream: StreamId) -> Moment {
        Moment { stream, tick: self.advance(stream), waits: self.streams[stream.index()].waits.clone() }
    }

    /// `stream` has been told to wait for another one up to a moment, and so for all that that one had waited for.
    pub(crate) fn waits_for(&mut self, stream: StreamId, moment: &Moment) {
        for (on, tick) in moment.waits.iter().filter(|(on, _)| *on != stream) {
            self.waits_for_tick(stream, *on, *tick);
        }
        self.waits_for_tick(stream, moment.stream, moment.tick);
    }

    /// The host has waited for a stream up to a moment, and so for all that it had waited for.
    pub(crate) fn synchronized(&mut self, moment: &Moment) {
        for (stream, tick) in moment.waits.iter().copied().chain([(moment.stream, moment.tick)]) {
            let clock = &mut self.streams[stream.index()];
            clock.synchronized = clock.synchronized.max(tick);
        }
    }
}

/// A stream up to one of its ticks, with what it had waited for by then.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    stream: StreamId,
    tick: Tick,
    waits: Waits,
}

#[cfg(test)]
#[path = "../../tests/unit/clocks.rs"]
mod tests;
