//! A communicator's interface to the watchdog, and the functions with which a program waits.

use crate::backoff::Backoff;
use crate::communicator::Communicator;
use crate::communicator::ending::{Ending, GRACE, end_all};
use crate::communicator::error::{CommError, Stage};
use crate::communicator::order::CommOrder;
use crate::communicator::shared::{Ownership, Shared};
use crate::ffi::calls::CallProgress;
use crate::ffi::driver::{self, refused};
use crate::watchdog::{Observed, Polled, keyed, mark};
use cudarc::driver::CudaStream;
use std::borrow::Cow;
use std::slice::from_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use symmalloc_cuda::RelaxedCapture;
use symmalloc_files::is_forked;
use symmalloc_rendezvous::SequenceCounter;
use symmalloc_watchdog::{
    CommunicatorId, EntryNumber, Failure, FailureCause, Identity, LocalError, Tick, Watchable, Work,
};

/// Announced work that the program submits to a stream itself. The work must be in its stream when this value is dropped. See
/// [`announcement`](Communicator::announcement).
#[derive(Debug)]
#[must_use = "the work counts as being submitted until this value is dropped"]
pub struct Announcement {
    communicator: Communicator,
    entry: EntryNumber,
    stream: Arc<CudaStream>,
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        self.communicator.note_submitted(self.entry, &self.stream);
    }
}

impl Communicator {
    /// Waits on the host until the stream has completed all work submitted to it so far, or until the watchdog ends the communicator.
    ///
    /// # Errors
    /// [`CommError::Failed`] if a rank is gone, stopped or stuck, [`CommError::Revoked`] if the communicator is revoked, and errors of the
    /// driver. Without a watchdog, [`CommError::Deadline`] once the wait exceeds the deadline, which ends the communicator.
    pub fn synchronize(&self, stream: &Arc<CudaStream>) -> Result<(), CommError> {
        self.check_stream(stream)?;
        let _current = self.device().enter()?;
        let event = self.device().context().new_event(None).map_err(refused("cuEventCreate"))?;
        let flight = self.watched().flight();
        let end = flight.end_of(keyed(stream));
        event.record(stream).map_err(refused("cuEventRecord"))?;
        let backoff = Backoff::new(self.wait_limit());
        let _relaxed = self.device().relax_capture();
        while !event.try_is_complete().map_err(refused("cuEventQuery"))? {
            self.shared.check_failure()?;
            if !backoff.pause() {
                return Err(self.end_overdue(Stage::Run, backoff.waited()));
            }
        }
        flight.done(end, Tick::now());
        self.shared.check_results()
    }

    /// Runs the program's own wait and then checks whether the communicator failed or was revoked in the meantime. If so, the results of
    /// its collectives are invalid. Even if a rank is gone, `wait` does not block indefinitely, because the watchdog stops the kernels that
    /// `wait` waits for, or ends the process.
    ///
    /// # Errors
    /// [`CommError::Failed`] if the watchdog ended the communicator, and [`CommError::Revoked`] if it is revoked.
    pub fn guarded<T>(&self, wait: impl FnOnce() -> T) -> Result<T, CommError> {
        let answer = wait();
        self.shared.check_results()?;
        Ok(answer)
    }

    /// Tells the watchdog about work that every rank submits to a stream without this crate's collectives: an NCCL call with
    /// [`raw`](Self::raw), or the launch of a graph that contains collectives. `submit` submits the work to the stream. The work gets the
    /// next number among the communicator's collectives, and the same deadline as a collective.
    ///
    /// # Examples
    /// ```no_run
    /// # fn example(comm: &symmalloc_nccl::Communicator, graph: &cudarc::driver::CudaGraph,
    /// #     stream: &std::sync::Arc<cudarc::driver::CudaStream>) -> Result<(), Box<dyn std::error::Error>> {
    /// comm.announce("step", None, stream, || graph.launch())??;
    /// comm.synchronize(stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the communicator has ended or the stream belongs to another device; `submit` is then not called.
    pub fn announce<T>(
        &self,
        kind: impl Into<Cow<'static, str>>,
        elements: Option<u64>,
        stream: &Arc<CudaStream>,
        submit: impl FnOnce() -> T,
    ) -> Result<T, CommError> {
        let entry = self.begin_announced(kind.into(), elements, stream)?;
        let answer = submit();
        self.note_submitted(entry, stream);
        Ok(answer)
    }

