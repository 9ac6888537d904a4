//! Trace files of running allocators: complete and truncated files, a full or slow disk, and a process that is killed or forks.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use symmalloc_core::recording::{RecordingEnd, RecordingError, StartRecordingError};
use symmalloc_core::{Config, Op, PoolId, SharedAllocator};
use symmalloc_import::compression::{Compression, Compressor};
use symmalloc_import::{
    ImportErrorKind, ReadOptions, TraceFile, TraceFileError, TraceFileOptions, read_bytes, read_path,
};
use symmalloc_sim::SimBackend;
use symmalloc_trace::{Trace, TraceWriter};

fn allocator() -> SharedAllocator<SimBackend> {
    SharedAllocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid")
}

/// Allocates and frees this many times; some allocations have names that need escaping.
fn work(allocator: &SharedAllocator<SimBackend>, rounds: u64) {
    let stream = allocator.register_stream().expect("a stream id is available");
    for round in 0..rounds {
        let size_bytes = 512 << (round % 12);
        let made = match round % 3 {
            0 => allocator.allocate_named(PoolId::DEFAULT, stream, size_bytes, "a \"name\"\nof two lines"),
            _ => allocator.allocate(PoolId::DEFAULT, stream, size_bytes),
        };
        allocator.free(made.expect("memory should suffice").handle).expect("the allocation should be live");
    }
}

fn recorded(path: &Path, options: TraceFileOptions, rounds: u64) -> u64 {
    let allocator = allocator();
    allocator.start_recording(TraceFile::create(path, options).expect("a new file")).expect("nothing allocated");
    work(&allocator, rounds);
    allocator.stop_recording().expect("the disk has free space").records
}

#[test]
fn a_trace_file_is_a_canonical_trace_however_it_is_compressed() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| {
        let path = folder.path().join(name);
        // More than one chunk.
        assert_eq!(recorded(&path, TraceFileOptions::default(), 5000), 10_001);
        let mut text = String::new();
        symmalloc_import::compression::open(&path).unwrap().read_to_string(&mut text).unwrap();
        (text, read_path(&path, &ReadOptions::default()).unwrap())
    };
    let (text, plain) = read("job.trace");
    assert_eq!(Trace::parse(&text).unwrap().to_text(), text);
    assert_eq!(plain.config, Some(Config::default()));
    assert_eq!(plain.summary.placements, 5000);
    for (name, compression) in [("job.trace.gz", Compression::Gzip), ("job.trace.zst", Compression::Zstd)] {
        let (compressed_text, recording) = read(name);
        assert_eq!(recording.compression, compression);
        assert_eq!(compressed_text, text);
        assert_eq!(recording.records, plain.records);
    }
}

#[test]
fn a_dropped_allocator_leaves_a_whole_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace.zst");
    let allocator = allocator();
    allocator.start_recording(TraceFile::create(&path, TraceFileOptions::default()).unwrap()).unwrap();
    work(&allocator, 10);
    drop(allocator);
    assert_eq!(read_path(&path, &ReadOptions::default()).unwrap().records.len(), 21);
}

