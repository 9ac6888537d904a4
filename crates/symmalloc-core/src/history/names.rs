//! Names of live allocations. Blocks have no room for them, and most programs name few allocations.

use crate::blocks::table::Slot;
use ahash::RandomState;

/// A hash map with fixed seeds. Nothing iterates over it, so no decision and no report follows hash order.
#[allow(clippy::disallowed_types, reason = "looked up by key only, with fixed seeds")]
pub(crate) type SlotMap<K, V> = std::collections::HashMap<K, V, RandomState>;

pub(crate) fn slot_map<K, V>() -> SlotMap<K, V> {
    SlotMap::with_hasher(RandomState::with_seeds(1, 2, 3, 4))
}

/// What the program called its live allocations, by slot.
pub(crate) struct Names {
    by_slot: SlotMap<Slot, Box<str>>,
}

impl Default for Names {
    fn default() -> Self {
        Names { by_slot: slot_map() }
    }
}

impl Names {
    pub(crate) fn insert(&mut self, slot: Slot, name: &str) {
        self.by_slot.insert(slot, name.into());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_slot.is_empty()
    }

    pub(crate) fn take(&mut self, slot: Slot) -> Option<Box<str>> {
        if self.is_empty() { None } else { self.by_slot.remove(&slot) }
    }

    pub(crate) fn find(&self, slot: Slot) -> Option<&str> {
        self.by_slot.get(&slot).map(AsRef::as_ref)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_slot.len()
    }
}

/// As many whole characters of a name as fit into so many bytes.
pub(crate) fn cut_name(name: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}
