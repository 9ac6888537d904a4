//! The problem: rectangles with known lifetimes and sizes, and a lower bound on the height.

use thiserror::Error;

/// An allocation: its lifetime and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rectangle {
    /// Beginning of the lifetime: the number of an op, or any other measure of time.
    pub lower: u64,
    /// End of the lifetime, exclusive; greater than `lower`. In a [periodic](Problem::periodic) problem, it may lie in
    /// the next step.
    pub upper: u64,
    /// Size in any unit; not 0. Offsets have the same unit.
    pub size: u64,
}

/// An invalid set of rectangles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A rectangle has an empty lifetime or ends before it begins.
    #[error("rectangle {index} lives from {lower} to {upper}: the end must come after the beginning")]
    Lifetime {
        /// Index of the rectangle.
        index: usize,
        /// Beginning of its lifetime.
        lower: u64,
        /// End of its lifetime.
        upper: u64,
    },
    /// A rectangle of a repeated step does not begin within the step, or lives longer than a step.
    #[error(
        "rectangle {index} lives from {lower} to {upper}: it must begin before {period}, where the step ends, and live no \
         longer than a step"
    )]
    OutsidePeriod {
        /// Index of the rectangle.
        index: usize,
        /// Beginning of its lifetime.
        lower: u64,
        /// End of its lifetime.
        upper: u64,
        /// Length of the step.
        period: u64,
    },
    /// The size of a rectangle is 0.
    #[error("rectangle {index} has size 0: leave it out")]
    Size {
        /// Index of the rectangle.
        index: usize,
    },
    /// The sizes add up to more than 2^63, so offsets could overflow.
    #[error("the sizes add up to more than 2^63, at rectangle {index}: use a larger unit")]
    TooLarge {
        /// Index of the rectangle that exceeds the maximum.
        index: usize,
    },
    /// There are more than 2^31 rectangles.
    #[error("{count} rectangles exceed the maximum of 2^31: split the problem")]
    TooMany {
        /// Number of rectangles.
        count: usize,
    },
}

/// A valid set of rectangles to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    rectangles: Vec<Rectangle>,
    /// Length of a repeated step. No rectangle begins after the end of the step or lives longer than a step.
    period: Option<u64>,
    lower_bound: u64,
}

/// An interval in which a rectangle lives. A rectangle has one interval, or two if it lives into the next step; the
/// second begins at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) lower: u64,
    pub(crate) upper: u64,
    /// Index of the rectangle in the problem.
    pub(crate) owner: u32,
}

impl Problem {
    /// Creates a problem with these rectangles.
    ///
    /// # Errors
    /// Returns [`ProblemError`] if the rectangles are invalid.
    pub fn new(rectangles: Vec<Rectangle>) -> Result<Self, ProblemError> {
        Self::checked(rectangles, None)
    }

    /// Creates a problem of a step that repeats every `period`. An allocation made in one step and freed in the next has an
    /// `upper` of up to `lower + period`: it lives from `lower` to the end of the step, and from the beginning of a step to
    /// `upper - period`, at the same offset.
    ///
    /// ```text
    ///  offset ▲
    ///         │▓▓▓▓ a ▓▓▓▓┐     ┌▓▓▓▓ a ▓▓▓▓│▓▓▓▓ a ▓▓▓▓┐     ┌▓▓▓        a: from lower to upper, which lies beyond the period
    ///         └───────────┴─────┴───────────┼───────────┴─────┴───► time
    ///         0                             period
    /// ```
    ///
    /// # Errors
    /// Returns [`ProblemError`] if the rectangles are invalid.
    pub fn periodic(period: u64, rectangles: Vec<Rectangle>) -> Result<Self, ProblemError> {
        Self::checked(rectangles, Some(period))
    }

    fn checked(rectangles: Vec<Rectangle>, period: Option<u64>) -> Result<Self, ProblemError> {
        if rectangles.len() > 1 << 31 {
            return Err(ProblemError::TooMany { count: rectangles.len() });
        }
        let mut sum = 0_u64;
        for (index, &Rectangle { lower, upper, size }) in rectangles.iter().enumerate() {
            if upper <= lower {
                return Err(ProblemError::Lifetime { index, lower, upper });
            }
            if let Some(period) = period
                && (lower >= period || upper - lower > period)
            {
                return Err(ProblemError::OutsidePeriod { index, lower, upper, period });
            }
            if size == 0 {
                return Err(ProblemError::Size { index });
            }
            sum = sum.checked_add(size).filter(|sum| *sum <= 1 << 63).ok_or(ProblemError::TooLarge { index })?;
        }
        let mut problem = Problem { rectangles, period, lower_bound: 0 };
        problem.lower_bound = problem.peak_live();
        Ok(problem)
    }

    /// Returns a problem with these rectangles and the same period.
    pub(crate) fn part(&self, rectangles: Vec<Rectangle>) -> Self {
        Self::checked(rectangles, self.period).expect("a part of a valid problem is valid")
    }

    /// Returns the rectangles to place.
    pub fn rectangles(&self) -> &[Rectangle] {
        &self.rectangles
    }

    /// Returns the length of a repeated step; `None` if the problem is not periodic.
    pub fn period(&self) -> Option<u64> {
        self.period
    }

    /// Returns the peak of the live sizes. No placement has a smaller height.
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// Returns the intervals in which rectangles live. Intervals of one rectangle are consecutive.
    pub(crate) fn intervals(&self) -> impl Iterator<Item = Interval> {
        self.rectangles.iter().enumerate().flat_map(|(index, &Rectangle { lower, upper, .. })| {
            let owner = index as u32;
            let end = self.period.unwrap_or(upper).min(upper);
            let next_step = (end < upper).then(|| Interval { lower: 0, upper: upper - end, owner });
            std::iter::once(Interval { lower, upper: end, owner }).chain(next_step)
        })
    }

    /// Returns the peak of the live sizes. Ends are processed before beginnings at the same time.
    fn peak_live(&self) -> u64 {
        let size = |of: &Interval| self.rectangles[of.owner as usize].size;
        let begins = self.intervals().map(|it| (it.lower, true, size(&it)));
        let ends = self.intervals().map(|it| (it.upper, false, size(&it)));
        let mut changes: Vec<(u64, bool, u64)> = begins.chain(ends).collect();
        changes.sort_unstable();
        let (mut live, mut peak) = (0_u64, 0);
        for (_, begins, size) in changes {
            live = if begins { live + size } else { live - size };
            peak = live.max(peak);
        }
        peak
    }
}
