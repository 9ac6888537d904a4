//! How long our allocator takes for an op, once it holds the memory it needs.
//!
//! One thread, exclusive access, statistics and digest included; the device below costs nothing. The first pass, in
//! which memory is obtained, does not count, and what the program left allocated is freed outside of the measurement.

use crate::job::{Job, JobError, Options};
use std::hint::black_box;
use std::time::{Duration, Instant};
use symmalloc_core::Allocator;
use symmalloc_core::config::Config;
use symmalloc_core::lock::Exclusive;
use symmalloc_sim::IdleBackend;
use symmalloc_trace::replay::Replay;

/// Nanoseconds per op of the median pass after the first, or of the first if it is the only one. With a plan, of following it.
///
/// # Errors
/// When the plan cannot be adopted, or what the program left cannot be freed. Ops that the allocator refuses are timed like others.
pub fn nanoseconds_per_op(job: &Job, config: &Config, options: &Options) -> Result<f64, JobError> {
    let program = job.program();
    let allocator = Allocator::<_, Exclusive>::new(IdleBackend::default(), config.clone())?;
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

/// The middle one; of an even number, the faster of the two in the middle.
fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        let milliseconds = |times: &[u64]| times.iter().copied().map(Duration::from_millis).collect::<Vec<_>>();
        assert_eq!(median(&mut milliseconds(&[9, 1, 5])), Duration::from_millis(5));
        assert_eq!(median(&mut milliseconds(&[9, 1, 5, 7])), Duration::from_millis(5));
        assert_eq!(median(&mut milliseconds(&[3])), Duration::from_millis(3));
    }
}
