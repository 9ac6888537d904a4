//! The fuzz targets as plain functions: each accepts any bytes and panics if something is wrong.
//!
//! `fuzz/` calls them with the fuzzer's input. The `seeds` test calls them with the seed corpus, so every seed and every input that once
//! failed remains a test.

use crate::checker::{compare_at, decisions};
use crate::generate::Scenario;
use crate::hostile;
use crate::recovery;
use crate::steps::{StepScenario, run};
use std::io::Write;
use std::num::{NonZeroU32, NonZeroUsize};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::AllocationId;
use symmalloc_core::lock::{Exclusive, Shared};
use symmalloc_core::plans::{Plan, PlanError};
use symmalloc_core::work::{self, Allowance};
use symmalloc_core::{Allocator, Op, PoolId, Record};
use symmalloc_import::export::export;
use symmalloc_import::{Format, ReadOptions, read_bytes};
use symmalloc_sim::job::{JobPlan, simulate, story};
use symmalloc_sim::{Delays, SimBackend};
use symmalloc_trace::replay::{Program, Replay, StepError};
use symmalloc_trace::{TraceReader, TraceWriter, layout, plan};
use symmalloc_watchdog::{
    CommunicatorId, CommunicatorRecord, Connection, Finding, Findings, FlightRecord, Lifeline, Member, PeerEvent,
    ProcessId, Progress, RankId,
};

/// A function that accepts any bytes, and panics if something is wrong. Returns the number of ops executed, or read.
pub type Target = fn(&[u8]) -> u64;

/// Number of ops between two checks of all blocks and invariants, which cost as much as dozens of ops.
const LOOK_EVERY: usize = 16;

/// Name and function of every target.
pub const TARGETS: [(&str, Target); 14] = [
    ("ops_vs_oracle", ops_vs_oracle),
    ("two_ranks", two_ranks),
    ("local_recovery", local_recovery),
    ("steps", steps),
    ("job", job),
    ("trace_reader", trace_reader),
    ("layout_reader", layout_reader),
    ("plan_reader", plan_reader),
    ("config_text", config_text),
    ("snapshot_reader", snapshot_reader),
    ("rmm_reader", rmm_reader),
    ("flight_record_reader", flight_record_reader),
    ("watchdog_peer", watchdog_peer),
    ("work", work),
];

/// Runs a program on the allocator and the oracle.
///
/// # Panics
/// Panics on the first difference, violated invariant, race, violation of the backend's contract, or leak.
pub fn ops_vs_oracle(bytes: &[u8]) -> u64 {
    let scenario = Scenario::from_bytes(bytes);
    let ops = scenario.program.ops().len();
    compare_at(&scenario, &scenario.device(bytes.len() as u64), |op| (op + 1) % LOOK_EVERY == 0 || op + 1 == ops);
    ops as u64
}

/// Runs a program on two ranks that share nothing but the program. Where one uses a handle, the other uses an address.
///
/// # Panics
/// Panics if they decide differently.
pub fn two_ranks(bytes: &[u8]) -> u64 {
    let scenario = Scenario::from_bytes(bytes);
    let one = scenario.device_builder(1).rank(0).delays(Delays::Immediate).build();
    let other = scenario.device_builder(2).rank(1).delays(Delays::UntilSynchronized).build();
    let one = decisions::<Exclusive>(&scenario, &one, |op, _, _, allocator| {
        if op % 8 == 0 {
            allocator.drop_completed_fences().expect("no fault was injected");
        }
    });
    let ops = scenario.program.ops().len() as u64;
    let other = decisions::<Shared>(&scenario.with_other_access(), &other, |_, _, _, _| {});
    assert_eq!(one, other, "two ranks decided differently");
    2 * ops
}

/// Runs a program on two ranks, one of which makes room for its wakes alone.
///
/// # Panics
/// Panics if the ranks decide differently in a symmetric pool, or a wake fails.
pub fn local_recovery(bytes: &[u8]) -> u64 {
    recovery::run(bytes, recovery::trim_private)
}

/// Runs a program that repeats steps and a model of following a plan, on two ranks that share nothing but the program.
///
/// # Panics
/// Panics if a rank deviates from the model, or the ranks decide differently.
pub fn steps(bytes: &[u8]) -> u64 {
    let scenario = StepScenario::from_bytes(bytes);
    let one = SimBackend::builder().seed(1).rank(0).delays(Delays::Immediate).build();
    let other = SimBackend::builder().seed(2).rank(1).delays(Delays::UntilSynchronized).build();
    assert_eq!(run::<Exclusive>(&scenario, &one), run::<Shared>(&scenario, &other), "two ranks decided differently");
    2 * scenario.ops() as u64
}

