//! The watchdog over communicators without a device: two ranks in one process, whose streams are numbers.
//!
//! The tests run in processes of their own, which write their flight records to a temporary folder.

use std::env;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;
use symmalloc_watchdog::{
    CommunicatorId, Failure, FailureCause, FlightRecord, FlightRecorder, Identity, LocalError, Process, StreamRef,
    Tick, WatchSettings, Watchable, WatchdogMode, Watched, Work,
};

const DEADLINE: Duration = Duration::from_millis(300);

/// Set in the process that runs the body of a test.
const CHILD_VARIABLE: &str = "WATCHING_TEST_CHILD";

/// Longest time that a test waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// A communicator whose end the test observes.
#[derive(Default)]
struct Endable {
    /// The failure for which the watchdog ended it.
    failure: Mutex<Option<Arc<Failure>>>,
    ended: Condvar,
    /// `true` if its kernels never end.
    hangs: bool,
}

impl Endable {
    fn failure(&self) -> FailureCause {
        let failure = self.failure.lock().expect("no thread should have panicked");
        let waited = self.ended.wait_timeout_while(failure, PATIENCE, |failure| failure.is_none());
        let failure = waited.expect("no thread should have panicked").0.clone();
        failure.expect("the watchdog ends the communicator").cause.clone()
    }
}

impl Watchable for Endable {
    fn end(&self, failure: &Arc<Failure>) {
        self.failure.lock().expect("no thread should have panicked").get_or_insert(Arc::clone(failure));
        self.ended.notify_all();
    }

    fn is_ended(&self) -> bool {
        !self.hangs && self.failure.lock().expect("no thread should have panicked").is_some()
    }

    fn state_text(&self) -> String {
        "observed".to_owned()
    }
}

struct TestProcess;

impl Process for TestProcess {
    fn delay_exit(&self) -> Box<dyn Send> {
        Box::new(())
    }

