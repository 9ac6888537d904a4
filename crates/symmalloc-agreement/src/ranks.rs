//! Sets of ranks, kept and shown as ranges: `0-2,4-7`.

use std::fmt;

/// A set of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankSet {
    /// Inclusive, ascending, with gaps between them.
    ranges: Vec<(u32, u32)>,
}

impl RankSet {
    /// Adds a rank that is greater than all others.
    pub(crate) fn push(&mut self, rank: u32) {
        match self.ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            last => {
                debug_assert!(last.is_none_or(|(_, last)| *last < rank), "ranks are added in order");
                self.ranges.push((rank, rank));
            }
        }
    }

    /// Whether the rank is in the set.
    pub fn contains(&self, rank: u32) -> bool {
        let at = self.ranges.partition_point(|(_, last)| *last < rank);
        self.ranges.get(at).is_some_and(|(first, _)| *first <= rank)
    }

    /// Number of ranks.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(|(first, last)| (last - first) as usize + 1).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The least rank.
    pub fn first(&self) -> Option<u32> {
        self.ranges.first().map(|(first, _)| *first)
    }

    /// The ranks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().flat_map(|(first, last)| *first..=*last)
    }
}

impl FromIterator<u32> for RankSet {
    /// The set of these ranks, in any order.
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
    /// `0-2,4-7`; after eight ranges, how many there are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        for (index, (first, last)) in self.ranges.iter().take(SHOWN).enumerate() {
            let comma = if index > 0 { "," } else { "" };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        if self.ranges.len() > SHOWN { write!(f, ",... ({} ranks)", self.len()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_a_range_and_every_rank_is_found_again() {
        let set: RankSet = [7, 0, 2, 1, 4, 5, 2, 6].into_iter().collect();
        assert_eq!(set.to_string(), "0-2,4-7");
        assert_eq!((set.len(), set.first()), (7, Some(0)));
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6, 7]);
        assert!((0..10).all(|rank| set.contains(rank) != [3, 8, 9].contains(&rank)));
    }

    #[test]
    fn a_scattered_set_is_cut_short_when_shown() {
        let set: RankSet = (0..4096).step_by(2).collect();
        assert_eq!(set.to_string(), "0,2,4,6,8,10,12,14,... (2048 ranks)");
        assert!(RankSet::default().is_empty());
    }
}
