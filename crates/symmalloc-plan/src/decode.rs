//! Decoding of an order into offsets: rectangles are placed one by one, each in a gap among those before it.
//!
//! Two structures find the rectangles that overlap a new one in time, so that no pairs are stored:
//!
//! ```text
//!            lower          upper
//!   ───────────┼──────────────┼────────►  time, as ranks of births: every rectangle has its own
//!  a ──────────┼────                      lives at `lower`:          a segment tree, each in O(log n) nodes
//!  b           │    ────────  │           is born in (lower, upper): a bit set by birth
//! ```
//!
//! A rectangle that lives into the next step has two intervals and therefore two births. Both are looked up.
//!
//! The gaps between these rectangles are scanned from below. [`Fit::Best`] takes the smallest gap that is large enough,
//! [`Fit::Lowest`] the lowest. Examining one rectangle costs one step, and so does examining 32 words of bits.

use crate::problem::Problem;

/// The choice of a gap for a rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The smallest gap that is large enough. Of several, the lowest.
    Best,
    /// The lowest gap that is large enough.
    Lowest,
}

/// The state shared by all orders of one problem. Items are its rectangles, numbered by beginning, then by index in the
/// problem. Births are the beginnings of their intervals, in order of time.
pub(crate) struct Decoder {
    /// By item: index of the rectangle in the problem.
    place: Vec<u32>,
    /// By item: size.
    size: Vec<u64>,
    /// By item: births of its intervals. Both are equal if it has one interval.
    births: Vec<[u32; 2]>,
    /// By birth: its item.
    item: Vec<u32>,
    /// By birth: the first birth at or after the end of its interval.
    end: Vec<u32>,
    /// Number of leaves of the segment tree; a power of two.
    leaves: usize,
}

/// Offsets by item, and the height that the items reach.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) offsets: Vec<u64>,
    pub(crate) height: u64,
}

impl Decoder {
    pub(crate) fn new(problem: &Problem) -> Self {
        let rectangles = problem.rectangles();
        let mut place: Vec<u32> = (0..rectangles.len() as u32).collect();
        place.sort_by_key(|place| rectangles[*place as usize].lower);
        let mut item_at = vec![0; place.len()];
        (0..).zip(&place).for_each(|(item, place)| item_at[*place as usize] = item);
        let mut intervals: Vec<(u64, u32, u64)> =
            problem.intervals().map(|it| (it.lower, item_at[it.owner as usize], it.upper)).collect();
        intervals.sort_unstable();
        let end = |upper: u64| intervals.partition_point(|(lower, ..)| *lower < upper) as u32;
        let mut births = vec![[u32::MAX; 2]; place.len()];
        for (birth, &(_, item, _)) in (0..).zip(&intervals) {
            let [first, _] = births[item as usize];
            births[item as usize] = [first.min(birth), birth];
        }
        Decoder {
            size: place.iter().map(|place| rectangles[*place as usize].size).collect(),
            place,
            births,
            item: intervals.iter().map(|(_, item, _)| *item).collect(),
            end: intervals.iter().map(|(.., upper)| end(*upper)).collect(),
            leaves: intervals.len().next_power_of_two(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.place.len()
    }

    /// Returns an item's size and its lifetime in births.
    pub(crate) fn extent(&self, item: u32) -> (u64, u64) {
        let life = self.births_of(item).map(|birth| u64::from(self.end[birth as usize] - birth)).sum();
        (self.size[item as usize], life)
    }

    /// Returns the index of an item in the problem.
    pub(crate) fn place(&self, item: u32) -> u32 {
        self.place[item as usize]
    }

    /// Converts offsets by item into offsets by index in the problem.
    pub(crate) fn by_place(&self, decoded: &Decoded) -> Vec<u64> {
        let mut offsets = vec![0; self.len()];
        for (place, offset) in self.place.iter().zip(&decoded.offsets) {
            offsets[*place as usize] = *offset;
        }
        offsets
    }

    /// Converts offsets by index in the problem into offsets by item.
    pub(crate) fn by_item(&self, offsets: &[u64]) -> Decoded {
        let offsets: Vec<u64> = self.place.iter().map(|place| offsets[*place as usize]).collect();
        let height = offsets.iter().zip(&self.size).map(|(offset, size)| offset + size).max().unwrap_or(0);
        Decoded { offsets, height }
    }

    fn births_of(&self, item: u32) -> impl Iterator<Item = u32> {
        let [first, last] = self.births[item as usize];
        std::iter::once(first).chain((first != last).then_some(last))
    }

    /// Places the items in this order. Returns `None` if an item would reach above `limit` or the steps run out.
    pub(crate) fn decode(&self, order: &[u32], fit: Fit, limit: u64, steps: &mut u64) -> Option<Decoded> {
        let mut offsets = vec![0; self.len()];
        let mut covers: Vec<Vec<u32>> = vec![Vec::new(); 2 * self.leaves];
        let mut born = vec![0_u64; self.item.len().div_ceil(64)];
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut height = 0;
        for &item in order {
            taken.clear();
            let mut words = 0;
            let mut look_at = |other: u32| {
                let offset = offsets[other as usize];
                taken.push((offset, offset + self.size[other as usize]));
            };
            for birth in self.births_of(item) {
                let mut node = self.leaves + birth as usize;
                while node > 0 {
                    covers[node].iter().for_each(|other| look_at(*other));
                    node /= 2;
                }
                let end = self.end[birth as usize];
                for_each_bit(&born, birth + 1, end, |birth| look_at(self.item[birth as usize]));
                words += u64::from((end - birth) / 64);
            }
            let looked_at = taken.len() as u64 + 1 + words / 32;
            if *steps < looked_at {
                *steps = 0;
                return None;
            }
            *steps -= looked_at;
            let size = self.size[item as usize];
            let offset = free_place(&mut taken, size, fit);
            if offset + size > limit {
                return None;
            }
            offsets[item as usize] = offset;
            height = height.max(offset + size);
            for birth in self.births_of(item) {
                born[birth as usize / 64] |= 1 << (birth % 64);
                self.cover(&mut covers, birth, item);
            }
        }
        Some(Decoded { offsets, height })
    }

    /// Adds an item to the nodes that cover its interval.
    fn cover(&self, covers: &mut [Vec<u32>], birth: u32, item: u32) {
        let (mut from, mut to) = (self.leaves + birth as usize, self.leaves + self.end[birth as usize] as usize);
        while from < to {
            if from % 2 == 1 {
                covers[from].push(item);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                covers[to].push(item);
            }
            (from, to) = (from / 2, to / 2);
        }
    }
}

/// Calls `call` with each bit set in `from..to`.
fn for_each_bit(words: &[u64], from: u32, to: u32, mut call: impl FnMut(u32)) {
    let mut at = from;
    while at < to {
        let word = words[at as usize / 64] >> (at % 64);
        if word == 0 {
            at = (at / 64 + 1) * 64;
            continue;
        }
        at += word.trailing_zeros();
        if at < to {
            call(at);
        }
        at += 1;
    }
}

/// Returns the offset for `size` among the taken ranges, each given by its start and end.
fn free_place(taken: &mut [(u64, u64)], size: u64, fit: Fit) -> u64 {
    taken.sort_unstable();
    let (mut top, mut best) = (0, None);
    for &(from, to) in &*taken {
        if from >= top + size {
            let room = from - top;
            if fit == Fit::Lowest {
                return top;
            }
            if best.is_none_or(|(least, _)| room < least) {
                best = Some((room, top));
            }
        }
        top = to.max(top);
    }
    best.map_or(top, |(_, offset)| offset)
}
