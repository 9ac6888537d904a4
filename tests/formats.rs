//! Files of older versions, which `tests/formats/DATE` keeps: they are read, and mean the same.
//!
//! The program that wrote a folder is the function `write` of its version. `SYMMALLOC_WRITE_FORMATS=FOLDER cargo test -p symmalloc-harness
//! formats` writes the files of this version. After a change of a format, add a folder with the files that the new version writes. The
//! recorded jobs are traces of version 1, too, and `golden.rs` replays them.

use std::fs;
use std::path::{Path, PathBuf};
use symmalloc_core::op::{Contents, Op};
use symmalloc_core::{Allocator, Config, PoolConfig, PoolId};
use symmalloc_import::{ReadOptions, Recording, TraceFile, TraceFileOptions, read_bytes, read_path};
use symmalloc_sim::SimBackend;
use symmalloc_trace::plan::{self, PlanFile};
use symmalloc_trace::replay::{Program, Replay};
use symmalloc_trace::{Trace, layout};
use symmalloc_watchdog::{
    CollectiveRecord, CollectiveState, CommunicatorId, CommunicatorRecord, FlightRecord, PeerRecord, Progress,
    Signature,
};

/// The files of a folder, with the words that begin their first lines.
const FILES: [(&str, &str); 5] = [
    ("recording.trace", "symmalloc-trace "),
    ("default.layout", "symmalloc-layout "),
    ("second.layout", "symmalloc-layout "),
    ("learned.plan", "symmalloc-plan "),
    ("flight-record.json", ""),
];

/// Settings of the two pools of the recording.
const SECOND: &str = "segments:fixed,streams:shared,symmetric:true,release_threshold_mb:64";
const LEARNING: &str = "segments:expandable,plan:learn";

fn folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("formats")).expect("the folder exists");
    let mut found: Vec<_> = entries.map(|entry| entry.expect("the folder can be read").path()).collect();
    found.sort();
    found
}

fn simulated(config: Config) -> Allocator<SimBackend> {
    Allocator::new(SimBackend::builder().seed(1).build(), config).expect("the configuration is valid")
}

fn read(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{}/{name}: {error}", folder.display()))
}

/// Writes one file of each format.
fn write(folder: &Path) {
    let config: Config = "segments:expandable".parse().expect("valid settings");
    let allocator = simulated(config.clone());
    let file = TraceFile::create(folder.join("recording.trace"), TraceFileOptions::default()).expect("a file");
    allocator.start_recording(file).expect("no op was executed");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream"));
    let grouped = allocator.register_stream_in(streams[1]).expect("a stream");
    let second = allocator.create_pool(SECOND.parse().expect("valid settings")).expect("a pool");
    let mut live = Vec::new();
    for step in 0..40_u64 {
        let pool = if step % 3 == 0 { second } else { PoolId::DEFAULT };
        let size_bytes = 512 + (step * 0x9e37_79b1) % (6 << 20);
        let stream = streams[(step % 2) as usize];
        let allocation = match step % 5 {
            0 => allocator.allocate_named(pool, stream, size_bytes, "weights \"of\" layer"),
            _ => allocator.allocate(pool, stream, size_bytes),
        };
        live.push(allocation.expect("memory").handle);
        if step % 4 == 1 {
            let handle = *live.last().expect("just allocated");
            allocator.record_use(handle, grouped).expect("the allocation is live");
        }
        if step % 2 == 1 {
            allocator.free(live.remove((step as usize * 7) % live.len())).expect("the allocation is live");
        }
        match step {
            20 => allocator.note_stream_wait(streams[0], streams[1]).expect("both streams exist"),
            25 => {
                allocator.sleep(second, Contents::Keep).expect("asleep");
                allocator.wake(second).expect("awake");
            }
            30 => drop(allocator.trim_pool(PoolId::DEFAULT).expect("the pool exists")),
            _ => {}
        }
    }
    allocator.allocate(PoolId::DEFAULT, streams[0], 1 << 50).expect_err("no device has so much memory");
    for (pool, name) in [(PoolId::DEFAULT, "default.layout"), (second, "second.layout")] {
        let text = layout::to_text(&allocator.save_layout(pool).expect("the pool can be saved"));
        fs::write(folder.join(name), text).expect("the folder is writable");
    }
    allocator.stop_recording().expect("the recording is complete");
    fs::write(folder.join("learned.plan"), plan::to_text(&learned(config))).expect("the folder is writable");
    flight_record().write(&folder.join("flight-record.json")).expect("the folder is writable");
}

