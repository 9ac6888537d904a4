//! The hash by which ranks compare lists of actions, pools and windows.

/// Folds a word into a digest.
pub(crate) fn fold(digest: u64, word: u64) -> u64 {
    // Digits of pi.
    let wide = u128::from(digest ^ word ^ 0x243f6a88_85a308d3) * 0x9e3779b9_7f4a7c15_u128;
    ((wide as u64) ^ ((wide >> 64) as u64)).rotate_left(23).wrapping_add(word)
}
