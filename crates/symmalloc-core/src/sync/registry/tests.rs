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

#[test]
fn a_large_index_takes_one_page() {
    let registry = Registry::new();
    for index in [65_534, 20_000, NEAR, NEAR + PAGE - 1, 0] {
        assert_eq!(registry.get_or_make(index, || index), &index);
    }
    let indices: Vec<usize> =
        registry.iter().map(|(index, entry)| (index == *entry).then_some(index).expect("equal")).collect();
    assert_eq!(indices, [0, NEAR, NEAR + PAGE - 1, 20_000, 65_534]);
    assert_eq!(registry.far.iter().filter(|(_, page)| page.get().is_some()).count(), 3);
    assert_eq!([1, NEAR + 1, NEAR + PAGE, 65_533, 65_535].map(|index| registry.get(index)), [None; 5]);
}
