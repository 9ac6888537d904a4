//! Tests with ranks as processes that die, stop, skip collectives or are slow, on the stubs.

mod endings;
mod forks;
mod programs;
mod several;
mod stops;
mod threads;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stub_process::{Barrier, RankOutput, WAIT_MAX, cuda, nccl, nccl_test, ranks, scaled_to_load, until, until_some};
use symmalloc_core::Config;
use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer};
use symmalloc_nccl::{
    CommError, CommState, Communicator, Failure, FailureCause, Launch, ReduceOp, UniqueId, WatchdogMode, flight_record,
    write_flight_record,
};
use symmalloc_watchdog::FlightRecord;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Deadline of collectives.
const DEADLINE: Duration = Duration::from_secs(2);

/// Maximum time from the deadline to the end of a process, as documented: an overdue operation returns its error at most three seconds
/// after its deadline ([`symmalloc_nccl::CommunicatorBuilder::deadline`]), and the end of the process waits a second for the report.
const LATE: Duration = Duration::from_secs(3 + 1);

/// Returns the directory of flight records.
fn folder() -> PathBuf {
    PathBuf::from(std::env::var("SYMMALLOC_FLIGHT_RECORDS").expect("it should be set"))
}

/// A rank with a communicator of all ranks.
struct Rank {
    comm: Communicator,
    stream: Arc<cudarc::driver::CudaStream>,
    buffer: DeviceBuffer<f32>,
    allocator: CudaAllocator,
    folder: PathBuf,
}

impl Rank {
    fn new(rank: usize, ranks: usize, deadline: Duration) -> Self {
        let folder = folder();
        let variables = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", ranks.to_string()),
            ("TORCHELASTIC_RUN_ID", folder.display().to_string()),
        ];
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let launch = Launch::from_variables(variable).expect("the variables should be complete");
        let id = UniqueId::for_job(&launch, Duration::from_secs(60)).expect("all ranks should meet");
        Rank { folder, ..Rank::of_thread(rank, ranks, id, deadline) }
    }

    /// Creates a rank that is a thread of this process.
    fn of_thread(rank: usize, ranks: usize, id: UniqueId, deadline: Duration) -> Self {
        let device = CudaDevice::new(rank).expect("the stub should have a device");
        let comm = Communicator::builder(&device).deadline(deadline).connect(id, rank as u32, ranks as u32);
        let comm = comm.expect("all ranks should connect");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        let buffer = allocator.alloc_zeroed(&stream, 1024).expect("the allocation should succeed");
        Rank { comm, stream, buffer, allocator, folder: PathBuf::new() }
    }

    /// Destroys the communicator and waits until all ranks have done so, because NCCL needs all of them until then.
    fn part(self) {
        self.comm.destroy().expect("the communicator should be destroyed");
        fs::write(self.folder.join(format!("through.{}", self.comm.rank())), "").expect("the write should succeed");
        until(|| (0..self.comm.ranks()).all(|rank| self.folder.join(format!("through.{rank}")).exists()));
    }

    fn reduce(&mut self) -> Result<(), CommError> {
        self.comm.all_reduce_in_place(&mut self.buffer, ReduceOp::Sum, &self.stream)?;
        self.comm.synchronize(&self.stream)
    }

    /// Reduces repeatedly until a call fails. Returns the error and the duration of the failed call.
    fn reduce_until_failure(&mut self) -> (CommError, Duration) {
        until_some(|| {
            let begun = Instant::now();
            self.reduce().err().map(|error| (error, begun.elapsed()))
        })
    }
}

/// Runs ranks that write their flight records to `folder`.
fn run(count: usize, folder: &Path, body: impl FnOnce(Rank)) -> Vec<RankOutput> {
    ranks(count, &[("SYMMALLOC_FLIGHT_RECORDS", &folder.to_string_lossy())], |rank| {
        body(Rank::new(rank, count, DEADLINE));
    })
}

