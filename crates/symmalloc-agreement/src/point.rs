//! Where ranks come together.

use std::fmt;

/// What kind of point of the program a rank has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Point {
    /// Where the program synchronizes its ranks.
    Sync = 1,
    /// After an op, because the [`Mode`](crate::Mode) says so.
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
