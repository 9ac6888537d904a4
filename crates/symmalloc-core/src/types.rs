//! Types that every other module uses: ids, units, handles, look-up maps, bases, and the contract of a backend.

pub mod backend;
pub mod base;
pub mod groups;
pub(crate) mod handle;
pub mod ids;
pub(crate) mod look_up;
pub mod units;
pub mod work;
