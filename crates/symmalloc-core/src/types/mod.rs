//! Types that every other room uses: ids, units, handles, and the contract of a backend.

pub mod backend;
pub(crate) mod handle;
pub mod ids;
pub mod units;