    /// Like [`announce`](Self::announce), without a closure: the program submits the work to the stream while it holds the returned value.
    ///
    /// # Errors
    /// Same as [`announce`](Self::announce).
    pub fn announcement(
        &self,
        kind: impl Into<Cow<'static, str>>,
        elements: Option<u64>,
        stream: &Arc<CudaStream>,
    ) -> Result<Announcement, CommError> {
        let entry = self.begin_announced(kind.into(), elements, stream)?;
        Ok(Announcement { communicator: self.clone(), entry, stream: Arc::clone(stream) })
    }

    fn begin_announced(
        &self,
        kind: Cow<'static, str>,
        elements: Option<u64>,
        stream: &Arc<CudaStream>,
    ) -> Result<EntryNumber, CommError> {
        self.check_stream(stream)?;
        self.shared.check_ready()?;
        Ok(self.watched().flight().begin(Work::Named { kind, elements }, Some(keyed(stream)), Tick::now()))
    }

    /// Records that the work is in its stream, or in a graph.
    pub(super) fn note_submitted(&self, entry: EntryNumber, stream: &CudaStream) {
        let is_captured = driver::is_captured_on(self.device(), stream);
        // If the stream cannot be queried, assume that it is not capturing.
        let due = self.watched().flight().submitted(entry, is_captured.unwrap_or(false));
        if let Some(due) = due
            && let Ok(_current) = self.device().enter()
        {
            mark(self.watched(), &due);
        }
    }
}

impl Shared {
    /// Starts to watch a ready communicator, whose rank and number of ranks are known.
    pub(super) fn start_watching(self: &Arc<Self>) {
        // A borrowed communicator is identified only by its name, which several communicators can share.
        static BORROWED: SequenceCounter<CommOrder> = SequenceCounter::new();
        let mut key = self.order.as_bytes().to_vec();
        if self.ownership == Ownership::Borrowed {
            key.extend_from_slice(&BORROWED.next(self.order.clone(), self.rank).to_be_bytes());
        }
        let identity = Identity {
            id: CommunicatorId::of(&key),
            name: Arc::clone(&self.name),
            rank: self.rank,
            ranks: self.ranks,
            deadline: self.deadline,
            meeting: self.meeting,
        };
        let fresh = || Arc::new(Observed::new(identity, self.watch_settings.clone(), self));
        self.watched.get_or_init(fresh).watch();
    }

    pub(super) fn watched(&self) -> &Observed {
        self.watched.get().expect("every ready communicator is watched")
    }
}

impl Watchable for Shared {
    fn end(&self, failure: &Arc<Failure>) {
        self.abort_requested.store(true, Ordering::Release);
        let Ok(inner) = self.lock_or_revoke(GRACE) else { return };
        let Ok(mut access) = self.access_even_revoked_with(inner) else { return };
        let cause = Arc::new(CommError::Failed(Arc::clone(failure)));
        // Other threads that return the error wait for the rest of the limit, without the lock.
        end_all(from_mut(&mut access), Ending::Idle, Some(&cause), GRACE);
    }

    fn is_ended(&self) -> bool {
        Shared::is_ended(self)
    }

    fn state_text(&self) -> String {
        self.state().to_string()
    }
}

impl Polled for Shared {
    fn poll_error(&self) -> Option<FailureCause> {
        // The owner of a borrowed communicator polls NCCL itself.
        if self.ownership == Ownership::Borrowed {
            return None;
        }
        let inner = self.inner.try_lock().ok()?;
        let access = self.access_with(inner).ok()?;
        let _current = self.device.enter().ok()?;
        match self.nccl.calls().poll("ncclCommGetAsyncError", access.comm) {
            Ok(CallProgress::Done | CallProgress::Underway) => None,
            Err(error) => Some(FailureCause::Nccl(LocalError::new(error))),
        }
    }

    fn relax_capture(&self) -> RelaxedCapture {
        self.device.relax_capture()
    }
}
