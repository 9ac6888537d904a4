//! Stream clocks: which stream has waited for how much of which other one (rule D3).
//!
//! Logical clocks, from the program's ops alone: equal on all ranks. A fence whose tick is covered is void, see
//! [`crate::fence`].

use crate::backend::{Event, InRow};
use crate::ids::StreamId;

/// A moment of a stream's logical clock. 0 is before everything.
pub(crate) type Tick = u64;

/// The clocks of all streams of an allocator.
#[derive(Debug, Default)]
pub(crate) struct StreamClocks {
    streams: Vec<StreamClock>,
}

#[derive(Debug)]
struct StreamClock {
    /// The moment that work submitted now belongs to. Advances whenever someone may wait for "now".
    now: Tick,
    /// The tick that the last fence of a row of frees ended; other fences of the row have it too until the clock goes on. 0: none.
    row: Tick,
    /// The host has waited for the stream's work up to this tick.
    synchronized: Tick,
    /// `waited[t]`: this stream has waited for stream t's work up to that tick. Grown on demand.
    waited: Vec<Tick>,
}

impl StreamClocks {
    pub(crate) fn register(&mut self) {
        self.streams.push(StreamClock { now: 1, row: 0, synchronized: 0, waited: Vec::new() });
    }

    /// The tick of work that the stream was given last.
    #[inline]
    pub(crate) fn now(&self, stream: StreamId) -> Tick {
        self.streams[stream.index()].now
    }

    /// Ends the current tick of a stream and returns it: an event recorded now covers it.
    #[inline]
    pub(crate) fn advance(&mut self, stream: StreamId) -> Tick {
        let clock = &mut self.streams[stream.index()];
        clock.now += 1;
        clock.now - 1
    }

    /// The tick that frees in a row share, unless the clock went on since.
    #[inline]
    pub(crate) fn row(&self, stream: StreamId) -> Option<Tick> {
        let StreamClock { now, row, .. } = self.streams[stream.index()];
        (row > 0 && row + 1 == now).then_some(row)
    }

    /// As [`advance`](Self::advance), for a free in a row. Frees that share an event share a tick, unless the clock went on
    /// between them: a wait for one is a wait for all. No thread may advance the clock between the recording and this.
    #[inline]
    pub(crate) fn advance_in_row(&mut self, stream: StreamId, recorded: InRow) -> (Tick, Event) {
        match (recorded, self.row(stream)) {
            (InRow::Joined(event), Some(row)) => (row, event),
            (InRow::Joined(event) | InRow::Apart(event), _) => {
                let tick = self.advance(stream);
                self.streams[stream.index()].row = tick;
                (tick, event)
            }
        }
    }

    /// Whether work of `stream` up to `tick` is over, or waited for, before any later work of `taker`.
    #[inline]
    pub(crate) fn covers(&self, taker: StreamId, stream: StreamId, tick: Tick) -> bool {
        taker == stream
            || tick <= self.streams[stream.index()].synchronized
            || self.streams[taker.index()].waited.get(stream.index()).is_some_and(|waited| tick <= *waited)
            || tick == 0
    }

    /// `stream` has been told to wait for an event that covers `on` up to `tick`.
    #[inline]
    pub(crate) fn waits_for_tick(&mut self, stream: StreamId, on: StreamId, tick: Tick) {
        let waited = &mut self.streams[stream.index()].waited;
        if waited.len() <= on.index() {
            waited.resize(on.index() + 1, 0);
        }
        waited[on.index()] = waited[on.index()].max(tick);
    }

    /// The present moment of a stream. Work that is given to it later, by whichever thread, is not part of it.
    ///
    /// Whoever makes the driver wait for a stream takes the moment *before* the driver call: what another thread gives to the
    /// stream meanwhile may or may not be waited for, and must not be taken to be.
    pub(crate) fn moment(&mut self, stream: StreamId) -> Moment {
        Moment { stream, tick: self.advance(stream), waited: self.streams[stream.index()].waited.clone() }
    }

    /// `stream` has been told to wait for another one up to a moment, and so for all that that one had waited for.
    pub(crate) fn waits_for(&mut self, stream: StreamId, on: &Moment) {
        for (index, tick) in on.waited.iter().enumerate() {
            if *tick > 0 && index != stream.index() {
                self.waits_for_tick(stream, StreamId(index as u16), *tick);
            }
        }
        self.waits_for_tick(stream, on.stream, on.tick);
    }