/// Checks that these ranks succeeded. The message has the output of all that did not, because the failure of one makes others fail.
fn assert_success(outputs: &[RankOutput], of: impl Fn(usize) -> bool) {
    let failed = outputs.iter().filter(|output| of(output.rank) && !output.is_success);
    let texts: Vec<String> = failed.map(|output| format!("rank {}:\n{}", output.rank, output.text)).collect();
    assert!(texts.is_empty(), "{}", texts.join("\n"));
}

fn failure(error: &CommError) -> &FailureCause {
    match error {
        CommError::Failed(failure) => &failure.cause,
        CommError::Gone { cause: Some(cause), .. } => failure(cause),
        other => panic!("{other:?}"),
    }
}

nccl_test!(a_process_that_is_killed_is_named_by_all_others_immediately, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(3, folder.path(), |mut rank| {
        if rank.comm.rank() == 1 {
            for _ in 0..5 {
                rank.reduce().expect("all ranks should take part");
            }
            // SAFETY: the call only ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        let (error, took) = rank.reduce_until_failure();
        assert!(took < Duration::from_secs(3), "{took:?}");
        assert!(matches!(failure(&error), FailureCause::RankGone { rank: 1, .. }), "{error:?}");
        println!("{error}");
    });
    assert_success(&outputs, |rank| rank != 1);
    assert!(outputs[0].text.contains("rank 1 is gone: its process ended"), "{}", outputs[0].text);
    let records = fs::read_dir(folder.path())
        .expect("the folder should be readable")
        .map(|entry| entry.expect("it should be readable").path());
    let records: Vec<_> = records.map(|path| FlightRecord::read(&path).expect("the record is valid")).collect();
    assert_eq!(records.len(), 2);
    assert!(records.iter().all(|record| record.communicators[0].collectives.len() >= 5), "{records:?}");
});

/// A subscriber that delays the end of a failure's report until it receives a message.
struct Delay(Mutex<Receiver<()>>);

impl Subscriber for Delay {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.name() == "communicator.failed"
    }
    fn event(&self, _: &Event<'_>) {
        self.0.lock().expect("the lock is not poisoned").recv_timeout(WAIT_MAX).expect("the program has reacted");
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

nccl_test!(a_flight_record_has_the_communicators_that_the_program_drops_at_the_error, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(2, folder.path(), |mut rank| {
        let (dropped, receiver) = mpsc::channel();
        tracing::subscriber::set_global_default(Delay(Mutex::new(receiver))).expect("there is no other subscriber");
        if rank.comm.rank() == 1 {
            for _ in 0..5 {
                rank.reduce().expect("both ranks take part");
            }
            // SAFETY: the call only ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        rank.reduce_until_failure();
        drop(rank);
        // The watchdog's threads look at the communicator for the last time.
        std::thread::sleep(Duration::from_millis(300));
        // Only the report, which has not ended, keeps what the program dropped.
        assert_eq!(flight_record("after the drop").communicators.len(), 1);
        dropped.send(()).expect("the report waits");
    });
    assert_success(&outputs, |rank| rank == 0);
    let mut records = fs::read_dir(folder.path())
        .expect("the folder should be readable")
        .map(|entry| entry.expect("it should be readable").path());
    let record = FlightRecord::read(&records.next().expect("rank 0 has written it")).expect("the record is valid");
    let [communicator] = &record.communicators[..] else { panic!("{record:?}") };
    assert!(communicator.collectives.len() >= 5, "{record:?}");
});

// The slow abort imitates a symmetric kernel, which has no abort flag.
nccl_test!(an_abort_that_hangs_does_not_delay_errors, ["SYMMALLOC_WATCHDOG" = "abort"], {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(2, folder.path(), |mut rank| {
        nccl::slow("ncclCommAbort", Some(0), 1, 30_000);
        if rank.comm.rank() == 1 {
            for _ in 0..5 {
                rank.reduce().expect("both ranks take part");
            }
            // SAFETY: the call only ends this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        for (call, limit_ms) in [("wait", 6000), ("call after it", 3000)] {
            let (error, took) = rank.reduce_until_failure();
            assert!(took < Duration::from_millis(limit_ms), "{call}: {took:?}");
            assert!(matches!(failure(&error), FailureCause::RankGone { rank: 1, .. }), "{call}: {error:?}");
        }
        assert_eq!(nccl::calls("ncclCommAbort"), 1);
        // SAFETY: skips the exit handlers, because the aborting thread is still inside NCCL.
        unsafe { libc::_exit(0) };
    });
    assert_success(&outputs, |rank| rank == 0);
});

nccl_test!(a_process_that_is_stopped_is_named_at_the_deadline, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(2, folder.path(), |mut rank| {
        let file = rank.folder.join("stopped.pid");
        if rank.comm.rank() == 1 {
            rank.reduce().expect("both ranks take part");
            fs::write(&file, std::process::id().to_string()).expect("the write should succeed");
            // SAFETY: the call only stops this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            // Another thread may receive the signal first, and this thread must not destroy the communicator before it is stopped as well.
            loop {
                std::thread::park();
            }
        }
        let (error, took) = rank.reduce_until_failure();
        let stopped = fs::read_to_string(&file)
            .expect("the file should have been written")
            .parse()
            .expect("it should be a number");
        // SAFETY: the call only ends the other rank, which is stopped.
        unsafe { libc::kill(stopped, libc::SIGKILL) };
        assert!(took > DEADLINE - Duration::from_millis(300) && took < DEADLINE + Duration::from_secs(1), "{took:?}");
        assert!(matches!(failure(&error), FailureCause::RankStopped { rank: 1, .. }), "{error:?}");
    });
    assert_success(&outputs, |rank| rank == 0);
});

