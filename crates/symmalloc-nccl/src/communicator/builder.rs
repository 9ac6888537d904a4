//! How a communicator comes to be.

use super::Communicator;
use super::ending::{Ending, GRACE, end_all};
use super::order::CommOrder;
use super::shared::{Inner, Life, Mode, Ownership, Shared};
use super::state::{CommState, Stage};
use super::threads::{self, Answer, Kept, Waited, start, wait_for};
use super::unborn::Unborn;
use crate::backoff::Backoff;
use crate::driver;
use crate::error::CommError;
use crate::handles::{CommHandle, NewHandle};
use crate::launch::Launch;
use crate::library::Nccl;
use crate::rendezvous;
use crate::sequence_counter::SequenceCounter;
use crate::unique_id::{COMM_ID_VARIABLE, UniqueId};
use crate::watch::{self, Failure, MeetingId, WatchSettings, WatchdogMode};
use std::ffi::{CStr, CString, c_int, c_void};
use std::slice::from_mut;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use symmalloc_cuda::CudaDevice;

/// NCCL's own switch, which it puts above the program's.
const BLOCKING_VARIABLE: &str = "NCCL_COMM_BLOCKING";

/// Makes a [`Communicator`].
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
/// use symmalloc_cuda::CudaDevice;
/// use symmalloc_nccl::{Communicator, Launch};
///
/// let launch = Launch::from_env()?; // torchrun, mpirun, mpiexec, srun
/// let device = CudaDevice::new(launch.local_rank as usize)?;
/// let world = Communicator::builder(&device).deadline(Duration::from_secs(60)).connect_env()?;
/// let pair = world.split(Some(world.rank() / 2), world.rank())?.expect("every rank has a color");
/// assert_eq!(pair.name(), format!("world/1.{}", world.rank() / 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CommunicatorBuilder {
    device: Arc<CudaDevice>,
    nccl: Option<&'static Nccl>,
    deadline: Duration,
    mode: Mode,
    name: String,
    watch_settings: WatchSettings,
    rendezvous: Option<String>,
}

impl Communicator {
    /// How long a communicator waits for other ranks unless it is told otherwise: five minutes.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

    /// A builder of communicators on this device.
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
    /// How long anything that depends on other ranks may take without getting on, each time:
    /// [`Communicator::DEFAULT_DEADLINE`] by default. The error comes at most three seconds later.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Lets NCCL work on threads of its own. After a deadline, also while connecting, everything can be taken back, and
    /// each collective costs the host nine times as much. See [`Communicator`] for the choice.
    #[must_use]
    pub fn nonblocking(mut self) -> Self {
        self.mode = Mode::Nonblocking;
        self
    }

    /// The name in errors, in NCCL's log, and first in the [`order`](Communicator::order): the same on all ranks of the
    /// communicator. "world" by default.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Where the ranks meet for the connections by which each learns what became of the others: a free port of rank 0's machine,
    /// "host:port", the same on all ranks. For communicators that are [connected](Self::connect) with an id that came by the
    /// program's own way, and for [borrowed](Self::borrow) ones; [`connect_env`](Self::connect_env) and
    /// [`Launch::unique_id`] meet by themselves. Ranks that did not meet know of each other within a process alone.
    ///
    /// At a loopback address, ranks meet on a Unix socket of the machine, which accepts processes of the same user. Elsewhere they meet over
    /// TCP: with a `SYMMALLOC_JOB_SECRET` they prove to each other that they know it; without one, any process that can connect can take a
    /// rank's place.
    #[must_use]
    pub fn rendezvous(mut self, address: &str) -> Self {
        self.rendezvous = Some(address.to_owned());
        self
    }

    /// What the watchdog does when a rank is gone, stopped or stuck: [`WatchdogMode::Exit`] by default. Splits do the same.
    #[must_use]
    pub fn watchdog(mut self, mode: WatchdogMode) -> Self {
        self.watch_settings.set_mode(mode);
        self
    }

