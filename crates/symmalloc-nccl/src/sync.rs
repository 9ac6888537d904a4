//! The parts of a sync: the events of the observed pools, the actions that follow from these events, and the comparison of the actions
//! across ranks. `registrar/attached_comm/sync.rs` combines the parts.

pub(crate) mod actions;
pub(crate) mod agreement;
pub(crate) mod error;
pub(crate) mod message;
pub(crate) mod observed;
pub(crate) mod offset_difference;
pub(crate) mod settings;

use std::collections::BTreeMap;
use symmalloc_agreement::RankSet;

/// Folds a word into a digest that ranks compare: of actions, pools or windows.
pub(crate) fn fold(digest: u64, word: u64) -> u64 {
    // Digits of pi.
    let wide = u128::from(digest ^ word ^ 0x243f6a88_85a308d3) * 0x9e3779b9_7f4a7c15_u128;
    ((wide as u64) ^ ((wide >> 64) as u64)).rotate_left(23).wrapping_add(word)
}

/// Groups ranks that have the same value, in ascending order of the values.
pub(crate) fn groups<T: Ord>(values: impl Iterator<Item = T>) -> Vec<(RankSet, T)> {
    let mut groups: BTreeMap<T, Vec<u32>> = BTreeMap::new();
    for (value, rank) in values.zip(0..) {
        groups.entry(value).or_default().push(rank);
    }
    groups.into_iter().map(|(value, ranks)| (ranks.into_iter().collect(), value)).collect()
}
