//! A debugging aid that compares buffer offsets across all ranks before a collective runs.
//!
//! NCCL's symmetric kernels address a peer's buffer by this rank's own offset. The core's agreement compares what the ranks *allocated*. It
//! does not cover which of these buffers a rank then *passes to a collective*:
//!
//! ```text
//!   rank 0: all_reduce(gradients)       both allocated both buffers identically, and the histories agree
//!   rank 1: all_reduce(weights)         wrong values on both, and ncclSuccess
//! ```
//!
//! With [`check_offsets`](crate::RegistrarBuilder::check_offsets), one all-gather of the buffer locations precedes each call through
//! [`CheckedCollectives`]. The host waits once per call, so use it only to find bugs.

use crate::collectives::collectives;
use crate::communicator::Communicator;
use crate::communicator::error::CommError;
use crate::communicator::submission::{Buffers, Elements};
use crate::ffi::operation::NcclCall;
use crate::ffi::operation::{NcclType, ReduceOp};
use crate::registrar::Registrar;
use crate::sync::error::SyncError;
use crate::sync::offset_difference::{BufferPlace, CallMessage, CollectiveCall, Comparison, compare};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::sync::Arc;
use symmalloc_agreement::Transport;
use zerocopy::IntoBytes;

/// Collectives of one communicator that first compare their buffers across all ranks, if the registrar is configured to do so. For each
/// call, either all ranks or none must use this type.
#[derive(Clone, Copy, Debug)]
pub struct CheckedCollectives<'a> {
    registrar: &'a Registrar,
    comm: &'a Communicator,
}

impl Registrar {
    /// Returns the collectives of a communicator. If [`check_offsets`](crate::RegistrarBuilder::check_offsets) is set, each call first
    /// compares the offsets of its buffers across all ranks. Otherwise the calls are unchecked.
    pub fn checked<'a>(&'a self, comm: &'a Communicator) -> CheckedCollectives<'a> {
        CheckedCollectives { registrar: self, comm }
    }
}

collectives! {
    /// # Errors
    /// [`SyncError::OffsetsDiffer`] on every rank if offsets are compared and differ; otherwise the errors of the [`Communicator`].
    impl CheckedCollectives<'_>, SyncError
}

impl CheckedCollectives<'_> {
    fn collective<'b>(
        &self,
        call: NcclCall,
        buffers: impl FnOnce(&Communicator) -> Result<Buffers<'b>, CommError>,
    ) -> Result<(), SyncError> {
        let refused = |error| SyncError::Communicator { communicator: self.comm.name().to_owned(), error };
        if !self.registrar.settings().check_offsets {
            return self.comm.collective(call, buffers).map_err(refused);
        }
        let buffers = buffers(self.comm).map_err(refused)?;
        self.check(call, &buffers)?;
        self.comm.collective(call, |_| Ok(buffers)).map_err(refused)
    }

    /// Compares the buffer locations across ranks.
    fn check(&self, call: NcclCall, buffers: &Buffers<'_>) -> Result<(), SyncError> {
        let Some(collective) = call.collective() else { return Ok(()) };
        let attachment = self.registrar.attachment(self.comm)?;
        let bytes = |elements: Elements| (elements.count * buffers.data_type.size_bytes()) as u64;
        let place = |elements: Elements| {
            BufferPlace::of(attachment.view().registered.find(elements.address, bytes(elements)), elements.address)
        };
        let call = CollectiveCall {
            collective,
            send_bytes: bytes(buffers.send),
            receive_bytes: bytes(buffers.receive),
            send: place(buffers.send),
            receive: place(buffers.receive),
        };
        let communicator = || self.comm.name().to_owned();
        let compared = attachment.with_transport(self.registrar.allocator(), |transport| {
            let lost = |error| SyncError::Transport { communicator: communicator(), error };
            let gathered = transport.all_gather(CallMessage::from(call).as_bytes()).map_err(lost)?;
            compare(&gathered).map_err(|error| SyncError::Protocol { communicator: communicator(), error })
        })?;
        let difference = match compared {
            Comparison::Equal => return Ok(()),
            Comparison::Protocol(difference) => {
                let name = self.comm.name();
                tracing::error!(name: "offsets.diverged", target: "symmalloc", communicator = name, %difference);
                return Err(SyncError::Differ { communicator: communicator(), difference: Box::new(difference) });
            }
            Comparison::Calls(difference) => difference,
        };
        tracing::error!(name: "offsets.diverged", target: "symmalloc", communicator = self.comm.name(), %difference);
        Err(SyncError::OffsetsDiffer { communicator: communicator(), difference: Box::new(difference) })
    }
}
