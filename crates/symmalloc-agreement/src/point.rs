//! The kinds of points at which ranks run an agreement.

use std::fmt;

/// The kind of point in the program at which a rank runs an agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Point {
    /// A point where the program synchronizes its ranks.
    Sync = 1,
    /// A point after an op, because the [`Mode`](crate::Mode) requires a comparison there.
    Op = 2,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Point::Sync => "a sync",
            Point::Op => "an op",
        })
    }
}
