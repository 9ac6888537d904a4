//! Collectives on their way into streams.

use super::Communicator;
use super::call::{Route, perform};
use super::operation::Operation;
use super::shared::{Access, Mode};
use super::state::Stage;
use crate::error::CommError;
use crate::handles::CommHandle;
use smallvec::SmallVec;
use std::sync::Arc;

/// Gives collectives to NCCL: one as it is, several as a group. Returns when they are in their streams. The guards of their buffers
/// live until then.
pub(crate) fn submit(operations: &[(&Communicator, Operation)]) -> Result<(), CommError> {
    let mut accesses = access_all(operations)?;
    let mut issues: SmallVec<[(CommHandle, Operation); 2]> = SmallVec::with_capacity(operations.len());
    let mut has_run = true;
    for (comm, operation) in operations {
        let access = find(&mut accesses, comm);
        has_run &= access.inner.shapes.contains(operation.shape());
        issues.push((access.comm, *operation));
    }
    let Some(first) = accesses.first() else { return Ok(()) };
    let route = if has_run { Route::Here } else { Route::when_blocking(first.shared.mode, Route::Apart) };
    perform(&mut accesses, Stage::Submit, route, &None, move |calls| calls.issue(&issues))?;
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
