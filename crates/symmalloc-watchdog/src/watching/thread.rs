//! The watchdog's thread. There is one per process. It polls lifelines, advances the clock and detects stalled communicators. It calls
//! neither the driver nor NCCL.

use crate::connection::Connection;
use crate::endpoint::{PeerEvent, SILENT_AFTER};
use crate::ids::{ProcessId, RankId};
use crate::lifeline::Lifeline;
use crate::message::{Departure, FailureReport, Member};
use crate::threads;
use crate::watching::clock::{POLL_INTERVAL, Tick};
use crate::watching::connecting::Connecting;
use crate::watching::failure::{FailureCause, PENDING_COMM};
use crate::watching::handle::{COMMAND_LIMIT, Command, Handle};
use crate::watching::judgment::Judgment;
use crate::watching::process_record;
use crate::watching::response::{self, log};
use crate::watching::settings::WatchdogMode;
use crate::watching::watched::{self, Identity, MeetingId, Watched};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Longest time to wait for news of other ranks after an error of NCCL or the driver, which often means that another rank is gone.
pub const ATTRIBUTION_LIMIT: Duration = Duration::from_millis(500);

impl MeetingId {
    /// Registers the connections of this process from a meeting of the job's processes. `own` is the process's number among `processes`.
    pub fn register(
        id: &[u8; MeetingId::BYTES],
        own: u32,
        processes: u32,
        connections: Vec<(u32, Connection)>,
    ) -> MeetingId {
        let meeting = MeetingId { id: *id, own };
        let connections = connections.into_iter().map(|(process, stream)| (ProcessId(process), stream)).collect();
        match Lifeline::new(ProcessId(own), processes, connections, Tick::now().time()) {
            Ok(lifeline) => {
                if let Some(watchdog) = watchdog() {
                    watchdog.note_meeting(meeting);
                    watchdog.command(Command::Met(meeting, Box::new(lifeline)));
                }
            }
            Err(error) => tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error),
        }
        meeting
    }

    /// Returns the registered meeting with this id: as this rank, if ranks are threads that each met separately.
    pub fn find(id: &[u8; MeetingId::BYTES], rank: u32) -> Option<MeetingId> {
        watchdog()?.meeting_of(id, rank)
    }
}

/// Returns `true` if the watchdog runs.
pub fn is_running() -> bool {
    Handle::get().is_some()
}

/// Starts the watchdog if it does not run yet. After an error, the next call tries again.
///
/// # Errors
/// Returns an error if the system cannot create a thread or a descriptor. A communicator without a watchdog can hang indefinitely.
pub fn start() -> io::Result<()> {
    start_handle().map(drop)
}

impl Watched {
    /// Watches the communicator until it is dropped.
    pub fn watch(self: &Arc<Self>) {
        if let Some(watchdog) = watchdog() {
            watched::add(self);
            watchdog.command(Command::Watch(self.identity().clone()));
        }
    }

    /// Notifies the other ranks that the communicator was destroyed normally, so that they no longer watch this process for it. On return,
    /// the notification has been sent.
    pub fn leave(&self) {
        self.close();
        if let Some(watchdog) = watchdog() {
            watchdog.command(Command::Leave(self.identity().clone()));
            // Without the notification, the end of the process looks like a failure to the other ranks.
            watchdog.flush(self.identity().deadline.max(COMMAND_LIMIT));
        }
    }

    /// Notifies the other ranks that the communicator was ended because of an error. On return, the notification has been sent.
    pub fn fail(&self, report: FailureReport) {
        self.close();
        // The watchdog has notified them before it recorded a failure. Its own thread may be the caller, and would wait for itself.
        if self.failure().is_some() {
            return;
        }
        if let Some(watchdog) = watchdog() {
            watchdog.command(Command::Fail(self.identity().clone(), report));
            watchdog.flush(COMMAND_LIMIT);
        }
    }
}

/// Announces that this process is creating a communicator, so that the other ranks are notified if it fails. Waits up to a second until
/// the announcement has been sent.
pub(super) fn announce_pending(connecting: &Arc<Connecting>) {
    if let Some(watchdog) = watchdog() {
        watchdog.command(Command::Expect(Arc::clone(connecting)));
        watchdog.flush(COMMAND_LIMIT);
    }
}

/// Withdraws the announcement, because the communicator is watched or will not be created.
pub(super) fn withdraw_pending(connecting: &Arc<Connecting>) {
    if let Some(watchdog) = watchdog() {
        watchdog.command(Command::Withdraw(Arc::clone(connecting)));
    }
}