/// Flushed records are readable wherever the file is cut: exactly the records before the cut, and the error states their number.
#[test]
fn a_trace_cut_at_any_byte_yields_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace");
    recorded(&path, TraceFileOptions::default(), 20);
    let whole = read_path(&path, &ReadOptions::default()).unwrap();
    for compression in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        // Written like the file's thread does, flushed after every third record.
        let mut stored = Vec::new();
        let mut flushed: Vec<(usize, usize)> = Vec::new();
        let sink = Ends { bytes: &mut stored };
        let mut trace = TraceWriter::new(Compressor::new(sink, compression).unwrap(), whole.config.as_ref()).unwrap();
        let mut lengths = Vec::new();
        for (count, record) in (1..).zip(&whole.records) {
            trace.write(record).unwrap();
            if count % 3 == 0 {
                trace.flush().unwrap();
                lengths.push(count);
            }
        }
        trace.finish().unwrap().finish().unwrap();
        // Find the end of each flush by writing the same bytes again, flush by flush.
        for until in lengths {
            let mut part = Vec::new();
            let mut trace = TraceWriter::new(
                Compressor::new(Ends { bytes: &mut part }, compression).unwrap(),
                whole.config.as_ref(),
            )
            .unwrap();
            for (count, record) in (1..=until).zip(&whole.records) {
                trace.write(record).unwrap();
                if count % 3 == 0 {
                    trace.flush().unwrap();
                }
            }
            drop(trace);
            flushed.push((part.len(), until));
        }
        let mut before = 0;
        for cut in 0..stored.len() {
            let torn = &stored[..cut];
            let safe =
                flushed.iter().take_while(|(length, _)| *length <= cut).last().map_or(0, |(_, records)| *records);
            let result = read_bytes(torn, &ReadOptions::default());
            match read_bytes(torn, &ReadOptions::default().accept_torn()) {
                Ok(recording) => {
                    let records = recording.records.len();
                    assert_eq!(recording.records, whole.records[..records], "{compression}, cut at {cut}");
                    assert!(records >= safe && records >= before, "{compression}, cut at {cut}: {records} of {safe}");
                    before = records;
                    match result.map_err(|error| error.to_string()) {
                        // Only the last line break is missing.
                        Ok(read) => assert_eq!(read.records, whole.records),
                        Err(message) => {
                            assert!(recording.summary.torn_at_line.is_some());
                            assert!(
                                message.contains(&format!("after {records} whole records")),
                                "cut at {cut}: {message}"
                            );
                        }
                    }
                }
                Err(error) => {
                    assert_eq!(safe, 0, "{compression}, cut at {cut}: {error}");
                    assert!(result.is_err());
                }
            }
        }
        assert!(before >= whole.records.len() - 1, "{compression}: {before}");
    }
}

/// A sink that records where each write ended.
struct Ends<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Write for Ends<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn records_reach_the_file_while_the_program_is_idle() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["job.trace", "job.trace.gz", "job.trace.zst"] {
        let path = folder.path().join(name);
        let mut options = TraceFileOptions::default();
        options.flush_interval = Duration::from_millis(20);
        let allocator = allocator();
        allocator.start_recording(TraceFile::create(&path, options).unwrap()).unwrap();
        work(&allocator, 3);
        let begun = Instant::now();
        let torn = ReadOptions::default().accept_torn();
        while read_path(&path, &torn).map_or(0, |recording| recording.records.len()) < 7 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{name}: nothing was flushed");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(read_path(&path, &ReadOptions::default()).is_err(), "the trace has no end line yet");
        assert_eq!(allocator.stop_recording().unwrap().records, 7);
        assert_eq!(read_path(&path, &ReadOptions::default()).unwrap().records.len(), 7);
    }
}

/// Set in a copy of this process that records into the file and is then killed.
const VICTIM: &str = "SYMMALLOC_TRACE_FILE_VICTIM";