/// Characters of each class that control a terminal or disguise text: a color, a title, DEL, C1, directions, zero width, line breaks.
const HOSTILE: &str = "\u{1b}[31m\u{1b}]0;title\u{7}\r\t\u{8}\u{7f}\u{9b}1m\u{85}\u{202e}lre\u{2066}\u{200b}\u{feff}\u{2028}x\nsymmalloc: forged";

// Rank 1 is stuck in a collective with a hostile name, which its report contains. Its own output is its own concern.
nccl_test!(the_report_of_a_rank_cannot_control_the_terminal_of_another, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(2, folder.path(), |mut rank| {
        rank.reduce().expect("both ranks take part");
        if rank.comm.rank() == 1 {
            let stuck = rank.comm.announcement(HOSTILE, None, &rank.stream).expect("the work should be announced");
            until(|| rank.comm.synchronize(&rank.stream).is_err());
            drop(stuck);
        }
        let error = until_some(|| rank.comm.synchronize(&rank.stream).err());
        println!("ERROR {error}");
        println!("RECORD {}", write_flight_record(&error.to_string()).expect("the write should succeed").display());
    });
    assert_success(&outputs, |_| true);
    let text = &outputs[0].text;
    assert!(text.contains("ERROR") && text.contains("rank 1 gave up") && text.contains("symmalloc: forged"), "{text}");
    let is_hidden = |c: char| c != '\n' && symmalloc_text::is_hidden(c);
    assert_eq!(text.chars().find(|c| is_hidden(*c)), None, "{}", text.escape_debug());
    assert!(!text.lines().any(|line| line.starts_with("symmalloc: forged")), "{text}");
});

