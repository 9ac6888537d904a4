//! Submission of collectives to streams.

use crate::communicator::Communicator;
use crate::communicator::call::{Route, perform};
use crate::communicator::error::CommError;
use crate::communicator::error::Stage;
use crate::communicator::operation::Operation;
use crate::communicator::shared::{Access, Mode};
use crate::ffi::handles::CommHandle;
use crate::watchdog::{EntryNumber, Tick, Work};
use cudarc::driver::CudaStream;
use smallvec::SmallVec;
use std::sync::Arc;

/// A collective with its communicator and its stream.
pub(crate) type Submission<'a> = (&'a Communicator, Operation, &'a Arc<CudaStream>);

/// Submits collectives to NCCL: a single one directly, several as a group. Returns when they are in their streams. The guards of their
/// buffers must live until then. If `is_noted` is set, each collective is recorded for the watchdog; otherwise the caller announces them as
/// a whole.
pub(crate) fn submit(operations: &[Submission<'_>], is_noted: bool) -> Result<(), CommError> {
    let mut accesses = access_all(operations)?;
    let mut issues: SmallVec<[(CommHandle, Operation); 2]> = SmallVec::with_capacity(operations.len());
    let mut has_run = true;
    for (comm, operation, _) in operations {
        let access = find(&mut accesses, comm);
        has_run &= access.inner.shapes.contains(operation.shape());
        issues.push((access.comm, *operation));
    }
    let Some(first) = accesses.first() else { return Ok(()) };
    let route = if has_run { Route::Here } else { Route::when_blocking(first.shared.mode, Route::Apart) };
    let entries = if is_noted { begin(operations) } else { Entries::new() };
    let issued = perform(&mut accesses, Stage::Submit, route, &None, move |calls| calls.issue(&issues));
    note(operations, &entries, issued.is_ok());
    issued?;
    if !has_run {
        for (comm, operation, _) in operations {
            find(&mut accesses, comm).inner.shapes.insert(operation.shape());
        }
    }
    Ok(())
}

/// Entries of the operations in the flight records of their communicators.
type Entries = SmallVec<[EntryNumber; 2]>;

fn begin(operations: &[Submission<'_>]) -> Entries {
    let now = Tick::now();
    let entry = |(comm, operation, stream): &Submission<'_>| {
        comm.watched().flight().begin(Work::of(operation), Some(*stream), now)
    };
    operations.iter().map(entry).collect()
}

fn note(operations: &[Submission<'_>], entries: &Entries, is_issued: bool) {
    for ((comm, _, stream), entry) in operations.iter().zip(entries) {
        if is_issued {
            comm.note_submitted(*entry, stream);
        } else {
            comm.watched().flight().over(*entry, Tick::now());
        }
    }
}

/// Acquires access to every communicator once, in an order that is the same for all threads.
fn access_all<'a>(operations: &[Submission<'a>]) -> Result<SmallVec<[Access<'a>; 1]>, CommError> {
    let mut comms: SmallVec<[&Communicator; 1]> = operations.iter().map(|(comm, ..)| *comm).collect();
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
