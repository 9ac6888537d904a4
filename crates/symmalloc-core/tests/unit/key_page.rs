//! Tests of `src/blocks/key_page.rs`, which has them as its module.

use super::*;

fn key(size: u32) -> FreeKey {
    FreeKey::least_of(size)
}

/// Every other size, put in from both ends to the middle, and sorted now and then.
fn nearly_full_page() -> (KeyPage, Vec<FreeKey>) {
    let (mut page, mut oracle) = (KeyPage::default(), Vec::new());
    for number in 1..PAGE_MAX as u32 {
        let new = key(if number % 2 == 0 { number } else { 1000 - number });
        page.insert(new);
        oracle.push(new);
        oracle.sort_unstable();
        assert!(page.keys_in_order().eq(oracle.iter().copied()));
        if number % 5 == 0 {
            page.sort();
            assert!(page.keys().iter().rev().eq(&oracle));
        }
    }
    page.sort();
    (page, oracle)
}

#[test]
fn a_search_counts_the_keys_that_are_not_less() {
    let (page, oracle) = nearly_full_page();
    for size in 1..1010 {
        let less = oracle.partition_point(|there| *there < key(size));
        assert_eq!(page.count_at_least(key(size)), oracle.len() - less);
    }
    assert_eq!(page.key(page.len()), FreeKey::MIN);
}

#[test]
fn a_page_that_is_cut_and_joined_again_holds_the_same_keys() {
    let (mut page, mut oracle) = nearly_full_page();
    page.remove(page.count_at_least(oracle[20]) - 1);
    oracle.remove(20);
    page.remove(page.count_at_least(oracle[7]) - 1);
    page.insert(oracle[7]);
    let upper = page.split_off();
    assert_eq!((page.len(), upper.len()), (PAGE_MAX / 2 - 1, PAGE_MAX / 2 - 1));
    assert!(page.keys_in_order().chain(upper.keys_in_order()).eq(oracle.iter().copied()));
    assert_eq!(page.count_at_least(upper.key(upper.len() - 1)), 0);
    page.append(&upper);
    page.sort();
    assert!(page.keys().iter().rev().eq(&oracle));
}
