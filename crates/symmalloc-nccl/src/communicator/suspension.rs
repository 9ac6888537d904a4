//! Suspension: an idle communicator releases NCCL's memory and keeps its addresses, until it is resumed.
//!
//! NCCL suspends and resumes on all ranks together and has no deadline, so both operations run like a registration: on a separate thread,
//! or polled. If one rank fails, the others keep waiting inside NCCL. Every error therefore ends the communicator.

use crate::communicator::Communicator;
use crate::communicator::call::{CallThread, HostEntry, perform};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shared::lock;
use crate::ffi::calls::MemoryStat;
use crate::ffi::version::Capability;
use std::collections::BTreeMap;
use std::slice::from_mut;
use std::sync::Arc;

/// Device memory that NCCL holds for a communicator, as NCCL reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommMemory {
    /// Bytes that a suspension releases. They are on the device unless the communicator is suspended.
    pub suspendable_bytes: u64,
    /// Bytes that a suspension does not release.
    pub persistent_bytes: u64,
    /// `true` if the communicator is suspended.
    pub is_suspended: bool,
}

impl CommMemory {
    /// Returns the bytes that are on the device.
    pub fn held_bytes(&self) -> u64 {
        self.persistent_bytes + if self.is_suspended { 0 } else { self.suspendable_bytes }
    }
}

impl Communicator {
    /// Returns the memory that NCCL holds for the communicator.
    ///
    /// # Errors
    /// Returns an error if the communicator has ended, the library is older than 2.29.7, or NCCL's memory manager is disabled.
    pub fn memory(&self) -> Result<CommMemory, CommError> {
        self.require(Capability::Suspension)?;
        let access = self.shared.access()?;
        let stat = |stat| access.shared.nccl.calls().memory_stat(access.comm, stat);
        Ok(CommMemory {
            suspendable_bytes: stat(MemoryStat::Suspendable)?,
            persistent_bytes: stat(MemoryStat::Persistent)?,
            is_suspended: self.is_suspended(),
        })
    }

    /// Returns the bytes of device memory that NCCL holds for communicators. An `ncclComm_t` that several communicators borrow counts once.
    /// Communicators for which [`memory`](Self::memory) returns an error do not count.
    pub fn held_bytes(communicators: &[Communicator]) -> u64 {
        let distinct: BTreeMap<usize, &Communicator> =
            communicators.iter().map(|comm| (comm.raw().addr(), comm)).collect();
        distinct.values().filter_map(|comm| comm.memory().ok()).map(|memory| memory.held_bytes()).sum()
    }

    /// Returns `true` if the communicator is suspended. Never waits.
    pub fn is_suspended(&self) -> bool {
        self.suspended_bytes().is_some()
    }

    /// Returns the bytes that NCCL released when it suspended the communicator. To resume it, the same number of bytes must be free on the
    /// device. Returns `None` if the communicator is not suspended. Never waits.
    pub fn suspended_bytes(&self) -> Option<u64> {
        if self.state() == CommState::Ready { lock(&self.shared.usage).suspended_bytes } else { None }
    }

    /// Returns the number of windows and buffers that are registered on NCCL's communicator, including those of other borrowers.
    pub(crate) fn registrations(&self) -> usize {
        lock(&self.shared.usage).registrations
    }

    /// Releases the memory that NCCL holds for the communicator, once all of its work has completed. All ranks must make this call. Until
    /// it is [resumed](Self::resume), collectives and registrations return [`CommError::Suspended`]. Returns the released bytes. Does
    /// nothing if the communicator is already suspended.
    ///
    /// No graph that contains its collectives may be launched until it is resumed.
    ///
    /// # Errors
    /// Returns an error without any effect if the library is older than 2.29.7, NCCL's memory manager is disabled, or windows or buffers
    /// are registered on it. If NCCL fails or ranks do not arrive within the deadline, the communicator is ended.
    pub fn suspend(&self) -> Result<u64, CommError> {
        if let Some(bytes) = self.suspended_bytes() {
            return Ok(bytes);
        }
        let bytes = self.memory()?.suspendable_bytes;
        let mut access = self.shared.access_active()?;
        let registrations = self.registrations();
        if registrations > 0 {
            return Err(CommError::Registered { name: Arc::clone(&self.shared.name), registrations });
        }
        let comm = access.comm;
        let _entry = HostEntry::begin(self.watched(), Stage::Suspend, None);
        let route = CallThread::when_blocking(self.shared.mode, CallThread::Separate);
        perform(from_mut(&mut access), Stage::Suspend, route, &None, move |calls| calls.suspend(comm))?;
        lock(&self.shared.usage).suspended_bytes = Some(bytes);
        Ok(bytes)
    }

    /// Restores the memory that NCCL holds for a suspended communicator, at the same addresses. All ranks must make this call. Does nothing
    /// if the communicator is not suspended.
    ///
    /// # Errors
    /// If the device has no room, NCCL fails, or ranks do not arrive within the deadline, the communicator is ended.
    pub fn resume(&self) -> Result<(), CommError> {
        if !self.is_suspended() {
            return Ok(());
        }
        let mut access = self.shared.access()?;
        let comm = access.comm;
        let _entry = HostEntry::begin(self.watched(), Stage::Resume, None);
        let route = CallThread::when_blocking(self.shared.mode, CallThread::Separate);
        perform(from_mut(&mut access), Stage::Resume, route, &None, move |calls| calls.resume(comm))?;
        lock(&self.shared.usage).suspended_bytes = None;
        Ok(())
    }
}
