//! The parts of a sync: the changes to the segments, the actions that follow from them, and their comparison across ranks.
//! `registrar/attachment/sync.rs` puts them together.

pub(crate) mod actions;
pub(crate) mod agreement;
pub(crate) mod changes;
pub(crate) mod error;
pub(crate) mod message;

/// Folds a word into a digest of actions, pools or windows, which ranks compare.
pub(crate) fn fold(digest: u64, word: u64) -> u64 {
    // Digits of pi.
    let wide = u128::from(digest ^ word ^ 0x243f6a88_85a308d3) * 0x9e3779b9_7f4a7c15_u128;
    ((wide as u64) ^ ((wide >> 64) as u64)).rotate_left(23).wrapping_add(word)
}