/// Waits until a process is stopped, and lets it continue after the deadline of the others.
fn pause(pid: &Path) {
    let pid: i32 = until_some(|| fs::read_to_string(pid).ok()?.parse().ok());
    until(|| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T ")));
    std::thread::sleep(DEADLINE + Duration::from_secs(2));
    // SAFETY: the call only continues another rank of this test.
    unsafe { libc::kill(pid, libc::SIGCONT) };
}

// A debugger stops a process for longer than the deadline, as documented in `docs/watchdog.md`.
nccl_test!(a_rank_pauses_at_a_debugger_if_the_watchdog_is_off_on_every_rank, {
    for is_off_on in ["every rank", "the paused rank"] {
        let folder = tempfile::tempdir().expect("a folder should be created");
        let options = [("SYMMALLOC_FLIGHT_RECORDS", &*folder.path().to_string_lossy()), ("IS_OFF_ON", is_off_on)];
        let outputs = ranks(2, &options, |number| {
            let is_off_everywhere = std::env::var("IS_OFF_ON").is_ok_and(|ranks| ranks == "every rank");
            if is_off_everywhere || number == 1 {
                // SAFETY: no other thread runs yet.
                unsafe { std::env::set_var("SYMMALLOC_WATCHDOG", "off") };
            }
            let mut rank = Rank::new(number, 2, DEADLINE);
            rank.reduce().expect("both ranks take part");
            let pid = rank.folder.join("paused.pid");
            let mut debugger = None;
            if number == 1 {
                fs::write(&pid, std::process::id().to_string()).expect("the write should succeed");
                // SAFETY: the call only stops this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
                // Another thread may receive the signal first.
                std::thread::sleep(Duration::from_millis(200));
            } else {
                debugger = Some(std::thread::spawn(move || pause(&pid)));
            }
            let submitted = rank.comm.all_reduce_in_place(&mut rank.buffer, ReduceOp::Sum, &rank.stream);
            // A wait of this crate would end at the deadline. A wait without it would never end on the rank without a watchdog.
            let waited = if is_off_everywhere {
                rank.stream.synchronize().map_err(|error| error.to_string())
            } else {
                rank.comm.synchronize(&rank.stream).map_err(|error| error.to_string())
            };
            println!("waited: {waited:?}");
            let outcome = submitted.and_then(|()| rank.reduce());
            if let Some(debugger) = debugger {
                debugger.join().expect("the rank is stopped and continued");
            }
            if is_off_everywhere {
                outcome.expect("nothing ended during the pause");
                rank.part();
            } else {
                outcome.expect_err("the watchdog of rank 0 ended the communicator");
            }
        });
        assert_success(&outputs, |_| true);
    }
});

nccl_test!(a_live_rank_that_is_missing_is_named_at_the_deadline, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(3, folder.path(), |mut rank| {
        if rank.comm.rank() == 2 {
            rank.reduce().expect("all ranks should take part");
            std::thread::sleep(DEADLINE * 2);
            return;
        }
        let (error, took) = rank.reduce_until_failure();
        assert!(took < DEADLINE + Duration::from_secs(2), "{took:?}");
        match failure(&error) {
            FailureCause::RanksBehind { ranks } => assert_eq!(*ranks, [(2, 1)]),
            // The other rank detected the failure first.
            FailureCause::RankFailed { report, .. } => {
                assert!(report.text.contains("rank 2, whose last collective was 1"));
            }
            other => panic!("{other:?}"),
        }
    });
    assert_success(&outputs, |rank| rank != 2);
});

// `SYMMALLOC_SLOW_SECONDS` prolongs the test.
nccl_test!(a_slow_rank_is_awaited, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let seconds: u64 =
        std::env::var("SYMMALLOC_SLOW_SECONDS").map_or(6, |text| text.parse().expect("a number of seconds"));
    let outputs = run(2, folder.path(), |mut rank| {
        // First, a host thread sleeps for just under the deadline. Then, steps take fifty times as long as those of the other rank.
        for round in 0..seconds * 1000 / 3600 {
            if rank.comm.rank() == 1 {
                std::thread::sleep(DEADLINE * 9 / 10);
            }
            rank.reduce().expect("the slow rank arrives eventually");
            for _ in 0..6 {
                let slowness = if u64::from(rank.comm.rank()) == round % 2 { 50 } else { 1 };
                std::thread::sleep(Duration::from_millis(6) * slowness);
                rank.reduce().expect("the slow rank arrives eventually");
            }
        }
        for _ in 0..4 {
            if rank.comm.rank() == 1 {
                std::thread::sleep(DEADLINE * 6 / 10);
            }
            rank.reduce().expect("the slow rank arrives eventually");
        }
        // Rank 0 is far ahead of rank 1, and waits in the stream for the work of rank 1.
        for _ in 0..6 {
            if rank.comm.rank() == 1 {
                std::thread::sleep(DEADLINE * 6 / 10);
            }
            rank.comm
                .all_reduce_in_place(&mut rank.buffer, ReduceOp::Sum, &rank.stream)
                .expect("the work should be submitted");
        }
        rank.comm.synchronize(&rank.stream).expect("the slow rank arrives eventually");
        rank.part();
    });
    assert_success(&outputs, |_| true);
    let is_record = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|extension| extension == "json");
    let entries = fs::read_dir(folder.path())
        .expect("the folder should be readable")
        .map(|entry| entry.expect("it should be readable"));
    assert_eq!(entries.filter(is_record).count(), 0, "no record is written");
});

