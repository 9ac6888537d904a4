//! Sets of ranks, stored and displayed as ranges: `0-2,4-7`.

use std::fmt;

/// A set of ranks, displayed as ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankSet {
    /// Inclusive ranges, ascending, with at least one missing rank between neighbors.
    ranges: Vec<(u32, u32)>,
}

impl RankSet {
    /// Adds a rank, which must be greater than all ranks in the set.
    pub(crate) fn push(&mut self, rank: u32) {
        match self.ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            last => {
                debug_assert!(last.is_none_or(|(_, last)| *last < rank), "ranks must be added in ascending order");
                self.ranges.push((rank, rank));
            }
        }
    }

    /// Returns `true` if the set contains the rank.
    pub fn contains(&self, rank: u32) -> bool {
        let at = self.ranges.partition_point(|(_, last)| *last < rank);
        self.ranges.get(at).is_some_and(|(first, _)| *first <= rank)
    }

    /// Returns the number of ranks in the set.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(|(first, last)| (last - first) as usize + 1).sum()
    }

    /// Returns `true` if the set contains no ranks.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the smallest rank.
    pub fn first(&self) -> Option<u32> {
        self.ranges.first().map(|(first, _)| *first)
    }

    /// Returns an iterator over the ranks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().flat_map(|(first, last)| *first..=*last)
    }
}

impl FromIterator<u32> for RankSet {
    /// Creates a set from ranks in any order. Duplicates are ignored.
    fn from_iter<I: IntoIterator<Item = u32>>(ranks: I) -> Self {
        let mut ranks: Vec<u32> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let mut set = RankSet::default();
        ranks.into_iter().for_each(|rank| set.push(rank));
        set
    }
}

impl fmt::Display for RankSet {
    /// Writes the set as `0-2,4-7`. After eight ranges, the total number of ranks replaces the rest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        for (index, (first, last)) in self.ranges.iter().take(SHOWN).enumerate() {
            let comma = if index > 0 { "," } else { "" };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        if self.ranges.len() > SHOWN { write!(f, ",... ({} ranks)", self.len()) } else { Ok(()) }
    }
}

/// A set of ranks, displayed as `rank 3` or `ranks 0-2`.
#[derive(Clone, Copy, Debug)]
pub struct Ranks<'a>(
    /// The ranks.
    pub &'a RankSet,
);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", if self.0.len() == 1 { "rank" } else { "ranks" }, self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranks_form_a_range_and_contains_finds_every_rank() {
        let set: RankSet = [7, 0, 2, 1, 4, 5, 2, 6].into_iter().collect();
        assert_eq!(set.to_string(), "0-2,4-7");
        assert_eq!((set.len(), set.first()), (7, Some(0)));
        assert_eq!([3..4, 3..5].map(|ranks| Ranks(&ranks.collect()).to_string()), ["rank 3", "ranks 3-4"]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6, 7]);
        assert!((0..10).all(|rank| set.contains(rank) != [3, 8, 9].contains(&rank)));
    }

    #[test]
    fn display_truncates_a_scattered_set() {
        let set: RankSet = (0..4096).step_by(2).collect();
        assert_eq!(set.to_string(), "0,2,4,6,8,10,12,14,... (2048 ranks)");
        assert!(RankSet::default().is_empty());
    }
}
