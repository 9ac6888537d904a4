//! The fallback placement: best fit in order of time, as an online allocator would place the rectangles.
//! It takes O(n log n).
//!
//! It searches free blocks instead of overlapping rectangles. Therefore even a problem that is too large to decode a
//! single order within the budget has a solution. Rectangles of a repeated step that live into the next step lie at the
//! bottom, for the whole step.

use crate::problem::Problem;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Returns offsets by index in the problem.
pub(crate) fn best_fit_by_time(problem: &Problem) -> Vec<u64> {
    let rectangles = problem.rectangles();
    let mut offsets = vec![0; rectangles.len()];
    let mut intervals = vec![0_u8; rectangles.len()];
    problem.intervals().for_each(|it| intervals[it.owner as usize] += 1);
    let mut blocks = FreeBlocks::default();
    for (index, _) in intervals.iter().enumerate().filter(|(_, count)| **count > 1) {
        offsets[index] = blocks.take(rectangles[index].size);
    }
    let within = || problem.intervals().filter(|it| intervals[it.owner as usize] == 1);
    let begins = within().map(|it| (it.lower, true, Reverse(it.upper), it.owner as usize));
    let ends = within().map(|it| (it.upper, false, Reverse(it.upper), it.owner as usize));
    // If several rectangles begin together, the longest comes first, so that rectangles that end together are adjacent.
    let mut changes: Vec<(u64, bool, Reverse<u64>, usize)> = begins.chain(ends).collect();
    changes.sort_unstable();
    for (_, begins, _, index) in changes {
        let size = rectangles[index].size;
        if begins {
            offsets[index] = blocks.take(size);
        } else {
            blocks.give_back(offsets[index], size);
        }
    }
    offsets
}

/// Free blocks below the top. No two are adjacent, and none touches the top.
#[derive(Default)]
struct FreeBlocks {
    /// Sizes by offset.
    by_offset: BTreeMap<u64, u64>,
    /// The same blocks, as (size, offset).
    by_size: BTreeSet<(u64, u64)>,
    top: u64,
}

impl FreeBlocks {
    /// Takes space from the smallest block that is large enough, or from the top if there is none. If several blocks
    /// are equally small, takes the lowest.
    fn take(&mut self, size: u64) -> u64 {
        let Some(&(room, offset)) = self.by_size.range((size, 0)..).next() else {
            self.top += size;
            return self.top - size;
        };
        self.remove(offset, room);
        if room > size {
            self.insert(offset + size, room - size);
        }
        offset
    }

    fn give_back(&mut self, mut offset: u64, mut size: u64) {
        if let Some((&below, &room)) = self.by_offset.range(..offset).next_back()
            && below + room == offset
        {
            self.remove(below, room);
            (offset, size) = (below, room + size);
        }
        if let Some(&room) = self.by_offset.get(&(offset + size)) {
            self.remove(offset + size, room);
            size += room;
        }
        if offset + size == self.top {
            self.top = offset;
        } else {
            self.insert(offset, size);
        }
    }

    fn insert(&mut self, offset: u64, size: u64) {
        self.by_offset.insert(offset, size);
        self.by_size.insert((size, offset));
    }

    fn remove(&mut self, offset: u64, size: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(size, offset));
    }
}
