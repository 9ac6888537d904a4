//! A map from bytes to values, stored as disjoint intervals.
//!
//! ```text
//! insert [2,6) b into   [0────a────8)   gives   [0─a─2)[2─b─6)[6─a─8)
//! insert [6,8) b                        gives   [0─a─2)[2───b───8)          (adjacent equal values merge)
//! ```
//!
//! An empty map owns no memory. The size of a map depends on the number of runs of equal values, not on the number of
//! bytes.

use std::collections::BTreeMap;
use symmalloc_core::work;

/// A map of disjoint half-open intervals, each with a value.
#[derive(Clone, Debug)]
pub(crate) struct IntervalMap<V> {
    /// Start → (end, value). Intervals are nonempty and disjoint, and adjacent intervals differ in value.
    by_start: BTreeMap<u64, (u64, V)>,
}

/// An interval and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval<V> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) value: V,
}

impl<V> Default for IntervalMap<V> {
    fn default() -> Self {
        IntervalMap { by_start: BTreeMap::new() }
    }
}

impl<V: Copy + PartialEq> IntervalMap<V> {
    /// Returns the number of intervals.
    pub(crate) fn len(&self) -> usize {
        self.by_start.len()
    }

    /// Returns the parts of `start..end` that have a value, in ascending order.
    pub(crate) fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = Interval<V>> + '_ {
        let before = self.by_start.range(..start).next_back();
        before.into_iter().chain(self.by_start.range(start..end)).inspect(|_| work::count(1)).filter_map(
            move |(&from, &(to, value))| {
                let part = Interval { start: from.max(start), end: to.min(end), value };
                (part.start < part.end).then_some(part)
            },
        )
    }

    /// Returns `true` if every byte of `start..end` has a value.
    pub(crate) fn covers(&self, start: u64, end: u64) -> bool {
        self.overlapping(start, end).map(|part| part.end - part.start).sum::<u64>() == end - start
    }

    /// Removes the values of `start..end`. Values outside this range are unchanged.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if let Some((&from, &(to, value))) = self.by_start.range(..start).next_back()
            && to > start
        {
            self.by_start.insert(from, (start, value));
            if to > end {
                self.by_start.insert(end, (to, value));
                return;
            }
        }
        while let Some((&from, &(to, value))) = self.by_start.range(start..end).next() {
            self.by_start.remove(&from);
            if to > end {
                self.by_start.insert(end, (to, value));
            }
        }
    }

    /// Sets the value of every byte of `start..end`, replacing existing values.
    pub(crate) fn insert(&mut self, mut start: u64, mut end: u64, value: V) {
        debug_assert!(start < end);
        self.remove(start, end);
        if let Some((&from, &(to, left))) = self.by_start.range(..start).next_back()
            && to == start
            && left == value
        {
            start = from;
        }
        if let Some(&(to, right)) = self.by_start.get(&end)
            && right == value
        {
            self.by_start.remove(&end);
            end = to;
        }
        self.by_start.insert(start, (end, value));
    }

    /// Keeps only the intervals whose value satisfies `keep`.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(V) -> bool) {
        self.by_start.retain(|_, (_, value)| keep(*value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sets bytes in the reference model, which stores one value per byte.
    fn apply(bytes: &mut [Option<u8>], start: u64, end: u64, value: Option<u8>) {
        bytes[start as usize..end as usize].fill(value);
    }

    proptest! {
        #[test]
        fn behaves_like_a_value_per_byte(steps in prop::collection::vec((0u64..40, 1u64..20, prop::option::of(0u8..3)), 1..60)) {
            let mut map = IntervalMap::default();
            let mut bytes = vec![None; 64];
            for (start, size, value) in steps {
                let end = start + size;
                match value {
                    Some(value) => map.insert(start, end, value),
                    None => map.remove(start, end),
                }
                apply(&mut bytes, start, end, value);
                let seen: Vec<Option<u8>> = (0..64).map(|b| map.overlapping(b, b + 1).next().map(|i| i.value)).collect();
                prop_assert_eq!(&seen, &bytes);
                prop_assert_eq!(map.covers(start, end), value.is_some());
                // The map has exactly one interval per run of equal values.
                let runs = bytes.chunk_by(|a, b| a == b).filter(|run| run[0].is_some()).count();
                prop_assert_eq!(map.len(), runs);
            }
        }
    }

    #[test]
    fn overlapping_parts_are_clipped() {
        let mut map = IntervalMap::default();
        map.insert(0, 10, 'a');
        map.insert(20, 30, 'b');
        let parts: Vec<_> = map.overlapping(5, 25).map(|i| (i.start, i.end, i.value)).collect();
        assert_eq!(parts, [(5, 10, 'a'), (20, 25, 'b')]);
    }

    #[test]
    fn retain_drops_by_value() {
        let mut map = IntervalMap::default();
        map.insert(0, 10, 1);
        map.insert(10, 20, 2);
        map.retain(|value| value == 2);
        assert!(!map.covers(0, 1) && map.covers(10, 20));
    }
}