    /// Is called once when the watchdog ends the communicator or a split of it, on a thread of its own. When the process must be
    /// ended, that happens two seconds after the failure, whether the callback has returned or not.
    #[must_use]
    pub fn on_failure(mut self, callback: impl Fn(&Failure) + Send + Sync + 'static) -> Self {
        self.watch_settings.set_callback(Arc::new(callback));
        self
    }

    /// The library to use in place of [`Nccl::load`]'s.
    #[must_use]
    pub fn library(mut self, nccl: &'static Nccl) -> Self {
        self.nccl = Some(nccl);
        self
    }

    /// Connects with the other ranks, which call it with the same id and number of ranks. Waits until all have come.
    ///
    /// # Errors
    /// When ranks do not come within the deadline, or NCCL or the driver refuses. Nothing is left then, but for a deadline in
    /// blocking mode: the thread that connects stays in NCCL until the other ranks have come or are gone.
    pub fn connect(self, id: UniqueId, rank: u32, ranks: u32) -> Result<Communicator, CommError> {
        let backoff = Backoff::new(self.deadline);
        self.connect_until(id, rank, ranks, &backoff)
    }

    /// Connects all ranks of the job, as the launcher's variables say, with an id that comes to all ranks as
    /// [`Launch::unique_id`] describes.
    ///
    /// # Errors
    /// When the environment does not say enough, and as [`connect`](Self::connect).
    pub fn connect_env(self) -> Result<Communicator, CommError> {
        let backoff = Backoff::new(self.deadline);
        let launch = Launch::from_env()?;
        let id = launch.unique_id_from(self.nccl()?, &backoff)?;
        self.connect_until(id, launch.rank, launch.ranks, &backoff)
    }

    fn nccl(&self) -> Result<&'static Nccl, CommError> {
        match self.nccl {
            Some(nccl) => Ok(nccl),
            None => Ok(Nccl::load()?),
        }
    }

    fn connect_until(self, id: UniqueId, rank: u32, ranks: u32, backoff: &Backoff) -> Result<Communicator, CommError> {
        let name = self.name.as_str();
        let span = tracing::debug_span!(target: "symmalloc", "communicator.connect", communicator = name, rank, ranks);
        let _entered = span.entered();
        let nccl = self.nccl()?;
        let (raw_rank, raw_ranks) = match (c_int::try_from(rank), c_int::try_from(ranks)) {
            (Ok(raw_rank), Ok(raw_ranks)) if rank < ranks => (raw_rank, raw_ranks),
            _ => return Err(CommError::NoSuchRank { rank, ranks }),
        };
        check_context(&self.device)?;
        let met = match watch::meeting_of(&id, rank) {
            Some(meeting) => Some(meeting),
            None => self.meet(rank, ranks, backoff)?,
        };
        let (name, c_name) = self.names()?;
        let order = CommOrder::connected(&name, &id, ordinal_of(&id, rank));
        // Until it is watched.
        let _unborn = Unborn::new(met, rank, &order);

        let new = NewHandle::named(&c_name);
        let (kept, out, blocking): (Kept, _, _) =
            (Some(Arc::clone(&new) as _), Arc::clone(&new), self.mode == Mode::Blocking);
        let caller =
            start(&self.device, kept, move || nccl.calls().init(&out, raw_ranks, *id.as_bytes(), raw_rank, blocking));
        let answer = match wait_for(&caller, backoff, || false) {
            Waited::Came(answer) => answer,
            Waited::Stopped | Waited::TooLong => {
                abort_when_back(caller, &self.device, nccl, new);
                let (stage, waited, state) = (Stage::Connect, backoff.waited(), CommState::Lost);
                return Err(CommError::Deadline { name, stage, waited, state });
            }
        };
        let Some(comm) = new.comm() else {
            answer?;
            return Err(CommError::NoCommunicator { call: "ncclCommInitRankConfig" });
        };
        let shared = self.shared(nccl, (name, c_name), order, Ownership::Owned, comm, met);
        if let Err(error) = answer {
            let error = Arc::new(CommError::from(error));
            end_all(from_mut(&mut shared.access()?), Ending::Unborn, Some(&error), GRACE);
            return Err(Arc::unwrap_or_clone(error));
        }
        Communicator::settled(shared, backoff)
    }

    /// A communicator that other code made and destroys, under this builder's name, which all ranks give alike. It is never
    /// aborted: after a deadline it is [`Lost`](CommState::Lost) to this crate, and its owner's to abort.
    ///
    /// # Safety
    /// `comm` is a live `ncclComm_t` of this library, ready, and of this device. It lives, and no other code calls NCCL with it
    /// at the same time, until the last clone of the returned name is gone.
    ///
    /// # Errors
    /// When NCCL does not know it or it is on another device.
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
            return Err(CommError::OtherDevice { ordinal, actual });
        }
        let (order, backoff) = (CommOrder::borrowed(&names.0), Backoff::new(self.deadline));
        let met = self.meet(rank, ranks, &backoff)?;
        Communicator::settled(self.shared(nccl, names, order, Ownership::Borrowed, comm, met), &backoff)
    }

    fn meet(&self, rank: u32, ranks: u32, backoff: &Backoff) -> Result<Option<MeetingId>, CommError> {
        match &self.rendezvous {
            Some(address) => rendezvous::meet(address, &self.name, rank, ranks, backoff),
            None => Ok(None),
        }
    }

    fn names(&self) -> Result<(Arc<str>, Arc<CStr>), CommError> {
        let c_name = CString::new(self.name.as_str()).map_err(|_| CommError::Name)?;
        if self.name.is_empty() {
            return Err(CommError::Name);
        }
        Ok((self.name.as_str().into(), c_name.into()))
    }

    fn shared(
        self,
        nccl: &'static Nccl,
        (name, c_name): (Arc<str>, Arc<CStr>),
        order: CommOrder,
        ownership: Ownership,
        comm: CommHandle,
        met: Option<MeetingId>,
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
            abort_asked: AtomicBool::new(false),
            met,
            watch_settings: self.watch_settings,
            watched: OnceLock::new(),
            failed_at: OnceLock::new(),
            inner: Mutex::new(Inner::default()),
            life: Life::ready(comm),
        }
    }
}

