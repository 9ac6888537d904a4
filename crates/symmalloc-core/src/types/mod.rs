//! Types that every other room uses: ids, units, handles, maps that are looked up, and the contract of a backend.

pub mod backend;
pub(crate) mod handle;
pub mod ids;
pub(crate) mod look_up;
pub mod units;
