//! Orders in which rectangles are placed. Ties are broken by birth, so an order is a function of the problem.

use crate::decode::Decoder;

/// Returns orders that usually do well, the best first: large rectangles while there is space, and long ones because they block
/// many others. Then the same orders, but with the rectangles first that live while the load is near its peak. The others have space.
pub(crate) fn orders(decoder: &Decoder) -> Vec<Vec<u32>> {
    let area = |(size, life): (u64, u64)| u128::from(size) * u128::from(life);
    let mut orders = vec![
        descending(decoder, |extent| (u128::from(extent.0), extent.1)),
        descending(decoder, |extent| (area(extent), extent.1)),
        descending(decoder, |extent| (u128::from(extent.1), extent.0)),
        (0..decoder.len() as u32).collect(),
    ];
    // Most orders of this kind fail after few rectangles, so that they cost little.
    let loads = decoder.loads();
    for share in PEAK_SHARES {
        let is_at_peak = at_peak(&loads, share);
        for order in 0..3 {
            let mut first = orders[order].clone();
            first.sort_by_key(|item| !is_at_peak[*item as usize]);
            orders.push(first);
        }
    }
    orders
}

/// Shares of the peak: rectangles that live while the load is within a share of its peak are the hard ones.
pub(crate) const PEAK_SHARES: [u64; 4] = [50, 20, 10, 5];

/// Returns, by item, `true` if the item lives while the load is above the peak minus one `share`-th of it.
pub(crate) fn at_peak(loads: &[u64], share: u64) -> Vec<bool> {
    let peak = loads.iter().copied().max().unwrap_or(0);
    loads.iter().map(|load| *load >= peak - peak / share).collect()
}

fn descending<K: Ord>(decoder: &Decoder, key: impl Fn((u64, u64)) -> K) -> Vec<u32> {
    let mut order: Vec<u32> = (0..decoder.len() as u32).collect();
    order.sort_by_cached_key(|item| std::cmp::Reverse(key(decoder.extent(*item))));
    order
}
