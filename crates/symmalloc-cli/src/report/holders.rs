//! Holders of memory: live allocations grouped by name, or by size if they have no name.

use crate::picture::memory::{DrawnBlock, DrawnHeap, Memory};
use crate::quantity::memory;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_core::PoolId;

/// Live allocations with the same name, or without a name and with the same size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Holder {
    /// Name of the allocations, if the program named them.
    pub(super) name: Option<Box<str>>,
    /// Size of each allocation, if they have no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) each_bytes: Option<u64>,
    pub(super) allocations: usize,
    pub(super) requested_bytes: u64,
}

impl Holder {
    /// Describes where the allocations come from, as text to put after their number.
    pub(super) fn origin(&self) -> String {
        match (&self.name, self.each_bytes) {
            (Some(name), _) => format!("by {name}"),
            (None, each) => format!("of {} without a name", memory(each.unwrap_or(0))),
        }
    }

    pub(super) fn label(&self) -> String {
        match (&self.name, self.each_bytes) {
            (Some(name), _) => name.to_string(),
            (None, each) => format!("without a name, {} each", memory(each.unwrap_or(0))),
        }
    }
}

/// Returns the holders in descending order of bytes.
pub(super) fn of(memory: &Memory) -> Vec<Holder> {
    of_blocks(memory.blocks())
}

/// Returns the holders in some pools in descending order of bytes.
pub(super) fn of_pools(memory: &Memory, is_meant: impl Fn(PoolId) -> bool) -> Vec<Holder> {
    of_blocks(memory.heaps.iter().filter(|heap| is_meant(heap.owner.pool)).flat_map(DrawnHeap::blocks))
}

fn of_blocks<'a>(blocks: impl Iterator<Item = &'a DrawnBlock>) -> Vec<Holder> {
    let mut holders: BTreeMap<(Option<Arc<str>>, Option<u64>), Holder> = BTreeMap::new();
    for held in blocks.filter_map(|block| block.held.as_ref()) {
        let each_bytes = held.name.is_none().then_some(held.requested_bytes);
        let holder = holders.entry((held.name.clone(), each_bytes)).or_insert_with(|| Holder {
            name: held.name.as_deref().map(Into::into),
            each_bytes,
            allocations: 0,
            requested_bytes: 0,
        });
        holder.allocations += 1;
        holder.requested_bytes += held.requested_bytes;
    }
    let mut holders: Vec<Holder> = holders.into_values().collect();
    holders.sort_by_key(|holder| Reverse(holder.requested_bytes));
    holders
}
