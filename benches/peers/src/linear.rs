//! The scaling of a machine itself, measured with threads that share nothing, on the processors that they get.
//!
//! If processors share cores, sixteen threads that keep a core's units busy do less than sixteen times the work of one
//! thread with a core to itself, no matter what they compute. Threads that wait for their own previous result lose
//! less.

use crate::cases::{Amounts, rates};
use crate::processor::independent;
use crate::report::Report;
use std::hint::black_box;

/// Measures the combined rate of threads for both kinds of arithmetic.
pub(crate) fn measure(amounts: &Amounts) {
    const ROUNDS_EACH: u64 = 100;
    for (name, arithmetic) in
        [("independent arithmetic", independent as fn(u64) -> u64), ("chained arithmetic", chained)]
    {
        let report = Report::new(name);
        for count in &amounts.threads {
            let values = rates(amounts, *count, |_| move || _ = black_box(arithmetic(ROUNDS_EACH)));
            report.figure("arithmetic_per_second", count, &values);
        }
    }
}

/// Performs multiplications that depend on each other, so that most units of a core are idle.
#[inline(never)]
fn chained(rounds: u64) -> u64 {
    (0..rounds).fold(black_box(3), |product: u64, round| (product ^ round).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
