//! The interface through which other threads send requests to the watchdog's thread.

use crate::lifeline::Lifeline;
use crate::message::{FailureReport, Member};
use crate::watching::connecting::Connecting;
use crate::watching::watched::{Identity, MeetingId};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Longest time for which other threads wait for the watchdog's answer.
pub(super) const COMMAND_LIMIT: Duration = Duration::from_secs(1);

/// A request to the watchdog's thread.
pub(super) enum Command {
    /// The processes of this meeting are connected.
    Met(MeetingId, Box<Lifeline>),
    /// A communicator was created.
    Watch(Identity),
    /// This process is creating a communicator.
    Expect(Arc<Connecting>),
    /// The communicator was created, or will not be.
    Withdraw(Arc<Connecting>),
    /// Names a silent process as the failure of the creation, if there is one.
    BlameSilent(Arc<Connecting>),
    /// This process failed to create the communicator.
    FailToConnect(Arc<Connecting>, FailureReport),
    /// A communicator was destroyed normally.
    Leave(Identity),
    /// A communicator was ended because of an error.
    Fail(Identity, FailureReport),
    /// Asks for the members of the communicator.
    Members(Identity, Sender<Vec<Member>>),
    /// Waits until earlier commands have been processed.
    Flush(Sender<()>),
}

pub(super) struct Handle {
    commands: Mutex<Sender<Command>>,
    /// Event descriptor. A write wakes the thread.
    wakeup: OwnedFd,
    /// The meetings whose connections are kept.
    meetings: Mutex<BTreeSet<MeetingId>>,
}

static HANDLE: OnceLock<Handle> = OnceLock::new();

impl Handle {
    pub(super) fn new(commands: Sender<Command>, wakeup: OwnedFd) -> Self {
        Handle { commands: Mutex::new(commands), wakeup, meetings: Mutex::default() }
    }

    /// Returns the handle of the process, and starts the thread if it does not run yet. After an error, the next call tries again.
    ///
    /// # Errors
    /// Returns an error if the system cannot create a thread or a descriptor.
    pub(super) fn get_or_start(start: impl FnOnce() -> io::Result<Self>) -> io::Result<&'static Self> {
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(handle) = HANDLE.get() {
            return Ok(handle);
        }
        let _starting = lock(&STARTING);
        match HANDLE.get() {
            Some(handle) => Ok(handle),
            None => {
                let handle = start()?;
                Ok(HANDLE.get_or_init(|| handle))
            }
        }
    }

    /// Returns the handle of the process, or `None` if the watchdog does not run.
    pub(super) fn get() -> Option<&'static Self> {
        HANDLE.get()
    }

    pub(super) fn command(&self, command: Command) {
        if lock(&self.commands).send(command).is_ok() {
            let _rung = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
        }
    }

    /// Waits until earlier commands have been processed, for at most `limit`. Returns immediately if the thread has ended.
    pub(super) fn flush(&self, limit: Duration) {
        let (sender, done) = channel();
        self.command(Command::Flush(sender));
        let _in_time = done.recv_timeout(limit);
    }

    pub(super) fn note_meeting(&self, meeting: MeetingId) {
        lock(&self.meetings).insert(meeting);
    }

    pub(super) fn forget_meeting(&self, meeting: &MeetingId) {
        lock(&self.meetings).remove(meeting);
    }

    /// Returns the meeting with this id. If ranks are threads that met separately, returns the meeting of this rank.
    pub(super) fn meeting_of(&self, id: &[u8; MeetingId::BYTES], rank: u32) -> Option<MeetingId> {
        let meetings = lock(&self.meetings);
        let of_id = || meetings.iter().filter(|meeting| meeting.id == *id);
        of_id().find(|meeting| meeting.own == rank).or_else(|| of_id().next()).copied()
    }
}

/// Returns the known state of a communicator's ranks, or an empty list if nothing was ever watched.
pub(super) fn members(identity: &Identity) -> Vec<Member> {
    let Some(watchdog) = HANDLE.get() else { return Vec::new() };
    let (sender, answer) = channel();
    watchdog.command(Command::Members(identity.clone(), sender));
    answer.recv_timeout(COMMAND_LIMIT).unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