    /// As [`waits_for`](Self::waits_for) the present moment of a stream, which ends.
    pub(crate) fn waits_for_all(&mut self, stream: StreamId, on: StreamId) {
        for index in 0..self.streams[on.index()].waited.len() {
            let tick = self.streams[on.index()].waited[index];
            if tick > 0 && index != stream.index() {
                self.waits_for_tick(stream, StreamId(index as u16), tick);
            }
        }
        let tick = self.advance(on);
        self.waits_for_tick(stream, on, tick);
    }

    /// The host has waited for a stream up to a moment, and so for all that it had waited for.
    pub(crate) fn synchronized(&mut self, moment: &Moment) {
        for (clock, waited) in self.streams.iter_mut().zip(&moment.waited) {
            clock.synchronized = clock.synchronized.max(*waited);
        }
        let clock = &mut self.streams[moment.stream.index()];
        clock.synchronized = clock.synchronized.max(moment.tick);
    }
}

/// A stream up to one of its ticks, with what it had waited for by then.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    stream: StreamId,
    tick: Tick,
    waited: Vec<Tick>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);
    const C: StreamId = StreamId(2);

    fn three_streams() -> StreamClocks {
        let mut clocks = StreamClocks::default();
        (0..3).for_each(|_| clocks.register());
        clocks
    }

    #[test]
    fn a_wait_covers_what_came_before_it_and_nothing_after() {
        let mut clocks = three_streams();
        let before = clocks.now(B);
        let moment = clocks.moment(B);
        clocks.waits_for(A, &moment);
        assert!(clocks.covers(A, B, before));
        assert!(!clocks.covers(A, B, clocks.now(B)));
        assert!(!clocks.covers(C, B, before));
    }

    #[test]
    fn a_wait_carries_what_the_other_stream_waited_for() {
        let mut clocks = three_streams();
        let tick = clocks.now(C);
        let moment = clocks.moment(C);
        clocks.waits_for(B, &moment);
        let moment = clocks.moment(B);
        clocks.waits_for(A, &moment);
        assert!(clocks.covers(A, C, tick));
    }

    #[test]
    fn a_wait_for_all_is_a_wait_for_the_present_moment() {
        let [mut at_once, mut by_moment] = [(); 2].map(|()| three_streams());
        for (stream, on) in [(B, C), (A, B), (C, A), (A, C), (B, A), (A, B)] {
            at_once.waits_for_all(stream, on);
            let moment = by_moment.moment(on);
            by_moment.waits_for(stream, &moment);
            assert_eq!(format!("{at_once:?}"), format!("{by_moment:?}"));
        }
        assert!(at_once.covers(A, C, 2) && !at_once.covers(A, C, 3));
    }

    #[test]
    fn a_synchronized_stream_covers_for_everyone() {
        let mut clocks = three_streams();
        let (b, c) = (clocks.now(B), clocks.now(C));
        let moment = clocks.moment(C);
        clocks.waits_for(B, &moment);
        let moment = clocks.moment(B);
        clocks.synchronized(&moment);
        assert!(clocks.covers(A, B, b) && clocks.covers(A, C, c));
        assert!(!clocks.covers(A, B, clocks.now(B)));
    }

    /// What another thread gives to a stream while the driver is being told to wait for it.
    #[test]
    fn what_comes_after_the_moment_is_not_covered_by_it() {
        let mut clocks = three_streams();
        let moment = clocks.moment(B);
        let later = clocks.advance(B);
        clocks.waits_for_tick(B, C, 7);
        clocks.waits_for(A, &moment);
        clocks.synchronized(&moment);
        assert!(!clocks.covers(A, B, later) && !clocks.covers(A, C, 7));
    }

    #[test]
    fn frees_that_share_an_event_share_a_tick_unless_the_clock_went_on() {
        let mut clocks = three_streams();
        let (apart, joined) = (InRow::Apart(Event(1)), InRow::Joined(Event(2)));
        let (first, _) = clocks.advance_in_row(B, apart);
        assert_eq!(clocks.advance_in_row(B, joined), (first, Event(2)));
        // Whoever waited for this moment is not behind the frees that join later.
        let moment = clocks.moment(B);
        clocks.waits_for(A, &moment);
        let (later, _) = clocks.advance_in_row(B, joined);
        assert!(clocks.covers(A, B, first) && !clocks.covers(A, B, later));
        assert_eq!(clocks.advance_in_row(B, joined).0, later);
        assert!(clocks.advance_in_row(B, apart).0 > later);
        assert_eq!(clocks.advance_in_row(C, joined).0, 1, "streams have rows of their own");
    }
}
