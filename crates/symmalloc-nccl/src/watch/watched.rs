//! A communicator as the watchdog sees it.

use super::clock::Tick;
use super::failure::{Failure, FailureCause, UNBORN};
use super::flight::Flight;
use super::marks::Marks;
use super::settings::WatchSettings;
use crate::unique_id::UniqueId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use symmalloc_cuda::RelaxedCapture;
use symmalloc_watchdog::{CollectiveRecord, CommunicatorId, CommunicatorRecord, Member, PeerRecord, RankId};

/// What the watchdog asks of a communicator. Called on threads of its own, which it may keep for ever.
pub(crate) trait Watchable: Send + Sync {
    /// Ends it because of the failure: whoever waits in it or for it is to come back.
    fn end(&self, failure: &Arc<Failure>);

    /// Looks whether NCCL reports an error. Does not wait for a thread that is in NCCL.
    fn examine(&self) -> Option<FailureCause>;

    /// Whether nothing of it runs any more, or it is another one's to end.
    fn is_ended(&self) -> bool;

    /// What became of it: "ready", "aborted".
    fn condition(&self) -> String;

    /// Lets this thread ask about streams and events while another one captures.
    fn relax_capture(&self) -> RelaxedCapture;
}

/// A meeting of processes, and one's number in it: ranks may be threads of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MeetingId {
    pub(super) id: UniqueId,
    pub(super) own: u32,
}

/// What does not change of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) id: CommunicatorId,
    pub(crate) name: Arc<str>,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) deadline: Duration,
    /// Where its processes met; `None` where they did not, and only ranks of this process know of each other.
    pub(crate) met: Option<MeetingId>,
}

impl Identity {
    pub(crate) fn rank_id(&self) -> RankId {
        RankId { communicator: self.id, rank: self.rank }
    }
}

pub(crate) struct Watched {
    identity: Identity,
    settings: WatchSettings,
    flight: Flight,
    failure: OnceLock<Arc<Failure>>,
    /// It was destroyed, or ended because of an error: nothing of it is judged any more.
    is_over: AtomicBool,
    /// What waits in streams.
    marks: Mutex<Marks>,
    /// What the marker thread found.
    trouble: Mutex<Option<(FailureCause, Tick)>>,
    communicator: Weak<dyn Watchable>,
}

impl Watched {
    pub(crate) fn new(identity: Identity, settings: WatchSettings, communicator: Weak<dyn Watchable>) -> Self {
        Watched {
            identity,
            settings,
            flight: Flight::default(),
            failure: OnceLock::new(),
            is_over: AtomicBool::new(false),
            marks: Mutex::default(),
            trouble: Mutex::default(),
            communicator,
        }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn settings(&self) -> &WatchSettings {
        &self.settings
    }

    /// Its last collectives.
    #[inline]
    pub(crate) fn flight(&self) -> &Flight {
        &self.flight
    }

    /// Why the watchdog ended it, if it did.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        self.failure.get()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Nothing of it is judged any more.
    pub(super) fn close(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub(super) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` when the program has dropped it.
    pub(super) fn communicator(&self) -> Option<Arc<dyn Watchable>> {
        self.communicator.upgrade()
    }

    /// Notes what the driver or NCCL reports, for the watchdog.
    pub(super) fn note_trouble(&self, cause: FailureCause) {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((cause, Tick::now()));
    }

    /// That, and since when it is known.
    pub(super) fn trouble(&self) -> Option<(FailureCause, Tick)> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The failure, if this is the first.
    pub(super) fn fail(
        &self,
        cause: FailureCause,
        collective: Option<CollectiveRecord>,
        waited: Duration,
    ) -> Option<Arc<Failure>> {
        let Identity { name, rank, .. } = &self.identity;
        let failure = Arc::new(Failure { communicator: Arc::clone(name), rank: *rank, cause, collective, waited });
        self.failure.set(Arc::clone(&failure)).is_ok().then_some(failure)
    }

    /// What is known of it.
    pub(super) fn record(&self, members: &[Member]) -> CommunicatorRecord {
        let Identity { id, name, rank, ranks, .. } = &self.identity;
        let now = Tick::now();
        CommunicatorRecord {
            id: *id,
            name: name.to_string(),
            rank: *rank,
            ranks: *ranks,
            state: self.communicator().map_or_else(|| "dropped".to_owned(), |it| it.condition()),
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
    PeerRecord { rank: member.rank & !UNBORN, progress: member.progress, condition }
}