#[test]
fn the_trace_of_a_killed_process_is_readable_up_to_the_last_flush() {
    const ROUNDS: u64 = 3000;
    if let Some(path) = std::env::var_os(VICTIM) {
        let mut options = TraceFileOptions::default();
        options.flush_interval = Duration::from_millis(20);
        let allocator = allocator();
        allocator.start_recording(TraceFile::create(PathBuf::from(path), options).unwrap()).unwrap();
        work(&allocator, ROUNDS);
        std::thread::sleep(Duration::from_millis(500));
        std::process::abort();
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["job.trace", "job.trace.gz", "job.trace.zst"] {
        let path = folder.path().join(name);
        let mut victim = Command::new(std::env::current_exe().unwrap());
        victim.args(["--exact", "trace_file::the_trace_of_a_killed_process_is_readable_up_to_the_last_flush"]);
        let ended = victim.env(VICTIM, &path).output().unwrap();
        assert!(!ended.status.success());
        let error = read_path(&path, &ReadOptions::default()).unwrap_err();
        assert!(error.to_string().contains("6001 whole records"), "{error}");
        let recording = read_path(&path, &ReadOptions::default().accept_torn()).unwrap();
        assert_eq!(recording.records.len() as u64, 1 + 2 * ROUNDS);
    }
}

#[test]
fn a_full_disk_ends_the_recording_and_not_the_job() {
    if !Path::new("/dev/full").exists() {
        return println!("skipped: /dev/full does not exist");
    }
    let allocator = allocator();
    let mut options = TraceFileOptions::default();
    options.pending_records_max = 64;
    allocator.start_recording(TraceFile::create("/dev/full", options).unwrap()).unwrap();
    work(&allocator, 10_000);
    assert!(!allocator.is_recording());
    let Err(RecordingError::Ended { source: RecordingEnd::Sink(source), .. }) = allocator.stop_recording() else {
        panic!("the full disk did not end the recording")
    };
    let error = source.downcast_ref::<TraceFileError>().expect("a trace file's");
    assert!(matches!(error, TraceFileError::Write { path, .. } if path == Path::new("/dev/full")), "{error}");
    assert_eq!(allocator.stats().usage.all.allocations.allocated, 10_000);
    allocator.check().expect("the invariants should hold");
    // The few records of a short job are lost at the end, which reports an error as well.
    let short = self::allocator();
    short.start_recording(TraceFile::create("/dev/full", TraceFileOptions::default()).unwrap()).unwrap();
    work(&short, 1);
    assert!(matches!(short.stop_recording(), Err(RecordingError::Ended { source: RecordingEnd::Sink(_), .. })));
}

/// The limit raises SIGXFSZ, which ends a program that does not handle it.
#[test]
fn a_limit_on_file_sizes_ends_the_recording_and_not_the_job() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["job.trace", "job.trace.gz", "job.trace.zst"] {
        let path = folder.path().join(name);
        let script =
            "ulimit -f 8; exec \"$0\" --exact trace_file::a_job_is_recorded_beyond_the_limit --ignored --nocapture";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(std::env::current_exe().unwrap()).env("TRACE", &path);
        let ended = shell.output().unwrap();
        let text = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && text.contains("the job is done"), "{name}: {}\n{text}", ended.status);
        let torn = read_path(&path, &ReadOptions::default().accept_torn()).unwrap();
        // Compressed data has no whole block within the limit.
        assert!(name != "job.trace" || !torn.records.is_empty(), "what fits is kept");
        assert!(torn.records.len() < 200_001, "{name}: {}", torn.records.len());
    }
}

#[test]
#[ignore = "run by another test, under a limit"]
fn a_job_is_recorded_beyond_the_limit() {
    let path = PathBuf::from(std::env::var_os("TRACE").expect("it should be set"));
    let allocator = allocator();
    allocator.start_recording(TraceFile::create(&path, TraceFileOptions::default()).unwrap()).unwrap();
    work(&allocator, 100_000);
    let Err(RecordingError::Ended { source: RecordingEnd::Sink(source), .. }) = allocator.stop_recording() else {
        panic!("the limit did not end the recording")
    };
    let error = source.downcast_ref::<TraceFileError>().expect("a trace file's");
    assert!(matches!(error, TraceFileError::Write { path: of, .. } if *of == path), "{error}");
    allocator.check().expect("the invariants should hold");
    println!("the job is done");
}

#[test]
fn a_file_that_cannot_be_created_is_reported_immediately() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no").join("such").join("folder.trace");
    let error = TraceFile::create(&path, TraceFileOptions::default()).unwrap_err();
    assert!(matches!(error, TraceFileError::Create { .. }) && error.to_string().contains("folder.trace"), "{error}");
}

