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
//! [`StreamClocks`](crate::stream_clocks::StreamClocks) knows that from the program's ops alone: it is bookkeeping on logical clocks, equal on all ranks.
//!
//! ```text
//!  void(fence, taker)  ⇔  fence.tick ≤ waited[taker][fence.stream]  or  fence.tick ≤ synchronized[fence.stream]
//! ```

use crate::backend::Event;
use crate::ids::StreamId;
use crate::stream_clocks::Tick;
use std::collections::BTreeMap;

/// One use that must be over: all work that `stream` was given up to `tick`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(crate) stream: StreamId,
    /// 0: there is nothing to wait for, or nothing yet, while the block is allocated.
    pub(crate) tick: Tick,
    /// The recorded event, owned by this fence alone; `None` for ticks.
    pub(crate) event: Option<Event>,
}

impl Fence {
    /// A stream alone: a use before it has a tick.
    #[inline]
    pub(crate) fn of(stream: StreamId) -> Self {
        Fence { stream, tick: 0, event: None }
    }
}

/// Names a set of fences of a [`FenceTable`], at most one per stream, in stream order. Most blocks have the empty set, and most
/// others a set of one, which takes no place of its own: it is the fence, or the stream alone.
///
/// ```text
///  00 │ place 30               the fence in this place
///  01 │ 0 │ stream 16          a stream alone
///  10 │ place 30               a list, whose first node is in this place
///  11 │ all ones               empty
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FenceSetId(u32);

const ALONE: u32 = 1 << 30;
const LIST: u32 = 1 << 31;
const PLACE: u32 = ALONE - 1;

impl FenceSetId {
    pub(crate) const EMPTY: FenceSetId = FenceSetId(u32::MAX);

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    /// The set of a stream alone.
    #[inline]
    pub(crate) fn alone(stream: StreamId) -> Self {
        FenceSetId(ALONE | u32::from(stream.0))
    }

    /// The stream, if this is a set of a stream alone.
    #[inline]
    pub(crate) fn stream_alone(self) -> Option<StreamId> {
        (self.0 & (LIST | ALONE) == ALONE).then_some(StreamId(self.0 as u16))
    }

    #[inline]
    fn is_fence(self) -> bool {
        self.0 < ALONE
    }

    #[inline]
    pub(crate) fn is_list(self) -> bool {
        self.0 & (LIST | ALONE) == LIST
    }

    /// Of a fence or of a node, the place.
    #[inline]
    fn place(self) -> usize {
        (self.0 & PLACE) as usize
    }
}

/// The fences of one heap. Blocks that were freed in a row share one: whoever waits for it waits for all of them.
///
/// ```text
///  block ─────► fence: stream │ tick │ event │ holders 2
///  block ───────────▲
///  block ─────► node: one ─► fence s1   rest ─► node: one ─► fence s3   rest ─► empty
/// ```
/// Blocks are fenced and waited for over and over, so a fence that is over leaves its place to the next one.
#[derive(Debug)]
pub(crate) struct FenceTable {
    fences: Vec<Held>,
    /// The vacant place for a fence to use next; [`NONE`] when there is none.
    vacant_fence: u32,
    nodes: Vec<Node>,
    /// The vacant nodes, as a list.
    vacant_nodes: FenceSetId,
    /// The fence that was recorded last for a free in a row; it may be gone.
    row: FenceSetId,
    /// Events that no fence names any more, for the heap to recycle.
    spent: Vec<Event>,
}

/// A fence, by how many sets it is held.
#[derive(Debug)]
struct Held {
    fence: Fence,
    /// In a vacant place, which has no event: the next vacant one.
    holders: u32,
}

/// A fence or a stream alone, and behind it a list again.
#[derive(Debug)]
struct Node {
    one: FenceSetId,
    rest: FenceSetId,
}

const NONE: u32 = u32::MAX;

impl Default for FenceTable {
    fn default() -> Self {
        FenceTable {
            fences: Vec::new(),
            vacant_fence: NONE,
            nodes: Vec::new(),
            vacant_nodes: FenceSetId::EMPTY,
            row: FenceSetId::EMPTY,
            spent: Vec::new(),
        }
    }
}

impl FenceTable {
    /// The fences of a set.
    pub(crate) fn fences(&self, set: FenceSetId) -> impl Iterator<Item = Fence> {
        self.ones(set).map(|one| self.fence(one))
    }

    /// What a set consists of: sets of one.
    pub(crate) fn ones(&self, mut set: FenceSetId) -> impl Iterator<Item = FenceSetId> {
        std::iter::from_fn(move || {
            let (one, rest) = self.first(set)?;
            set = rest;
            Some(one)
        })
    }

