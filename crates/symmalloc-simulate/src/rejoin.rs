//! Rejoining: a rank that starts again and has the same future as the others from the next sync on.

use crate::failure::Cause;
use crate::rank::{Job, Rank, Stop};
use crate::schedule::Scheduler;
use crate::surroundings::Surroundings;
use symmalloc_core::lock::Lock;

/// Starts a rank again after so many stretches. To the new one nothing happens.
pub(crate) fn rejoin<L: Lock>(
    job: &Job,
    surroundings: &Surroundings,
    incarnation: u32,
    stretches: usize,
) -> Result<Rank<L>, Cause> {
    let restarted = Surroundings {
        faults: Vec::new(),
        memory_bytes: None,
        private_per_million: 0,
        restart_at: None,
        ..surroundings.clone()
    };
    let mut rank = Rank::new(job, restarted, incarnation);
    let mut scheduler = Scheduler::default();
    for stretch in 0..stretches {
        match rank.repeat(job, stretch, &mut scheduler) {
            Ok(()) => {}
            Err(Stop::Failed { cause, .. }) => return Err(cause),
            Err(Stop::Lost) => unreachable!("nothing happens to it"),
        }
    }
    Ok(rank)
}