/// Nobody waits any more for a thread that connects. Should it come back, what it brings is aborted.
fn abort_when_back(caller: Receiver<Answer>, device: &Arc<CudaDevice>, nccl: &'static Nccl, new: Arc<NewHandle>) {
    let device = Arc::clone(device);
    let _started = threads::run(move || {
        let (_answer, comm) = (caller.recv(), new.comm());
        if let (Some(comm), Ok(_current)) = (comm, device.enter()) {
            let _relaxed = device.relax_capture();
            let _aborted = nccl.calls().abort(comm);
        }
    });
}

/// The mode that NCCL works in, which its own variable decides if it is set. NCCL reads its configuration files into the
/// environment when it connects first.
fn effective_mode(asked: Mode, variable: Option<&str>) -> Mode {
    match variable.map(str::trim) {
        Some("0") => Mode::Nonblocking,
        Some("1") => Mode::Blocking,
        _ => asked,
    }
}

/// NCCL works through CUDA's runtime, and so in the primary context.
fn check_context(device: &CudaDevice) -> Result<(), CommError> {
    if driver::primary_context(device)? == device.context().cu_ctx() {
        return Ok(());
    }
    Err(CommError::ForeignContext { ordinal: device.ordinal() })
}

/// How many communicators this rank has connected with this id before. Ids are used once, but for that of `NCCL_COMM_ID`.
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
    fn nccls_own_variable_decides_the_mode() {
        assert_eq!(effective_mode(Mode::Blocking, None), Mode::Blocking);
        assert_eq!(effective_mode(Mode::Blocking, Some("0")), Mode::Nonblocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some(" 1")), Mode::Blocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some("yes")), Mode::Nonblocking);
        assert_eq!(effective_mode(Mode::Nonblocking, Some("")), Mode::Nonblocking);
    }
}
