//! Creation of communicators: connecting, splitting and borrowing.

use crate::backoff::Backoff;
use crate::communicator::call::{CallThread, HostEntry, attribute, creation_failure, perform, poll_until_done};
use crate::communicator::ending::{Ending, GRACE, end_all};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::meeting;
use crate::communicator::order::CommOrder;
use crate::communicator::shared::{Inner, Life, Mode, Ownership, Shared, Usage};
use crate::communicator::threads::{CallError, CallResult, KeepAlive, Waited, start, wait_for};
use crate::communicator::{Communicator, Owner};
use crate::ffi::calls::{Calls, NO_COLOR, Outcome};
use crate::ffi::driver;
use crate::ffi::handles::{CommHandle, NewHandle};
use crate::ffi::library::Nccl;
use crate::ffi::version::Capability;
use crate::unique_id::{COMM_ID_VARIABLE, UniqueId};
use crate::watchdog::{self, at_exit::Unfinished};
use std::ffi::{CStr, CString, c_int, c_void};
use std::slice::from_mut;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use symmalloc_cuda::CudaDevice;
use symmalloc_rendezvous::Launch;
use symmalloc_rendezvous::SequenceCounter;
use symmalloc_watchdog::{
    ATTRIBUTION_LIMIT, Announced, CommunicatorId, Connecting, Failure, MeetingId, WatchSettings, WatchdogMode, threads,
};

/// NCCL's environment variable for the blocking mode, which takes precedence over the program's choice.
const BLOCKING_VARIABLE: &str = "NCCL_COMM_BLOCKING";

/// A builder for a [`Communicator`].
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
/// use symmalloc_cuda::CudaDevice;
/// use symmalloc_nccl::{Communicator, Launch};
///
/// let launch = Launch::from_env()?; // torchrun, mpirun, mpiexec, srun
/// let device = CudaDevice::for_local_rank(launch.local_rank)?;
/// let world = Communicator::builder(&device).deadline(Duration::from_secs(60)).connect_env()?;
/// let pair = world.split(Some(world.rank() / 2), world.rank())?.expect("every rank has a color");
/// assert_eq!(pair.name(), format!("world/1.{}", world.rank() / 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CommunicatorBuilder {
    pub(super) device: Arc<CudaDevice>,
    nccl: Option<&'static Nccl>,
    pub(super) deadline: Duration,
    pub(super) mode: Mode,
    name: String,
    pub(super) watch_settings: WatchSettings,
    rendezvous: Option<String>,
}

impl Communicator {
    /// The default deadline: a communicator waits for other ranks without progress for at most five minutes.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

    /// Returns a builder of a communicator on this device.
    pub fn builder(device: &Arc<CudaDevice>) -> CommunicatorBuilder {
        CommunicatorBuilder {
            device: Arc::clone(device),
            nccl: None,
            deadline: Communicator::DEFAULT_DEADLINE,
            mode: Mode::Blocking,
            name: "world".to_owned(),
            watch_settings: WatchSettings::default(),
            rendezvous: None,
        }
    }
}

impl CommunicatorBuilder {
    /// Sets the longest time that an operation may wait for other ranks without progress: [`Communicator::DEFAULT_DEADLINE`] by default. An
    /// overdue operation returns its error at most three seconds later.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Makes NCCL work on its own threads. A communicator that misses a deadline, even while connecting, can then be aborted completely,
    /// but each collective costs the host nine times as much. [`Communicator`] compares the modes.
    #[must_use]
    pub fn nonblocking(mut self) -> Self {
        self.mode = Mode::Nonblocking;
        self
    }

    /// Sets the name for errors and NCCL's log, and the first key of the [`order`](Communicator::order). It must be the same on all ranks
    /// of the communicator. "world" by default.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Sets the address where the ranks meet to connect their watchdogs: a free port of rank 0's machine, "host:port", the same on all
    /// ranks. Use it for communicators that are [connected](Self::connect) with an id that the program distributes itself, and for
    /// [borrowed](Self::borrow) ones; [`connect_env`](Self::connect_env) and [`UniqueId::for_job`] meet automatically. Without a
    /// rendezvous, the watchdog observes only ranks in the same process.
    ///
    /// With a loopback address, ranks meet on a Unix socket of the machine, which accepts processes of the same user. Otherwise they meet
    /// over TCP: with a `SYMMALLOC_JOB_SECRET`, they prove to each other that they know it; without one, any process that can connect can
    /// impersonate a rank.
    #[must_use]
    pub fn rendezvous(mut self, address: &str) -> Self {
        self.rendezvous = Some(address.to_owned());
        self
    }

