//! `ncclCommShrink`: a communicator of the ranks that remain. The others do not call it, and may have left already.

use crate::calls::{Config, is_blocking, on};
use crate::codes::{INVALID_ARGUMENT, INVALID_USAGE};
use crate::group::{self, Action};
use crate::ledger::violate;
use crate::member::{Life, Member, Step};
use crate::messages::Round;
use crate::options::options;
use std::ffi::c_int;
use std::sync::Arc;

/// `NCCL_SHRINK_DEFAULT`. The stub does not have `NCCL_SHRINK_ABORT`.
const DEFAULT: c_int = 0;

/// Shrinks a communicator, like `ncclCommShrink`.
///
/// # Safety
/// The list must be valid for reading, the configuration null or valid, and `out` valid for writing until the step completes.
pub unsafe fn shrink(
    comm: u64,
    (list, count): (*const c_int, c_int),
    out: *mut u64,
    config: *const Config,
    flags: c_int,
) -> c_int {
    on("ncclCommShrink", comm, |member, is_hung| {
        let count = usize::try_from(count).unwrap_or(0);
        if options().version < 22_703 || flags != DEFAULT {
            violate(format!("rank {}: ncclCommShrink with flags {flags}", member.world));
            return INVALID_USAGE;
        }
        if list.is_null() || out.is_null() || count == 0 {
            return INVALID_ARGUMENT;
        }
        // SAFETY: guaranteed by the caller.
        let blocking = match unsafe { is_blocking(config, member.is_blocking) } {
            Ok(blocking) => blocking,
            Err(code) => return code,
        };
        // SAFETY: guaranteed by the caller.
        let list = unsafe { std::slice::from_raw_parts(list, count) };
        let (rank, ranks, pending, life) = {
            let inner = member.lock();
            (inner.rank, inner.ranks, inner.queue.len(), inner.life)
        };
        let mut excluded: Vec<usize> = list.iter().filter_map(|rank| usize::try_from(*rank).ok()).collect();
        excluded.sort_unstable();
        if excluded.len() < count || excluded.iter().any(|other| *other >= ranks || *other == rank) {
            return INVALID_ARGUMENT;
        }
        if pending > 0 || !matches!(life, Life::Live | Life::Revoked) {
            violate(format!(
                "rank {}: a communicator that is {life:?} shrinks with {pending} pending collectives",
                member.world
            ));
            return INVALID_USAGE;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(0) };
        let child = Member::create(member.world, member.device, blocking);
        let round = Round::Shrink { excluded, member: child.handle };
        let step = Step::Split { child: Some(child), out: out as usize };
        group::submit(Arc::clone(member), Action::Step(step, (!is_hung).then_some(round)))
    })
}
