//! A communicator that is watched, with the events that are pending in its streams.

use crate::ffi::operation::{NcclCall, Operation, ReduceOp};
use crate::watchdog::at_exit::ThisProcess;
use cudarc::driver::{CudaEvent, CudaStream};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use symmalloc_cuda::RelaxedCapture;
use symmalloc_watchdog::{
    Call, EntryNumber, FailureCause, FlightRecorder, Identity, Marked, NamedRank, StreamRef, Tick, WatchSettings,
    Watchable, Watched, Work,
};

/// The marker's interface to a communicator. It is called on a thread that may block indefinitely.
pub(crate) trait Polled: Send + Sync {
    /// Returns an error that NCCL reports, without waiting for a thread that is in NCCL.
    fn poll_error(&self) -> Option<FailureCause>;

    /// Lets this thread query streams and events while another thread captures.
    fn relax_capture(&self) -> RelaxedCapture;
}

/// A communicator that the watchdog watches and whose streams the marker polls. Neither of them delays the communicator's destruction.
pub(crate) struct Observed {
    watched: Arc<Watched>,
    flight: Arc<FlightRecorder<Arc<CudaStream>>>,
    /// Pending events in the communicator's streams.
    marks: Mutex<Marks>,
    communicator: Weak<dyn Polled>,
}

impl Observed {
    pub(crate) fn new<C: Watchable + Polled + 'static>(
        identity: Identity,
        settings: WatchSettings,
        communicator: &Arc<C>,
    ) -> Self {
        let flight = Arc::<FlightRecorder<_>>::default();
        let ended: Weak<dyn Watchable> = Arc::downgrade(&(Arc::clone(communicator) as _));
        let polled: Weak<dyn Polled> = Arc::downgrade(&(Arc::clone(communicator) as _));
        let watched = Watched::new(identity, settings, Arc::clone(&flight) as _, ended, &ThisProcess);
        Observed { watched: Arc::new(watched), flight, marks: Mutex::default(), communicator: polled }
    }

    /// Returns the watchdog's view of the communicator.
    pub(crate) fn watched(&self) -> &Arc<Watched> {
        &self.watched
    }

    /// Returns the record of the communicator's last collectives.
    #[inline]
    pub(crate) fn flight(&self) -> &FlightRecorder<Arc<CudaStream>> {
        &self.flight
    }

    /// Records a collective that is about to be submitted to NCCL.
    #[inline]
    pub(crate) fn begin(&self, operation: &Operation, stream: &Arc<CudaStream>, now: Tick) -> EntryNumber {
        self.flight.begin(Work::Call(call(operation)), Some(keyed(stream)), now)
    }

    pub(super) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the communicator, or `None` if the program has dropped it.
    pub(super) fn communicator(&self) -> Option<Arc<dyn Polled>> {
        self.communicator.upgrade()
    }
}

impl Deref for Observed {
    type Target = Watched;

    fn deref(&self) -> &Watched {
        &self.watched
    }
}

/// Returns the call of an operation as flight records describe it.
fn call(operation: &Operation) -> Call {
    let rank = match operation.call {
        NcclCall::Broadcast { root } | NcclCall::Reduce { root, .. } => Some(NamedRank::Root(root)),
        NcclCall::Send { peer } => Some(NamedRank::To(peer)),
        NcclCall::Receive { peer } => Some(NamedRank::From(peer)),
        NcclCall::AllReduce { .. } | NcclCall::AllGather | NcclCall::ReduceScatter { .. } => None,
    };
    Call {
        symbol: operation.call.symbol(),
        count: operation.count as u64,
        data_type: operation.data_type.word(),
        reduction: operation.call.reduction().map(ReduceOp::word),
        rank,
    }
}

/// Returns the stream as flight recorders identify it.
pub(crate) fn keyed(stream: &Arc<CudaStream>) -> StreamRef<'_, Arc<CudaStream>> {
    StreamRef { key: stream.cu_stream() as u64, stream }
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

    /// Returns an unused event that was kept, if any.
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

static OBSERVED: Mutex<Vec<Weak<Observed>>> = Mutex::new(Vec::new());

/// Registers a communicator, which stays registered until it is dropped.
pub(super) fn add(observed: &Arc<Observed>) {
    OBSERVED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(observed));
}

/// Returns all observed communicators in the order in which they were connected.
pub(super) fn all() -> Vec<Arc<Observed>> {
    let mut observed = OBSERVED.lock().unwrap_or_else(PoisonError::into_inner);
    observed.retain(|it| it.strong_count() > 0);
    observed.iter().filter_map(Weak::upgrade).collect()
}
