//! Fences: what a free block's next user must wait for, on the device (rule D3).
//!
//! A block that other streams used is free at `free`, at the same op on every rank. The uses go with it as fences, and
//! whoever takes the block waits for them with `cuStreamWaitEvent`. Completion never decides who takes it.
//!
//! There are two ways to fence a use, and each has its place:
//! - an **event recorded at free** on each other stream that used the block. Exact: the taker waits for no more than it must.
//!   Where a program frees many blocks in a row, its backend may give them one event, which they share
//!   ([`Backend::record_in_row`](crate::backend::Backend::record_in_row)).
//! - a **tick** of the last owner's logical clock. Free to make; if another stream takes the block (shared heaps only)
//!   an event is recorded then, on the owner's stream as it stands, which waits for a little more.
//!
//! Many fences are void by the time the block is taken, because the taker's stream has waited for the other one since.
//! [`StreamClocks`] knows that from the program's ops alone: it is bookkeeping on logical clocks, equal on all ranks.
//!
//! ```text
//!  void(fence, taker)  ⇔  fence.tick ≤ waited[taker][fence.stream]  or  fence.tick ≤ synchronized[fence.stream]
//! ```

use crate::backend::{Event, InRow};
use crate::ids::StreamId;

/// A moment of a stream's logical clock. 0 is before everything.
pub(crate) type Tick = u64;

/// One use that must be over: all work that `stream` was given up to `tick`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(crate) stream: StreamId,
    pub(crate) tick: Tick,
    /// The recorded event, owned by this fence alone; `None` while the block is allocated, and for ticks.
    pub(crate) event: Option<Event>,
}

/// Names a set of fences of a [`FenceTable`], at most one per stream, in stream order: it is the place of the first one.
/// Most blocks have the empty set, which has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FenceSetId(u32);

impl FenceSetId {
    pub(crate) const EMPTY: FenceSetId = FenceSetId(u32::MAX);

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }
}

/// The fences of one heap, in lists: a set is its first fence and, behind it, a set again.
///
/// ```text
///  set ──► s1 │ tick │ event │ rest ──► s3 │ tick │ event │ rest ──► empty
/// ```
/// Blocks are fenced and waited for over and over, so a fence that is over leaves its place to the next one.
#[derive(Debug)]
pub(crate) struct FenceTable {
    places: Vec<Place>,
    /// The vacant places, as a set.
    vacant: FenceSetId,
    /// Events that no fence names any more, for the heap to recycle.
    spent: Vec<Event>,
}

#[derive(Debug)]
struct Place {
    fence: Fence,
    rest: FenceSetId,
}

impl Default for FenceTable {
    fn default() -> Self {
        FenceTable { places: Vec::new(), vacant: FenceSetId::EMPTY, spent: Vec::new() }
    }
}

impl FenceTable {
    /// The fences of a set.
    pub(crate) fn fences(&self, mut set: FenceSetId) -> impl Iterator<Item = Fence> {
        std::iter::from_fn(move || {
            let (fence, rest) = self.first(set)?;
            set = rest;
            Some(fence)
        })
    }

    /// The first fence of a set, and the set of all others.
    #[inline]
    pub(crate) fn first(&self, set: FenceSetId) -> Option<(Fence, FenceSetId)> {
        self.places.get(set.0 as usize).map(|place| (place.fence, place.rest))
    }

    /// Adds a fence to a set; of two fences on one stream the later one covers the earlier.
    #[inline]
    pub(crate) fn add(&mut self, set: FenceSetId, fence: Fence) -> FenceSetId {
        let place = match self.places.get_mut(self.vacant.0 as usize) {
            Some(place) => {
                let new = std::mem::replace(&mut self.vacant, place.rest);
                (place.fence, place.rest) = (fence, FenceSetId::EMPTY);
                new
            }
            None => self.add_place(fence),
        };
        if set.is_empty() { place } else { self.link(set, place) }
    }

    #[cold]
    fn add_place(&mut self, fence: Fence) -> FenceSetId {
        self.places.push(Place { fence, rest: FenceSetId::EMPTY });
        FenceSetId(self.places.len() as u32 - 1)
    }

    /// Puts the first fence of another set into this one. Returns what this one is then.
    fn link(&mut self, set: FenceSetId, new: FenceSetId) -> FenceSetId {
        let fence = self.places[new.0 as usize].fence;
        let (mut before, mut at) = (FenceSetId::EMPTY, set);
        while let Some(place) = self.places.get_mut(at.0 as usize) {
            if place.fence.stream == fence.stream {
                let is_later = fence.tick >= place.fence.tick;
                let (later, earlier) = if is_later { (fence, place.fence) } else { (place.fence, fence) };
                place.fence = later;
                self.spent.extend(earlier.event);
                self.vacate(new, new);
                return set;
            }
            if place.fence.stream > fence.stream {
                break;
            }
            (before, at) = (at, place.rest);
        }
        self.places[new.0 as usize].rest = at;
        match self.places.get_mut(before.0 as usize) {
            Some(place) => {
                place.rest = new;
                set
            }
            None => new,
        }
    }

    /// Gives the first fence of a set its event and tick. Returns the set of all others.
    #[inline]
    pub(crate) fn arm(&mut self, set: FenceSetId, (tick, event): (Tick, Event)) -> FenceSetId {
        let Place { fence, rest } = &mut self.places[set.0 as usize];
        debug_assert!(fence.event.is_none());
        fence.tick = tick;
        fence.event = Some(event);
        *rest
    }

