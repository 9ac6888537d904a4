//! Decodes an order into offsets: places the rectangles one by one, each in a gap between those that are already
//! placed.
//!
//! Two structures find the rectangles that overlap a given rectangle in time, so that overlapping pairs need not be
//! stored:
//!
//! ```text
//!            lower          upper
//!   ───────────┼──────────────┼────────►  time, as ranks of births: every rectangle has its own
//!  a ──────────┼────                      lives at `lower`:          a segment tree, each in O(log n) nodes
//!  b           │    ────────  │           is born in (lower, upper): a bit for each birth of a placed rectangle
//! ```
//!
//! A rectangle that lives into the next step has two intervals and therefore two births. The search looks up both.
//!
//! Once it knows these rectangles, the search scans the gaps between them from below. [`Fit::Best`] takes the smallest
//! gap that is large enough, [`Fit::Lowest`] the lowest. One unit of work pays for examining one placed rectangle, 32
//! words of bits, or 32 births in the tree.

use crate::problem::Problem;

/// The choice of a gap for a rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The smallest gap that is large enough; the lowest one if several are equally small.
    Best,
    /// The lowest gap that is large enough.
    Lowest,
}

/// The state shared by all orders of one problem. The problem's rectangles are called items here. They are numbered by
/// beginning, then by index in the problem. A birth is the beginning of an interval; births are numbered in order of
/// time.
pub(crate) struct Decoder {
    /// By item: index of the rectangle in the problem.
    place: Vec<u32>,
    /// By item: size.
    size: Vec<u64>,
    /// By item: births of its intervals. If the item has one interval, both entries are equal.
    births: Vec<[u32; 2]>,
    /// By birth: its item.
    item: Vec<u32>,
    /// By birth: the first birth at or after the end of its interval.
    end: Vec<u32>,
    /// Number of leaves of the segment tree; a power of two.
    leaves: usize,
    /// By node of the segment tree: births of the intervals that cover the node but not all of its parent.
    covers: Vec<Vec<u32>>,
}

/// Offsets by item, and the resulting height.
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
        let mut decoder = Decoder {
            size: place.iter().map(|place| rectangles[*place as usize].size).collect(),
            place,
            births,
            item: intervals.iter().map(|(_, item, _)| *item).collect(),
            end: intervals.iter().map(|(.., upper)| end(*upper)).collect(),
            leaves: intervals.len().next_power_of_two(),
            covers: vec![Vec::new(); 2 * intervals.len().next_power_of_two()],
        };
        (0..decoder.item.len() as u32).for_each(|birth| decoder.cover(birth));
        decoder
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

    /// Places the items in this order. Returns `None` if an item would extend above `limit` or the budget runs out.
    pub(crate) fn decode(&self, order: &[u32], fit: Fit, limit: u64, budget: &mut u64) -> Option<Decoded> {
        let mut placement = Placement::empty(self);
        order.iter().all(|item| placement.place(*item, fit, limit, budget)).then(|| placement.into_decoded())
    }

    /// Adds an interval to the nodes that cover it.
    fn cover(&mut self, birth: u32) {
        let (mut from, mut to) = (self.leaves + birth as usize, self.leaves + self.end[birth as usize] as usize);
        while from < to {
            if from % 2 == 1 {
                self.covers[from].push(birth);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                self.covers[to].push(birth);
            }
            (from, to) = (from / 2, to / 2);
        }
    }

    /// Calls `call` with the births of all intervals that contain this birth, including its own.
    fn for_each_at(&self, birth: u32, call: impl FnMut(u32)) {
        let nodes = std::iter::successors(Some(self.leaves + birth as usize), |node| (*node > 1).then_some(node / 2));
        nodes.flat_map(|node| &self.covers[node]).copied().for_each(call);
    }

    /// Calls `call` with each item that lives between the births `from` and `to`. The same item may occur several
    /// times.
    pub(crate) fn for_each_within(&self, from: u32, to: u32, mut call: impl FnMut(u32)) {
        self.for_each_at(from, |birth| call(self.item[birth as usize]));
        self.item[from as usize + 1..to as usize].iter().copied().for_each(call);
    }

    /// Returns the intervals of an item: its birth, and the first birth at or after its end.
    pub(crate) fn intervals_of(&self, item: u32) -> impl Iterator<Item = (u32, u32)> {
        self.births_of(item).map(|birth| (birth, self.end[birth as usize]))
    }

    /// Returns, by item, the peak of the live sizes during its lifetime.
    pub(crate) fn loads(&self) -> Vec<u64> {
        // Live sizes at each birth.
        let mut change = vec![0_i128; self.item.len() + 1];
        for birth in 0..self.item.len() {
            let size = i128::from(self.size[self.item[birth] as usize]);
            change[birth] += size;
            change[self.end[birth] as usize] -= size;
        }
        // A tree of maxima.
        let leaves = self.leaves;
        let mut most = vec![0_u64; 2 * leaves];
        let mut live = 0;
        for birth in 0..self.item.len() {
            live += change[birth];
            most[leaves + birth] = live as u64;
        }
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        let within = |from: u32, to: u32| {
            let (mut from, mut to, mut max) = (leaves + from as usize, leaves + to as usize, 0);
            while from < to {
                if from % 2 == 1 {
                    max = most[from].max(max);
                    from += 1;
                }
                if to % 2 == 1 {
                    to -= 1;
                    max = most[to].max(max);
                }
                (from, to) = (from / 2, to / 2);
            }
            max
        };
        (0..self.len() as u32)
            .map(|item| self.intervals_of(item).map(|(from, to)| within(from, to)).max().unwrap_or(0))
            .collect()
    }

    /// Returns the number of births.
    pub(crate) fn births(&self) -> u32 {
        self.item.len() as u32
    }
}

