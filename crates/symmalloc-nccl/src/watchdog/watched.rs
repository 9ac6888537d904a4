//! The watchdog's view of a communicator: its identity, its flight record, and the events that are pending in its streams.

use crate::rendezvous::unique_id::UniqueId;
use crate::watchdog::clock::Tick;
use crate::watchdog::failure::{Failure, FailureCause, PENDING_COMM};
use crate::watchdog::flight::{FlightRecorder, Marked};
use crate::watchdog::settings::WatchSettings;
use cudarc::driver::CudaEvent;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};
use symmalloc_cuda::RelaxedCapture;
use symmalloc_watchdog::{CollectiveRecord, CommunicatorId, CommunicatorRecord, Member, PeerRecord, RankId};

/// The watchdog's interface to a communicator. It is called on threads that may block indefinitely.
pub(crate) trait Watchable: Send + Sync {
    /// Ends the communicator because of the failure. All threads that wait inside its calls or for its work must return.
    fn end(&self, failure: &Arc<Failure>);

    /// Returns an error that NCCL reports, without waiting for a thread that is in NCCL.
    fn poll_error(&self) -> Option<FailureCause>;

    /// Returns `true` if none of its work runs any more, or if another owner has to end it.
    fn is_ended(&self) -> bool;

    /// Returns the communicator's state, such as "ready" or "aborted".
    fn state_text(&self) -> String;

    /// Lets this thread query streams and events while another thread captures.
    fn relax_capture(&self) -> RelaxedCapture;
}

/// The id of a meeting, in which the processes of a communicator connect to each other. It includes this rank's number, because ranks can
/// be threads of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MeetingId {
    pub(super) id: UniqueId,
    pub(super) own: u32,
}

/// The constant properties of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: CommunicatorId,
    pub(crate) name: Arc<str>,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) deadline: Duration,
    /// The meeting of its processes; `None` if there was none and only ranks of this process know of each other.
    pub(crate) meeting: Option<MeetingId>,
}

impl Identity {
    pub(crate) fn rank_id(&self) -> RankId {
        RankId { communicator: self.id, rank: self.rank }
    }
}

pub(crate) struct Watched {
    identity: Identity,
    settings: WatchSettings,
    flight: FlightRecorder,
    /// The failure for which the watchdog ended the communicator, and its time.
    failure: OnceLock<(Arc<Failure>, Instant)>,
    /// Time at which the watchdog learned that the process of another rank is gone or stopped while this rank destroys the communicator.
    peer_lost: OnceLock<Instant>,
    /// `true` once the communicator was destroyed or ended because of an error. It is then no longer checked.
    is_closed: AtomicBool,
    /// `true` once a thread ensures that the communicator ends.
    is_end_ensured: AtomicBool,
    /// Pending events in its streams.
    marks: Mutex<Marks>,
    /// An error that the marker thread detected, with its time.
    error: Mutex<Option<(FailureCause, Tick)>>,
    communicator: Weak<dyn Watchable>,
}

impl Watched {
    pub(crate) fn new(identity: Identity, settings: WatchSettings, communicator: Weak<dyn Watchable>) -> Self {
        Watched {
            identity,
            settings,
            flight: FlightRecorder::default(),
            failure: OnceLock::new(),
            peer_lost: OnceLock::new(),
            is_closed: AtomicBool::new(false),
            is_end_ensured: AtomicBool::new(false),
            marks: Mutex::default(),
            error: Mutex::default(),
            communicator,
        }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn settings(&self) -> &WatchSettings {
        &self.settings
    }

    /// Returns the communicator's last collectives.
    #[inline]
    pub(crate) fn flight(&self) -> &FlightRecorder {
        &self.flight
    }

    /// Returns the failure for which the watchdog ended the communicator, if any.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get().map(|(failure, _)| failure)
    }

    /// Returns the time since the failure.
    pub(crate) fn since_failure(&self) -> Option<Duration> {
        self.failure.get().map(|(_, since)| since.elapsed())
    }

    /// Records that the process of another rank is gone or stopped, for a communicator that is being destroyed.
    pub(super) fn note_peer_lost(&self) {
        self.peer_lost.get_or_init(Instant::now);
    }

    /// Returns the time since the process of another rank was known to be gone or stopped, if the communicator is being destroyed.
    pub(crate) fn since_peer_lost(&self) -> Option<Duration> {
        self.peer_lost.get().map(Instant::elapsed)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Stops checking the communicator for stalls.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Returns `true` for the first caller, which must ensure that the communicator ends.
    pub(super) fn claim_end(&self) -> bool {
        !self.is_end_ensured.swap(true, Ordering::AcqRel)
    }

    pub(super) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the communicator, or `None` if the program has dropped it.
    pub(super) fn communicator(&self) -> Option<Arc<dyn Watchable>> {
        self.communicator.upgrade()
    }

    /// Records an error of the driver or NCCL for the watchdog.
    pub(super) fn record_error(&self, cause: FailureCause) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((cause, Tick::now()));
    }

    /// Returns the recorded error of the driver or NCCL, and its time.
    pub(super) fn error(&self) -> Option<(FailureCause, Tick)> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the failure and returns it if it is the communicator's first.
    pub(super) fn fail(
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

/// Maximum number of unused events that are kept for reuse.
const FREE_MAX: usize = 16;

/// The pending events of a communicator's streams.
#[derive(Default)]
pub(super) struct Marks {
    waiting: Vec<Mark>,
    free: Vec<CudaEvent>,
}

/// An event that was recorded in a stream after some collectives.
pub(super) struct Mark {
    pub(super) upto: Marked,
    pub(super) event: CudaEvent,
}

impl Marks {
    pub(super) fn add(&mut self, mark: Mark) {
        self.waiting.push(mark);
    }

    pub(super) fn take_waiting(&mut self) -> Vec<Mark> {
        std::mem::take(&mut self.waiting)
    }

    /// Returns an unused event.
    pub(super) fn free_event(&mut self) -> Option<CudaEvent> {
        self.free.pop()
    }

    /// Keeps an event for reuse, unless there are [`FREE_MAX`] already.
    pub(super) fn keep(&mut self, event: CudaEvent) {
        if self.free.len() < FREE_MAX {
            self.free.push(event);
        }
    }
}

static WATCHED: Mutex<Vec<Weak<Watched>>> = Mutex::new(Vec::new());

/// Registers a communicator, which stays registered until it is dropped.
pub(super) fn add(watched: &Arc<Watched>) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(watched));
}

/// Returns all watched communicators in the order in which they were connected.
pub(super) fn all() -> Vec<Arc<Watched>> {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    watched.retain(|it| it.strong_count() > 0);
    watched.iter().filter_map(Weak::upgrade).collect()
}
