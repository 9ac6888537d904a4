//! Random jobs, on which all commands must agree with each other and with the oracle of the harness.
//!
//! ```text
//! seed ──► draft ──► trace ────────────┬─► oracle, five passes ─► peaks, refusals, placements ◄──┐
//!            └─► late ─► log, snapshot ┘                                                         │ equal
//!                         ├─► replay ─► peaks, refusals, placements of each pass ────────────────┤
//!                         ├─► report, chart, chart --share, export ─► the same ──────────────────┘
//!                         └─► plan ─► plan -o ─► replay --plan, chart --plan, report, chart --share ─► the same planned bytes
//! ```
//!
//! Every command runs as from a shell, with `--json`. A job that the oracle cannot carry out, because a limit refuses to wake a pool, must
//! stop every command at the same op.
//! The test runs 200 jobs, or 10,000 with `SYMMALLOC_NIGHT=1`. `SYMMALLOC_JOB=n` runs only job n, and prints its trace.
//! 200 jobs by day and 10,000 with `SYMMALLOC_NIGHT=1`. `SYMMALLOC_JOB=n` runs one, and prints its trace.

mod draft;
mod expected;
mod late;

use crate::args::{Args, PolicyArgs, ReportArgs};
use crate::error::CliError;
use crate::output::{reason, take_printed};
use crate::planned::NoPlan;
use crate::recorded::Recorded;
use crate::{Command, Verdict, carry_out};
use clap::Parser;
use draft::Draft;
use expected::{Expected, Numbers, Stop};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_import::{ReadOptions, Summary, read_bytes};
use symmalloc_sim::SplitMix64;
use symmalloc_trace::TraceWriter;

/// Passes that commands make by default.
const PASSES: u32 = 5;

/// Number of jobs by outcome. Printed, and compared with lower bounds, so that too many skipped jobs fail the test.
type Tally = BTreeMap<&'static str, u64>;

/// Runs a command as a shell would. Returns its JSON output.
fn run(line: &[&str]) -> Result<(Value, Verdict), CliError> {
    let arguments = ["symmalloc"].iter().chain(line).chain(["--json"].iter());
    let args = Args::try_parse_from(arguments).expect("the arguments should be valid");
    take_printed();
    let verdict = carry_out(&args.command)?;
    let printed = take_printed();
    Ok((serde_json::from_str(&printed).expect("the output should be JSON"), verdict))
}

/// A job in a file, and its expected numbers.
struct Job<'a> {
    path: &'a str,
    folder: &'a Path,
    recorded: Recorded,
    expected: Expected,
    /// Allocations of at least one byte that succeed in the first pass.
    served: u64,
}

