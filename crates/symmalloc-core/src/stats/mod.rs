//! Statistics and limits.

pub(crate) mod budget;
pub mod usage;