    fn exit_now(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

/// One of two ranks.
struct Rank {
    communicator: Arc<Endable>,
    flight: Arc<FlightRecorder<u64>>,
    watched: Arc<Watched>,
}

impl Rank {
    fn new(rank: u32, hangs: bool, mode: WatchdogMode) -> Self {
        let identity =
            Identity { id: CommunicatorId(7), name: "world".into(), rank, ranks: 2, deadline: DEADLINE, meeting: None };
        let mut settings = WatchSettings::default();
        settings.set_mode(mode);
        let flight = Arc::<FlightRecorder<u64>>::default();
        let communicator = Arc::new(Endable { hangs, ..Endable::default() });
        let weak: Weak<dyn Watchable> = Arc::downgrade(&(Arc::clone(&communicator) as _));
        let watched = Arc::new(Watched::new(identity, settings, Arc::clone(&flight) as _, weak, &TestProcess));
        watched.watch();
        Rank { communicator, flight, watched }
    }

    /// Submits a collective to stream 5, which completes it only if `is_done` is set.
    fn submit(&self, is_done: bool) {
        let work = Work::Named { kind: "step".into(), elements: None };
        let stream = StreamRef { key: 5, stream: &5 };
        let entry = self.flight.begin(work, Some(stream), Tick::now());
        assert!(self.flight.submitted(entry, false).is_none(), "a mark is due only after many entries");
        if is_done {
            self.flight.done(self.flight.end_of(stream), Tick::now());
        }
    }
}

/// Runs the body in a process of its own, and returns the exit code and the process's flight record.
fn in_child(test: &str, body: impl FnOnce()) -> Option<(i32, FlightRecord)> {
    if env::var_os(CHILD_VARIABLE).is_some() {
        body();
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder should be created");
    let mut child = Command::new(env::current_exe().expect("the path of the test"));
    child.args(["--exact", test]).env(CHILD_VARIABLE, "1").env("SYMMALLOC_FLIGHT_RECORDS", folder.path());
    let status = child.env_remove("SYMMALLOC_WATCHDOG").status().expect("the process starts");
    let file = folder
        .path()
        .read_dir()
        .expect("the folder should be readable")
        .next()
        .expect("a flight record")
        .expect("it should be readable")
        .path();
    let record = FlightRecord::read(&file).expect("a flight record");
    Some((status.code().expect("no signal ended the process"), record))
}

/// Waits until the process has written its flight record, which another thread does.
fn wait_for_record() {
    let folder = env::var_os("SYMMALLOC_FLIGHT_RECORDS").expect("set for the child");
    let is_written = || {
        let mut entries = std::fs::read_dir(&folder).expect("the folder should be readable");
        entries.any(|entry| entry.expect("it should be readable").path().extension().is_some_and(|it| it == "json"))
    };
    let begun = std::time::Instant::now();
    while !is_written() {
        assert!(begun.elapsed() < PATIENCE, "there is no flight record");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_misses_a_collective_ends_both() {
    let result = in_child("a_rank_that_misses_a_collective_ends_both", || {
        let ranks = [0, 1].map(|rank| Rank::new(rank, false, WatchdogMode::Exit));
        ranks.iter().for_each(|rank| rank.submit(true));
        ranks[0].submit(false);
        assert_eq!(ranks[0].communicator.failure(), FailureCause::RanksBehind { ranks: vec![(1, 1)] });
        let FailureCause::RankFailed { rank, report } = ranks[1].communicator.failure() else {
            panic!("rank 1 learns why rank 0 failed")
        };
        assert_eq!((rank, report.first_rank), (0, Some(1)));
        assert!(ranks.iter().all(|rank| rank.watched.is_closed()));
        wait_for_record();
        // The record is written again when the other rank fails, which may be after the end of this body.
        std::mem::forget(ranks);
    });
    let Some((code, record)) = result else { return };
    assert_eq!(code, 0);
    let states: Vec<_> = record.communicators.iter().map(|it| (it.rank, it.state.as_str(), it.progress)).collect();
    assert_eq!(states.len(), 2);
    let progress = |submitted| symmalloc_watchdog::Progress { submitted, finished: 1, is_destroying: false };
    assert_eq!(states, [(0, "observed", progress(2)), (1, "observed", progress(1))]);
}

#[test]
fn an_error_of_a_library_ends_the_communicator_and_keeps_its_type() {
    let result = in_child("an_error_of_a_library_ends_the_communicator_and_keeps_its_type", || {
        let rank = Rank::new(0, false, WatchdogMode::Abort);
        rank.watched.record_error(FailureCause::Driver(LocalError::new(std::fmt::Error)));
        let FailureCause::Driver(error) = rank.communicator.failure() else { panic!("the recorded error") };
        assert!(error.downcast_ref::<std::fmt::Error>().is_some());
        wait_for_record();
    });
    assert_eq!(result.map_or(0, |(code, _)| code), 0);
}

#[test]
fn a_communicator_that_does_not_end_ends_the_process_while_work_is_on_the_device() {
    let test = "a_communicator_that_does_not_end_ends_the_process_while_work_is_on_the_device";
    let result = in_child(test, || {
        let rank = Rank::new(0, true, WatchdogMode::Exit);
        rank.submit(false);
        let cause = rank.communicator.failure();
        assert_eq!(cause, FailureCause::Unknown, "rank 1 is unknown");
        std::thread::sleep(PATIENCE);
    });
    assert_eq!(result.map_or(symmalloc_watchdog::FAILURE_EXIT_CODE, |(code, _)| code), 86);
}

#[test]
fn a_communicator_without_work_on_the_device_does_not_end_the_process() {
    let result = in_child("a_communicator_without_work_on_the_device_does_not_end_the_process", || {
        let rank = Rank::new(0, true, WatchdogMode::Exit);
        rank.submit(true);
        rank.watched.record_error(FailureCause::Driver(LocalError::new(std::fmt::Error)));
        rank.communicator.failure();
        // The process would end two seconds after the failure.
        std::thread::sleep(Duration::from_secs(4));
    });
    assert_eq!(result.map_or(0, |(code, _)| code), 0);
}