/// Number of ops between two syncs of a [`job`].
const OPS_A_SYNC: usize = 24;

/// Runs a program on a few ranks under adverse conditions, whose threads interleave differently: a whole job.
///
/// # Panics
/// Panics if ranks differ that must not, a differing rank is not reported, or anything leaks.
pub fn job(bytes: &[u8]) -> u64 {
    let scenario = Scenario::from_bytes(bytes);
    let seed =
        bytes.iter().fold(0, |seed: u64, byte| seed.rotate_left(7).wrapping_mul(0x100_0000_01b3) ^ u64::from(*byte));
    let ops = scenario.program.ops().chunks(OPS_A_SYNC).flat_map(|ops| ops.iter().cloned().chain([Op::Sync]));
    let plan = JobPlan::of_records(
        scenario.config,
        ops.map(Record::from),
        seed,
        NonZeroU32::new(5).expect("the number should not be zero"),
    );
    let plan = plan.with_granularity_bytes(scenario.granularity_bytes);
    match simulate(&plan, NonZeroUsize::MIN, &mut |_| ()) {
        Ok(outcome) => outcome.ops + outcome.private_ops,
        Err(failure) => {
            let story = story::write(&plan, &failure, "Found by the fuzz target `job`.");
            panic!("{}", story.unwrap_or_else(|_| failure.to_string()));
        }
    }
}

/// Reads text as a trace. Accepted text has one canonical form, which reads back as the same trace.
///
/// # Panics
/// Panics if the reader panics, or reading back differs.
pub fn trace_reader(bytes: &[u8]) -> u64 {
    let Ok(mut reader) = TraceReader::new(bytes) else { return 0 };
    let Ok(records) = reader.by_ref().collect::<Result<Vec<Record>, _>>() else { return 0 };
    let text = written(reader.config(), &records);
    let mut again = TraceReader::new(text.as_slice()).expect("written text can be read");
    let read: Result<Vec<Record>, _> = again.by_ref().collect();
    assert_eq!(read.expect("written text can be read"), records);
    assert_eq!(again.config(), reader.config());
    assert_eq!(written(again.config(), &records), text, "writing is canonical");
    Program::new(&records).expect("a consistent trace is a program");
    records.len() as u64
}

/// Reads text as a layout. Accepted text has one canonical form, and the layout can be restored and used.
///
/// # Panics
/// Panics if the reader panics, reading back differs, or the restored state is inconsistent.
pub fn layout_reader(bytes: &[u8]) -> u64 {
    let as_it_is = restore(bytes);
    // Correct the number of lines at the end, so that truncated or duplicated text gets further.
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("end")).collect();
    let output = lines.iter().filter(|line| !line.trim_ascii_start().is_empty() && !line.starts_with('#')).count();
    as_it_is + restore(format!("{}\nend {}\n", lines.join("\n"), output.saturating_sub(1)).as_bytes())
}

/// Restores a readable layout into a fresh allocator, uses it, and revives it. Returns the number of allocations read.
fn restore(bytes: &[u8]) -> u64 {
    let Ok(layout) = layout::read(bytes) else { return 0 };
    assert_eq!(layout::parse(&layout::to_text(&layout)).expect("written text can be read"), layout);
    let device = SimBackend::builder().granularity_bytes(layout.granularity_bytes()).memory_bytes(1 << 50).build();
    {
        let config =
            Config::builder().default_pool(layout.config().clone()).total_limit_bytes(layout.total_limit_bytes());
        let allocator: Allocator<_> =
            Allocator::new(&device, config.build().expect("the configuration should be valid"))
                .expect("the arguments should be valid");
        let streams: Vec<_> = (0..4).map(|_| allocator.register_stream().expect("a stream id is available")).collect();
        if let Ok(restored) = allocator.restore_layout(PoolId::DEFAULT, &layout) {
            allocator.check().expect("the invariants should hold");
            assert_eq!(allocator.save_layout(PoolId::DEFAULT), Ok(layout.clone()));
            let freed = restored.allocations().step_by(2);
            freed.for_each(|live| allocator.free(live.allocation.handle).expect("the allocation should be live"));
            for (stream, size_bytes) in streams.into_iter().zip([512, 3 << 20, 1 << 20, 40 << 20]) {
                if let Ok(made) = allocator.allocate(PoolId::DEFAULT, stream, size_bytes) {
                    allocator.free(made.handle).expect("the allocation should be live");
                }
            }
            let trimmed =
                bytes.len().is_multiple_of(2).then(|| allocator.trim_all().expect("no fault should be injected"));
            allocator.check().expect("the invariants should hold");
            let revived = allocator.revive_layout(PoolId::DEFAULT, &layout);
            // A limit or a threshold may have released memory as well.
            let may_be_gone = trimmed.is_some() || layout.config() != &PoolConfig::default();
            assert!(revived.is_ok() || may_be_gone, "{revived:?}");
        }
        allocator.check().expect("the invariants should hold");
    }
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    layout.allocation_count() as u64
}

