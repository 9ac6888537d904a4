//! Statistics without the totals that grow with every op, so that repeated rounds can be compared.

use symmalloc_core::report::MemoryStats;
use symmalloc_core::stats::Stat;

/// Returns the statistics with all totals and counts of ops set to zero. Current values, peaks and the number of errors stay.
pub fn levels(mut stats: MemoryStats) -> MemoryStats {
    let without = |stat: &mut Stat| (stat.allocated, stat.freed) = (0, 0);
    for class in [&mut stats.usage.all, &mut stats.usage.small, &mut stats.usage.large] {
        let stats = [&mut class.allocations, &mut class.allocated_bytes, &mut class.requested_bytes];
        stats.into_iter().for_each(without);
    }
    without(&mut stats.reserved_bytes);
    (stats.segments_born, stats.growth_count, stats.trim_count, stats.retry_count) = (0, 0, 0, 0);
    let steps = &mut stats.steps;
    (steps.steps, steps.followed, steps.allocations, steps.planned) = (0, 0, 0, 0);
    (steps.learned, steps.placed) = (0, 0);
    stats
}
