//! Random jobs, on which all commands must agree with each other, and with a naive count that does not use an allocator.
//!
//! ```text
//! seed ──► trace ─┬─► replay ───────────────► decisions ──► naive count: live bytes, refusals
//!                 ├─► report, chart, export ─► the same first pass       live ≤ reserved ≤ limit
//!                 ├─► report's settings ────► the same five passes
//!                 └─► plan ─► file ─► replay --plan, chart --share ─► the same planned bytes
//! ```
//!
//! The test runs 200 jobs, or 10,000 with `SYMMALLOC_NIGHT=1`. `SYMMALLOC_JOB=n` runs one job and prints its trace.

use crate::args::{Args, Command, PolicyArgs, ReportArgs};
use crate::chart::timeline_of;
use crate::error::CliError;
use crate::job::{JobError, Options};
use crate::picture::Selection;
use crate::picture::timeline::{ALLOCATED, LIVE, RESERVED};
use crate::planned::{PlannedJob, follow};
use crate::recorded::Recorded;
use crate::report;
use clap::Parser;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_core::config::{Config, PoolConfig, SegmentPolicy};
use symmalloc_core::ids::{AllocationId, PoolId, StreamId};
use symmalloc_core::op::{Contents, Op, Record};
use symmalloc_import::export::export;
use symmalloc_sim::SplitMix64;
use symmalloc_trace::TraceWriter;
use symmalloc_trace::plan::to_text;
use symmalloc_trace::replay::StepError;

const MIB: u64 = 1 << 20;

/// A job under construction.
struct Draft {
    random: SplitMix64,
    config: Config,
    records: Vec<Record>,
    /// Existing pools, each with whether it has an open step or sleeps.
    pools: BTreeMap<PoolId, PoolState>,
    live: Vec<(AllocationId, PoolId)>,
    streams: u16,
    pools_made: u32,
    allocations: u64,
    has_steps: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct PoolState {
    step: bool,
    asleep: bool,
}

impl Draft {
    fn new(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let total =
            if random.below(4) == 0 { format!("total_limit_mb:{},", 16 + random.below(240)) } else { String::new() };
        let config = (total + &pool_text(&mut random)).parse().expect("a valid configuration");
        let has_steps = random.below(4) == 0;
        let pools = BTreeMap::from([(PoolId::DEFAULT, PoolState::default())]);
        Draft {
            random,
            config,
            records: Vec::new(),
            pools,
            live: Vec::new(),
            streams: 0,
            pools_made: 1,
            allocations: 0,
            has_steps,
        }
    }

    fn chance(&mut self, of: u64) -> bool {
        self.random.below(of) == 0
    }

    fn push(&mut self, op: Op) {
        self.records.push(op.into());
    }

    fn stream(&mut self) -> StreamId {
        StreamId(self.random.below(self.streams.into()) as u16)
    }

    fn pool(&mut self) -> PoolId {
        let pools: Vec<PoolId> = self.pools.keys().copied().collect();
        pools[self.random.below(pools.len() as u64) as usize]
    }

    /// Returns a random size. Some sizes recur, and others do not.
    fn size_bytes(&mut self) -> u64 {
        match self.random.below(8) {
            0 => self.random.below(3),
            1 | 2 => 1 + self.random.below(MIB),
            3 => 1 + self.random.below(64 * MIB),
            4 => (1 + self.random.below(4)) * 16 * MIB,
            _ => (1 + self.random.below(8)) * MIB,
        }
    }

    fn make(mut self) -> (Config, Vec<Record>) {
        for _ in 0..=self.random.below(3) {
            self.register_stream();
        }
        for _ in 0..self.random.below(3) {
            self.create_pool();
        }
        for _ in 0..10 + self.random.below(60) {
            self.step();
        }
        // Half of the jobs break off, with live allocations, open steps and sleeping pools.
        if self.chance(2) {
            self.wake_all();
            self.free_of(None);
            self.end_steps();
        }
        (self.config, self.records)
    }

    fn register_stream(&mut self) {
        self.push(Op::RegisterStream { stream: StreamId(self.streams) });
        self.streams += 1;
    }

    fn create_pool(&mut self) {
        let config: PoolConfig = pool_text(&mut self.random).parse().expect("a valid pool");
        let pool = PoolId(self.pools_made);
        self.pools_made += 1;
        self.push(Op::CreatePool { pool, config: Box::new(config) });
        self.pools.insert(pool, PoolState::default());
    }

    fn wake_all(&mut self) {
        let asleep: Vec<PoolId> = self.pools.iter().filter(|(_, state)| state.asleep).map(|(pool, _)| *pool).collect();
        for pool in asleep {
            self.push(Op::Wake { pool });
            self.pools.insert(pool, PoolState { asleep: false, ..self.pools[&pool] });
        }
    }