    /// The first one of a set, as a set, and the set of all others.
    #[inline]
    pub(crate) fn first(&self, set: FenceSetId) -> Option<(FenceSetId, FenceSetId)> {
        if set.is_list() {
            let Node { one, rest } = self.nodes[set.place()];
            return Some((one, rest));
        }
        (!set.is_empty()).then_some((set, FenceSetId::EMPTY))
    }

    /// The fence of a set of one.
    #[inline]
    pub(crate) fn fence(&self, one: FenceSetId) -> Fence {
        match one.stream_alone() {
            Some(stream) => Fence::of(stream),
            None => self.fences[one.place()].fence,
        }
    }

    /// Makes a set of one that holds a fence.
    #[inline(always)]
    pub(crate) fn hold(&mut self, Fence { stream, tick, event }: Fence) -> FenceSetId {
        if tick == 0 {
            debug_assert!(event.is_none());
            return FenceSetId::alone(stream);
        }
        let place = self.vacant_fence;
        let Some(held) = self.fences.get_mut(place as usize) else {
            return self.add_fence(Fence { stream, tick, event });
        };
        // Field by field: from a fence in memory it would be read before it is written.
        held.fence.stream = stream;
        held.fence.tick = tick;
        held.fence.event = event;
        self.vacant_fence = std::mem::replace(&mut held.holders, 1);
        FenceSetId(place)
    }

    #[cold]
    fn add_fence(&mut self, fence: Fence) -> FenceSetId {
        let place = self.fences.len() as u32;
        assert!(place < ALONE, "a heap has more than a billion fences");
        self.fences.push(Held { fence, holders: 1 });
        FenceSetId(place)
    }

    /// As [`hold`](Self::hold), of a fence that other frees in a row may [share](Self::share).
    #[inline]
    pub(crate) fn hold_in_row(&mut self, fence: Fence) -> FenceSetId {
        self.row = self.hold(fence);
        self.row
    }

    /// The event of the last fence in a row, if it is of this stream and tick.
    #[inline]
    pub(crate) fn in_row(&self, stream: StreamId, tick: Tick) -> Option<Event> {
        let Fence { stream: last, tick: ended, event } = self.fences.get(self.row.0 as usize)?.fence;
        event.filter(|_| last == stream && ended == tick)
    }

    /// Another set of the last fence in a row, which is there.
    #[inline]
    pub(crate) fn share(&mut self) -> FenceSetId {
        self.fences[self.row.place()].holders += 1;
        self.row
    }

    /// A set of one is given up, and with the last one its fence, whose event is spent.
    #[inline]
    fn let_go(&mut self, one: FenceSetId) {
        if one.is_fence() {
            let held = &mut self.fences[one.place()];
            held.holders -= 1;
            if held.holders == 0 {
                if let Some(event) = held.fence.event.take() {
                    self.spent.push(event);
                }
                (held.fence.tick, held.holders) = (0, self.vacant_fence);
                self.vacant_fence = one.0;
            }
        }
    }

    /// Whether nobody has to wait for the fence of a set of one, or not yet.
    #[inline]
    pub(crate) fn is_met(&self, one: FenceSetId) -> bool {
        !one.is_fence() || self.fences[one.place()].fence.tick == 0
    }

    /// Nobody has to wait for a fence any more. Its event is the caller's.
    #[inline]
    pub(crate) fn meet(&mut self, one: FenceSetId) {
        let fence = &mut self.fences[one.place()].fence;
        (fence.tick, fence.event) = (0, None);
    }

    /// Puts another one on the same stream in the place of the first one of a set. Returns the set.
    pub(crate) fn replace_first(&mut self, set: FenceSetId, one: FenceSetId) -> FenceSetId {
        if set.is_list() {
            let before = std::mem::replace(&mut self.nodes[set.place()].one, one);
            self.let_go(before);
            return set;
        }
        self.let_go(set);
        one
    }

    /// Forgets the first one of a set. Returns the set of all others.
    #[inline]
    pub(crate) fn drop_first(&mut self, set: FenceSetId) -> FenceSetId {
        if set.is_list() {
            return self.drop_first_node(set);
        }
        self.let_go(set);
        FenceSetId::EMPTY
    }

    #[inline(never)]
    fn drop_first_node(&mut self, set: FenceSetId) -> FenceSetId {
        let node = &mut self.nodes[set.place()];
        let (one, rest) = (node.one, std::mem::replace(&mut node.rest, self.vacant_nodes));
        self.vacant_nodes = set;
        self.let_go(one);
        rest
    }