    /// Sets the watchdog's response to a rank that is gone, stopped or stuck: [`WatchdogMode::Exit`] by default. Splits inherit it.
    #[must_use]
    pub fn watchdog(mut self, mode: WatchdogMode) -> Self {
        self.watch_settings.set_mode(mode);
        self
    }

    /// Sets a callback that is called once, on a separate thread, when the watchdog ends the communicator or a split of it. If the watchdog
    /// must end the process, it does so two seconds after the failure, even if the callback has not returned.
    #[must_use]
    pub fn on_failure(mut self, callback: impl Fn(&Failure) + Send + Sync + 'static) -> Self {
        self.watch_settings.set_callback(Arc::new(callback));
        self
    }

    /// Sets the library to use instead of the one that [`Nccl::load`] returns.
    #[must_use]
    pub fn library(mut self, nccl: &'static Nccl) -> Self {
        self.nccl = Some(nccl);
        self
    }

    /// Connects to the other ranks, which must make this call with the same id and number of ranks. Waits for all of them.
    ///
    /// # Errors
    /// Returns an error if ranks do not arrive within the deadline, or NCCL or the driver fails. No resources remain, with one exception:
    /// after a deadline in blocking mode, the connecting thread stays in NCCL until the other ranks have connected or are gone.
    pub fn connect(self, id: UniqueId, rank: u32, ranks: u32) -> Result<Communicator, CommError> {
        let backoff = Backoff::new(self.deadline);
        self.connect_until(id, rank, ranks, &backoff)
    }

    /// Connects all ranks of the job as the launcher's variables specify, with an id that is distributed as [`UniqueId::for_job`]
    /// describes.
    ///
    /// # Errors
    /// Returns an error if the environment is incomplete, and the errors of [`connect`](Self::connect).
    pub fn connect_env(self) -> Result<Communicator, CommError> {
        let backoff = Backoff::new(self.deadline);
        let launch = Launch::from_env()?;
        // Before the ranks meet, because the watchdog takes over the connections.
        self.start_watchdog()?;
        let id = UniqueId::for_job_from(self.nccl()?, &launch, &backoff)?;
        self.connect_until(id, launch.rank, launch.ranks, &backoff)
    }

