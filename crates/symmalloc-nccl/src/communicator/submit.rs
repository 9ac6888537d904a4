//! Collectives on their way into streams.

use super::call::{Route, perform};
use super::shared::{Access, Mode};
use super::{Communicator, Stage};
use crate::calls::{Calls, Progress};
use crate::communicator::operation::Operation;
use crate::error::{CommError, NcclError};
use smallvec::SmallVec;
use std::sync::Arc;

/// Collectives that NCCL gets at once, each with its communicator.
type Issues = SmallVec<[(super::CommPtr, Operation); 2]>;

/// Gives collectives to NCCL: one as it is, several as a group. Returns when they are in their streams.
///
/// # Safety
/// Each operation's memory is of its communicator's device, long enough, and left alone by others until its stream is past the
/// collective; its stream lives and is of that device.
pub(crate) unsafe fn submit(operations: &[(&Communicator, Operation)]) -> Result<(), CommError> {
    let mut accesses = access_all(operations)?;
    let mut issues = Issues::with_capacity(operations.len());
    let mut has_run = true;
    for (comm, operation) in operations {
        let access = find(&mut accesses, comm);
        has_run &= access.inner.shapes.contains(operation.shape());
        issues.push((access.comm, *operation));
    }
    let Some(first) = accesses.first() else { return Ok(()) };
    let route = if has_run { Route::Here } else { Route::when_blocking(first.shared.mode, Route::Apart) };
    // SAFETY: the caller's contract; the accesses are held until the call is through.
    perform(&mut accesses, Stage::Submit, route, &None, move |calls| unsafe { issue(calls, &issues) })?;
    if !has_run {
        for (comm, operation) in operations {
            find(&mut accesses, comm).inner.shapes.insert(operation.shape());
        }
    }
    Ok(())
}

/// The right to use all communicators, each once, taken in an order that is the same for all threads.
fn access_all<'a>(operations: &[(&'a Communicator, Operation)]) -> Result<SmallVec<[Access<'a>; 1]>, CommError> {
    let mut comms: SmallVec<[&Communicator; 1]> = operations.iter().map(|(comm, _)| *comm).collect();
    comms.sort_unstable_by_key(|comm| comm.serial());
    comms.dedup_by_key(|comm| comm.serial());
    let name_of = |mode| comms.iter().find(|comm| comm.shared.mode == mode).map(|comm| Arc::clone(&comm.shared.name));
    if let (Some(blocking), Some(nonblocking)) = (name_of(Mode::Blocking), name_of(Mode::Nonblocking)) {
        return Err(CommError::MixedGroup { blocking, nonblocking });
    }
    comms.into_iter().map(|comm| comm.shared.access()).collect()
}

fn find<'a, 'b>(accesses: &'b mut [Access<'a>], comm: &Communicator) -> &'b mut Access<'a> {
    let place = accesses.iter().position(|access| access.shared.serial == comm.serial());
    &mut accesses[place.expect("every communicator was accessed")]
}

/// Calls NCCL.
///
/// # Safety
/// As [`submit`], and the communicators live and are this thread's.
unsafe fn issue(calls: &Calls, issues: &[(super::CommPtr, Operation)]) -> Result<Progress, NcclError> {
    if let [(comm, operation)] = issues {
        // SAFETY: the caller's contract.
        return unsafe { operation.issue(calls, comm.0) };
    }
    // SAFETY: takes nothing.
    unsafe { calls.group_start() }?;
    let mut issued = Ok(Progress::Done);
    for (comm, operation) in issues {
        // SAFETY: the caller's contract.
        issued = issued.and(unsafe { operation.issue(calls, comm.0) });
        if issued.is_err() {
            break;
        }
    }
    // The group must be ended on this thread in any case; after an error NCCL drops what it holds.
    // SAFETY: takes nothing.
    let ended = unsafe { calls.group_end() };
    issued.and(ended)
}
