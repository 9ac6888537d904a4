//! `ncclCommGrow`: a communicator of the ranks of another one and of ranks that join it.
//!
//! The ranks of the old communicator meet there, and the one that created the id passes it to the others. Then all of them join a job with
//! this id, like the new ranks. Nothing completes without all of them.

use crate::calls::{Config, UniqueId, is_blocking, on};
use crate::codes::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, SYSTEM_ERROR};
use crate::group::{self, Action};
use crate::ledger::{self, Verdict, violate};
use crate::member::{Life, Member, Step};
use crate::messages::{Join, Round};
use crate::options::options;
use crate::outputs::Pending;
use crate::{cuda, registry};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

/// First version with the calls.
const SINCE: i32 = 22_902;

/// The unused ids, by the communicators that created them.
static UNUSED: Mutex<BTreeMap<u64, [u8; 128]>> = Mutex::new(BTreeMap::new());

fn unused<T>(act: impl FnOnce(&mut BTreeMap<u64, [u8; 128]>) -> T) -> T {
    act(&mut UNUSED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns an error code unless the communicator is live and has no pending work.
fn check(call: &str, member: &Member) -> Result<(), c_int> {
    let (life, pending) = {
        let inner = member.lock();
        (inner.life, inner.queue.len())
    };
    if options().version < SINCE || life != Life::Live || pending > 0 {
        violate(format!(
            "rank {}: {call} on a communicator that is {life:?}, {pending} pending collectives",
            member.world
        ));
        return Err(INVALID_USAGE);
    }
    Ok(())
}

/// Creates the id of a grow, like `ncclCommGetUniqueId`.
///
/// # Safety
/// `out` must be valid for writing.
pub unsafe fn unique_id(comm: u64, out: *mut UniqueId) -> c_int {
    on("ncclCommGetUniqueId", comm, |member, _| {
        if let Err(code) = check("ncclCommGetUniqueId", member) {
            return code;
        }
        if std::env::var_os("NCCL_COMM_ID").is_some() {
            violate(format!("rank {}: ncclCommGetUniqueId while NCCL_COMM_ID is set", member.world));
            return INVALID_USAGE;
        }
        let id = registry::unique_id();
        if unused(|unused| unused.insert(comm, id.internal)).is_some() {
            violate(format!("rank {}: ncclCommGetUniqueId before the last id was used", member.world));
            return INVALID_USAGE;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(id) };
        SUCCESS
    })
}

/// Grows a communicator, or joins one that grows, like `ncclCommGrow`.
///
/// # Safety
/// The id and the configuration must be null or valid, and `out` valid for writing until the step completes.
pub unsafe fn grow(
    comm: u64,
    ranks: c_int,
    id: *const UniqueId,
    rank: c_int,
    out: *mut u64,
    config: *const Config,
) -> c_int {
    let Ok(ranks) = usize::try_from(ranks) else { return INVALID_ARGUMENT };
    // SAFETY: guaranteed by the caller.
    let (id, blocking) = unsafe { (id.as_ref().map(|id| id.internal), is_blocking(config, true)) };
    let blocking = match blocking {
        Ok(blocking) if !out.is_null() => blocking,
        Ok(_) => return INVALID_ARGUMENT,
        Err(code) => return code,
    };
    let _output = Pending::new(out);
    // SAFETY: guaranteed by the caller.
    let write = |member: &Member| unsafe { out.write(member.handle) };
    if comm != 0 {
        return on("ncclCommGrow", comm, |member, is_hung| {
            if let Err(code) = check("ncclCommGrow", member) {
                return code;
            }
            if rank != -1 || ranks <= member.lock().ranks {
                return INVALID_ARGUMENT;
            }
            if unused(|unused| unused.remove(&comm)) != id {
                violate(format!("rank {}: ncclCommGrow with another id than its last one", member.world));
                return INVALID_ARGUMENT;
            }
            let child = Member::create(member.world, member.device, blocking);
            write(&child);
            let round = Round::Grow { id: id.map(Vec::from), ranks };
            let step = Step::Grow { child };
            group::submit(Arc::clone(member), Action::Step(step, (!is_hung).then_some(round)))
        });
    }
    let (Some(id), Ok(rank)) = (id, usize::try_from(rank)) else { return INVALID_ARGUMENT };
    if options().version < SINCE || rank >= ranks {
        return INVALID_ARGUMENT;
    }
    let verdict = ledger::enter("ncclCommGrow", Some(rank));
    if let Verdict::Fail(code) = verdict {
        return code;
    }
    let member = Member::create(rank, cuda::device().unwrap_or(0), blocking);
    write(&member);
    if verdict == Verdict::Hang && blocking {
        ledger::wait_for_heal();
        member.lock().life = Life::Refused(SYSTEM_ERROR);
        return SYSTEM_ERROR;
    }
    let join = join(&member, id.to_vec(), rank, ranks);
    group::submit(member, Action::Init((verdict != Verdict::Hang).then_some(join)))
}

/// Returns the request of a communicator to join a grown one as this rank.
pub fn join(member: &Member, id: Vec<u8>, rank: usize, ranks: usize) -> Join {
    Join {
        id,
        rank,
        ranks,
        world: member.world,
        device: member.device,
        process: std::process::id(),
        file: cuda::memory_file().0,
        member: member.handle,
    }
}