    pub(super) fn nccl(&self) -> Result<&'static Nccl, CommError> {
        match self.nccl {
            Some(nccl) => Ok(nccl),
            None => Ok(Nccl::load()?),
        }
    }

    fn connect_until(self, id: UniqueId, rank: u32, ranks: u32, backoff: &Backoff) -> Result<Communicator, CommError> {
        let nccl = self.nccl()?;
        self.start_watchdog()?;
        let order = |name: &str| CommOrder::connected(name, &id, ordinal_of(&id, rank));
        let meeting = MeetingId::find(id.as_bytes(), rank);
        let call = move |calls: &Calls, new: &NewHandle, [rank, ranks]: [c_int; 2], blocking| {
            calls.init(new, ranks, *id.as_bytes(), rank, blocking)
        };
        self.create(nccl, (rank, ranks), meeting, order, backoff, call)
    }

    /// Creates a communicator that did not exist on this rank, with a call that gets the new handle, the rank, the number of ranks and the
    /// blocking mode. Without a meeting, the ranks meet at the rendezvous, if there is one.
    pub(super) fn create(
        self,
        nccl: &'static Nccl,
        (rank, ranks): (u32, u32),
        meeting: Option<MeetingId>,
        order: impl FnOnce(&str) -> CommOrder,
        backoff: &Backoff,
        call: impl FnOnce(&Calls, &NewHandle, [c_int; 2], bool) -> Outcome + Send + 'static,
    ) -> Result<Communicator, CommError> {
        let name = self.name.as_str();
        let span = tracing::debug_span!(target: "symmalloc", "communicator.connect", communicator = name, rank, ranks);
        let _entered = span.entered();
        let raw = match (c_int::try_from(rank), c_int::try_from(ranks)) {
            (Ok(raw_rank), Ok(raw_ranks)) if rank < ranks => [raw_rank, raw_ranks],
            _ => return Err(CommError::NoSuchRank { rank, ranks }),
        };
        self.start_watchdog()?;
        let meeting = match meeting {
            Some(meeting) => Some(meeting),
            None => self.meet(rank, ranks, backoff)?,
        };
        let (name, c_name) = self.names()?;
        let order = order(&name);
        let id = CommunicatorId::of(order.as_bytes());
        let announced = Announced::new(Connecting::new(&name, meeting, rank, Some(ranks), id, &self.watch_settings));
        let connecting = Arc::clone(announced.connecting());
        let failure = || creation_failure(&connecting);
        let created = || {
            check_context(&self.device)?;
            let new = NewHandle::named(&c_name);
            let (kept, out, blocking): (KeepAlive, _, _) =
                (Some(Arc::clone(&new) as _), Arc::clone(&new), self.mode == Mode::Blocking);
            let caller = start(&self.device, kept, move || call(nccl.calls(), &out, raw, blocking));
            let answer = match wait_for(&caller, backoff, || failure().is_some()) {
                Waited::Returned(answer) => answer,
                waited => {
                    drop(abort_when_returned(caller, &self.device, nccl, new));
                    let (stage, waited_for, state) = (Stage::Connect, backoff.waited(), CommState::Lost);
                    let overdue = CommError::Deadline { name, stage, waited: waited_for, state };
                    return Err(match waited {
                        Waited::Stopped => failure().unwrap_or(overdue),
                        _ => overdue,
                    });
                }
            };
            let attributed = |error: CallError| attribute(error.into(), ATTRIBUTION_LIMIT, failure);
            let Some(comm) = new.comm() else {
                answer.map_err(attributed)?;
                return Err(CommError::NoCommunicator { call: Stage::Connect.call() });
            };
            let connecting = Some(Arc::clone(&connecting));
            let shared = self.shared(nccl, (name, c_name), order, Ownership::Owned, comm, (meeting, connecting));
            if let Err(error) = answer {
                let error = Arc::new(attributed(error));
                end_all(from_mut(&mut shared.access_unchecked()?), Ending::Pending, Some(&error), GRACE);
                return Err(Arc::unwrap_or_clone(error));
            }
            Communicator::finish_connecting(shared, backoff)
        };
        let named = |error: CommError| {
            if matches!(error, CommError::Deadline { .. }) && meeting.is_some() {
                announced.blame_silent();
                // Only rank 0 hears of every process. It reaches its own deadline now, and names the missing rank to the others.
                return attribute(error, ATTRIBUTION_LIMIT, failure);
            }
            error
        };
        created().map_err(named).inspect_err(|error| announced.fail(error.report()))
    }

    /// Wraps a communicator that other code created and will destroy, under this builder's name, which must be the same on all ranks. This
    /// crate never aborts a borrowed communicator: after a deadline, its state is [`Lost`](CommState::Lost), and the owner is responsible
    /// for the abort.
    ///
    /// # Safety
    /// `comm` must be a live, ready `ncclComm_t` of this library and this device. Until the last clone of the returned communicator is
    /// dropped, it must stay live, and no other code may call NCCL with it at the same time.
    ///
    /// # Errors
    /// Returns an error if NCCL does not recognize the communicator, or it is on another device.
    pub unsafe fn borrow(self, comm: *mut c_void) -> Result<Communicator, CommError> {
        let nccl = self.nccl()?;
        let names = self.names()?;
        if comm.is_null() {
            return Err(CommError::NoCommunicator { call: "borrow" });
        }
        let (comm, ordinal) = (CommHandle::new(comm), self.device.ordinal());
        let (actual, (rank, ranks)) = {
            let _current = self.device.enter()?;
            (nccl.calls().device_of(comm)?, nccl.calls().rank_of_ranks(comm)?)
        };
        if usize::try_from(actual) != Ok(ordinal) {
            return Err(CommError::DeviceMismatch { ordinal, actual });
        }
        self.start_watchdog()?;
        let (order, backoff) = (CommOrder::borrowed(&names.0), Backoff::new(self.deadline));
        let meeting = self.meet(rank, ranks, &backoff)?;
        let shared = self.shared(nccl, names, order, Ownership::Borrowed, comm, (meeting, None));
        Communicator::finish_connecting(shared, &backoff)
    }

    pub(super) fn start_watchdog(&self) -> Result<(), CommError> {
        watchdog::start(&self.watch_settings).map_err(|error| CommError::Watchdog { kind: error.kind() })
    }

    pub(super) fn meet(&self, rank: u32, ranks: u32, backoff: &Backoff) -> Result<Option<MeetingId>, CommError> {
        match &self.rendezvous {
            Some(address) => meeting::meet(address, &self.name, rank, ranks, backoff),
            None => Ok(None),
        }
    }

    pub(super) fn names(&self) -> Result<(Arc<str>, Arc<CStr>), CommError> {
        let c_name = CString::new(self.name.as_str()).map_err(|_| CommError::Name)?;
        if self.name.is_empty() {
            return Err(CommError::Name);
        }
        Ok((self.name.as_str().into(), c_name.into()))
    }

    pub(super) fn shared(
        self,
        nccl: &'static Nccl,
        (name, c_name): (Arc<str>, Arc<CStr>),
        order: CommOrder,
        ownership: Ownership,
        comm: CommHandle,
        (meeting, connecting): (Option<MeetingId>, Option<Arc<Connecting>>),
    ) -> Shared {
        Shared {
            nccl,
            device: self.device,
            name,
            c_name,
            rank: 0,
            ranks: 0,
            deadline: self.deadline,
            mode: effective_mode(self.mode, std::env::var(BLOCKING_VARIABLE).ok().as_deref()),
            ownership,
            order,
            serial: Shared::next_serial(),
            abort_requested: AtomicBool::new(false),
            revoke_requested: AtomicBool::new(false),
            meeting,
            connecting,
            watch_settings: self.watch_settings,
            watched: OnceLock::new(),
            inner: Mutex::new(Inner::default()),
            life: Life::ready(comm),
            usage: match ownership {
                Ownership::Owned => Arc::default(),
                Ownership::Borrowed => Usage::borrowed(comm),
            },
        }
    }
}

