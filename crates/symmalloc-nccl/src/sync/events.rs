//! The events of some pools since the last sync.

use crate::windows::table::{SegmentChange, SegmentTable};
use symmalloc_core::PoolId;
use symmalloc_core::segment_log::SegmentEvent;

/// The events since the last sync in the pools of one kind of registration.
#[derive(Debug, Default)]
pub(crate) struct PoolEvents {
    /// In order of pools, and within a pool in the order of its log.
    pub(crate) events: Vec<SegmentEvent>,
    /// Pools that the sync detaches, in ascending order.
    pub(crate) leaving: Vec<PoolId>,
}

impl PoolEvents {
    /// Applies the events to the table, and then removes the segments of the pools that are detached. Returns what changed, in this order.
    pub(crate) fn apply_to(&self, table: &mut SegmentTable) -> Vec<SegmentChange> {
        let mut changes: Vec<SegmentChange> = self.events.iter().filter_map(|event| table.apply(event)).collect();
        for &pool in &self.leaving {
            changes.extend(table.detach(pool));
        }
        changes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.leaving.is_empty()
    }
}