fn learned(config: Config) -> PlanFile {
    let allocator = simulated(config.clone());
    let stream = allocator.register_stream().expect("a stream");
    let settings: PoolConfig = LEARNING.parse().expect("valid settings");
    let pool = allocator.create_pool(settings.clone()).expect("a pool");
    for _ in 0..4 {
        allocator.begin_step(pool, 7).expect("no step is open");
        let [first, second] = [3, 5].map(|mib| allocator.allocate(pool, stream, mib << 20).expect("memory").handle);
        allocator.free(first).expect("live");
        let third = allocator.allocate(pool, stream, 2 << 20).expect("memory").handle;
        [second, third].into_iter().for_each(|handle| allocator.free(handle).expect("live"));
        allocator.end_step(pool).expect("the step is open");
    }
    let mut file = PlanFile::new(config);
    file.add_pool(pool, settings).expect("a new pool");
    for plan in allocator.plans(pool).expect("the pool exists") {
        file.add_plan(pool, plan).expect("a new plan");
    }
    file
}

fn flight_record() -> FlightRecord {
    let word = |text: &str| Some(text.to_owned());
    let collective = |number| CollectiveRecord {
        number,
        is_point_to_point: false,
        signature: Signature {
            kind: "ncclAllReduce".to_owned(),
            elements: Some(1024),
            data_type: word("float32"),
            detail: word("sum"),
        },
        stream: Some(0),
        state: if number < 3 { CollectiveState::Finished } else { CollectiveState::Running },
        age_ms: 10,
    };
    let communicator = CommunicatorRecord {
        id: CommunicatorId::of(b"world"),
        name: "world".to_owned(),
        rank: 0,
        ranks: 2,
        state: "failed".to_owned(),
        cause: word("rank 1 is gone: its process ended"),
        progress: Progress { submitted: 3, finished: 2, is_destroying: false },
        peers: vec![PeerRecord {
            rank: 1,
            progress: Progress { submitted: 2, finished: 2, is_destroying: false },
            condition: "gone: its process ended".to_owned(),
        }],
        collectives: (1..4).map(collective).collect(),
    };
    FlightRecord::new("machine".to_owned(), "rank 1 is gone".to_owned(), vec![communicator])
}