/// Reads text as a plan. Accepted text has one canonical form, and the plan is followed or rejected.
///
/// # Panics
/// Panics if the reader panics, reading back differs, or an adopted plan is not followed.
pub fn plan_reader(bytes: &[u8]) -> u64 {
    let as_it_is = adopt(bytes);
    // Correct the number of lines at the end, as for layouts.
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("end")).collect();
    let output = lines.iter().filter(|line| !line.trim_ascii_start().is_empty() && !line.starts_with('#')).count();
    as_it_is + adopt(format!("{}\nend {}\n", lines.join("\n"), output.saturating_sub(1)).as_bytes())
}

/// Adopts readable plans, and executes two steps of each. Returns the number of allocations made.
fn adopt(bytes: &[u8]) -> u64 {
    let Ok(file) = plan::read(bytes) else { return 0 };
    assert_eq!(plan::parse(&plan::to_text(&file)).expect("written text can be read"), file);
    let device = SimBackend::builder().memory_bytes(1 << 50).build();
    let mut made = 0;
    {
        let Ok(allocator) = Allocator::<_>::new(&device, file.config().clone()) else { return 0 };
        (0..4).for_each(|_| _ = allocator.register_stream().expect("a stream id is available"));
        for pool in [PoolId::DEFAULT].into_iter().chain(file.pools().map(|(pool, _)| pool)) {
            let config = file.pool_config(pool).expect("a pool with plans should have a configuration").clone();
            let made_pool = if pool == PoolId::DEFAULT { Ok(pool) } else { allocator.create_pool(config) };
            let Ok(made_pool) = made_pool else { continue };
            for plan in file.plans_of(pool) {
                let before = allocator.digest(made_pool).expect("the pool should exist");
                match allocator.adopt_plan(made_pool, plan.clone()) {
                    Ok(()) => made += follow(&allocator, made_pool, plan),
                    Err(PlanError::Memory(_)) => {}
                    Err(_) => {
                        assert_eq!(allocator.digest(made_pool), Ok(before), "a rejected plan changes nothing");
                    }
                }
                allocator.check().expect("the invariants should hold");
            }
        }
    }
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    made
}

/// Executes two steps as planned, then frees everything.
fn follow(allocator: &Allocator<&SimBackend>, pool: PoolId, plan: &Plan) -> u64 {
    let plans = allocator.plans(pool).expect("the pool should exist");
    let is_alone = plans.iter().filter(|other| other.key() == plan.key()).count() == 1;
    let count = plan.allocations().len() as u64;
    let placed = plan.allocations().iter().filter(|planned| planned.offset_bytes.is_some()).count() as u64;
    let (mut live, mut made) = (Vec::new(), 0);
    for step in 0..2 {
        allocator.begin_step(pool, plan.key()).expect("no step should be open");
        // Another heap may have a plan of the same key, and receives no request here.
        let mut is_complete = is_alone;
        for (number, planned) in (step * count..).zip(plan.allocations()) {
            live.retain(|(until, handle)| {
                let is_over = *until <= number;
                if is_over {
                    allocator.free(*handle).expect("the allocation should be live");
                }
                !is_over
            });
            match allocator.allocate(pool, planned.wanted.stream, planned.wanted.requested_bytes) {
                Ok(allocation) => {
                    let until = planned.wanted.until.map_or(u64::MAX, |until| step * count + u64::from(until));
                    live.push((until, allocation.handle));
                    made += 1;
                }
                // Ordinary placement may need more than the device or a limit allows.
                Err(_) => is_complete = false,
            }
        }
        let report = allocator.end_step(pool).expect("a step should be open");
        assert!(!is_complete || (report.difference, report.planned) == (None, placed), "{report:?}");
        assert!(!is_complete || report.allocations == count, "{report:?}");
    }
    live.into_iter().for_each(|(_, handle)| allocator.free(handle).expect("the allocation should be live"));
    made
}

