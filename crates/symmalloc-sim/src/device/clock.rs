//! Vector clocks, which record how much of each stream's work is known to precede a point in time.
//!
//! ```text
//! clock = { stream → epoch }        a use (stream, epoch) precedes the clock  ⇔  clock[stream] ≥ epoch
//! join(a, b)[s] = max(a[s], b[s])
//! ```
//!
//! A stream's *epoch* counts the observations of its work: recorded events and synchronizations. Work submitted between two
//! observations shares one epoch, since nothing can be ordered in between. Adjacent uses therefore merge, and clocks
//! advance slowly.

use smallvec::SmallVec;
use symmalloc_core::ids::StreamId;

/// The latest preceding epoch of each stream. The epoch of an absent stream is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VectorClock {
    /// Ascending by stream, with each stream at most once and no epoch 0.
    epochs: SmallVec<[(StreamId, u64); 2]>,
}

impl VectorClock {
    /// Returns the number of streams with an epoch.
    pub(crate) fn len(&self) -> usize {
        self.epochs.len()
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

    /// Adds everything that precedes `other` to the preceding work.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        for &(stream, epoch) in &other.epochs {
            self.raise(stream, epoch);
        }
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
        assert!(a.covers(StreamId(2), 9) && !a.covers(StreamId(2), 10) && !a.covers(StreamId(7), 1));
    }
}
