//! Fences: the uses that a free block's next user must wait for on the device (rule D3).
//!
//! A block that other streams used becomes free at `free`, at the same op on every rank. Its uses become fences, and
//! the next stream that takes the block waits for them with `cuStreamWaitEvent`. The completion of work never decides
//! which stream takes the block.
//!
//! A use is fenced in one of two ways:
//! - An **event recorded at free** on each other stream that used the block. The next user waits for no more than
//!   necessary.
//! - A **tick** of the last owner's logical clock, which costs nothing. If another stream takes the block, which
//!   happens only where streams share a heap, an event is then recorded on the owner's stream.
//!
//! Many fences are void by the time the block is reused, because the stream that reuses it has waited for the fence's
//! stream in the meantime. [`StreamClocks`](crate::streams::clocks::StreamClocks) derives this from the program's ops
//! alone, so all ranks agree.
//!
//! ```text
//!  void(fence, taker)  ⇔  fence.tick ≤ waited[taker][fence.stream]  or  fence.tick ≤ synchronized[fence.stream]
//! ```

use crate::streams::clocks::Tick;
use crate::types::backend::Event;
use crate::types::ids::StreamId;
use crate::types::look_up::LookUp;
use crate::types::work;
use slab::Slab;
use smallvec::SmallVec;

/// One use that must complete: all work that was submitted to `stream` up to `tick`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(crate) stream: StreamId,
    /// 0 if there is nothing to wait for, or while the block is still allocated.
    pub(crate) tick: Tick,
    /// The recorded event, which copies of this fence share; `None` if the fence is only a tick.
    pub(crate) event: Option<Event>,
}

impl Fence {
    /// Creates a fence for a use before the block is freed. It has no tick yet.
    pub(crate) fn of(stream: StreamId) -> Self {
        Fence { stream, tick: 0, event: None }
    }
}

/// The fences of one block: at most one per stream, in stream order.
pub(crate) type Fences = SmallVec<[Fence; 2]>;

/// The index of a block's fences in a [`FenceTable`]. Most blocks have no fences and no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FenceSetId(u32);

impl FenceSetId {
    pub(crate) const EMPTY: FenceSetId = FenceSetId(u32::MAX);

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }
}

/// The fences of one heap's blocks.
#[derive(Debug, Default)]
pub(crate) struct FenceTable {
    /// The sets of fences. None is empty, and each belongs to one block.
    sets: Slab<Fences>,
    /// Events that no fence refers to any more. The arena recycles them.
    spent: Vec<Event>,
    /// For each event that several fences share, the number of these fences minus one.
    copies: LookUp<u64, u32>,
}

impl FenceTable {
    /// Returns the fences of a set.
    pub(crate) fn fences(&self, set: FenceSetId) -> &[Fence] {
        self.sets.get(set.0 as usize).map_or(&[], |fences| fences)
    }

    /// Adds a set. Its fences are in stream order.
    pub(crate) fn insert(&mut self, fences: Fences) -> FenceSetId {
        debug_assert!(fences.is_sorted_by(|a, b| a.stream < b.stream));
        if fences.is_empty() {
            return FenceSetId::EMPTY;
        }
        let place = self.sets.insert(fences);
        assert!(place < u32::MAX as usize, "a heap has more than four billion fenced blocks");
        FenceSetId(place as u32)
    }

    /// Removes a set and returns its fences. The caller owns their events.
    pub(crate) fn take(&mut self, set: FenceSetId) -> Fences {
        self.sets.try_remove(set.0 as usize).unwrap_or_default()
    }

    /// Adds a copy of a set for another block with the same users.
    pub(crate) fn copy(&mut self, set: FenceSetId) -> FenceSetId {
        let fences = Fences::from_slice(self.fences(set));
        for event in fences.iter().filter_map(|fence| fence.event) {
            let copies = self.copies.find(event.0).copied().unwrap_or(0);
            self.copies.insert(event.0, copies + 1);
        }
        self.insert(fences)
    }

    /// Drops a fence's reference to its event. The last reference makes the event spent.
    fn drop_event(&mut self, event: Event) {
        match self.copies.take(event.0) {
            None => self.spent.push(event),
            Some(1) => {}
            Some(copies) => self.copies.insert(event.0, copies - 1),
        }
    }

    /// Replaces the fences of a set. The old fences must have no events.
    pub(crate) fn replace(&mut self, set: FenceSetId, fences: Fences) {
        self.sets[set.0 as usize] = fences;
    }

    /// Adds a fence to a set. If the set already has a fence on this stream, only the later of the two remains.
    pub(crate) fn add(&mut self, set: FenceSetId, fence: Fence) -> FenceSetId {
        let Some(fences) = self.sets.get_mut(set.0 as usize) else {
            return self.insert(SmallVec::from_slice(&[fence]));
        };
        let spent = match fences.binary_search_by_key(&fence.stream, |there| there.stream) {
            Err(at) => {
                fences.insert(at, fence);
                None
            }
            Ok(at) if fence.tick < fences[at].tick => fence.event,
            Ok(at) => std::mem::replace(&mut fences[at], fence).event,
        };
        if let Some(event) = spent {
            self.drop_event(event);
        }
        set
    }

    /// Merges the fences of two blocks that become one.
    pub(crate) fn union(&mut self, one: FenceSetId, other: FenceSetId) -> FenceSetId {
        if one.is_empty() {
            return other;
        }
        let fences = self.take(other);
        work::count(fences.len());
        fences.into_iter().fold(one, |set, fence| self.add(set, fence))
    }

    /// Removes a set. Its events become spent.
    pub(crate) fn clear(&mut self, set: FenceSetId) {
        let fences = self.take(set);
        fences.into_iter().filter_map(|fence| fence.event).for_each(|event| self.drop_event(event));
    }

    /// Drops the fences for which `is_over` returns `true`. Returns the remaining set.
    pub(crate) fn drop_over(&mut self, set: FenceSetId, is_over: impl Fn(&Fence) -> bool) -> FenceSetId {
        let (over, left): (Fences, Fences) = self.take(set).into_iter().partition(is_over);
        over.into_iter().filter_map(|fence| fence.event).for_each(|event| self.drop_event(event));
        self.insert(left)
    }

    /// Passes the events that no fence refers to any more to `recycle`, in the order in which they were dropped.
    #[inline]
    pub(crate) fn drain_spent(&mut self, recycle: impl FnMut(Event)) {
        if !self.spent.is_empty() {
            self.spent.drain(..).for_each(recycle);
        }
    }

    /// Returns the number of fences that share an event, for the invariants.
    pub(crate) fn shares(&self, event: Event) -> u32 {
        self.copies.find(event.0).map_or(1, |copies| copies + 1)
    }

    /// Returns the number of sets, for the invariants.
    pub(crate) fn len(&self) -> usize {
        self.sets.len()
    }
}