impl<'a> Job<'a> {
    fn read(path: &'a str, folder: &'a Path) -> Self {
        let args = Args::try_parse_from(["symmalloc", "report", path, "-o", "job.html"])
            .expect("the arguments should be valid");
        let Command::Report(ReportArgs { reading, .. }) = args.command else { unreachable!("it is a report") };
        let recorded =
            Recorded::read(Path::new(path), &reading, &PolicyArgs::default()).expect("the read should succeed");
        let expected = Expected::of(recorded.program(), &recorded.config, PASSES);
        let served = expected.placements.iter().flatten().count() as u64;
        Job { path, folder, recorded, expected, served }
    }

    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_str().expect("the path should be UTF-8").to_owned()
    }

    /// Checks all commands.
    fn check(&self, tally: &mut Tally) {
        if let Some(stop) = self.expected.stop {
            return self.check_stop(stop, tally);
        }
        *tally.entry("carried out").or_default() += 1;
        *tally.entry("with refusals").or_default() += u64::from(self.expected.all.refused > 0);
        let replayed = self.check_replay();
        self.check_first_pass();
        let report = self.check_report();
        self.check_share(&replayed, report.as_ref());
        self.check_plan(report.as_ref(), tally);
    }

    /// Checks that the commands that run the same passes as the oracle stop at the same op.
    fn check_stop(&self, stop: Stop, tally: &mut Tally) {
        *tally.entry("stopped").or_default() += 1;
        let page = self.file("job.html");
        let picture = self.file("share.svg");
        for line in [
            &["replay", self.path, "--ranks", "2"][..],
            &["report", self.path, "-o", &page],
            &["chart", self.path, "--share", "-o", &picture],
            &["plan", self.path],
        ] {
            let reason = run(line).map_or_else(|error| reason(&error), |(found, _)| panic!("{line:?}: {found}"));
            let place = match stop {
                Stop::Op { op, .. } => format!("op {op}"),
                Stop::Pass => "beginning another pass".to_owned(),
            };
            // The report shows the first pass before anything else.
            assert!(reason.contains(&place) && reason.contains("limit"), "{line:?}: {place} not in {reason}");
        }
    }

    fn check_replay(&self) -> Value {
        let record = self.file("placed.trace");
        let (mut replayed, verdict) =
            run(&["replay", self.path, "--ranks", "2", "--record", &record]).expect("`replay` should succeed");
        let replayed = replayed[0].take();
        let Expected { first, all, refused_most, .. } = &self.expected;
        assert_eq!(replayed["aligned"], true, "ranks differ: {}", replayed["first_divergence"]);
        assert_eq!(replayed["first_pass"]["peak_reserved_bytes"], first.reserved_bytes, "replay: first pass");
        assert_eq!(replayed["first_pass"]["refused"], first.refused, "replay: first pass");
        assert_eq!(replayed["peak_live_bytes"], all.live_bytes, "replay: live");
        assert_eq!(replayed["peak_reserved_bytes"], all.reserved_bytes, "replay: reserved");
        assert_eq!(replayed["refused"], *refused_most, "replay: refused");
        assert_eq!(verdict, if *refused_most > 0 { Verdict::Refused } else { Verdict::Agree }, "replay");
        let placed = read_bytes(&std::fs::read(&record).unwrap(), &ReadOptions::default())
            .expect("the recording should contain placements");
        let allocations = placed.records.iter().filter(|record| matches!(record.op, Op::Allocate { .. }));
        let placements: Vec<Option<Placement>> = allocations.map(|record| record.placement).collect();
        assert_eq!(placements, self.expected.placements, "replay: placements");
        replayed
    }

    /// Checks the commands that show one pass.
    fn check_first_pass(&self) {
        let Numbers { live_bytes, reserved_bytes, refused } = self.expected.first;
        match run(&["chart", self.path, "-o", &self.file("job.svg")]) {
            Err(CliError::NothingToShow { .. }) => assert_eq!((self.served, refused), (0, 0), "nothing to show"),
            charted => {
                let (charted, _) = charted.expect("`chart` should succeed");
                assert_eq!(charted["live"]["peak_bytes"], live_bytes, "chart: live");
                assert_eq!(charted["reserved"]["peak_bytes"], reserved_bytes, "chart: reserved");
                assert!(charted["allocated"]["peak_bytes"].as_u64() >= Some(live_bytes), "chart: allocated");
                assert_eq!(charted["refused"], refused, "chart: refused");
            }
        }
        let snapshot = self.file("ours.pickle");
        let (exported, _) = run(&["export", self.path, &snapshot]).expect("`export` should succeed");
        assert_eq!(exported["allocations"], self.served, "export");
        assert_eq!(exported["refused"], refused, "export");
        if self.served > 0 {
            let (imported, _) =
                run(&["import", &snapshot, &self.file("again.trace")]).expect("`import` should succeed");
            assert_eq!(imported["allocs"], self.served, "export, and import again");
            assert_eq!(imported["lived_before"], 0, "export, and import again");
            assert_eq!(imported["recorded_reserved_bytes_peak"], reserved_bytes, "export, and import again");
        }
    }

    /// Returns the JSON of the report, or `None` if there is no memory to report on.
    fn check_report(&self) -> Option<Value> {
        let Expected { first, all, .. } = &self.expected;
        let report = match run(&["report", self.path, "-o", &self.file("job.html")]) {
            Err(CliError::NothingToShow { .. }) => {
                assert_eq!((self.served, first.refused), (0, 0), "nothing to report");
                return None;
            }
            report => report.expect("`report` should succeed").0,
        };
        assert_eq!(report["live"]["peak_bytes"], first.live_bytes, "report: live");
        assert_eq!(report["refused"], first.refused, "report: refused");
        assert_eq!(report["reserved"]["peak_bytes"], first.reserved_bytes, "report: reserved");
        assert_eq!(report["steady_reserved_bytes"], all.reserved_bytes, "report: steady");
        let settings = report["settings"].as_array().expect("the report should list settings");
        let own =
            settings.iter().find(|setting| setting["is_own"] == true).expect("the job's own settings should be listed");
        assert_eq!(own["peak_reserved_bytes"], all.reserved_bytes, "report: own settings");
        assert_eq!(own["refused"], all.refused, "report: own settings");
        for setting in settings {
            let number = |key: &str| setting[key].as_u64().expect("it should be a number");
            let is_better = (number("refused"), number("peak_reserved_bytes")) < (all.refused, all.reserved_bytes);
            assert_eq!(setting["is_better"], is_better, "report: {setting}");
        }
        Some(report)
    }

    fn check_share(&self, replayed: &Value, report: Option<&Value>) {
        let (shared, _) = run(&["chart", self.path, "--share", "-o", &self.file("share.svg")])
            .expect("`chart --share` should succeed");
        let Numbers { live_bytes, reserved_bytes, refused } = self.expected.all;
        assert_eq!(shared["symmalloc_bytes"], reserved_bytes, "chart --share");
        assert_eq!(shared["peak_live_bytes"], live_bytes, "chart --share: live");
        assert_eq!(shared["refused"], refused, "chart --share: refused");
        for (key, at) in [("pytorch_expandable_bytes", 0), ("pytorch_bytes", 1)] {
            assert_eq!(shared[key], replayed["pytorch"][at]["peak_reserved_bytes"], "chart --share and replay: {key}");
        }
        if let Some(report) = report {
            assert_eq!(shared["planned_bytes"], report["plan"]["planned_bytes"], "chart --share and report: plan");
            assert_eq!(shared["no_plan"], report["no_plan"], "chart --share and report: plan");
        }
    }

    fn check_plan(&self, report: Option<&Value>, tally: &mut Tally) {
        let no_plan = report.map_or(&Value::Null, |report| &report["no_plan"]);
        let planned = match run(&["plan", self.path]) {
            Err(error @ (CliError::NotPlanned { .. } | CliError::NotFollowed { .. })) => {
                *tally.entry("cannot be planned").or_default() += 1;
                assert_eq!(*no_plan, NoPlan::of(&error).reason, "report and plan");
                let written = run(&["plan", self.path, "-o", &self.file("job.plan")]);
                assert_eq!(written.err().map(|error| reason(&error)), Some(reason(&error)), "plan and plan -o");
                return;
            }
            planned => planned.expect("`plan` should succeed"),
        };
        assert_eq!(planned.1, Verdict::Agree, "plan: the reservations do not hold: {}", planned.0);
        let planned = &planned.0[0];
        let Numbers { live_bytes, reserved_bytes, refused } = self.expected.all;
        assert_eq!(planned["online_bytes"], reserved_bytes, "plan: online");
        assert_eq!(planned["online_refused"], refused, "plan: online");
        if planned["plans"] == 0 {
            *tally.entry("nothing to plan").or_default() += 1;
            assert_eq!(*no_plan, Value::Null, "report and plan: {planned}");
            return;
        }
        *tally.entry("planned").or_default() += 1;
        let refuses_more = planned["refused"].as_u64() > Some(refused);
        assert_eq!(no_plan.is_null(), !refuses_more, "report and plan: {no_plan}");
        if let (Some(report), false) = (report, refuses_more) {
            for key in ["planned_bytes", "refused"] {
                assert_eq!(report["plan"][key], planned[key], "report and plan: {key}");
            }
        }
        let live = planned["peak_live_bytes"].as_u64().expect("it should be a number");
        let sleeps = self.recorded.program().ops().iter().any(|op| matches!(op, Op::Sleep { .. }));
        assert!(sleeps || planned["planned_bytes"].as_u64() >= Some(live), "plan: live bytes exceed planned bytes");
        if planned["refused"] == 0 && refused == 0 {
            assert_eq!(live, live_bytes, "plan: live");
        }
        self.check_followed(planned);
    }

    /// Checks that `plan -o` writes the same plan, and that `replay --plan` follows it.
    fn check_followed(&self, planned: &Value) {
        let file = self.file("job.plan");
        let (written, _) = run(&["plan", self.path, "-o", &file]).expect("`plan -o` should succeed");
        for key in ["planned_bytes", "online_bytes", "refused", "plans", "plan_bytes", "planned_ops_share", "waits"] {
            assert_eq!(written[0][key], planned[key], "plan and plan -o: {key}");
        }
        let line = ["replay", self.path, "--plan", &file, "--ranks", "2"];
        let followed = run(&line).expect("`replay --plan` should succeed").0[0].take();
        assert_eq!(followed["aligned"], true, "ranks that follow the plan differ: {}", followed["first_divergence"]);
        assert_eq!(followed["peak_reserved_bytes"], planned["planned_bytes"], "replay --plan");
        assert_eq!(followed["peak_live_bytes"], planned["peak_live_bytes"], "replay --plan: live");
        assert_eq!(followed["planned_ops_share"], planned["planned_ops_share"], "replay --plan: share");
        assert_eq!(followed["refused"] == 0, planned["refused"] == 0, "replay --plan: refused");
        let (charted, _) = run(&["chart", self.path, "--plan", &file, "-o", &self.file("planned.svg")])
            .expect("`chart --plan` should succeed");
        assert_eq!(
            charted["plan"]["reserved"]["peak_bytes"], followed["first_pass"]["peak_reserved_bytes"],
            "chart --plan and replay --plan"
        );
    }
}