nccl_test!(a_rank_that_destroyed_its_communicator_may_end, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let outputs = run(3, folder.path(), |mut rank| {
        rank.reduce().expect("all ranks should take part");
        rank.comm.destroy().expect("the communicator should be destroyed");
        let number = rank.comm.rank();
        drop(rank);
        // NCCL needs all ranks until all of them have destroyed the communicator.
        std::thread::sleep(Duration::from_millis(500) + Duration::from_millis(200) * number);
    });
    assert_success(&outputs, |_| true);
    assert_eq!(fs::read_dir(folder.path()).expect("the folder should be readable").count(), 0, "no record is written");
});

// A program that returns an unrelated error drops its communicator, which destroys it normally.
nccl_test!(a_rank_that_destroys_its_communicator_early_is_named_immediately, {
    for leaver in 0..3 {
        for lingers in [false, true] {
            let folder = tempfile::tempdir().expect("a folder should be created");
            let outputs = ranks(3, &[("SYMMALLOC_FLIGHT_RECORDS", &folder.path().to_string_lossy())], |number| {
                let mut rank = Rank::new(number, 3, Duration::from_secs(300));
                (0..5).for_each(|_| rank.reduce().expect("all ranks should take part"));
                // A rank that is still in its fifth collective would fail in it.
                fs::write(rank.folder.join(format!("reduced.{number}")), "").expect("the write should succeed");
                until(|| (0..3).all(|it| folder_has("reduced", it)));
                let is_last = |name: &str| (0..3).filter(|other| *other != leaver).all(|it| folder_has(name, it));
                if number == leaver {
                    drop(rank);
                    if lingers {
                        until(|| is_last("named"));
                    }
                    return;
                }
                let (error, _) = rank.reduce_until_failure();
                fs::write(rank.folder.join(format!("named.{number}")), "").expect("the write should succeed");
                let FailureCause::RankFailed { rank: named, report } = failure(&error) else { panic!("{error:?}") };
                let text = "it destroyed the communicator after collective 5, but other ranks need it for collective 6";
                // The third rank may hear of it from the leaver, or first from the rank that noticed.
                let first = report.first_rank.unwrap_or(*named);
                assert_eq!((first as usize, report.text.contains(text)), (leaver, true), "{error}");
            });
            assert_success(&outputs, |_| true);
        }
    }
});

/// Returns `true` if a rank has left this mark in the folder.
fn folder_has(name: &str, rank: usize) -> bool {
    folder().join(format!("{name}.{rank}")).exists()
}

nccl_test!(a_record_is_written_on_request_and_at_a_signal, ["SYMMALLOC_FLIGHT_SIGNAL" = "USR2"], {
    let folder = folder();
    let id = UniqueId::new().expect("NCCL should create an id");
    let mut rank = Rank::of_thread(0, 1, id, DEADLINE);
    for _ in 0..3 {
        rank.reduce().expect("a single rank reduces");
    }
    let path = write_flight_record("asked for").expect("the write should succeed");
    assert!(path.starts_with(&folder), "{}", path.display());
    let record = FlightRecord::read(&path).expect("the record is valid");
    let [communicator] = &record.communicators[..] else { panic!("{record:?}") };
    assert_eq!(
        (&*record.reason, &*communicator.name, communicator.rank, communicator.ranks),
        ("asked for", "world", 0, 1)
    );
    assert_eq!((communicator.progress.submitted, communicator.progress.finished), (3, 3));
    assert_eq!(communicator.collectives[2].signature.to_string(), "ncclAllReduce of 1024 float32 sum");
    fs::remove_file(&path).expect("the file should exist");
    // SAFETY: this process handles the signal.
    unsafe { libc::kill(libc::getpid(), libc::SIGUSR2) };
    until(|| path.exists());
    assert_eq!(FlightRecord::read(&path).expect("a record appears only when complete").reason, "a signal arrived");
});

