//! The watchdog's view of a communicator: its identity, its flight record, and why it ended.

use crate::flight_record::{CollectiveRecord, CommunicatorRecord, PeerRecord};
use crate::ids::{CommunicatorId, RankId};
use crate::message::Member;
use crate::watching::clock::Tick;
use crate::watching::failure::{Failure, FailureCause, PENDING_COMM};
use crate::watching::recorder::Flight;
use crate::watching::settings::WatchSettings;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// A communicator that the watchdog can end. Its methods are called on threads that may block indefinitely.
pub trait Watchable: Send + Sync {
    /// Ends the communicator because of the failure. All threads that wait in the communicator's calls or for its work must return.
    fn end(&self, failure: &Arc<Failure>);

    /// Returns `true` if none of the communicator's work is running anymore, or if another owner has to end it.
    fn is_ended(&self) -> bool;

    /// Returns the communicator's state, such as "ready" or "aborted".
    fn state_text(&self) -> String;
}

/// The way to end this process, by the rules of the device's owner.
pub trait Process: Sync {
    /// Lets `exit` wait for a report that is being written, until the returned value is dropped.
    fn delay_exit(&self) -> Box<dyn Send>;

    /// Ends the process immediately, without the handlers of `exit`.
    fn exit_now(&self, code: i32) -> !;
}

/// The id of a meeting, in which the processes of a communicator connect to each other. It includes this rank's number, because ranks can
/// be threads of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MeetingId {
    pub(super) id: [u8; MeetingId::BYTES],
    pub(super) own: u32,
}

impl MeetingId {
    /// Size in bytes of the id that the processes share.
    pub const BYTES: usize = 128;
}

/// The constant properties of a communicator.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its id, equal on all ranks.
    pub id: CommunicatorId,
    /// Its name, for reports.
    pub name: Arc<str>,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Maximum time without progress. The watchdog then looks for the cause.
    pub deadline: Duration,
    /// The meeting of its processes; `None` if there was none and only ranks of this process know of each other.
    pub meeting: Option<MeetingId>,
}

impl Identity {
    /// Returns this rank of the communicator.
    pub fn rank_id(&self) -> RankId {
        RankId { communicator: self.id, rank: self.rank }
    }
}

/// The watchdog's view of a communicator on one rank. It may outlive the communicator, and keeps the communicator's record.
pub struct Watched {
    identity: Identity,
    settings: WatchSettings,
    flight: Arc<dyn Flight>,
    /// The failure for which the watchdog ended the communicator, and its time.
    failure: OnceLock<(Arc<Failure>, Instant)>,
    /// Time at which the watchdog learned that the process of another rank is gone or stopped while this rank destroys the communicator.
    peer_lost: OnceLock<Instant>,
    /// `true` once the communicator was destroyed or ended because of an error. It is then no longer checked.
    is_closed: AtomicBool,
    /// `true` once a thread ensures that the communicator ends.
    is_end_ensured: AtomicBool,
    /// An error of the driver or NCCL that no call of the program returned, with its time.
    error: Mutex<Option<(FailureCause, Tick)>>,
    communicator: Weak<dyn Watchable>,
    process: &'static dyn Process,
}

impl Watched {
    /// Creates the watchdog's view of a communicator. [`watch`](Self::watch) starts to watch it.
    pub fn new(
        identity: Identity,
        settings: WatchSettings,
        flight: Arc<dyn Flight>,
        communicator: Weak<dyn Watchable>,
        process: &'static dyn Process,
    ) -> Self {
        Watched {
            identity,
            settings,
            flight,
            failure: OnceLock::new(),
            peer_lost: OnceLock::new(),
            is_closed: AtomicBool::new(false),
            is_end_ensured: AtomicBool::new(false),
            error: Mutex::default(),
            communicator,
            process,
        }
    }