/// Checks the job of a seed. The error is one line.
fn check(seed: u64, tally: &mut Tally) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let (config, records) = Draft::new(seed).make();
    let path = folder.path().join("job.trace");
    let mut writer = TraceWriter::new(Vec::new(), Some(&config)).unwrap();
    records.iter().for_each(|record| writer.write(record).unwrap());
    std::fs::write(&path, writer.finish().unwrap()).unwrap();
    if std::env::var_os("SYMMALLOC_JOB").is_some() {
        println!("{}", std::fs::read_to_string(&path).unwrap_or_default());
    }
    let mut random = SplitMix64::new(!seed);
    let format =
        [late::Format::RmmLog, late::Format::Snapshot, late::Format::SnapshotWithoutSegments][random.below(3) as usize];
    // A third of the jobs are recorded late, too.
    let late = if random.below(3) == 0 { late::recording(&records, format, &mut random) } else { None };
    let checked = catch_unwind(AssertUnwindSafe(|| {
        *tally.entry("jobs").or_default() += 1;
        Job::read(path.to_str().expect("the path should be UTF-8"), folder.path()).check(tally);
        if let Some((file, beginning)) = late {
            let path = folder.path().join(format.file_name());
            std::fs::write(&path, file).unwrap();
            let job = Job::read(path.to_str().expect("the path should be UTF-8"), folder.path());
            let Summary { lived_before, lived_before_bytes, is_overwritten, .. } = job.recorded.recording.summary;
            assert_eq!(lived_before, beginning.lived_before, "{format:?}: lived before");
            assert_eq!(lived_before_bytes, beginning.lived_before_bytes, "{format:?}: lived before");
            assert_eq!(is_overwritten, beginning.is_overwritten, "{format:?}: overwritten");
            assert_eq!(job.expected.first.live_bytes, beginning.peak_live_bytes, "{format:?}: live");
            *tally.entry("jobs").or_default() += 1;
            *tally.entry("recorded late").or_default() += 1;
            job.check(tally);
        }
    }));
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
        let (mut failures, mut tally) = (BTreeSet::new(), Tally::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return (failures, tally);
            }
            failures.extend(check(seed, &mut tally).err());
        }
    };
    let (mut failures, mut tally) = (BTreeSet::new(), Tally::new());
    std::thread::scope(|scope| {
        for worker in [scope.spawn(work), scope.spawn(work)] {
            let (some_failures, some) = worker.join().unwrap();
            failures.extend(some_failures);
            some.into_iter().for_each(|(what, count)| *tally.entry(what).or_default() += count);
        }
    });
    println!("{tally:?}");
    let failures: Vec<String> = failures.into_iter().collect();
    assert!(failures.is_empty(), "{} jobs failed:\n{}", failures.len(), failures.join("\n"));
    let count = |what| tally.get(what).copied().unwrap_or(0);
    if seeds.end - seeds.start > 1 {
        assert!(count("carried out") * 10 >= count("jobs") * 9, "too many jobs stop: {tally:?}");
        assert!(count("planned") * 2 >= count("jobs"), "too few jobs are planned: {tally:?}");
        assert!(count("with refusals") > 0 && count("recorded late") > 0, "{tally:?}");
        assert!(seeds.end < 10_000 || count("stopped") > 0, "no job stops: {tally:?}");
    }
}
