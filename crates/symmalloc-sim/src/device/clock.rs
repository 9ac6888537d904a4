//! Vector clocks, which record how much work of each stream is known to precede a point in time.
//!
//! ```text
//! clock = { stream → epoch }        a use (stream, epoch) precedes the clock  ⇔  clock[stream] ≥ epoch
//! join(a, b)[s] = max(a[s], b[s])
//! ```
//!
//! A stream's *epoch* counts the observations of its work, which are recorded events and synchronizations. Work
//! submitted between two observations shares one epoch, because nothing can be ordered between parts of it. Adjacent
//! uses therefore merge, and clocks advance slowly.

use smallvec::SmallVec;
use symmalloc_core::ids::StreamId;

/// Maximum number of epochs that are inserted one by one.
const FEW: usize = 8;

/// The latest preceding epoch of each stream. The epoch of an absent stream is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VectorClock {
    /// Ascending by stream. Each stream occurs at most once, and no epoch is 0.
    epochs: SmallVec<[(StreamId, u64); 2]>,
}

impl VectorClock {
    /// Returns the number of streams with an epoch.
    pub(crate) fn len(&self) -> usize {
        self.epochs.len()
    }

    /// Returns the streams that have an epoch, with their latest epochs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, u64)> + '_ {
        self.epochs.iter().copied()
    }

    /// Returns the latest epoch of `stream` that precedes this clock.
    pub(crate) fn epoch(&self, stream: StreamId) -> u64 {
        match self.epochs.binary_search_by_key(&stream, |&(s, _)| s) {
            Ok(index) => self.epochs[index].1,
            Err(_) => 0,
        }
    }

    /// Returns `true` if the work of `stream` in `epoch` precedes this clock.
    pub(crate) fn covers(&self, stream: StreamId, epoch: u64) -> bool {
        self.epoch(stream) >= epoch
    }

    /// Adds work of `stream` up to `epoch` to the preceding work.
    pub(crate) fn raise(&mut self, stream: StreamId, epoch: u64) {
        match self.epochs.binary_search_by_key(&stream, |&(s, _)| s) {
            Ok(index) => self.epochs[index].1 = self.epochs[index].1.max(epoch),
            Err(index) => self.epochs.insert(index, (stream, epoch)),
        }
    }

    /// Adds all work that precedes `other` to the preceding work.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        if other.len() <= FEW {
            other.epochs.iter().for_each(|&(stream, epoch)| self.raise(stream, epoch));
            return;
        }
        // A sort merges two ascending runs in linear time. Inserting one by one would move the rest each time.
        self.epochs.extend_from_slice(&other.epochs);
        self.epochs.sort_by_key(|(stream, _)| *stream);
        self.epochs.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            if is_same {
                kept.1 = kept.1.max(next.1);
            }
            is_same
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_takes_the_later_epoch_of_each_stream() {
        let (mut a, mut b) = (VectorClock::default(), VectorClock::default());
        a.raise(StreamId(1), 5);
        a.raise(StreamId(3), 1);
        b.raise(StreamId(1), 2);
        b.raise(StreamId(2), 9);
        a.join(&b);
        assert_eq!([1, 2, 3, 4].map(|s| a.epoch(StreamId(s))), [5, 9, 1, 0]);
        let many = |step: u16| {
            let mut clock = VectorClock::default();
            (0..100).for_each(|index| clock.raise(StreamId(index * step), u64::from(index) + 1));
            clock
        };
        let (mut twos, threes) = (many(2), many(3));
        twos.join(&threes);
        assert_eq!([0, 1, 2, 3, 6, 198, 297].map(|s| twos.epoch(StreamId(s))), [1, 0, 2, 2, 4, 100, 100]);
        assert_eq!(twos.len(), 100 + 100 - 34);
        assert!(a.covers(StreamId(2), 9) && !a.covers(StreamId(2), 10) && !a.covers(StreamId(7), 1));
    }
}