/// Runs two ranks and aborts rank 1's communicator. Returns rank 0's outcome and the failures that the callbacks received. The environment
/// overrides `mode`.
fn failure_of_the_other(mode: WatchdogMode) -> (Result<(), CommError>, Vec<String>) {
    let (id, barrier, failures) =
        (UniqueId::new().expect("NCCL should create an id"), Barrier::new(2), Mutex::new(Vec::new()));
    let (failures, deadline) = (Arc::new(failures), scaled_to_load(DEADLINE / 4));
    let mut outcomes = stub_process::threads(2, |number| {
        let (device, failures) =
            (CudaDevice::new(number).expect("the stub should have a device"), Arc::clone(&failures));
        let record =
            move |failure: &Failure| failures.lock().expect("the lock is not poisoned").push(failure.to_string());
        let builder = Communicator::builder(&device).deadline(deadline).watchdog(mode).on_failure(record);
        let comm = builder.connect(id, number as u32, 2).expect("the connection should succeed");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let stream = device.context().new_stream().expect("the driver should create a stream");
        let mut buffer = allocator.alloc_zeroed::<f32>(&stream, 8).expect("the allocation should succeed");
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum, &stream).expect("the work should be submitted");
        comm.guarded(|| stream.synchronize()).expect("nothing failed").expect("the work should complete");
        barrier.wait();
        let outcome = if number == 1 {
            comm.abort().and_then(|()| comm.guarded(|| ()))
        } else {
            comm.guarded(|| std::thread::sleep(deadline / 2))
        };
        barrier.wait();
        outcome
    });
    let failures = failures.lock().expect("the lock is not poisoned").clone();
    (outcomes.remove(0), failures)
}

nccl_test!(an_abort_is_reported_to_the_others_and_to_the_callback, {
    let (outcome, failures) = failure_of_the_other(WatchdogMode::Exit);
    let error = outcome.expect_err("rank 1 aborted");
    assert!(error.to_string().contains("rank 1 gave up: its program aborted the communicator"), "{error}");
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].contains("rank 0: rank 1 gave up"), "{failures:?}");
});

nccl_test!(a_watchdog_that_is_off_does_nothing, ["SYMMALLOC_WATCHDOG" = "off"], {
    let (outcome, failures) = failure_of_the_other(WatchdogMode::Exit);
    assert_eq!((outcome, failures), (Ok(()), Vec::new()));
});

/// Returns a single rank with a collective on its device, and makes the watchdog's calls of this name fail with `code`.
fn rank_whose_watchdog_meets(call: &str, code: i32) -> Rank {
    let mut rank = Rank::of_thread(0, 1, UniqueId::new().expect("NCCL should create an id"), DEADLINE);
    let calls_of_others = || cuda::calls(call) - cuda::own_calls(call);
    let before = calls_of_others();
    cuda::fail_elsewhere(call, 0, code);
    rank.comm.all_reduce_in_place(&mut rank.buffer, ReduceOp::Sum, &rank.stream).expect("the work should be submitted");
    until(|| calls_of_others() >= before + 2 || rank.comm.state() != CommState::Ready);
    rank
}

nccl_test!(a_capture_and_missing_memory_are_not_a_lost_device, {
    for (call, code) in [("cuStreamIsCapturing", 906), ("cuEventQuery", 900), ("cuEventCreate", 2)] {
        let mut rank = rank_whose_watchdog_meets(call, code);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(rank.comm.state(), CommState::Ready, "{call}");
        cuda::heal();
        rank.reduce().expect("the call should have no effect");
    }
});

nccl_test!(a_device_that_is_lost_ends_the_communicator, {
    let mut rank = rank_whose_watchdog_meets("cuEventQuery", 700);
    std::thread::sleep(Duration::from_millis(1300));
    cuda::heal();
    let error = rank.reduce().expect_err("the communicator has ended");
    assert!(matches!(failure(&error), FailureCause::Driver(_)), "{error:?}");
});