    /// A list of one.
    fn list(&mut self, one: FenceSetId) -> FenceSetId {
        let list = self.vacant_nodes;
        if list.is_empty() {
            let place = self.nodes.len() as u32;
            assert!(place < ALONE, "a heap has more than a billion fences");
            self.nodes.push(Node { one, rest: FenceSetId::EMPTY });
            return FenceSetId(LIST | place);
        }
        let node = &mut self.nodes[list.place()];
        self.vacant_nodes = node.rest;
        *node = Node { one, rest: FenceSetId::EMPTY };
        list
    }

    /// Adds a fence to a set; of two fences on one stream the later one covers the earlier.
    #[inline]
    pub(crate) fn add(&mut self, set: FenceSetId, fence: Fence) -> FenceSetId {
        let one = self.hold(fence);
        if set.is_empty() { one } else { self.link(set, one) }
    }

    /// Puts a set of one into another set. Returns what that is then.
    #[inline(never)]
    fn link(&mut self, set: FenceSetId, new: FenceSetId) -> FenceSetId {
        let fence = self.fence(new);
        let (mut before, mut at) = (FenceSetId::EMPTY, set);
        while let Some((one, rest)) = self.first(at) {
            let there = self.fence(one);
            if there.stream == fence.stream {
                if fence.tick < there.tick {
                    self.let_go(new);
                    return set;
                }
                let there = self.replace_first(at, new);
                return if set.is_list() { set } else { there };
            }
            if there.stream > fence.stream {
                break;
            }
            (before, at) = (at, rest);
        }
        let node = self.list(new);
        if !set.is_list() {
            // The one that it was is behind the new one or before it.
            let old = self.list(set);
            let (first, second) = if before.is_empty() { (node, old) } else { (old, node) };
            self.nodes[first.place()].rest = second;
            return first;
        }
        self.nodes[node.place()].rest = at;
        if before.is_empty() {
            return node;
        }
        self.nodes[before.place()].rest = node;
        set
    }

    /// Takes the ticks and the events of a set's fences away again: streams alone are left. Returns the set.
    pub(crate) fn disarm(&mut self, set: FenceSetId) -> FenceSetId {
        let mut at = set;
        while let Some((one, rest)) = self.first(at) {
            let alone = FenceSetId::alone(self.fence(one).stream);
            let left = self.replace_first(at, alone);
            if !set.is_list() {
                return left;
            }
            at = rest;
        }
        set
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
        if one == other {
            // Freed in a row.
            self.let_go(other);
            return one;
        }
        if !one.is_list() && !other.is_list() {
            let (fence, there) = (self.fence(other), self.fence(one));
            if fence.stream == there.stream {
                let (later, earlier) = if fence.tick < there.tick { (one, other) } else { (other, one) };
                self.let_go(earlier);
                return later;
            }
        }
        while let Some((new, rest)) = self.first(other) {
            if other.is_list() {
                self.vacate_node(other);
            }
            one = self.link(one, new);
            other = rest;
        }
        one
    }

    fn vacate_node(&mut self, list: FenceSetId) {
        self.nodes[list.place()].rest = self.vacant_nodes;
        self.vacant_nodes = list;
    }

    /// Forgets a set; events that no other set has are spent.
    pub(crate) fn clear(&mut self, mut set: FenceSetId) {
        while !set.is_empty() {
            set = self.drop_first(set);
        }
    }

