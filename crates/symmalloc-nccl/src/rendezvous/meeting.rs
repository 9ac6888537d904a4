//! Meetings of a job's ranks.

use crate::rendezvous::handshake::Hello;
use crate::rendezvous::launch::Launch;
use crate::rendezvous::secret::Secret;
use std::time::Duration;

/// Time limit for a visitor to identify itself, and for rank 0 to answer.
pub(super) const VISITOR_LIMIT: Duration = Duration::from_secs(5);

/// One meeting of the ranks of one job.
#[derive(Clone, Debug)]
pub(super) struct Meeting {
    pub(super) job: u64,
    pub(super) ranks: u32,
    pub(super) secret: Option<Secret>,
}

impl Meeting {
    pub(super) fn new(launch: &Launch, turn: u32, secret: Option<Secret>) -> Self {
        Meeting { job: hash(format!("{}.{turn}", job_of(launch)).as_bytes()), ranks: launch.ranks, secret }
    }

    /// Returns `true` if the visitor is a rank of this job that rank 0 waits for.
    pub(super) fn is_of(&self, hello: &Hello) -> bool {
        (hello.job, hello.ranks) == (self.job, self.ranks) && (1..self.ranks).contains(&hello.rank)
    }
}

/// Returns the FNV-1a hash, which is the same on every machine.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns a name that distinguishes this job from others on the machine.
pub(super) fn job_of(launch: &Launch) -> String {
    if launch.job.is_empty() && launch.ranks == launch.local_ranks {
        // Under mpiexec and similar launchers, the ranks of one machine are children of one process.
        return format!("{}.{}", launch.launcher, std::os::unix::process::parent_id());
    }
    format!("{}.{}", launch.launcher, launch.job)
}