/// Regression test: a rejected recording must not truncate the file, which may be the one being written.
#[test]
fn a_refused_recording_leaves_the_existing_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace.zst");
    let create = || TraceFile::create(&path, TraceFileOptions::default()).unwrap();
    let allocator = allocator();
    allocator.start_recording(create()).unwrap();
    work(&allocator, 5000);
    assert!(matches!(allocator.start_recording(create()), Err(StartRecordingError::AlreadyRecording)));
    let records = allocator.stop_recording().unwrap().records;
    assert!(matches!(allocator.start_recording(create()), Err(StartRecordingError::InUse { .. })));
    let recording = read_path(&path, &ReadOptions::default()).expect("a whole trace");
    assert_eq!(recording.records.len() as u64, records);
    // A new recording replaces the file, even with less data.
    assert_eq!(recorded(&path, TraceFileOptions::default(), 1), 3);
    assert_eq!(read_path(&path, &ReadOptions::default()).expect("a whole trace").records.len(), 3);
}

/// The program waits for a slower disk; no record is dropped.
#[test]
fn a_slow_disk_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe.trace");
    let made = Command::new("mkfifo").arg(&path).status();
    if !made.is_ok_and(|status| status.success()) {
        return println!("skipped: mkfifo is not installed");
    }
    let reader = std::thread::spawn({
        let path = path.clone();
        move || {
            let (mut pipe, mut bytes, mut part) = (fs::File::open(path).unwrap(), Vec::new(), vec![0; 16 << 10]);
            loop {
                match pipe.read(&mut part).unwrap() {
                    0 => return bytes,
                    count => bytes.extend_from_slice(&part[..count]),
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
    let mut options = TraceFileOptions::default();
    options.pending_records_max = 100;
    let records = recorded(&path, options, 20_000);
    let recording = read_bytes(&reader.join().unwrap(), &ReadOptions::default()).unwrap();
    assert_eq!((recording.records.len() as u64, records), (40_001, 40_001));
}

/// Names that exceed a line are truncated at a character boundary.
#[test]
fn a_name_that_is_too_long_is_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace");
    let allocator = allocator();
    allocator.start_recording(TraceFile::create(&path, TraceFileOptions::default()).unwrap()).unwrap();
    let stream = allocator.register_stream().unwrap();
    let name = "\u{7}".repeat(4095) + "é";
    let _live = allocator.allocate_named(PoolId::DEFAULT, stream, 1, &name).unwrap();
    allocator.stop_recording().unwrap();
    let recording = read_path(&path, &ReadOptions::default()).unwrap();
    assert_eq!(recording.records[1].name.as_deref(), Some(&name[..4095]));
    assert!(matches!(recording.records[1].op, Op::Allocate { size_bytes: 1, .. }));
}

#[test]
fn a_torn_trace_reports_the_number_of_complete_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace.zst");
    recorded(&path, TraceFileOptions::default(), 100);
    let stored = fs::read(&path).unwrap();
    let error = read_bytes(&stored[..stored.len() - 5], &ReadOptions::default()).unwrap_err();
    let ImportErrorKind::TornTrace { compression, records, .. } = error.kind() else { panic!("{error}") };
    assert_eq!((*compression, *records), (Compression::Zstd, 201));
}

/// A forked child continues with a copy of everything except the thread. It records nothing and does not block, and the parent's file is
/// complete.
#[test]
#[cfg(unix)]
fn a_forked_child_does_not_write_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.trace.zst");
    let allocator = allocator();
    allocator.start_recording(TraceFile::create(&path, TraceFileOptions::default()).unwrap()).unwrap();
    work(&allocator, 100);
    // SAFETY: the child only calls what a forked child of a multithreaded program may call: its own code, and an allocator whose locks the
    // C library keeps usable.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            work(&allocator, 5000);
            let Err(RecordingError::Ended { source: RecordingEnd::Sink(source), .. }) = allocator.stop_recording()
            else {
                return false;
            };
            matches!(source.downcast_ref(), Some(TraceFileError::Forked { .. }))
        }));
        // SAFETY: ends the child without running the exit handlers that the test process registered.
        unsafe { libc::_exit(i32::from(!is_ended.unwrap_or(false))) };
    }
    let mut status = 0;
    // SAFETY: `child` is a child of this process, and `status` is valid for writing.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child recorded, or hung");
    work(&allocator, 100);
    assert_eq!(allocator.stop_recording().unwrap().records, 402);
    assert_eq!(read_path(&path, &ReadOptions::default()).unwrap().records.len(), 402);
}
