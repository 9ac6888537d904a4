//! Repair: lowers the rectangles at the top of a placement by placing them again, together with rectangles that live at about the same
//! time.
//!
//! ```text
//!  offset ▲          ┌───┐
//!         │    ┌───┐ │ t │ ┌───┐                  t: at the top
//!         │  ──┤ a ├─┴───┴─┤ b ├──               a, b, t: removed and placed again in another order
//!         │    │   ├───────┤   │
//!         └────┴───┴───────┴───┴──► time
//!            ├──── window ─────┤
//! ```
//!
//! An attempt chooses a rectangle at the top, a window of time around its lifetime, and the rectangles that live in the window but not much
//! longer. It removes these rectangles and places them in a different order. The attempt succeeds if all of them end below the height;
//! otherwise it is undone. It examines only rectangles that overlap the removed ones, so it takes much less work than decoding an order.

use crate::decode::{Decoded, Decoder, Fit, Placement};
use crate::random::Random;

/// Maximum number of rectangles that an attempt places again. A larger attempt rarely succeeds and takes as much work as many small ones.
const WINDOW_MAX: usize = 400;

/// Number of consecutive windows that are too large before a repair gives up.
const TOO_LARGE_MAX: u32 = 100;

/// The margin of a window, in births, is less than 2 to this power.
const MARGIN_BITS: u64 = 8;

/// The rectangles of a window live less than 2 to this power times as long as the rectangle at the top and the margin
/// together.
const LIFE_BITS: u64 = 6;

/// Repairs placements of one problem. Each repair makes different random choices.
pub(crate) struct Repair<'a> {
    decoder: &'a Decoder,
    random: Random,
}

impl<'a> Repair<'a> {
    pub(crate) fn new(decoder: &'a Decoder) -> Self {
        Repair { decoder, random: Random::default() }
    }

    /// Lowers a placement until its height is `least`, the budget is spent, or too many rectangles surround the ones at the top.
    pub(crate) fn lower(&mut self, best: &mut Decoded, least: u64, budget: &mut u64) {
        let mut placement = Placement::whole(self.decoder, best);
        let items = 0..self.decoder.len() as u32;
        let (mut height, mut too_large) = (best.height, 0);
        while height > least && *budget > 0 && too_large < TOO_LARGE_MAX {
            *budget = budget.saturating_sub(1 + items.len() as u64 / 32);
            let mut at_top: Vec<u32> = items.clone().filter(|item| placement.end(*item) == height).collect();
            while !at_top.is_empty() && *budget > 0 && too_large < TOO_LARGE_MAX {
                let item = at_top[self.random.below(at_top.len() as u64) as usize];
                let window = self.window(item);
                *budget = budget.saturating_sub(1 + window.len() as u64);
                if window.len() > WINDOW_MAX {
                    too_large += 1;
                    continue;
                }
                too_large = 0;
                let order = self.order(&placement, height, window, item);
                if self.place_below(&mut placement, height, &order, budget) {
                    at_top.retain(|item| placement.end(*item) == height);
                }
            }
            height = items.clone().map(|item| placement.end(item)).max().unwrap_or(0);
        }
        *best = placement.into_decoded();
    }

    /// Places the items of a window again, in this order. Returns `false` and changes nothing if an item would reach the height.
    fn place_below(&mut self, placement: &mut Placement<'_>, height: u64, order: &[u32], budget: &mut u64) -> bool {
        let before: Vec<u64> = order.iter().map(|item| placement.offset(*item)).collect();
        let fit = if self.random.below(2) == 0 { Fit::Best } else { Fit::Lowest };
        order.iter().for_each(|item| placement.remove(*item));
        let is_lower = order.iter().all(|item| placement.place(*item, fit, height - 1, budget));
        if !is_lower {
            order.iter().zip(before).for_each(|(item, offset)| placement.put(*item, offset));
        }
        is_lower
    }

    /// Returns the items that live around an item but not much longer, and the item itself.
    fn window(&mut self, item: u32) -> Vec<u32> {
        let margin = 1 << self.random.below(MARGIN_BITS);
        let (_, life) = self.decoder.extent(item);
        let longest = (life + margin) << self.random.below(LIFE_BITS);
        let mut window = vec![item];
        for (from, to) in self.decoder.intervals_of(item) {
            let from = from.saturating_sub(self.random.below(margin + 1) as u32);
            let to = (to + self.random.below(margin + 1) as u32).min(self.decoder.births());
            self.decoder.for_each_within(from, to, |other| {
                if self.decoder.extent(other).1 <= longest {
                    window.push(other);
                }
            });
        }
        window.sort_unstable();
        window.dedup();
        window
    }