impl Communicator {
    /// Splits the communicator into new ones, each with the ranks of one color, ordered by key and then by rank. All ranks must call it.
    /// Returns `None` on a rank without a color, which joins no communicator.
    ///
    /// The new communicator inherits the deadline and the mode. Its name is the parent's name with the number of the split and the color.
    ///
    /// # Errors
    /// Returns an error if ranks do not arrive within the deadline, or NCCL or the driver fails; this communicator is then ended. Also
    /// returns an error if it had already ended.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, CommError> {
        let shared = &self.shared;
        let (raw_color, raw_key) =
            (color.map_or(Some(NO_COLOR), |color| c_int::try_from(color).ok()), c_int::try_from(key));
        let (Some(raw_color), Ok(raw_key)) = (raw_color, raw_key) else {
            return Err(CommError::SplitArgument { color: color.unwrap_or(0), key });
        };
        let mut access = shared.access_active()?;
        access.inner.splits += 1;
        let ordinal = access.inner.splits;
        let name = format!("{}/{ordinal}.{}", shared.name, color.map_or(-1, i64::from));
        let c_name: Arc<CStr> = CString::new(name.as_str()).map_err(|_| CommError::Name)?.into();
        let new = NewHandle::named(&c_name);
        let (kept, out): (KeepAlive, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let (comm, mode) = (access.comm, shared.mode);
        let order = shared.order.split(ordinal, color.unwrap_or(0));
        let announced = color.map(|_| shared.announce(&name, &order));
        let entry = HostEntry::begin(shared.watched(), Stage::Split, None);
        let route = CallThread::when_blocking(mode, CallThread::Separate);
        let call = move |calls: &Calls| calls.split(comm, raw_color, raw_key, &out, mode == Mode::Blocking);
        let performed = perform(from_mut(&mut access), Stage::Split, route, &kept, call);
        if performed.is_err() && self.state() == CommState::Ready {
            // The call was not made. The next one has its number.
            access.inner.splits -= 1;
        }
        performed?;
        drop((entry, access));
        let Some(announced) = announced else { return Ok(None) };
        let derived = self.derived((name, c_name), order, &new, "ncclCommSplit", &announced);
        derived.map(Some).inspect_err(|error| announced.fail(error.report()))
    }

