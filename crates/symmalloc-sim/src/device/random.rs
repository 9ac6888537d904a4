//! SplitMix64, the only source of randomness in the simulator.
//!
//! ```text
//! state ← state + 0x9e3779b97f4a7c15        (an odd constant: the state runs through all 2^64 values)
//! output = mix(state)                       (a bijection: xor-shifts and odd multiplications)
//! ```
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
//! Vigna's reference code. The generator has eight bytes of state and no dependencies. It produces the same numbers on
//! every platform, so a seed always identifies the same run. It is not cryptographically secure.

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A seeded sequence of 64-bit numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// Creates the sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        SplitMix64 { state: seed }
    }

    /// Returns a separate sequence for one purpose, identified by a label, so that drawing more numbers for one purpose
    /// does not affect another. `self` is unchanged: the same label always returns the same sequence.
    #[must_use]
    pub fn split(&self, label: u64) -> Self {
        SplitMix64 { state: mix(self.state ^ mix(label.wrapping_add(GAMMA))) }
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0. The result has a bias of at most `bound` / 2^64, which is
    /// irrelevant here.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns `true` with a probability of `numerator_per_million` in a million.
    pub fn chance(&mut self, numerator_per_million: u32) -> bool {
        self.below(1_000_000) < u64::from(numerator_per_million)
    }
}

/// Maps a 64-bit number to a scrambled one. The mapping is a bijection: distinct inputs give distinct outputs.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_matches_the_reference_code() {
        let mut random = SplitMix64::new(1234567);
        let expected = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821u64,
        ];
        assert_eq!(expected.map(|_| random.next_u64()), expected);
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_both_ends() {
        let mut random = SplitMix64::new(1);
        let drawn: Vec<u64> = (0..1000).map(|_| random.below(7)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&0), Some(&6)));
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn chance_returns_true_at_the_given_rate() {
        let mut random = SplitMix64::new(2);
        let hits = (0..100_000).filter(|_| random.chance(250_000)).count();
        assert!((24_000..26_000).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| !random.chance(0) && random.chance(1_000_000)));
    }

    #[test]
    fn split_sequences_differ_by_label_and_by_seed() {
        let firsts: std::collections::BTreeSet<u64> =
            (0..10).flat_map(|seed| (0..10).map(move |label| SplitMix64::new(seed).split(label).next_u64())).collect();
        assert_eq!(firsts.len(), 100);
    }
}