fn written(config: Option<&Config>, records: &[Record]) -> Vec<u8> {
    let mut trace = TraceWriter::new(Vec::new(), config).expect("writing to memory cannot fail");
    for record in records {
        trace.write(record).expect("a record that was read can be written");
    }
    trace.finish().expect("writing to memory cannot fail")
}

/// Reads text as a configuration. The written form of accepted text reads back as the same configuration.
///
/// # Panics
/// Panics if a parser panics, or reading back differs.
pub fn config_text(bytes: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(bytes) else { return 0 };
    if let Ok(config) = text.parse::<Config>() {
        assert_eq!(config.to_string().parse(), Ok(config));
    }
    if let Ok(pool) = text.parse::<PoolConfig>() {
        assert_eq!(pool.to_string().parse(), Ok(pool));
    }
    if let Ok(pytorch) = Config::from_pytorch_text(text) {
        assert_eq!(pytorch.config.to_string().parse(), Ok(pytorch.config));
    }
    1
}

/// Reads bytes as a PyTorch snapshot, plain or compressed. Any recording read is a consistent trace.
///
/// # Panics
/// Panics if the reader panics, or the recording is not a program.
pub fn snapshot_reader(bytes: &[u8]) -> u64 {
    import(bytes, b"\x80")
}

/// Work that a replay of [`work`] may do at once.
const WORK_AT_ONCE: u64 = 50_000;
/// Work of one op and of reading, at most.
const WORK_OF_AN_OP: u64 = 1_000_000;

/// Reads and executes a hostile trace made from bytes, and counts its work.
///
/// # Panics
/// Panics if the trace does more work than its ops allow, or is not a trace.
pub fn work(bytes: &[u8]) -> u64 {
    let trace = hostile::mixed(bytes);
    let before = work::so_far();
    let recording = read_bytes(trace.text.as_bytes(), &ReadOptions::default()).expect("a valid trace");
    let program = Program::new(&recording.records).expect("a recording is consistent");
    let config = recording.config.unwrap_or_default();
    let device = SimBackend::builder().memory_bytes(u64::MAX).without_kernels().build();
    let allocator: Allocator<_> = Allocator::new(device, config).expect("the configuration should be valid");
    let mut replay = Replay::new(&allocator, &program).with_allowance(Allowance::of(WORK_AT_ONCE));
    let is_too_much = |op: &Op| matches!(replay.step(op), Err(StepError::TooMuchWork(_)));
    let _ends_early = program.ops().iter().any(is_too_much);
    let (units, ops) = (work::so_far() - before, program.ops().len() as u64);
    let allowed = WORK_AT_ONCE + work::WORK_PER_OP * ops + WORK_OF_AN_OP;
    assert!(units <= allowed, "{units} units of work for {ops} ops: at most {allowed} are expected");
    ops
}

/// Reads text as an RMM log.
///
/// # Panics
/// Panics if the reader panics, or the recording is not a program.
pub fn rmm_reader(bytes: &[u8]) -> u64 {
    import(bytes, b"Thread,Time,Action,Pointer,Size,Stream\n")
}

/// Reads the bytes both unchanged and with a prefix that selects the format.
fn import(bytes: &[u8], beginning: &[u8]) -> u64 {
    let mut read = 0;
    let options = ReadOptions::default().memory_limit_bytes(64 << 20).accept_torn();
    for bytes in [bytes.to_vec(), [beginning, bytes].concat()] {
        let Ok(recording) = read_bytes(&bytes, &options) else { continue };
        let made = recording.records.iter().filter(|record| matches!(record.op, Op::Allocate { .. })).count();
        let program = Program::new(&recording.records).expect("a recording is consistent");
        assert_eq!(program.allocation_count(), made);
        written(recording.config.as_ref(), &recording.records);
        if recording.format == Format::PyTorchSnapshot {
            there_and_back(&program, &recording.records);
            has_valid_stacks(&bytes, &options, made);
        }
        read += recording.records.len() as u64;
    }
    read
}

