//! The steps `Suspend` and `Resume` of a sleep and a wake: NCCL releases and restores the memory of a pool's communicators.
//!
//! ```text
//!  sleep   ... Check ─ Suspend the others ─ Suspend the communicator of the exchange
//!  wake    Resume that one ─ Agree ─ Remap ─ Decide ─ Resume the others ─ Register ...
//! ```
//! NCCL suspends and resumes on all ranks of a communicator together. Meanwhile, none of the ranks can communicate over the communicator.

use crate::sleep::error::{CollectiveSleepError, Obstacle, SleepStep};
use crate::sleep::phase_change::PhaseChange;
use crate::sync::error::SyncError;
use std::collections::BTreeSet;

impl PhaseChange<'_> {
    /// Checks that the communicators can be suspended.
    pub(super) fn check_suspension(&self) -> Result<(), Obstacle> {
        if !self.suspends {
            return Ok(());
        }
        for (_, locked) in self.comms.iter().enumerate().filter(|(at, _)| self.is_ready(*at)) {
            if locked.attachment.comm.memory().is_err() {
                return Err(self.record_obstacle(Obstacle::NoSuspension));
            }
            if locked.attachment.comm.registrations() > locked.attachment.registrations_of(self.pool) {
                return Err(self.record_obstacle(Obstacle::WindowsOfOtherPools));
            }
        }
        Ok(())
    }

    /// Executes `Suspend`: suspends the other communicators in their order, and then the communicator of the exchange. Returns the released
    /// bytes. Ends communicators that are broken on some rank, because that rank does not suspend them. If one of the other communicators
    /// cannot be suspended, it is ended, and the wake reports it as lost.
    pub(super) fn suspend(&mut self, broken: &BTreeSet<u64>) -> Result<u64, CollectiveSleepError> {
        let mut released_bytes = 0;
        if !self.suspends {
            return Ok(released_bytes);
        }
        for at in (1..self.comms.len()).chain([0]) {
            if broken.contains(&self.comms[at].id) {
                self.end(at);
            }
            if !self.is_ready(at) {
                continue;
            }
            let comm = self.comms[at].attachment.comm.clone();
            match comm.suspend() {
                Ok(bytes) => released_bytes += bytes,
                Err(error) if at == 0 => {
                    let error = self.comms[at].attachment.failed(error);
                    return Err(self.broken(SleepStep::Suspend, error));
                }
                Err(error) => {
                    tracing::warn!(name: "sleep.communicator_lost", target: "symmalloc", communicator = comm.name(), %error);
                    self.end(at);
                }
            }
        }
        Ok(released_bytes)
    }

    /// Executes `Resume` of the communicator of the exchange, without which the ranks cannot communicate. First checks that its memory
    /// fits, because if NCCL had no room on one rank, the other ranks would keep waiting.
    pub(super) fn resume_exchange(&mut self) -> Result<(), CollectiveSleepError> {
        let comm = self.over();
        let Some(needed_bytes) = comm.suspended_bytes() else { return Ok(()) };
        let communicator = || comm.name().to_owned();
        let free_bytes = self.free_bytes(needed_bytes);
        if free_bytes < needed_bytes {
            return Err(CollectiveSleepError::NoRoom { communicator: communicator(), needed_bytes, free_bytes });
        }
        match comm.resume() {
            Ok(()) => {
                self.resumed.push(communicator());
                Ok(())
            }
            Err(error) => {
                self.record_op();
                let error = self.comms[0].attachment.failed(error);
                Err(self.broken(SleepStep::Resume, error))
            }
        }
    }

    /// Checks that the memory of the other suspended communicators fits on the device.
    pub(super) fn check_room(&self, broken: &BTreeSet<u64>) -> Result<(), Obstacle> {
        let others = self.comms[1..].iter().filter(|locked| !broken.contains(&locked.id));
        let needed_bytes = others.filter_map(|locked| locked.attachment.comm.suspended_bytes()).sum();
        if self.free_bytes(needed_bytes) < needed_bytes {
            return Err(Obstacle::Memory { needed_bytes, code: 2 });
        }
        Ok(())
    }

    /// Executes `Resume` for one of the other communicators.
    pub(super) fn resume(&mut self, at: usize) -> Result<(), SyncError> {
        let attachment = self.comms[at].attachment;
        let comm = &attachment.comm;
        if comm.is_suspended() {
            comm.resume().map_err(|error| attachment.failed(error))?;
            self.resumed.push(comm.name().to_owned());
        }
        Ok(())
    }

    /// Returns the number of free bytes on the device. If they are fewer than needed, first trims the private pools. If the driver reports
    /// an error, returns `u64::MAX`, and the call to NCCL decides.
    fn free_bytes(&self, needed_bytes: u64) -> u64 {
        let allocator = self.registrar.allocator();
        let read = || allocator.device().memory_info().map_or(u64::MAX, |info| info.free_bytes);
        match read() {
            free_bytes if free_bytes < needed_bytes && allocator.trim_private() > 0 => read(),
            free_bytes => free_bytes,
        }
    }
}
