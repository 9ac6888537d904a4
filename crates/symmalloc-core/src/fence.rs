//! Fences: what a free block's next user must wait for, on the device (rule D3).
//!
//! A block that other streams used is free at `free`, at the same op on every rank. The uses go with it as fences, and
//! whoever takes the block waits for them with `cuStreamWaitEvent`. Completion never decides who takes it.
//!
//! There are two ways to fence a use, and each has its place:
//! - an **event recorded at free** on each other stream that used the block. Exact: the taker waits for no more than it must.
//! - a **tick** of the last owner's logical clock. Free to make; if another stream takes the block (shared heaps only)
//!   an event is recorded then, on the owner's stream as it stands, which waits for a little more.
//!
//! Many fences are void by the time the block is taken, because the taker's stream has waited for the other one since.
//! [`StreamClocks`] knows that from the program's ops alone: it is bookkeeping on logical clocks, equal on all ranks.
//!
//! ```text
//!  void(fence, taker)  ⇔  fence.tick ≤ waited[taker][fence.stream]  or  fence.tick ≤ synchronized[fence.stream]
//! ```

use crate::backend::Event;
use crate::ids::StreamId;
use smallvec::SmallVec;

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

/// At most one fence per stream, in stream order. Two streams besides the owner's are rare.
pub(crate) type FenceSet = SmallVec<[Fence; 2]>;

/// Names a fence set of a [`FenceTable`]; most blocks have the empty one, which takes no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FenceSetId(u32);

impl FenceSetId {
    pub(crate) const EMPTY: FenceSetId = FenceSetId(u32::MAX);

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }
}

/// The fences of one heap. Blocks are fenced and waited for over and over: ids and the room of sets are reused in place.
#[derive(Debug, Default)]
pub(crate) struct FenceTable {
    /// By id; vacant ones are empty.
    sets: Vec<FenceSet>,
    vacant: Vec<FenceSetId>,
    /// Events that no fence names any more, for the heap to recycle.
    spent: Vec<Event>,
}

impl FenceTable {
    #[inline]
    pub(crate) fn fences(&self, set: FenceSetId) -> &[Fence] {
        if set.is_empty() { &[] } else { &self.sets[set.0 as usize] }
    }

    /// Adds a fence to a set; of two fences on one stream the later one covers the earlier.
    pub(crate) fn add(&mut self, set: FenceSetId, fence: Fence) -> FenceSetId {
        let set = if set.is_empty() { self.take_vacant() } else { set };
        let fences = &mut self.sets[set.0 as usize];
        let at = fences.iter().position(|f| f.stream >= fence.stream).unwrap_or(fences.len());
        match fences.get_mut(at) {
            Some(there) if there.stream == fence.stream => {
                let (later, earlier) = if fence.tick >= there.tick { (fence, *there) } else { (*there, fence) };
                *there = later;
                self.spent.extend(earlier.event);
            }
            Some(_) => fences.insert(at, fence),
            None => fences.push(fence),
        }
        set
    }

    #[inline]
    fn take_vacant(&mut self) -> FenceSetId {
        self.vacant.pop().unwrap_or_else(|| {
            self.sets.push(FenceSet::new());
            FenceSetId(self.sets.len() as u32 - 1)
        })
    }

    /// Gives a fence of the set, by its place in the set's order, its event and tick.
    #[inline]
    pub(crate) fn arm(&mut self, set: FenceSetId, at: usize, (tick, event): (Tick, Event)) {
        let fence = &mut self.sets[set.0 as usize][at];
        debug_assert!(fence.event.is_none());
        fence.tick = tick;
        fence.event = Some(event);
    }

    /// Takes the events of a set's fences away again.
    pub(crate) fn disarm(&mut self, set: FenceSetId) {
        for fence in &mut self.sets[set.0 as usize] {
            fence.tick = 0;
            self.spent.extend(fence.event.take());
        }
    }

    /// The fences of two blocks that become one.
    #[inline]
    pub(crate) fn union(&mut self, one: FenceSetId, other: FenceSetId) -> FenceSetId {
        if one.is_empty() || other.is_empty() {
            return if one.is_empty() { other } else { one };
        }
        for at in 0..self.fences(other).len() {
            self.add(one, self.fences(other)[at]);
        }
        self.vacate(other);
        one
    }

    /// Forgets a set.
    #[inline]
    pub(crate) fn clear(&mut self, set: FenceSetId) {
        if !set.is_empty() {
            for fence in &self.sets[set.0 as usize] {
                self.spent.extend(fence.event);
            }
            self.vacate(set);
        }
    }

    #[inline]
    fn vacate(&mut self, set: FenceSetId) {
        self.sets[set.0 as usize].clear();
        self.vacant.push(set);
    }

    /// Keeps only the fences that `keep` wants; returns the set that is left.
    pub(crate) fn retain(&mut self, set: FenceSetId, mut keep: impl FnMut(&Fence) -> bool) -> FenceSetId {
        if set.is_empty() {
            return set;
        }
        let fences = &mut self.sets[set.0 as usize];
        fences.retain(|fence| {
            let is_kept = keep(fence);
            if !is_kept {
                self.spent.extend(fence.event);
            }
            is_kept
        });
        if !fences.is_empty() {
            return set;
        }
        self.vacate(set);
        FenceSetId::EMPTY
    }

    /// Hands over the events that no fence names any more, in the order in which they were given up.
    #[inline]
    pub(crate) fn drain_spent(&mut self, recycle: impl FnMut(Event)) {
        if !self.spent.is_empty() {
            self.spent.iter().copied().for_each(recycle);
            self.spent.clear();
        }
    }

    pub(crate) fn set_count(&self) -> usize {
        self.sets.len() - self.vacant.len()
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
    /// The host has waited for the stream's work up to this tick.
    synchronized: Tick,
    /// `waited[t]`: this stream has waited for stream t's work up to that tick. Grown on demand.
    waited: Vec<Tick>,
}

impl StreamClocks {
    pub(crate) fn register(&mut self) {
        self.streams.push(StreamClock { now: 1, synchronized: 0, waited: Vec::new() });
    }

    /// The tick of work that the stream was given last.
    #[inline]
    pub(crate) fn now(&self, stream: StreamId) -> Tick {
        self.streams[stream.index()].now
    }

    /// Ends the current tick of a stream and returns it: an event recorded now covers it.
    pub(crate) fn advance(&mut self, stream: StreamId) -> Tick {
        let clock = &mut self.streams[stream.index()];
        clock.now += 1;
        clock.now - 1
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
        table.arm(early, 0, (4, Event(40)));
        table.arm(late, 0, (7, Event(70)));
        let both = table.union(early, late);
        assert_eq!(table.fences(both).iter().map(|f| f.tick).collect::<Vec<_>>(), [7]);
        assert_eq!(spent(&mut table), [Event(40)]);
        table.clear(both);
        assert_eq!(spent(&mut table), [Event(70)]);
        assert_eq!(table.set_count(), 0);
    }
}
