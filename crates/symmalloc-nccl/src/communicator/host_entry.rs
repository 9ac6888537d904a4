//! Flight-record entries of host operations that all ranks perform together.

use crate::communicator::error::Stage;
use crate::watchdog::{EntryNumber, Tick, Watched, Work};

/// A host operation that all ranks perform together, recorded from `begin` until dropped.
pub(super) struct HostEntry<'a> {
    watched: &'a Watched,
    number: EntryNumber,
}

impl<'a> HostEntry<'a> {
    pub(super) fn begin(watched: &'a Watched, stage: Stage, elements: Option<u64>) -> Self {
        let work = Work::Named { kind: stage.call().into(), elements };
        HostEntry { watched, number: watched.flight().begin(work, None, Tick::now()) }
    }
}

impl Drop for HostEntry<'_> {
    fn drop(&mut self) {
        self.watched.flight().over(self.number, Tick::now());
    }
}
