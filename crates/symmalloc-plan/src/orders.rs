//! Orders in which rectangles are placed. Ties are broken by birth, so an order is a function of the problem.

use crate::decode::Decoder;

/// Returns orders that usually do well, the best first: large rectangles while there is space, and long ones because they block
/// many others.
pub(crate) fn orders(decoder: &Decoder) -> Vec<Vec<u32>> {
    let area = |(size, life): (u64, u64)| u128::from(size) * u128::from(life);
    vec![
        descending(decoder, |extent| (u128::from(extent.0), extent.1)),
        descending(decoder, |extent| (area(extent), extent.1)),
        descending(decoder, |extent| (u128::from(extent.1), extent.0)),
        (0..decoder.len() as u32).collect(),
    ]
}

fn descending<K: Ord>(decoder: &Decoder, key: impl Fn((u64, u64)) -> K) -> Vec<u32> {
    let mut order: Vec<u32> = (0..decoder.len() as u32).collect();
    order.sort_by_cached_key(|item| std::cmp::Reverse(key(decoder.extent(*item))));
    order
}
