//! From an order to offsets: each rectangle in turn goes where it fits among those before it.
//!
//! Which rectangles overlap a new one in time is asked of two structures, so that no pairs are kept:
//!
//! ```text
//!            lower          upper
//!   ───────────┼──────────────┼────────►  time, as ranks of births: every rectangle has its own
//!  a ──────────┼────                      lives at `lower`:          a segment tree, each in O(log n) nodes
//!  b           │    ────────  │           is born in (lower, upper): a bit set by birth
//! ```
//!
//! The free places between the tops of these are looked at from below. [`Fit::Best`] takes the smallest one that is large enough,
//! [`Fit::Lowest`] the lowest. A step is one rectangle that was looked at.

use crate::problem::Problem;

/// Which free place a rectangle takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The smallest that is large enough, the lowest of these.
    Best,
    /// The lowest that is large enough.
    Lowest,
}

/// What is the same for all orders of one problem. Rectangles are numbered by birth: by beginning, then by their place in the
/// problem.
pub(crate) struct Decoder {
    /// By birth: the rectangle's place in the problem.
    place: Vec<u32>,
    /// By birth: the first birth that is not before the end of this one's life.
    end: Vec<u32>,
    /// By birth.
    size: Vec<u64>,
    /// Leaves of the segment tree: a power of two.
    leaves: usize,
}

/// Offsets by birth, and how high they reach.
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
        let births: Vec<u64> = place.iter().map(|place| rectangles[*place as usize].lower).collect();
        let of = |place: &u32| rectangles[*place as usize];
        let end = place.iter().map(|place| births.partition_point(|birth| *birth < of(place).upper) as u32).collect();
        let size = place.iter().map(|place| of(place).size).collect();
        let leaves = place.len().next_power_of_two();
        Decoder { place, end, size, leaves }
    }

    pub(crate) fn len(&self) -> usize {
        self.place.len()
    }

    /// Size and length of life, in births, of the rectangle with this birth.
    pub(crate) fn extent(&self, birth: u32) -> (u64, u64) {
        (self.size[birth as usize], u64::from(self.end[birth as usize] - birth))
    }

    /// Offsets by place in the problem.
    pub(crate) fn by_place(&self, decoded: &Decoded) -> Vec<u64> {
        let mut offsets = vec![0; self.len()];
        for (place, offset) in self.place.iter().zip(&decoded.offsets) {
            offsets[*place as usize] = *offset;
        }
        offsets
    }

    /// Places the rectangles in this order of births. Gives up, with `None`, when one would reach above `limit`, or when the steps
    /// are used up.
    pub(crate) fn decode(&self, order: &[u32], fit: Fit, limit: u64, steps: &mut u64) -> Option<Decoded> {
        let mut offsets = vec![0; self.len()];
        let mut covers: Vec<Vec<u32>> = vec![Vec::new(); 2 * self.leaves];
        let mut born = vec![0_u64; self.len().div_ceil(64)];
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut height = 0;
        for &birth in order {
            let end = self.end[birth as usize];
            taken.clear();
            let mut look_at = |other: u32| {
                let offset = offsets[other as usize];
                taken.push((offset, offset + self.size[other as usize]));
            };
            let mut node = self.leaves + birth as usize;
            while node > 0 {
                covers[node].iter().for_each(|other| look_at(*other));
                node /= 2;
            }
            for_each_bit(&born, birth + 1, end, &mut look_at);
            let looked_at = taken.len() as u64 + 1;
            if *steps < looked_at {
                *steps = 0;
                return None;
            }
            *steps -= looked_at;
            let size = self.size[birth as usize];
            let offset = free_place(&mut taken, size, fit);
            if offset + size > limit {
                return None;
            }
            offsets[birth as usize] = offset;
            height = height.max(offset + size);
            born[birth as usize / 64] |= 1 << (birth % 64);
            self.cover(&mut covers, birth, end);
        }
        Some(Decoded { offsets, height })
    }

    /// Enters a rectangle into the nodes that cover its life.
    fn cover(&self, covers: &mut [Vec<u32>], birth: u32, end: u32) {
        let (mut from, mut to) = (self.leaves + birth as usize, self.leaves + end as usize);
        while from < to {
            if from % 2 == 1 {
                covers[from].push(birth);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                covers[to].push(birth);
            }
            (from, to) = (from / 2, to / 2);
        }
    }
}

/// The bits that are set in `from..to`.
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

/// The offset for `size` among what is taken, from and to.
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
