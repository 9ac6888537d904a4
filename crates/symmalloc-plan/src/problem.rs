//! The problem: rectangles with known lifetimes and sizes, and the bound from below.

use thiserror::Error;

/// An allocation: what it needs, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rectangle {
    /// When it begins to live: a number of an op, or any other time.
    pub lower: u64,
    /// When it lives no more; more than `lower`.
    pub upper: u64,
    /// How much it needs, in any unit; not 0. Offsets have the same unit.
    pub size: u64,
}

/// Why rectangles are no problem that can be solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A rectangle lives for no time, or ends before it begins.
    #[error("rectangle {index} lives from {lower} to {upper}: the end must come after the beginning")]
    Lifetime {
        /// Which one, counted from 0.
        index: usize,
        /// Its beginning.
        lower: u64,
        /// Its end.
        upper: u64,
    },
    /// A rectangle has no size.
    #[error("rectangle {index} has size 0: leave it out, it needs no place")]
    Size {
        /// Which one, counted from 0.
        index: usize,
    },
    /// The sizes add up to more than 2^63: offsets could not be counted.
    #[error("the sizes add up to more than 2^63, at rectangle {index}: use a larger unit")]
    TooLarge {
        /// The first one that is too much, counted from 0.
        index: usize,
    },
    /// There are more than 2^31 rectangles.
    #[error("{count} rectangles are more than this solver counts (2^31)")]
    TooMany {
        /// How many there are.
        count: usize,
    },
}

/// Rectangles that can be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    rectangles: Vec<Rectangle>,
    lower_bound: u64,
}

impl Problem {
    /// The problem of placing these.
    ///
    /// # Errors
    /// See [`ProblemError`].
    pub fn new(rectangles: Vec<Rectangle>) -> Result<Self, ProblemError> {
        if rectangles.len() > 1 << 31 {
            return Err(ProblemError::TooMany { count: rectangles.len() });
        }
        let mut sum = 0_u64;
        for (index, &Rectangle { lower, upper, size }) in rectangles.iter().enumerate() {
            if upper <= lower {
                return Err(ProblemError::Lifetime { index, lower, upper });
            }
            if size == 0 {
                return Err(ProblemError::Size { index });
            }
            sum = sum.checked_add(size).filter(|sum| *sum <= 1 << 63).ok_or(ProblemError::TooLarge { index })?;
        }
        let lower_bound = peak_live(&rectangles);
        Ok(Problem { rectangles, lower_bound })
    }

    /// What is to be placed.
    pub fn rectangles(&self) -> &[Rectangle] {
        &self.rectangles
    }

    /// The most that is live at any time: no placement has less height.
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }
}

/// The most that is live at any time. What ends at a moment makes room for what begins then.
fn peak_live(rectangles: &[Rectangle]) -> u64 {
    let begins = rectangles.iter().map(|it| (it.lower, true, it.size));
    let ends = rectangles.iter().map(|it| (it.upper, false, it.size));
    let mut changes: Vec<(u64, bool, u64)> = begins.chain(ends).collect();
    changes.sort_unstable();
    let (mut live, mut peak) = (0_u64, 0);
    for (_, begins, size) in changes {
        live = if begins { live + size } else { live - size };
        peak = live.max(peak);
    }
    peak
}