    /// Returns the items in the order in which they are placed again. The order is by decreasing size, area or lifetime, or by decreasing
    /// distance from the top. Random factors of up to two vary it. In half of the orders, the item at the top also moves to an earlier
    /// position.
    fn order(&mut self, placement: &Placement<'_>, height: u64, window: Vec<u32>, at_top: u32) -> Vec<u32> {
        let (criterion, deviation) = (self.random.below(4), 128 << self.random.below(4));
        let mut keys: Vec<(u128, u32)> = Vec::with_capacity(window.len());
        for item in window {
            let (size, life) = self.decoder.extent(item);
            let key = match criterion {
                0 => u128::from(size),
                1 => u128::from(size) * u128::from(life),
                2 => u128::from(life),
                _ => u128::from(height + 1 - placement.end(item)),
            };
            keys.push((key * u128::from(1024 + self.random.below(deviation)), item));
        }
        keys.sort_unstable_by(|one, other| other.cmp(one));
        let mut order: Vec<u32> = keys.into_iter().map(|(_, item)| item).collect();
        if self.random.below(2) == 0 {
            let at = order
                .iter()
                .position(|item| *item == at_top)
                .expect("a window should contain the rectangle at the top");
            let item = order.remove(at);
            order.insert(self.random.below(at as u64 + 1) as usize, item);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Problem, Rectangle};
    use proptest::prelude::*;

    /// A larger budget continues the same repair, so the heights fall with the budget.
    #[test]
    fn more_steps_never_give_a_higher_placement() {
        let mut random = Random::default();
        let mut rectangle = || {
            let lower = random.below(1_000);
            Rectangle { lower, upper: lower + 1 + random.below(60), size: 1 + random.below(1_000) }
        };
        let problem = Problem::new((0..500).map(|_| rectangle()).collect()).expect("the problem is valid");
        let decoder = Decoder::new(&problem);
        let order: Vec<u32> = (0..decoder.len() as u32).collect();
        let before =
            decoder.decode(&order, Fit::Lowest, u64::MAX, &mut { u64::MAX }).expect("no limit should be reached");
        let repaired = |mut budget: u64| {
            let mut repaired = before.clone();
            Repair::new(&decoder).lower(&mut repaired, problem.lower_bound(), &mut budget);
            repaired
        };
        let heights: Vec<u64> = (0..30).map(|times| repaired(times * 2_000).height).collect();
        assert!(heights.is_sorted_by(|fewer, more| fewer >= more), "{heights:?}");
        assert_eq!(heights[0], before.height);
        assert!(heights[29] < before.height * 9 / 10, "{} was {}", heights[29], before.height);
        assert_eq!(repaired(50_000).offsets, repaired(50_000).offsets);
    }

    proptest! {
        /// A repaired placement is valid and not higher, for rectangles that live into the next step as well.
        #[test]
        fn repaired_placements_are_valid(
            rectangles in prop::collection::vec((0..64_u64, 1..=64_u64, 1..99_u64), 1..60),
            budget in 0..20_000_u64,
        ) {
            let rectangle = |(lower, life, size)| Rectangle { lower, upper: lower + life, size };
            let problem = Problem::periodic(64, rectangles.into_iter().map(rectangle).collect()).expect("the problem is valid");
            let decoder = Decoder::new(&problem);
            let order: Vec<u32> = (0..decoder.len() as u32).collect();
            let before = decoder.decode(&order, Fit::Lowest, u64::MAX, &mut { u64::MAX }).expect("no limit should be reached");
            let mut repaired = before.clone();
            Repair::new(&decoder).lower(&mut repaired, problem.lower_bound(), &mut { budget });
            prop_assert!(problem.lower_bound() <= repaired.height && repaired.height <= before.height);
            let checked = crate::solution::check(&problem, &decoder.by_place(&repaired), repaired.height);
            prop_assert_eq!(checked, Ok(()));
        }
    }
}