    /// Creates a communicator of the ranks that are not in `excluded`, in the same order, while the excluded ranks do nothing. All remaining
    /// ranks must call it with the same ranks to exclude, after the work on this communicator has completed, or after they
    /// [revoked](Self::revoke) it. Use it when ranks leave the job and the others continue.
    ///
    /// The new communicator inherits the deadline and the mode. Its name is the parent's name with the excluded ranks: "world/without-3", and
    /// "world/without-3#2" the next time. It has no windows: attach the pools of the remaining ranks to it and sync. Their contents and
    /// placements do not change. Unless it was revoked, this communicator stays usable on all ranks, including the excluded ones, until each
    /// destroys it.
    ///
    /// A communicator that the watchdog has ended cannot shrink: connect a new one. Ranks rejoin with [`CommunicatorBuilder::grow`].
    ///
    /// # Errors
    /// Returns an error without any effect if the library lacks `ncclCommShrink` (before 2.27.3), or `excluded` is empty or contains this rank
    /// or a number that is no rank. Returns an error if a remaining rank does not arrive within the deadline, or NCCL or the driver fails;
    /// this communicator is then ended. Also returns an error if this communicator has already ended or is suspended.
    pub fn shrink(&self, excluded: &[u32]) -> Result<Communicator, CommError> {
        self.require(Capability::Shrink)?;
        let shared = &self.shared;
        let (ranks, rank) = (shared.ranks, shared.rank);
        let mut excluded = excluded.to_vec();
        excluded.sort_unstable();
        excluded.dedup();
        if let Some(unknown) = excluded.iter().find(|excluded| **excluded >= ranks) {
            return Err(CommError::NoSuchRank { rank: *unknown, ranks });
        }
        if excluded.is_empty() || excluded.contains(&rank) {
            return Err(CommError::ShrinkArgument { name: Arc::clone(&shared.name), rank, excluded });
        }
        let mut access = shared.access_even_revoked()?;
        shared.check_active()?;
        let ordinal = access.inner.shrinks.entry(excluded.clone()).or_default();
        *ordinal += 1;
        let list = excluded.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let again = if *ordinal > 1 { format!("#{ordinal}") } else { String::new() };
        let order = shared.order.shrunk(*ordinal, &excluded);
        let name = format!("{}/without-{list}{again}", shared.name);
        let c_name: Arc<CStr> = CString::new(name.as_str()).map_err(|_| CommError::Name)?.into();
        let new = NewHandle::named(&c_name);
        let (kept, out): (KeepAlive, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let (comm, mode) = (access.comm, shared.mode);
        let announced = shared.announce(&name, &order);
        let raw_excluded = excluded.iter().map(|rank| *rank as c_int).collect();
        let route = CallThread::when_blocking(mode, CallThread::Separate);
        let call = move |calls: &Calls| calls.shrink(comm, raw_excluded, &out, mode == Mode::Blocking);
        let performed = perform(from_mut(&mut access), Stage::Shrink, route, &kept, call);
        if performed.is_err() && matches!(self.state(), CommState::Ready | CommState::Revoked) {
            // As in `split`.
            access.inner.shrinks.entry(excluded).and_modify(|ordinal| *ordinal -= 1);
        }
        performed?;
        drop(access);
        let derived = self.derived((name, c_name), order, &new, "ncclCommShrink", &announced);
        derived.inspect_err(|error| announced.fail(error.report()))
    }

    /// Finishes the creation of a communicator that NCCL derived from this one.
    fn derived(
        &self,
        (name, c_name): (String, Arc<CStr>),
        order: CommOrder,
        new: &NewHandle,
        call: &'static str,
        announced: &Announced,
    ) -> Result<Communicator, CommError> {
        let shared = &self.shared;
        let raw = new.comm().ok_or(CommError::NoCommunicator { call })?;
        let child = Shared {
            nccl: shared.nccl,
            device: Arc::clone(&shared.device),
            name: name.into(),
            c_name,
            rank: 0,
            ranks: 0,
            deadline: shared.deadline,
            mode: shared.mode,
            ownership: Ownership::Owned,
            order,
            serial: Shared::next_serial(),
            abort_requested: AtomicBool::new(false),
            revoke_requested: AtomicBool::new(false),
            meeting: shared.meeting,
            connecting: Some(Arc::clone(announced.connecting())),
            watch_settings: shared.watch_settings.clone(),
            watched: OnceLock::new(),
            inner: Mutex::new(Inner::default()),
            life: Life::ready(raw),
            usage: Arc::default(),
        };
        Communicator::finish_connecting(child, &Backoff::new(shared.deadline))
    }

    /// Waits until the communicator is connected, and queries NCCL for the rank and the number of ranks.
    pub(super) fn finish_connecting(mut shared: Shared, backoff: &Backoff) -> Result<Communicator, CommError> {
        let mut access = shared.access_unchecked()?;
        poll_until_done(from_mut(&mut access), Stage::Connect, &None, backoff)?;
        let (rank, ranks) = {
            let _current = shared.device.enter()?;
            shared.nccl.calls().rank_of_ranks(access.comm)?
        };
        drop(access);
        (shared.rank, shared.ranks) = (rank, ranks);
        let (communicator, device) = (&*shared.name, shared.device.ordinal());
        tracing::debug!(name: "communicator.ready", target: "symmalloc", communicator, rank, ranks, device);
        let shared = Arc::new(shared);
        shared.start_watching();
        Ok(Communicator { shared: Arc::new(Owner(shared)) })
    }
}

impl Shared {
    /// Announces to the other ranks that this rank derives a new communicator from this one.
    fn announce(&self, name: &str, order: &CommOrder) -> Announced {
        let id = CommunicatorId::of(order.as_bytes());
        Announced::new(Connecting::new(&name.into(), self.meeting, self.rank, None, id, &self.watch_settings))
    }
}

/// Aborts the communicator of an abandoned connecting thread if that thread returns. Its answer can be received after that.
pub(super) fn abort_when_returned(
    caller: Receiver<CallResult>,
    device: &Arc<CudaDevice>,
    nccl: &'static Nccl,
    new: Arc<NewHandle>,
) -> Receiver<CallResult> {
    let device = Arc::clone(device);
    let (sender, aborted) = channel();
    let unfinished = Unfinished::ending();
    let _started = threads::run_when_possible(move || {
        let (answer, comm) = (caller.recv(), new.comm());
        if let (Some(comm), Ok(_current)) = (comm, device.enter()) {
            let _relaxed = device.relax_capture();
            let _aborted = nccl.calls().abort(comm);
        }
        drop(unfinished);
        // Nobody may wait for it any longer.
        let _heard = answer.map(|answer| sender.send(answer));
    });
    aborted
}

/// Returns the mode that NCCL uses. NCCL's environment variable takes precedence if set. NCCL copies its configuration files into the
/// environment on its first connection.
fn effective_mode(asked: Mode, variable: Option<&str>) -> Mode {
    match variable.map(str::trim) {
        Some("0") => Mode::Nonblocking,
        Some("1") => Mode::Blocking,
        _ => asked,
    }
}

/// Checks that the device uses the primary context, as CUDA's runtime and therefore NCCL do.
fn check_context(device: &CudaDevice) -> Result<(), CommError> {
    if driver::primary_context(device)? == device.context().cu_ctx() {
        return Ok(());
    }
    Err(CommError::ForeignContext { ordinal: device.ordinal() })
}

/// Returns the number of communicators that this rank has connected with this id before. Only the id of `NCCL_COMM_ID` is reused.
fn ordinal_of(id: &UniqueId, rank: u32) -> u32 {
    if std::env::var_os(COMM_ID_VARIABLE).is_none() {
        return 0;
    }
    static COUNTER: SequenceCounter<UniqueId> = SequenceCounter::new();
    COUNTER.next(*id, rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccls_variable_takes_precedence() {
        assert_eq!(effective_mode(Mode::Blocking, None), Mode::Blocking);
        assert_eq!(effective_mode(Mode::Blocking, Some("0")), Mode::Nonblocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some(" 1")), Mode::Blocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some("yes")), Mode::Nonblocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some("")), Mode::Nonblocking);
    }
}