    fn end_steps(&mut self) {
        let open: Vec<PoolId> = self.pools.iter().filter(|(_, state)| state.step).map(|(pool, _)| *pool).collect();
        for pool in open {
            self.push(Op::EndStep { pool });
            self.pools.insert(pool, PoolState { step: false, ..self.pools[&pool] });
        }
    }

    fn free_of(&mut self, pool: Option<PoolId>) {
        let (gone, kept) = self.live.iter().partition(|(_, of)| pool.is_none_or(|pool| pool == *of));
        self.live = kept;
        let gone: Vec<(AllocationId, PoolId)> = gone;
        gone.into_iter().for_each(|(id, _)| self.push(Op::Free { id }));
    }

    fn step(&mut self) {
        let pool = self.pool();
        let PoolState { step, asleep } = self.pools[&pool];
        match self.random.below(24) {
            0..=9 if !asleep => {
                let (id, stream, size_bytes) = (AllocationId(self.allocations), self.stream(), self.size_bytes());
                self.allocations += 1;
                self.push(Op::Allocate { id, pool, stream, size_bytes });
                self.live.push((id, pool));
            }
            10..=15 if !self.live.is_empty() => {
                let index = self.random.below(self.live.len() as u64) as usize;
                // The blocks of a sleeping pool must not change.
                if !self.pools[&self.live[index].1].asleep {
                    let (id, _) = self.live.swap_remove(index);
                    self.push(Op::Free { id });
                }
            }
            16 if !self.live.is_empty() => {
                let index = self.random.below(self.live.len() as u64) as usize;
                let (id, of) = self.live[index];
                if !self.pools[&of].asleep {
                    let stream = self.stream();
                    self.push(Op::RecordUse { id, stream });
                }
            }
            17 => {
                let (stream, on) = (self.stream(), self.stream());
                let waits = self.chance(2);
                self.push(if waits { Op::Wait { stream, on } } else { Op::Synchronize { stream } });
            }
            18 if !asleep => {
                let pool = if self.chance(2) { None } else { Some(pool) };
                self.push(Op::Trim { pool });
            }
            19 if !asleep => {
                let (stream, size_bytes) = (self.stream(), self.random.below(32) * MIB);
                self.push(Op::Reserve { pool, stream, size_bytes });
            }
            20 if self.has_steps && !asleep => {
                let key = self.random.below(2);
                self.push(if step { Op::EndStep { pool } } else { Op::BeginStep { pool, key } });
                self.pools.insert(pool, PoolState { step: !step, asleep });
            }
            21 if !step && self.chance(2) => {
                let contents = if self.chance(2) { Contents::Keep } else { Contents::Drop };
                self.push(if asleep { Op::Wake { pool } } else { Op::Sleep { pool, contents } });
                self.pools.insert(pool, PoolState { step, asleep: !asleep });
            }
            22 if pool != PoolId::DEFAULT && !asleep && !step && self.chance(2) => {
                self.free_of(Some(pool));
                self.push(Op::DestroyPool { pool });
                self.pools.remove(&pool);
            }
            23 if self.chance(3) => self.register_stream(),
            _ => {}
        }
    }
}

/// Returns random settings of a pool, in the notation of `config` lines and pools.
fn pool_text(random: &mut SplitMix64) -> String {
    let mut text = match random.below(6) {
        0 => "segments:fixed".to_owned(),
        1 => format!("segments:fixed,max_split_size_mb:{}", 20 + random.below(100)),
        2 => "segments:fixed,unsplit:true".to_owned(),
        3 => format!("segments:reserved,segment_mb:{}", [4, 32, 128][random.below(3) as usize]),
        4 => "segments:expandable,stitching:true,stitching_least_mb:4".to_owned(),
        _ => "segments:expandable".to_owned(),
    };
    if random.below(3) == 0 {
        text += ",streams:shared";
    }
    if random.below(4) == 0 && !text.contains("stitching") {
        text += ",symmetric:true";
    }
    if random.below(4) == 0 {
        text += &format!(",limit_mb:{}", 8 + random.below(160));
    }
    if random.below(8) == 0 {
        text += ",roundup_power2_divisions:4";
    }
    if random.below(8) == 0 {
        text += &format!(",release_threshold_mb:{}", random.below(32));
    }
    if random.below(6) == 0 {
        text += [",reclaim:never", ",reclaim:pool"][random.below(2) as usize];
    }
    text
}

/// Result of a count that uses only sizes.
#[derive(Debug, Default, PartialEq)]
struct Count {
    peak_live_bytes: u64,
    refused: u64,
    served: u64,
}

impl Count {
    /// Counts a job in which `is_refused` selects the refused allocations by ordinal.
    fn of(records: &[Record], is_refused: impl Fn(usize) -> bool) -> Self {
        let mut count = Count::default();
        let mut live: BTreeMap<AllocationId, u64> = BTreeMap::new();
        let (mut ordinal, mut live_bytes) = (0, 0);
        for record in records {
            match record.op {
                Op::Allocate { id, size_bytes, .. } => {
                    if is_refused(ordinal) {
                        count.refused += 1;
                    } else {
                        live.insert(id, size_bytes);
                        live_bytes += size_bytes;
                        count.served += u64::from(size_bytes > 0);
                    }
                    ordinal += 1;
                }
                Op::Free { id } => live_bytes -= live.remove(&id).unwrap_or(0),
                _ => {}
            }
            count.peak_live_bytes = count.peak_live_bytes.max(live_bytes);
        }
        count
    }
}

/// Returns the size in bytes above which each pool refuses any request, and whether anything may refuse one.
fn bounds(config: &Config, records: &[Record]) -> (BTreeMap<PoolId, u64>, bool) {
    let bound = |pool: &PoolConfig| {
        let segment = match pool.segments() {
            SegmentPolicy::Reserved { segment_bytes } => *segment_bytes,
            SegmentPolicy::Expandable(expandable) => expandable.range_bytes,
            _ => u64::MAX,
        };
        [pool.limit_bytes(), config.limit_bytes()].into_iter().flatten().fold(segment, u64::min)
    };
    let mut bounds = BTreeMap::from([(PoolId::DEFAULT, bound(config.default_pool()))]);
    for record in records {
        if let Op::CreatePool { pool, config } = &record.op {
            bounds.insert(*pool, bound(config));
        }
    }
    let may_refuse = config.limit_bytes().is_some() || bounds.values().any(|bound| *bound < 1 << 39);
    (bounds, may_refuse)
}

fn parsed(arguments: &[&str]) -> Command {
    Args::try_parse_from(arguments).expect("valid arguments").command
}

fn report_args(job: &Path, page: &Path) -> ReportArgs {
    match parsed(&["symmalloc", "report", job.to_str().unwrap(), "-o", page.to_str().unwrap()]) {
        Command::Report(args) => args,
        _ => unreachable!("it is the report"),
    }
}

/// Runs all commands on a job.
fn check(config: &Config, records: &[Record], folder: &Path) {
    let path = folder.join("job.trace");
    let mut writer = TraceWriter::new(Vec::new(), Some(config)).unwrap();
    records.iter().for_each(|record| writer.write(record).unwrap());
    std::fs::write(&path, writer.finish().unwrap()).unwrap();
    let Command::Replay(arguments) = parsed(&["symmalloc", "replay", path.to_str().unwrap()]) else { unreachable!() };
    let recorded = Recorded::read(&path, &arguments.reading, &PolicyArgs::default()).expect("read");
    let options = Options { ranks: NonZeroU32::new(2).unwrap(), ..Options::default() };
    let outcome = match recorded.job.replay(&options, &|| ()) {
        // A limit may leave no room for a pool to wake. Every command rejects such a job.
        Err(JobError::Step { error: StepError::Sleep(_), .. }) => return,
        outcome => outcome.expect("replay"),
    };
    assert!(outcome.is_aligned(), "ranks differ: {:?}", outcome.first_divergence);

    // The naive count.
    let count = Count::of(records, |ordinal| outcome.decisions[ordinal].is_none());
    assert_eq!(outcome.first_pass.live_bytes, count.peak_live_bytes, "replay: live");
    assert_eq!(outcome.first_pass_refused as u64, count.refused, "replay: refused");
    // Allocations of a sleeping pool have no memory.
    let sleeps = records.iter().any(|record| matches!(record.op, Op::Sleep { .. }));
    assert!(sleeps || outcome.first_pass.reserved_bytes >= count.peak_live_bytes, "more is live than reserved");
    let (bounds, may_refuse) = bounds(config, records);
    assert!(may_refuse || outcome.refused == 0, "refused without a limit");
    assert!(config.limit_bytes().is_none_or(|limit| outcome.peaks.reserved_bytes <= limit), "beyond the limit");
    let asked = records.iter().filter_map(|record| match record.op {
        Op::Allocate { pool, size_bytes, .. } => Some((pool, size_bytes)),
        _ => None,
    });
    for ((pool, size_bytes), decision) in asked.zip(&outcome.decisions) {
        assert!(size_bytes <= bounds[&pool] || decision.is_none(), "{size_bytes} bytes were served in {pool}");
    }

    // Commands that show the first pass.
    match timeline_of(&recorded, Selection::default()) {
        Err(CliError::NothingToShow { .. }) => assert_eq!(count.served, 0, "nothing to show"),
        timeline => {
            let timeline = timeline.expect("chart");
            assert_eq!(timeline.total.peaks[LIVE].bytes, count.peak_live_bytes, "chart: live");
            assert_eq!(timeline.total.peaks[RESERVED].bytes, outcome.first_pass.reserved_bytes, "chart: reserved");
            assert!(timeline.total.peaks[ALLOCATED].bytes >= count.peak_live_bytes, "chart: allocated");
            assert_eq!(timeline.refused, count.refused, "chart: refused");
        }
    }
    let mut snapshot = Vec::new();
    let exported = export(recorded.program(), &recorded.config, &mut snapshot).expect("export");
    assert_eq!((exported.refused, exported.allocations), (count.refused, count.served), "export");

    // Commands that run the job five times.
    let steady = recorded.job.steady(&recorded.config, None).expect("steady");
    assert_eq!(steady.peaks, outcome.peaks, "steady");
    check_report(&path, &folder.join("job.html"), &outcome, &count);
    check_plan(&path, &recorded, &outcome);
}

fn check_report(path: &Path, page: &Path, outcome: &crate::job::Outcome, count: &Count) {
    let args = report_args(path, page);
    let found = report::object(&args);
    if let Err(CliError::NothingToShow { .. }) = found {
        assert_eq!(count.served, 0, "nothing to report");
        return;
    }
    let found = found.expect("report");
    assert_eq!(found["live"]["peak_bytes"], count.peak_live_bytes, "report: live");
    assert_eq!(found["refused"], count.refused, "report: refused");
    assert_eq!(found["reserved"]["peak_bytes"], outcome.first_pass.reserved_bytes, "report: reserved");
    assert_eq!(found["steady_reserved_bytes"], outcome.peaks.reserved_bytes, "report: steady");
    let settings = found["settings"].as_array().expect("settings");
    let own = settings.iter().find(|setting| setting["is_own"] == true).expect("the job's own");
    assert_eq!(own["peak_reserved_bytes"], outcome.peaks.reserved_bytes, "report: own settings");
    for better in settings.iter().filter(|setting| setting["is_better"] == true) {
        assert!(
            better["refused"].as_u64() <= own["refused"].as_u64(),
            "report recommends settings that refuse more: {better}"
        );
    }
}

fn check_plan(path: &Path, recorded: &Recorded, outcome: &crate::job::Outcome) {
    let policy = PolicyArgs::default();
    let planned = match PlannedJob::of(recorded, &policy) {
        // There is no plan if a limit leaves no room for it.
        Err(CliError::NotPlanned { .. }) => return,
        planned => planned.expect("plan"),
    };
    if planned.plan_count() == 0 {
        return;
    }
    let followed = planned.followed;
    assert_eq!(followed.passes, outcome.passes);
    let sleeps = recorded.program().ops().iter().any(|op| matches!(op, Op::Sleep { .. }));
    assert!(sleeps || followed.peaks.reserved_bytes >= followed.peaks.live_bytes, "plan: more is live than reserved");
    assert!(followed.refused > 0 || followed.peaks.live_bytes >= outcome.peaks.live_bytes, "plan: live");
    let file = path.with_extension("plan");
    std::fs::write(&file, to_text(&planned.file)).unwrap();
    let mut recording = recorded.recording.clone();
    let read = follow(&file, path, &mut recording, &policy).expect("replay --plan");
    assert_eq!(read, *planned.file, "the plan's file");
    let job = crate::job::Job::new(&recording).expect("the job as planned");
    let ranks = NonZeroU32::new(2).unwrap();
    let options = Options { ranks, plan: Some(Arc::new(read)), ..Options::default() };
    let replayed = job.replay(&options, &|| ()).expect("replay --plan");
    assert!(replayed.is_aligned(), "ranks that follow the plan differ");
    assert_eq!(replayed.peaks, followed.peaks, "replay --plan");
}

/// Checks the job of a seed. An error is a single line.
fn run(seed: u64) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let (config, records) = Draft::new(seed).make();
    let checked = catch_unwind(AssertUnwindSafe(|| check(&config, &records, folder.path())));
    if std::env::var_os("SYMMALLOC_JOB").is_some() {
        println!("{}", std::fs::read_to_string(folder.path().join("job.trace")).unwrap_or_default());
    }
    checked.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        format!("job {seed}: {}", text.replace('\n', " "))
    })
}

#[test]
fn all_commands_agree_on_random_jobs() {
    let seeds = match std::env::var("SYMMALLOC_JOB").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None if std::env::var_os("SYMMALLOC_NIGHT").is_some() => 0..10_000,
        None => 0..200,
    };
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let work = || {
        let mut failures = BTreeSet::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return failures;
            }
            failures.extend(run(seed).err());
        }
    };
    let failures: Vec<String> = std::thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "{} jobs failed:\n{}", failures.len(), failures.join("\n"));
}