    /// Takes the events of a set's fences away again.
    pub(crate) fn disarm(&mut self, mut set: FenceSetId) {
        while let Some(place) = self.places.get_mut(set.0 as usize) {
            place.fence.tick = 0;
            self.spent.extend(place.fence.event.take());
            set = place.rest;
        }
    }

    /// The fences of two blocks that become one.
    #[inline]
    pub(crate) fn union(&mut self, one: FenceSetId, other: FenceSetId) -> FenceSetId {
        if one.is_empty() || other.is_empty() {
            return if one.is_empty() { other } else { one };
        }
        self.union_of_two(one, other)
    }

    #[inline(never)]
    fn union_of_two(&mut self, mut one: FenceSetId, mut other: FenceSetId) -> FenceSetId {
        while let Some((_, rest)) = self.first(other) {
            one = self.link(one, other);
            other = rest;
        }
        one
    }

    /// Forgets a set; its events are spent.
    pub(crate) fn clear(&mut self, set: FenceSetId) {
        let mut spent = std::mem::take(&mut self.spent);
        self.release(set, |event| spent.push(event));
        self.spent = spent;
    }

    /// Forgets a set, and hands over its events.
    #[inline]
    pub(crate) fn release(&mut self, set: FenceSetId, mut recycle: impl FnMut(Event)) {
        let mut next = set;
        let mut last = set;
        while let Some((fence, rest)) = self.first(next) {
            fence.event.into_iter().for_each(&mut recycle);
            (last, next) = (next, rest);
        }
        if !set.is_empty() {
            self.vacate(set, last);
        }
    }

    /// Gives up the places from the first to the last one of a set.
    #[inline]
    pub(crate) fn vacate(&mut self, first: FenceSetId, last: FenceSetId) {
        self.places[last.0 as usize].rest = self.vacant;
        self.vacant = first;
    }

    /// Keeps only the fences that `keep` wants; returns the set that is left.
    pub(crate) fn retain(&mut self, mut set: FenceSetId, keep: impl Fn(&Fence) -> bool) -> FenceSetId {
        let mut kept = FenceSetId::EMPTY;
        while let Some((fence, rest)) = self.first(set) {
            if keep(&fence) {
                self.places[set.0 as usize].rest = FenceSetId::EMPTY;
                kept = if kept.is_empty() { set } else { self.link(kept, set) };
            } else {
                self.spent.extend(fence.event);
                self.vacate(set, set);
            }
            set = rest;
        }
        kept
    }

    /// Hands over the events that no fence names any more, in the order in which they were given up.
    #[inline]
    pub(crate) fn drain_spent(&mut self, recycle: impl FnMut(Event)) {
        if !self.spent.is_empty() {
            self.spent.iter().copied().for_each(recycle);
            self.spent.clear();
        }
    }

    /// Number of fences in all sets. O(fences), for the invariants.
    pub(crate) fn fence_count(&self) -> usize {
        self.places.len() - self.fences(self.vacant).count()
    }
}

/// Which stream has waited for how much of which other one. See the [module documentation](self).
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

    /// As [`advance`](Self::advance), for a free in a row. Frees that share an event share a tick, unless the clock went on
    /// between them: a wait for one is a wait for all. No thread may advance the clock between the recording and this.
    #[inline]
    pub(crate) fn advance_in_row(&mut self, stream: StreamId, recorded: InRow) -> (Tick, Event) {
        let StreamClock { now, row, .. } = self.streams[stream.index()];
        match recorded {
            InRow::Joined(event) if row > 0 && row + 1 == now => (row, event),
            InRow::Joined(event) | InRow::Apart(event) => {
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

    fn spent(table: &mut FenceTable) -> Vec<Event> {
        let mut events = Vec::new();
        table.drain_spent(|event| events.push(event));
        events
    }

    #[test]
    fn of_two_fences_on_one_stream_the_later_event_survives() {
        let mut table = FenceTable::default();
        let fence = |stream| Fence { stream, tick: 0, event: None };
        let early = table.add(FenceSetId::EMPTY, fence(B));
        let late = table.add(FenceSetId::EMPTY, fence(B));
        table.arm(early, (4, Event(40)));
        table.arm(late, (7, Event(70)));
        let both = table.union(early, late);
        assert_eq!(table.fences(both).map(|f| f.tick).collect::<Vec<_>>(), [7]);
        assert_eq!(spent(&mut table), [Event(40)]);
        table.clear(both);
        assert_eq!(spent(&mut table), [Event(70)]);
        assert_eq!(table.fence_count(), 0);
    }

    #[test]
    fn a_set_is_in_stream_order_whatever_came_first() {
        let mut table = FenceTable::default();
        let fence = |stream| Fence { stream, tick: 0, event: None };
        let streams = |table: &FenceTable, set| table.fences(set).map(|fence| fence.stream).collect::<Vec<_>>();
        let outer = table.add(FenceSetId::EMPTY, fence(C));
        let outer = table.add(outer, fence(A));
        let inner = table.add(FenceSetId::EMPTY, fence(B));
        let all = table.union(inner, outer);
        assert_eq!(streams(&table, all), [A, B, C]);
        assert_eq!(table.add(all, fence(B)), all);
        assert_eq!((streams(&table, all), table.fence_count()), (vec![A, B, C], 3));
        let left = table.retain(all, |fence| fence.stream != A);
        assert_eq!((streams(&table, left), table.fence_count()), (vec![B, C], 2));
        assert_eq!(table.retain(left, |_| false), FenceSetId::EMPTY);
        assert_eq!(table.fence_count(), 0);
    }
}
