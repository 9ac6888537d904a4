//! Unit tests of `sync/registry.rs`.

use super::*;

#[test]
fn near_and_far_entries_are_found_and_gaps_are_not() {
    let registry = Registry::new();
    for index in 0..2 * NEAR {
        assert_eq!(registry.push(|index| 10 * index), index);
    }
    registry.get_or_make(5 * NEAR, || 7);
    assert_eq!(registry.get(NEAR + 1), Some(&(10 * NEAR + 10)));
    assert_eq!(registry.get(3 * NEAR), None);
    assert_eq!(registry.iter().count(), 2 * NEAR + 1);
    assert_eq!(registry.get_or_make(0, || 99), &0);
}