/// Names a process that is stopped or cannot be reached as the failure of the creation, if there is one. Waits up to a second.
pub(super) fn blame_silent(connecting: &Arc<Connecting>) {
    if let Some(watchdog) = watchdog() {
        watchdog.command(Command::BlameSilent(Arc::clone(connecting)));
        watchdog.flush(COMMAND_LIMIT);
    }
}

/// Notifies the other ranks that this process failed to create the communicator. Waits up to a second until the notification has been
/// sent.
pub(super) fn fail_pending(connecting: &Arc<Connecting>, report: FailureReport) {
    if let Some(watchdog) = watchdog() {
        watchdog.command(Command::FailToConnect(Arc::clone(connecting), report));
        watchdog.flush(COMMAND_LIMIT);
    }
}

/// Forgets a meeting whose connections are closed.
fn forget(meeting: Option<&MeetingId>) {
    if let (Some(meeting), Some(watchdog)) = (meeting, watchdog()) {
        watchdog.forget_meeting(meeting);
    }
}

/// Returns the watchdog, or `None` if the system cannot create a thread or a descriptor. In that case, nothing is watched, and the log
/// reports the error.
fn watchdog() -> Option<&'static Handle> {
    let handle = start_handle();
    if let Err(error) = &handle {
        log(|| tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error));
    }
    handle.ok()
}

fn start_handle() -> io::Result<&'static Handle> {
    Handle::get_or_start(|| {
        let (sender, commands) = channel();
        let wakeup = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let heard = wakeup.try_clone()?;
        let thread = std::thread::Builder::new().name("symmalloc-watchdog".to_owned());
        thread.spawn(move || WatchdogThread::new().run(&commands, &heard))?;
        Ok(Handle::new(sender, wakeup))
    })
}

/// The state of the thread.
struct WatchdogThread {
    /// Lifelines by meeting. Ranks of this process that met no other process share a lifeline without connections.
    lifelines: BTreeMap<Option<MeetingId>, Lifeline>,
    /// Joined communicators, which the process leaves when they are dropped.
    joined: BTreeMap<RankId, Option<MeetingId>>,
    delays: BTreeMap<RankId, Delay>,
    /// Communicators that may contain a stopped process.
    suspects: BTreeMap<RankId, Suspicion>,
    /// Communicators that are being created.
    connecting: BTreeMap<RankId, Arc<Connecting>>,
}

/// A question to the hub that finds the ranks of a stopped process in a communicator.
#[derive(Clone, Copy)]
struct Suspicion {
    asked: Tick,
    /// Silence of the stopped process at that time.
    silent: Duration,
}

/// Longest difference between the silences of one process that two communicators of this process know of.
const SILENCE_TOLERANCE: Duration = Duration::from_millis(500);

/// The progress of the investigation of unfinished work.
#[derive(Clone, Copy)]
enum Delay {
    /// The hub was asked at this time.
    Asked(Tick),
    /// No check is due until this pause has passed: its start and its length.
    Paused(Tick, Duration),
}

impl WatchdogThread {
    fn new() -> Self {
        WatchdogThread {
            lifelines: BTreeMap::new(),
            joined: BTreeMap::new(),
            delays: BTreeMap::new(),
            suspects: BTreeMap::new(),
            connecting: BTreeMap::new(),
        }
    }