/// A placement of some of the items.
pub(crate) struct Placement<'a> {
    decoder: &'a Decoder,
    /// By item: its offset, if it is placed.
    offsets: Vec<u64>,
    /// A bit for each birth of a placed item.
    born: Vec<u64>,
    /// The ranges of offsets that are taken during the lifetime of an item. Kept to reuse their memory.
    taken: Vec<(u64, u64)>,
}

impl<'a> Placement<'a> {
    fn empty(decoder: &'a Decoder) -> Self {
        let born = vec![0; decoder.item.len().div_ceil(64)];
        Placement { decoder, offsets: vec![0; decoder.len()], born, taken: Vec::new() }
    }

    /// Returns a placement of all items.
    pub(crate) fn whole(decoder: &'a Decoder, decoded: &Decoded) -> Self {
        let mut placement = Placement::empty(decoder);
        (0..).zip(&decoded.offsets).for_each(|(item, offset)| placement.put(item, *offset));
        placement
    }

    /// Returns the end of a placed item: its offset plus its size.
    pub(crate) fn end(&self, item: u32) -> u64 {
        self.offset(item) + self.decoder.size[item as usize]
    }

    /// Returns the offset of a placed item.
    pub(crate) fn offset(&self, item: u32) -> u64 {
        self.offsets[item as usize]
    }

    /// Puts an item at an offset.
    pub(crate) fn put(&mut self, item: u32, offset: u64) {
        self.offsets[item as usize] = offset;
        let births = self.decoder.births_of(item);
        births.for_each(|birth| self.born[birth as usize / 64] |= 1 << (birth % 64));
    }

    /// Removes a placed item.
    pub(crate) fn remove(&mut self, item: u32) {
        let births = self.decoder.births_of(item);
        births.for_each(|birth| self.born[birth as usize / 64] &= !(1 << (birth % 64)));
    }

    /// Places an item that is not placed yet. Returns `false` if it would extend above `limit` or the budget runs out.
    pub(crate) fn place(&mut self, item: u32, fit: Fit, limit: u64, budget: &mut u64) -> bool {
        let Placement { decoder, offsets, born, taken } = self;
        taken.clear();
        let mut looked_at = 0;
        let mut look_at = |birth: u32| {
            let other = decoder.item[birth as usize] as usize;
            taken.push((offsets[other], offsets[other] + decoder.size[other]));
        };
        for (birth, end) in decoder.intervals_of(item) {
            decoder.for_each_at(birth, |other| {
                looked_at += 1;
                if born[other as usize / 64] >> (other % 64) & 1 == 1 {
                    look_at(other);
                }
            });
            for_each_bit(born, birth + 1, end, &mut look_at);
            looked_at += u64::from((end - birth) / 64);
        }
        let cost = taken.len() as u64 + 1 + looked_at / 32;
        if *budget < cost {
            *budget = 0;
            return false;
        }
        *budget -= cost;
        let size = decoder.size[item as usize];
        let offset = free_place(taken, size, fit);
        if offset + size > limit {
            return false;
        }
        self.put(item, offset);
        true
    }

    /// Returns the offsets of a placement of all items.
    pub(crate) fn into_decoded(self) -> Decoded {
        let height = (0..self.decoder.len() as u32).map(|item| self.end(item)).max().unwrap_or(0);
        Decoded { offsets: self.offsets, height }
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

/// Returns an offset for `size` in a gap between the taken ranges, each of which is given by its start and end.
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