/// Checks that a snapshot reads with its stacks too, and that every stack has frames.
fn has_valid_stacks(bytes: &[u8], options: &ReadOptions, allocations: usize) {
    let Ok(recording) = read_bytes(bytes, &options.clone().stacks()) else { return };
    let Some(stacks) = recording.stacks else { return };
    for id in 0..allocations as u64 {
        let Some(stack) = stacks.of(AllocationId(id)) else { continue };
        let frames = &stacks.stacks()[stack].frames;
        assert!(!frames.is_empty() && frames.iter().all(|frame| (*frame as usize) < stacks.frames().len()));
    }
}

/// Exports a recording as a snapshot and reads it back: it has the same ops and names, and frees complete at the same points.
fn there_and_back(program: &Program, records: &[Record]) {
    let mut snapshot = Vec::new();
    let summary = export(program, &Config::default(), &mut snapshot).expect("a recording can be executed");
    // Allocations of zero bytes and refused ones have no entry; without entries there is nothing to read.
    if summary.entries > 0 && summary.allocations == program.allocation_count() as u64 {
        let again = read_bytes(&snapshot, &ReadOptions::default()).expect("an exported snapshot can be read");
        let visible = |record: &Record| (record.op.clone(), record.name.clone(), record.pending);
        assert!(again.records.iter().map(visible).eq(records.iter().map(visible)), "the ops differ after a round trip");
    }
}

/// Reads text as a flight record. Accepted text has one canonical form, which reads back as the same record. Of two ranks with equal
/// records, neither is reported as behind or different.
///
/// # Panics
/// Panics if the reader or the comparison panics, reading back differs, or a nonexistent difference is found.
pub fn flight_record_reader(bytes: &[u8]) -> u64 {
    let read = |text: &[u8]| FlightRecord::from_reader(text, Path::new("fuzzed"));
    let Ok(record) = read(bytes) else { return 0 };
    let text = record.to_json();
    let again = read(text.as_bytes()).expect("written text can be read");
    assert_eq!(again, record);
    assert_eq!(again.to_json(), text, "writing is canonical");
    compare_with_twin(&record);
    record.communicators.iter().map(|it| it.collectives.len() as u64).sum()
}

fn compare_with_twin(record: &FlightRecord) {
    let mut twin = record.clone();
    twin.communicators.iter_mut().for_each(|it| it.rank ^= 1);
    let alone = Findings::new(std::slice::from_ref(record));
    let both = Findings::new(&[twin, record.clone()]);
    let mut listed = 0;
    for (id, name, findings) in alone.communicators.iter().chain(&both.communicators) {
        let of_it: Vec<_> = record.communicators.iter().filter(|it| it.id == *id).collect();
        assert_eq!(*name, of_it[0].name);
        for finding in findings {
            assert!(!finding.to_string().is_empty());
            let is_invented = matches!(finding, Finding::Differs { .. } | Finding::Behind { .. });
            let is_plain = of_it.len() == 1 && numbers_differ(of_it[0]);
            assert!(!(is_invented && is_plain), "ranks that did the same: {finding}");
            if let Finding::NoRecord { ranks } = finding {
                listed += ranks.len();
            }
        }
    }
    assert!(listed <= 2 << 20, "{listed} ranks are listed as missing");
}

/// Returns `true` if each collective of the record has a different number.
fn numbers_differ(record: &CommunicatorRecord) -> bool {
    let mut numbers: Vec<u64> =
        record.collectives.iter().filter(|it| !it.is_point_to_point).map(|it| it.number).collect();
    numbers.sort_unstable();
    numbers.windows(2).all(|pair| pair[0] < pair[1])
}

