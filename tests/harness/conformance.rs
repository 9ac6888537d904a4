//! The conformance suite for the backends of this repository. All of them save and zero memory. Most of them alias it and
//! choose addresses.

use symmalloc_conformance::{Capability, check};
use symmalloc_core::backend::Backend;

/// Runs the suite.
///
/// # Panics
/// Panics if the implementation violates its contract, or refuses to save or to zero memory.
pub fn conformance<B: Backend + Send + Sync>(make: impl Fn() -> B) {
    let lacking = check(make);
    assert!(lacking.iter().all(|lacking| matches!(lacking, Capability::Alias | Capability::Base)), "{lacking:?}");
}