    /// Keeps only the fences that `keep` wants; returns the set that is left.
    pub(crate) fn retain(&mut self, mut set: FenceSetId, keep: impl Fn(&Fence) -> bool) -> FenceSetId {
        let mut kept = FenceSetId::EMPTY;
        while let Some((one, rest)) = self.first(set) {
            if set.is_list() {
                self.vacate_node(set);
            }
            if !keep(&self.fence(one)) {
                self.let_go(one);
            } else if kept.is_empty() {
                kept = one;
            } else {
                kept = self.link(kept, one);
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

    /// How many sets hold each fence, by the set of it alone. O(fences), for the invariants.
    pub(crate) fn holders(&self) -> BTreeMap<FenceSetId, usize> {
        let mut holders: BTreeMap<_, _> =
            self.fences.iter().zip(0..).map(|(held, place)| (FenceSetId(place), held.holders as usize)).collect();
        let mut vacant = self.vacant_fence;
        while let Some(held) = self.fences.get(vacant as usize) {
            holders.remove(&FenceSetId(vacant));
            vacant = held.holders;
        }
        holders
    }

    /// Number of nodes in all lists. O(nodes), for the invariants.
    pub(crate) fn node_count(&self) -> usize {
        self.nodes.len() - self.ones(self.vacant_nodes).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(0);
    const B: StreamId = StreamId(1);
    const C: StreamId = StreamId(2);

    fn spent(table: &mut FenceTable) -> Vec<Event> {
        let mut events = Vec::new();
        table.drain_spent(|event| events.push(event));
        events
    }

    fn is_empty(table: &FenceTable) -> bool {
        table.holders().is_empty() && table.node_count() == 0
    }

    fn ticks(table: &FenceTable, set: FenceSetId) -> Vec<(StreamId, Tick)> {
        table.fences(set).map(|fence| (fence.stream, fence.tick)).collect()
    }

    /// At this tick, with an event of ten times the number.
    fn armed(stream: StreamId, tick: Tick) -> Fence {
        Fence { stream, tick, event: Some(Event(10 * tick)) }
    }

    #[test]
    fn of_two_fences_on_one_stream_the_later_event_survives() {
        let mut table = FenceTable::default();
        for (one, other) in [(4, 7), (7, 4)] {
            let [one, other] = [one, other].map(|tick| table.hold(armed(B, tick)));
            let both = table.union(one, other);
            assert_eq!(ticks(&table, both), [(B, 7)]);
            assert_eq!(spent(&mut table), [Event(40)]);
            table.clear(both);
            assert_eq!(spent(&mut table), [Event(70)]);
            assert!(is_empty(&table));
        }
    }

    #[test]
    fn a_set_is_in_stream_order_whatever_came_first() {
        let orders = [[A, B, C], [A, C, B], [B, A, C], [B, C, A], [C, A, B], [C, B, A]];
        let mut table = FenceTable::default();
        for order in orders {
            let set = order.into_iter().fold(FenceSetId::EMPTY, |set, stream| table.add(set, Fence::of(stream)));
            assert_eq!(ticks(&table, set), [(A, 0), (B, 0), (C, 0)]);
            assert_eq!(table.add(set, Fence::of(B)), set);
            let set = table.add(set, armed(B, 7));
            assert_eq!(ticks(&table, set), [(A, 0), (B, 7), (C, 0)]);
            assert_eq!(table.add(set, Fence::of(B)), set, "it is covered");
            let left = table.retain(set, |fence| fence.stream != A);
            assert_eq!(ticks(&table, left), [(B, 7), (C, 0)]);
            assert_eq!(table.retain(left, |_| false), FenceSetId::EMPTY);
            assert!(is_empty(&table));
            assert_eq!(spent(&mut table), [Event(70)]);
        }
    }

    #[test]
    fn sets_of_several_become_one_set() {
        let mut table = FenceTable::default();
        let mut set = |fences: &[Fence]| fences.iter().fold(FenceSetId::EMPTY, |set, fence| table.add(set, *fence));
        let (one, other) = (set(&[armed(A, 1), armed(C, 5)]), set(&[armed(C, 3), armed(B, 2), Fence::of(A)]));
        let both = table.union(one, other);
        assert_eq!(ticks(&table, both), [(A, 1), (B, 2), (C, 5)]);
        assert_eq!(spent(&mut table), [Event(30)]);
        let disarmed = table.disarm(both);
        assert_eq!(ticks(&table, disarmed), [(A, 0), (B, 0), (C, 0)]);
        assert_eq!(spent(&mut table), [Event(10), Event(20), Event(50)]);
        table.clear(disarmed);
        assert!(is_empty(&table));
    }

    #[test]
    fn a_fence_that_frees_in_a_row_share_is_met_once_and_its_place_left_by_the_last() {
        let mut table = FenceTable::default();
        assert_eq!(table.in_row(B, 3), None);
        let one = table.hold_in_row(armed(B, 3));
        assert_eq!((table.in_row(B, 3), table.in_row(B, 2), table.in_row(C, 3)), (Some(Event(30)), None, None));
        let [other, third] = [(); 2].map(|()| table.share());
        assert_eq!((other, table.holders()[&one]), (one, 3));
        assert_eq!(table.union(one, other), one);
        let wide = table.add(third, Fence::of(A));
        assert_eq!((ticks(&table, wide), table.holders()[&one]), (vec![(A, 0), (B, 3)], 2));
        table.meet(one);
        assert!(table.is_met(one));
        assert_eq!((ticks(&table, wide), table.in_row(B, 3)), (vec![(A, 0), (B, 0)], None));
        assert_eq!(table.drop_first(one), FenceSetId::EMPTY);
        table.clear(wide);
        assert!(is_empty(&table) && spent(&mut table).is_empty());
        assert_eq!(table.hold(armed(C, 4)), one, "the place is used again");
    }
}