#[test]
fn traces_of_older_versions_are_read_and_replayed() {
    let count = |recording: &Recording, is: fn(&Op) -> bool| recording.records.iter().filter(|it| is(&it.op)).count();
    for folder in folders() {
        let path = folder.join("recording.trace");
        let recording = read_path(&path, &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(count(&recording, |op| matches!(op, Op::Allocate { .. })), 40, "{}", path.display());
        assert_eq!(count(&recording, |op| matches!(op, Op::Free { .. })), 20);
        assert_eq!(count(&recording, |op| matches!(op, Op::Sleep { .. } | Op::Wake { .. })), 2);
        let program = Program::new(&recording.records).expect("the recording is consistent");
        let allocator = simulated(recording.config.clone().expect("a recording has its configuration"));
        Replay::new(&allocator, &program).run(|_, _| {}).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        allocator.check().expect("the invariants should hold");
        // Written again, it is a trace of this version with the same meaning.
        let trace = Trace::new(recording.config, recording.records).expect("the recording is consistent");
        let again = read_bytes(trace.to_text().as_bytes(), &ReadOptions::default()).expect("this version is read");
        assert_eq!(&again.records[..], trace.records());
    }
}

#[test]
fn layouts_of_older_versions_are_read_and_restored() {
    for folder in folders() {
        for (name, is_default, allocations) in [("default.layout", true, 11), ("second.layout", false, 9)] {
            let text = read(&folder, name);
            let saved = layout::parse(&text).unwrap_or_else(|error| panic!("{}/{name}: {error}", folder.display()));
            let lines = |text: &str| text.lines().filter(|line| line.starts_with("a ")).count();
            assert_eq!(lines(&text), allocations, "{}/{name}", folder.display());
            // The first line states this version, and the second line may have keys that older versions did not have.
            let written = layout::to_text(&saved);
            assert!(written.lines().skip(2).eq(text.lines().skip(2)), "{}/{name}:\n{written}", folder.display());
            let allocator = simulated("segments:expandable".parse().expect("valid settings"));
            let [_, second] = [(); 2].map(|()| allocator.register_stream().expect("a stream"));
            // Older versions have no groups.
            if saved_streams(&text) > 2 {
                allocator.register_stream_in(second).expect("a stream");
            }
            let pool = match is_default {
                true => None,
                false => Some(allocator.create_pool(SECOND.parse().expect("valid settings")).expect("a pool")),
            };
            let restored = allocator.restore_layout(pool.unwrap_or(PoolId::DEFAULT), &saved);
            let restored = restored.unwrap_or_else(|error| panic!("{}/{name}: {error}", folder.display()));
            assert_eq!(restored.allocations().count(), allocations);
            allocator.check().expect("the invariants should hold");
        }
    }
}

/// Returns the number of streams that a layout names.
fn saved_streams(text: &str) -> usize {
    (0..10).rev().find(|stream| text.contains(&format!("s{stream}"))).map_or(0, |stream| stream + 1)
}

#[test]
fn plans_of_older_versions_are_read_and_followed() {
    for folder in folders() {
        let text = read(&folder, "learned.plan");
        let file = plan::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let (planned, settings) = file.pools().next().expect("the file has a pool");
        let allocator = simulated(file.config().clone());
        let stream = allocator.register_stream().expect("a stream");
        let pool = allocator.create_pool(settings.clone()).expect("a pool");
        assert_eq!(file.plans_of(planned).count(), 1);
        file.plans_of(planned).for_each(|plan| allocator.adopt_plan(pool, plan.clone()).expect("the plan fits"));
        allocator.begin_step(pool, 7).expect("no step is open");
        let buffers = [3, 5].map(|mib| allocator.allocate(pool, stream, mib << 20).expect("memory").handle);
        buffers.into_iter().for_each(|handle| allocator.free(handle).expect("live"));
        let step = allocator.end_step(pool).expect("the step is open");
        assert_eq!(step.planned, 2, "{}", folder.display());
    }
}

#[test]
fn flight_records_of_older_versions_are_read() {
    for folder in folders() {
        let record = FlightRecord::read(&folder.join("flight-record.json")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(record.communicators, flight_record().communicators, "{}", folder.display());
    }
}

#[test]
fn files_of_later_versions_are_rejected_with_the_remedy() {
    let folder = folders().pop().expect("there is a folder");
    for (name, magic) in FILES {
        let text = read(&folder, name);
        let error = if magic.is_empty() {
            let later = text.replacen("\"symmalloc_flight_record\":1", "\"symmalloc_flight_record\":99", 1);
            let later = later.replacen("\"symmalloc_flight_record\": 1", "\"symmalloc_flight_record\": 99", 1);
            assert_ne!(later, text, "{name} states its version");
            FlightRecord::from_reader(later.as_bytes(), Path::new(name)).expect_err("a later version").to_string()
        } else {
            let (first, rest) = text.split_once('\n').expect("several lines");
            assert!(first.starts_with(magic), "{name} states its version");
            let later = format!("{magic}99\n{rest}");
            match magic {
                "symmalloc-trace " => Trace::parse(&later).expect_err("a later version").to_string(),
                "symmalloc-layout " => layout::parse(&later).expect_err("a later version").to_string(),
                _ => plan::parse(&later).expect_err("a later version").to_string(),
            }
        };
        // The command line adds a remedy to the error of a flight record.
        let expected = if magic.is_empty() { "reads only version 1" } else { "newer" };
        assert!(error.contains("version 99") && error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn this_version_writes_the_files_that_it_reads() {
    if let Some(folder) = std::env::var_os("SYMMALLOC_WRITE_FORMATS") {
        fs::create_dir_all(&folder).expect("the folder can be created");
        write(Path::new(&folder));
    }
    let temporary = tempfile::tempdir().expect("a folder");
    write(temporary.path());
    for (name, _) in FILES {
        assert!(temporary.path().join(name).is_file(), "{name}");
    }
    // A new version of a format needs a folder with the files of the version before it.
    let first_lines = |folder: &Path, name: &str| read(folder, name).lines().next().map(str::to_owned);
    for (name, magic) in FILES.into_iter().filter(|(_, magic)| !magic.is_empty()) {
        let now = first_lines(temporary.path(), name).expect("a line");
        let version: u64 = now.strip_prefix(magic).expect("the first line").parse().expect("a number");
        for older in 1..=version {
            let line = format!("{magic}{older}");
            let has = |folder: &PathBuf| first_lines(folder, name).as_deref() == Some(&*line);
            assert!(folders().iter().any(has), "tests/formats has no {name} of version {older}");
        }
    }
}