    fn run(mut self, commands: &Receiver<Command>, wakeup: &OwnedFd) {
        loop {
            self.wait(wakeup);
            let now = Tick::advance();
            // Progress is published before the reports of the communicators' ends.
            self.publish_progress(&watched::all(), now);
            while let Ok(command) = commands.try_recv() {
                self.execute(command);
            }
            let watched = watched::all();
            self.forget_dropped(&watched);
            self.receive_events(&watched);
            for one in watched.iter().filter(|one| !one.is_closed()) {
                self.judge(one, now);
            }
            for one in &watched {
                self.find_stopped(one, now);
            }
            threads::retry_refused();
            if process_record::has_signal_arrived() {
                let _started = threads::run_when_possible(|| {
                    if let Err(error) = process_record::write_flight_record("a signal arrived") {
                        tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error);
                    }
                });
            }
        }
    }

    /// Waits until a message or a request arrives, or the next check is due.
    fn wait(&self, wakeup: &OwnedFd) {
        let mut descriptors = vec![PollFd::new(wakeup, PollFlags::IN)];
        descriptors.extend(self.lifelines.values().flat_map(Lifeline::descriptors));
        let time = if self.lifelines.values().any(Lifeline::is_due) { Duration::ZERO } else { POLL_INTERVAL };
        let limit = Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as i64 };
        if poll(&mut descriptors, Some(&limit)).is_err() {
            // The poll was interrupted or ran out of memory. Sleep to avoid a busy loop.
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(self.lifelines.values().map(Lifeline::pause).max().unwrap_or_default());
        let _drained = rustix::io::read(wakeup, &mut [0_u8; 8]);
    }

    fn execute(&mut self, command: Command) {
        let now = Tick::now().time();
        match command {
            Command::Met(id, lifeline) => drop(self.lifelines.insert(Some(id), *lifeline)),
            Command::Watch(identity) => {
                self.joined.insert(identity.rank_id(), identity.meeting);
                self.with_lifeline(identity.meeting, |lifeline| lifeline.endpoint().join(identity.rank_id(), now));
            }
            Command::Expect(connecting) => {
                self.with_lifeline(connecting.meeting(), |lifeline| lifeline.endpoint().join(connecting.rank(), now));
                self.connecting.insert(connecting.rank(), connecting);
            }
            Command::Withdraw(connecting) => {
                self.connecting.remove(&connecting.rank());
                self.with_lifeline(connecting.meeting(), |lifeline| {
                    lifeline.endpoint().withdraw(connecting.rank(), now);
                });
            }
            Command::BlameSilent(connecting) => {
                let silent = self.lifelines.get_mut(&connecting.meeting()).and_then(|lifeline| {
                    // In a communicator of all processes, ranks have the numbers of their processes, unless the program orders them
                    // differently.
                    let spans_all = connecting.ranks() == Some(lifeline.processes());
                    let number = connecting.rank().rank & !PENDING_COMM;
                    let is_in_order = connecting.meeting().is_some_and(|meeting| meeting.own == number);
                    lifeline.endpoint().silent_process(now).filter(|_| spans_all && is_in_order)
                });
                if let Some((process, silent)) = silent {
                    connecting.fail(FailureCause::RankStopped { rank: process.0, silent, submitted: 0 });
                }
            }
            Command::FailToConnect(connecting, report) => {
                self.with_lifeline(connecting.meeting(), |lifeline| {
                    lifeline.endpoint().fail(connecting.rank(), &report, now);
                });
            }
            Command::Leave(identity) => {
                self.joined.remove(&identity.rank_id());
                self.with_lifeline(identity.meeting, |lifeline| lifeline.endpoint().leave(identity.rank_id(), now));
            }
            Command::Fail(identity, report) => {
                self.with_lifeline(identity.meeting, |lifeline| {
                    lifeline.endpoint().fail(identity.rank_id(), &report, now);
                });
            }
            Command::Members(identity, answer) => {
                let members = self.members(&identity);
                let _heard = answer.send(members);
            }
            Command::Flush(done) => {
                let _heard = done.send(());
            }
        }
    }

    /// Calls `act` with the lifeline of a meeting and sends its messages immediately. Ranks of this process that did not meet share one.
    fn with_lifeline<T>(&mut self, meeting: Option<MeetingId>, act: impl FnOnce(&mut Lifeline) -> T) -> Option<T> {
        if meeting.is_none() && !self.lifelines.contains_key(&None) {
            // Creating a lifeline without connections cannot fail.
            let alone = Lifeline::new(ProcessId(0), 1, Vec::new(), Tick::now().time());
            self.lifelines.extend(alone.ok().map(|alone| (None, alone)));
        }
        let lifeline = self.lifelines.get_mut(&meeting)?;
        let answer = act(lifeline);
        lifeline.turn(Tick::now().time());
        Some(answer)
    }

    /// Leaves communicators that were dropped without being destroyed, and closes unused connections.
    fn forget_dropped(&mut self, watched: &[Arc<Watched>]) {
        let is_watched = |rank: &RankId| watched.iter().any(|one| one.identity().rank_id() == *rank);
        let lifelines = &mut self.lifelines;
        self.joined.retain(|rank, meeting| {
            let is_kept = is_watched(rank);
            if !is_kept && let Some(lifeline) = lifelines.get_mut(meeting) {
                lifeline.endpoint().leave(*rank, Tick::now().time());
            }
            is_kept
        });
        self.delays.retain(|rank, _| is_watched(rank));
        self.suspects.retain(|rank, _| is_watched(rank));
        lifelines.retain(|id, lifeline| {
            // The lifeline of ranks that did not meet has no connections. It keeps the failures of ranks for those that connect later.
            let is_over = id.is_some() && lifeline.endpoint().is_over();
            if is_over {
                lifeline.turn(Tick::now().time());
                forget(id.as_ref());
            }
            !is_over
        });
    }

    /// Publishes the progress of this process.
    fn publish_progress(&mut self, watched: &[Arc<Watched>], now: Tick) {
        for one in watched {
            let identity = one.identity();
            if let Some(lifeline) = self.lifelines.get_mut(&identity.meeting) {
                lifeline.endpoint().set_progress(identity.rank_id(), one.flight().progress(), now.time());
            }
        }
    }

    /// Receives the state of other processes.
    fn receive_events(&mut self, watched: &[Arc<Watched>]) {
        let (mut events, mut departures) = (Vec::new(), Vec::new());
        for (meeting, lifeline) in &mut self.lifelines {
            lifeline.turn(Tick::now().time());
            let processes = lifeline.processes();
            events.extend(lifeline.endpoint().take_events().into_iter().map(|event| (*meeting, processes, event)));
            departures.extend(lifeline.take_departures());
        }
        log_departures(departures);
        for (meeting, processes, event) in events {
            match event {
                PeerEvent::Gone { rank, departure, after } => {
                    self.end_with(rank, &FailureCause::RankGone { rank: rank.rank, departure, after }, watched);
                }
                PeerEvent::Failed { rank, report } => {
                    self.end_with(rank, &FailureCause::RankFailed { rank: rank.rank, report }, watched);
                }
                PeerEvent::NeverJoined { process, departure } => {
                    // In a communicator of all processes, ranks have the numbers of their processes.
                    let cause = FailureCause::RankGone { rank: process.0, departure, after: None };
                    let spans_all =
                        |of: Option<MeetingId>, ranks: Option<u32>| of == meeting && ranks == Some(processes);
                    for one in self.connecting.values().filter(|one| spans_all(one.meeting(), one.ranks())) {
                        one.fail(cause.clone());
                    }
                    for one in watched.iter().filter(|one| !one.is_closed()) {
                        let Identity { meeting, ranks, .. } = one.identity();
                        if spans_all(*meeting, Some(*ranks)) {
                            self.end(one, cause.clone(), Duration::ZERO);
                        }
                    }
                }
            }
        }
    }

    /// Ends the communicators that have this rank of another process, and their creation.
    fn end_with(&mut self, of: RankId, cause: &FailureCause, watched: &[Arc<Watched>]) {
        let has_rank = |own: RankId| own.communicator == of.communicator && own != of;
        self.connecting.values().filter(|it| has_rank(it.rank())).for_each(|it| it.fail(cause.clone()));
        for one in watched.iter().filter(|one| has_rank(one.identity().rank_id())) {
            match cause {
                _ if !one.is_closed() => self.end(one, cause.clone(), Duration::ZERO),
                FailureCause::RankGone { .. } => one.note_peer_lost(),
                _ => {}
            }
            self.suspect_others(one, cause, watched);
        }
    }

    /// Asks about all other communicators if the cause of a communicator's end is a stopped process, which may be in them as well. They
    /// would otherwise end only after another deadline, because the program need not have submitted any work to them.
    fn suspect_others(&mut self, of: &Watched, cause: &FailureCause, watched: &[Arc<Watched>]) {
        let Some(silent_ms) = cause.stopped_ms() else { return };
        let silent = Duration::from_millis(silent_ms);
        let asked = Tick::now();
        for one in watched.iter().filter(|one| one.failure().is_none()) {
            let identity = one.identity();
            if identity.rank_id() != of.identity().rank_id() {
                self.with_lifeline(identity.meeting, |lifeline| lifeline.endpoint().ask(identity.id, asked.time()));
                self.suspects.insert(identity.rank_id(), Suspicion { asked, silent });
            }
        }
    }

    /// Ends the communicator if the awaited answer shows that it contains a stopped process.
    fn find_stopped(&mut self, watched: &Arc<Watched>, now: Tick) {
        let (identity, rank) = (watched.identity(), watched.identity().rank_id());
        let Some(Suspicion { asked, silent }) = self.suspects.get(&rank).copied() else { return };
        let has_answer =
            |lifeline: &mut Lifeline| lifeline.endpoint().has_answer(identity.id, asked.time(), now.time());
        if self.with_lifeline(identity.meeting, has_answer) == Some(false) {
            return;
        }
        self.suspects.remove(&rank);
        // Members that became silent at another time are in other processes.
        let silences =
            silent.saturating_sub(SILENCE_TOLERANCE).max(SILENT_AFTER)..=silent + SILENCE_TOLERANCE + now.since(asked);
        let is_stopped = |member: &Member| {
            let has_departed = member.has_left || member.departure.is_some();
            member.rank != identity.rank && !has_departed && silences.contains(&Duration::from_millis(member.silent_ms))
        };
        let Some(stopped) = self.members(identity).into_iter().find(is_stopped) else { return };
        if watched.is_closed() {
            watched.note_peer_lost();
            return;
        }
        let (silent, submitted) = (Duration::from_millis(stopped.silent_ms), stopped.progress.submitted);
        self.end(watched, FailureCause::RankStopped { rank: stopped.rank, silent, submitted }, Duration::ZERO);
    }

    /// Determines whether a communicator has stalled, and why.
    fn judge(&mut self, watched: &Arc<Watched>, now: Tick) {
        let (identity, rank) = (watched.identity(), watched.identity().rank_id());
        if let Some((error, since)) = watched.error()
            && now.since(since) >= ATTRIBUTION_LIMIT
        {
            self.end(watched, error, Duration::ZERO);
            return;
        }
        // Allow one check interval beyond the deadline, because times have that resolution.
        let is_late = |since: Tick| now.since(since) >= identity.deadline.saturating_add(POLL_INTERVAL);
        let Some(unfinished) = watched.flight().unfinished(now).filter(|it| is_late(it.since)) else {
            self.delays.remove(&rank);
            return;
        };
        let asked = match self.delays.get(&rank) {
            Some(Delay::Paused(from, time)) if now.since(*from) < *time => return,
            Some(Delay::Asked(asked)) => *asked,
            _ => {
                self.with_lifeline(identity.meeting, |lifeline| lifeline.endpoint().ask(identity.id, now.time()));
                self.delays.insert(rank, Delay::Asked(now));
                now
            }
        };
        let has_answer =
            |lifeline: &mut Lifeline| lifeline.endpoint().has_answer(identity.id, asked.time(), now.time());
        // Without connections, there is no hub that could answer.
        if self.with_lifeline(identity.meeting, has_answer) == Some(false) {
            return;
        }
        match Judgment::new(identity, &unfinished, &self.members(identity)) {
            Judgment::End(cause) => {
                self.end(watched, cause.clone(), now.since(unfinished.since));
                self.suspect_others(watched, &cause, &watched::all());
            }
            Judgment::Wait(time) => drop(self.delays.insert(rank, Delay::Paused(now, time))),
        }
    }

    fn members(&mut self, identity: &Identity) -> Vec<Member> {
        let Some(lifeline) = self.lifelines.get_mut(&identity.meeting) else { return Vec::new() };
        lifeline.endpoint().members(identity.id, Tick::now().time())
    }

    fn end(&mut self, watched: &Arc<Watched>, cause: FailureCause, waited: Duration) {
        if watched.settings().mode() == WatchdogMode::Off {
            return;
        }
        watched.close();
        let (flight, now) = (watched.flight(), Tick::now());
        // The first collective that the other rank missed, or otherwise the first unfinished one.
        let missed = cause.last_submitted().and_then(|last| flight.find_collective(last + 1, now));
        let collective = missed.or_else(|| Some(flight.unfinished(now)?.first));
        if let Some(failure) = watched.record_failure(cause.with_parent_ranks(), collective, waited) {
            let (identity, report) = (watched.identity(), failure.report());
            self.with_lifeline(identity.meeting, |lifeline| {
                lifeline.endpoint().fail(identity.rank_id(), &report, now.time());
            });
            response::begin(watched, &failure);
        }
    }
}

/// Logs processes that are gone, on another thread: the program's subscriber may block or panic.
fn log_departures(departures: Vec<(ProcessId, Departure)>) {
    if departures.is_empty() {
        return;
    }
    let _started = threads::run(move || {
        for (process, departure) in departures {
            tracing::warn!(name: "peer.gone", target: "symmalloc", process = process.0, %departure);
        }
    });
}
