//! Time per op of our allocator in the steady state.
//!
//! The measurement uses one thread and exclusive access, and includes statistics and digests. Calls of the simulated
//! device take no time. The first pass, which obtains the memory, does not count. Freeing leftover allocations is not
//! measured.

use crate::job::{Job, JobError, Options};
use std::hint::black_box;
use std::time::{Duration, Instant};
use symmalloc_core::Allocator;
use symmalloc_core::config::Config;
use symmalloc_sim::IdleBackend;
use symmalloc_trace::replay::Replay;

/// Returns the nanoseconds per op of the median pass after the first, or of the first pass if it is the only one. If the options contain a
/// plan, the passes follow it.
///
/// # Errors
/// Returns an error if the plan cannot be adopted, or leftover allocations cannot be freed. The time includes ops that the allocator
/// refuses.
pub fn nanoseconds_per_op(job: &Job, config: &Config, options: &Options) -> Result<f64, JobError> {
    let program = job.program();
    let allocator = Allocator::new(IdleBackend::default(), config.clone())?;
    let not_followed = |error| JobError::Plan { rank: 0, error };
    let mut replay = match options.plan.as_deref() {
        Some(plan) => Replay::following(&allocator, program, plan).map_err(not_followed)?,
        None => Replay::new(&allocator, program),
    };
    let mut times = Vec::new();
    for _ in 0..options.passes.get() {
        replay.begin_pass().map_err(|error| JobError::Pass { rank: 0, error })?;
        let start = Instant::now();
        for op in program.ops() {
            let _ = black_box(replay.step(op));
        }
        times.push(start.elapsed());
        replay.free_all().map_err(|error| JobError::Free { rank: 0, error })?;
    }
    let steady = if times.len() > 1 { &mut times[1..] } else { &mut times[..] };
    Ok(median(steady).as_nanos() as f64 / program.ops().len().max(1) as f64)
}

/// Returns the median; with an even number of times, the faster of the two middle ones.
fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value() {
        let milliseconds = |times: &[u64]| times.iter().copied().map(Duration::from_millis).collect::<Vec<_>>();
        assert_eq!(median(&mut milliseconds(&[9, 1, 5])), Duration::from_millis(5));
        assert_eq!(median(&mut milliseconds(&[9, 1, 5, 7])), Duration::from_millis(5));
        assert_eq!(median(&mut milliseconds(&[3])), Duration::from_millis(3));
    }
}