    /// Returns the communicator's constant properties.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(super) fn settings(&self) -> &WatchSettings {
        &self.settings
    }

    pub(super) fn process(&self) -> &'static dyn Process {
        self.process
    }

    /// Returns the communicator's progress and its last collectives.
    pub(super) fn flight(&self) -> &dyn Flight {
        &*self.flight
    }

    /// Returns the failure for which the watchdog ended the communicator, if any.
    pub fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get().map(|(failure, _)| failure)
    }

    /// Returns the time since the failure.
    pub fn since_failure(&self) -> Option<Duration> {
        self.failure.get().map(|(_, since)| since.elapsed())
    }

    /// Records that the process of another rank is gone or stopped, for a communicator that is being destroyed.
    pub(super) fn note_peer_lost(&self) {
        self.peer_lost.get_or_init(Instant::now);
    }

    /// Returns the time since the watchdog learned that the process of another rank is gone or stopped, if the communicator is being
    /// destroyed.
    pub fn since_peer_lost(&self) -> Option<Duration> {
        self.peer_lost.get().map(Instant::elapsed)
    }

    /// Returns `true` if the communicator is no longer checked for stalls.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Stops checking the communicator for stalls.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Returns `true` for the first caller, which must ensure that the communicator ends.
    pub(super) fn claim_end(&self) -> bool {
        !self.is_end_ensured.swap(true, Ordering::AcqRel)
    }

    /// Returns the communicator, or `None` if the program has dropped it.
    pub(super) fn communicator(&self) -> Option<Arc<dyn Watchable>> {
        self.communicator.upgrade()
    }

    /// Records an error of the driver or NCCL, for which the watchdog ends the communicator unless it finds the cause on another rank.
    pub fn record_error(&self, cause: FailureCause) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((cause, Tick::now()));
    }

    /// Returns the recorded error of the driver or NCCL, and its time.
    pub(super) fn error(&self) -> Option<(FailureCause, Tick)> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the failure and returns it if it is the communicator's first.
    pub(super) fn record_failure(
        &self,
        cause: FailureCause,
        collective: Option<CollectiveRecord>,
        waited: Duration,
    ) -> Option<Arc<Failure>> {
        let Identity { name, rank, .. } = &self.identity;
        let failure = Arc::new(Failure { communicator: Arc::clone(name), rank: *rank, cause, collective, waited });
        self.failure.set((Arc::clone(&failure), Instant::now())).is_ok().then_some(failure)
    }

    /// Returns the communicator's known state as an entry of a flight record.
    pub(super) fn record(&self, members: &[Member]) -> CommunicatorRecord {
        let Identity { id, name, rank, ranks, .. } = &self.identity;
        let now = Tick::now();
        CommunicatorRecord {
            id: *id,
            name: name.to_string(),
            rank: *rank,
            ranks: *ranks,
            state: self.communicator().map_or_else(|| "dropped".to_owned(), |it| it.state_text()),
            cause: self.failure().map(ToString::to_string),
            progress: self.flight.progress(),
            peers: members.iter().filter(|member| member.rank != *rank).map(peer).collect(),
            collectives: self.flight.collectives(now),
        }
    }
}

fn peer(member: &Member) -> PeerRecord {
    let condition = if let Some(departure) = &member.departure {
        format!("gone: {departure}")
    } else if let Some(report) = &member.failure {
        format!("gave up: {}", report.text)
    } else if member.has_left {
        "destroyed the communicator".to_owned()
    } else if member.silent_ms > 1000 {
        format!("silent for {} ms", member.silent_ms)
    } else {
        "alive".to_owned()
    };
    PeerRecord { rank: member.rank & !PENDING_COMM, progress: member.progress, condition }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("identity", &self.identity).finish_non_exhaustive()
    }
}

static WATCHED: Mutex<Vec<Weak<Watched>>> = Mutex::new(Vec::new());

/// Registers a communicator. It stays registered until `watched` is dropped.
pub(super) fn add(watched: &Arc<Watched>) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(watched));
}

/// Returns all watched communicators in the order in which they were connected.
pub(super) fn all() -> Vec<Arc<Watched>> {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.retain(|it| it.strong_count() > 0);
    watched.iter().filter_map(Weak::upgrade).collect()
}
