//! The search: several orders, then improvement of the best one.
//!
//! ```text
//!  orders ──► decode, best fit and lowest fit ──► the best ──► those that reach the top come earlier ──► decode ─┐
//!                 one reaches the bound: done          ▲                                                          │
//!                                                      └───────────────── lower: keep it; else try another ◄──────┘
//! ```
//!
//! The improvement is known as squeaky wheel optimisation: what ended at the top is what had too little room, so it is placed
//! earlier next time. What is drawn is drawn by a generator with a fixed seed.

use crate::decode::{Decoded, Decoder, Fit};
use crate::orders::orders;
use crate::problem::Problem;
use crate::solution::Solution;

/// How long the search may take: rectangles that are looked at. About thirty million are a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Steps(pub u64);

impl Default for Steps {
    /// A few seconds.
    fn default() -> Self {
        Steps(100_000_000)
    }
}

/// Places the rectangles of a problem as low as the search finds in so many steps. The first order is carried out whatever it
/// takes, so there is always a solution.
///
/// # Determinism
/// The solution is a function of the problem and the steps. It takes O(n log n) memory for n rectangles.
pub fn solve(problem: &Problem, Steps(budget): Steps) -> Solution {
    let decoder = Decoder::new(problem);
    let bound = problem.lower_bound();
    let orders = orders(&decoder);
    let mut search = Portfolio::new(&decoder, &orders[0], budget);
    let mut best_order = 0;
    for (fit, number) in [Fit::Best, Fit::Lowest].into_iter().flat_map(|fit| (0..orders.len()).map(move |it| (fit, it)))
    {
        if search.best.height == bound {
            break;
        }
        if search.attempt(&orders[number], fit) {
            (best_order, search.fit) = (number, fit);
        }
    }
    if search.best.height > bound {
        search.improve(&orders[best_order], bound);
    }
    Solution::new(problem, decoder.by_place(&search.best), search.best.height, search.spent)
}

/// The best so far, and what the search may still take.
struct Portfolio<'a> {
    decoder: &'a Decoder,
    /// Steps that may still be taken.
    left: u64,
    spent: u64,
    best: Decoded,
    /// Of the best.
    fit: Fit,
}

impl<'a> Portfolio<'a> {
    /// The first order is carried out whatever it takes.
    fn new(decoder: &'a Decoder, order: &[u32], budget: u64) -> Self {
        let mut left = u64::MAX;
        let best =
            decoder.decode(order, Fit::Best, u64::MAX, &mut left).expect("without a limit every order is decoded");
        let spent = u64::MAX - left;
        Portfolio { decoder, left: budget.saturating_sub(spent), spent, best, fit: Fit::Best }
    }

    /// Tries an order. Whether it is lower than the best so far, and so the best now.
    fn attempt(&mut self, order: &[u32], fit: Fit) -> bool {
        let before = self.left;
        let decoded = self.decoder.decode(order, fit, self.best.height - 1, &mut self.left);
        self.spent += before - self.left;
        let Some(lower) = decoded else { return false };
        self.best = lower;
        true
    }

    /// Places what reached the top earlier, and draws some others, until the bound is reached or the steps are used up.
    fn improve(&mut self, order: &[u32], bound: u64) {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut current = order.to_vec();
        let mut failures = 0;
        while self.left > 0 && self.best.height > bound {
            let mut tried = current.clone();
            self.promote(&mut tried, failures, &mut random);
            let left = self.left;
            if self.attempt(&tried, self.fit) {
                (current, failures) = (tried, 0);
            } else {
                failures += 1;
                // An attempt that gives up at once costs steps as well.
                self.left = self.left.min(left.saturating_sub(self.decoder.len() as u64));
            }
        }
    }

    /// Moves the rectangles at the top to an earlier place, and after failures a few others to any.
    fn promote(&self, order: &mut Vec<u32>, failures: u64, random: &mut Random) {
        let top = |birth: &u32| {
            let (size, _) = self.decoder.extent(*birth);
            self.best.offsets[*birth as usize] + size == self.best.height
        };
        let at_top: Vec<usize> = (0..order.len()).filter(|at| top(&order[*at])).collect();
        for at in at_top {
            let birth = order.remove(at);
            order.insert(random.below(at as u64 + 1) as usize, birth);
        }
        for _ in 0..failures.min(16) {
            let (from, to) = (random.below(order.len() as u64) as usize, random.below(order.len() as u64) as usize);
            let birth = order.remove(from);
            order.insert(to, birth);
        }
    }
}

/// Xorshift, with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(bound)) >> 64) as u64
    }
}
