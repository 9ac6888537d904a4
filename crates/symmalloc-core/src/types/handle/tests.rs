//! Unit tests of `types/handle.rs`.

use super::*;

#[test]
fn serials_are_unique_and_a_heap_recognizes_its_own() {
    let [mut one, mut other] = [Serials::default(), Serials::default()];
    let mut given = vec![one.next(), other.next(), one.next()];
    // At the end of its range, a heap takes another one.
    one.last |= u64::from(u32::MAX) - 1;
    given.extend([one.next(), one.next(), one.next()]);
    let distinct: std::collections::BTreeSet<_> = given.iter().collect();
    assert_eq!(distinct.len(), given.len());
    assert_eq!(one.ranges.len(), 2);
    let known: Vec<bool> = given.iter().map(|serial| one.gave(*serial)).collect();
    assert_eq!(known, [true, false, true, true, true, true]);
    assert!(other.gave(given[1]) && !other.gave(given[0]));
    assert!(!one.gave(given[5].checked_add(1).expect("small")), "the serial is not assigned yet");
    assert!(
        !one.gave(NonZeroU64::new(given[0].get() - 1).expect("the number should not be zero")),
        "the first serial of a range is never assigned"
    );
}