/// Sends bytes to a process through the watchdog's connection, as a process that violates the protocol might. The first byte selects the
/// receiver: the hub, or a process that the hub sends them to. The second byte is the size of a piece in units of eight bytes.
///
/// # Panics
/// If the receiver panics, the bytes change its knowledge of a process that did not send them, or they delay news of that process.
pub fn watchdog_peer(bytes: &[u8]) -> u64 {
    let [receiver, size, sent @ ..] = bytes else { return 0 };
    let pieces = sent.chunks(8 * (1 + usize::from(*size)));
    if receiver.is_multiple_of(2) {
        send_to_hub(pieces);
    } else {
        send_from_hub(pieces);
    }
    sent.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Processes of the job. The sender is process 1, or the hub.
const WATCHED_PROCESSES: u32 = 3;
/// The communicator that all processes are part of. The rank of each is the number of the process.
const WATCHED: CommunicatorId = CommunicatorId(7);
/// Time after which a beat is due.
const BEAT: Duration = Duration::from_millis(250);
/// Time between two turns.
const TURN: Duration = Duration::from_millis(10);

/// Returns a lifeline of a process that is part of the communicator, and has progressed as far as its number.
fn lifeline(own: u32, connections: Vec<(ProcessId, Connection)>) -> Lifeline {
    let lifeline = Lifeline::new(ProcessId(own), WATCHED_PROCESSES, connections, Duration::ZERO);
    let mut lifeline = lifeline.expect("the connections can be set up");
    lifeline.endpoint().join(rank_of(own), Duration::ZERO);
    lifeline.endpoint().set_progress(rank_of(own), progress_of(own), Duration::ZERO);
    lifeline
}

fn rank_of(process: u32) -> RankId {
    RankId { communicator: WATCHED, rank: process }
}

fn progress_of(process: u32) -> Progress {
    Progress { submitted: u64::from(process) + 5, finished: u64::from(process), is_destroying: false }
}

fn connected(process: u32) -> ((ProcessId, Connection), UnixStream) {
    let (own, other) = UnixStream::pair().expect("the system should create a pair of sockets");
    ((ProcessId(process), own.into()), other)
}

/// Asserts that a process is known to be alive, with its rank and its progress.
fn assert_lives(lifeline: &mut Lifeline, process: u32, now: Duration) {
    let members = lifeline.endpoint().members(WATCHED, now);
    let is_meant = |it: &&Member| it.process == ProcessId(process) && it.rank == process;
    let of_it: Vec<&Member> = members.iter().filter(is_meant).collect();
    let [Member { progress, departure: None, has_left: false, failure: None, .. }] = of_it[..] else {
        panic!("process {process}: {members:?}");
    };
    assert_eq!(*progress, progress_of(process));
}

fn send_to_hub<'a>(pieces: impl Iterator<Item = &'a [u8]>) {
    let (to_sender, mut sender) = connected(1);
    let (to_honest, honest) = connected(2);
    let (mut hub, mut now) = (lifeline(0, vec![to_sender, to_honest]), Duration::ZERO);
    let mut honest = lifeline(2, vec![(ProcessId(0), honest.into())]);
    // The first beat of the process is omitted, because its join is pending.
    for _ in 0..2 {
        honest.turn(now);
        hub.turn(now);
        now += BEAT;
    }
    for piece in pieces {
        // After a violation, the hub closes the connection.
        let _refused = sender.write_all(piece);
        now += TURN;
        hub.turn(now);
        honest.turn(now);
        assert_lives(&mut hub, 0, now);
        assert_lives(&mut hub, 2, now);
    }
    let _earlier = hub.endpoint().take_events();
    drop(honest);
    // The first turn may read the last beat of the process.
    for _ in 0..2 {
        now += TURN;
        hub.turn(now);
    }
    let is_news = |event: &PeerEvent| matches!(event, PeerEvent::Gone { rank, .. } if *rank == rank_of(2));
    let events = hub.endpoint().take_events();
    assert_eq!(events.iter().filter(|event| is_news(event)).count(), 1, "{events:?}");
    assert_lives(&mut hub, 0, now);
}

fn send_from_hub<'a>(pieces: impl Iterator<Item = &'a [u8]>) {
    let (to_hub, mut hub) = connected(0);
    let (mut own, mut now) = (lifeline(1, vec![to_hub]), Duration::ZERO);
    own.endpoint().ask(WATCHED, now);
    for piece in pieces {
        let _refused = hub.write_all(piece);
        now += TURN;
        own.turn(now);
        assert_lives(&mut own, 1, now);
        for event in own.endpoint().take_events() {
            let (PeerEvent::Gone { rank, .. } | PeerEvent::Failed { rank, .. }) = event else { continue };
            assert_eq!(rank.communicator, WATCHED, "the process is part of no other communicator");
            assert_ne!(rank, rank_of(1), "the process knows its own rank");
        }
    }
    drop(hub);
    now += TURN;
    own.turn(now);
    assert!(own.endpoint().has_answer(WATCHED, now, now), "a hub that is gone answers nothing");
    assert_lives(&mut own, 1, now);
}
