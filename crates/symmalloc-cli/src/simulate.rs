//! `symmalloc simulate`: whole jobs on many adverse ranks. A failure is shrunk and saved as a trace.

mod finding;
mod json;
mod resident;
mod screen;

use crate::args::SimulateArgs;
use crate::error::CliError;
use crate::input;
use crate::job::{Job, JobError, Options};
use crate::output::{self, Palette};
use crate::progress::Progress;
use crate::verdict::Verdict;
use finding::{ProgramSource, SavedFailure, SimulationFinding};
use std::fs;
use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;
use symmalloc_files::Draft;
use symmalloc_sim::job::shrink::shrink;
use symmalloc_sim::job::{Failure, JobOutcome, JobPlan, on_threads, simulate as run_plan, story};
use symmalloc_trace::MAGIC;

/// Approximate budget for shrinking a failure, in steps times ranks. It takes some minutes.
const SHRINK_STEPS: usize = 400_000_000;
/// Maximum number of runs for shrinking.
const SHRINK_RUNS_MAX: usize = 3000;
/// Maximum size of a saved failure. Larger files are recordings.
const STORY_BYTES_MAX: u64 = 64 << 20;

/// Runs the simulations. The verdict is `Differ` if any run failed.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<Verdict, CliError> {
    let mut findings = Vec::new();
    let mut verdict = Verdict::Agree;
    let sources = sources(args)?;
    // A panic is a finding and is reported like others, with its seed and op.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    for source in &sources {
        let found = find_out(source, args);
        if found.is_err() {
            drop(std::panic::take_hook());
        }
        let finding = found?;
        if finding.failure.is_some() {
            verdict = Verdict::Differ;
        }
        if args.json {
            findings.push(json::object(&finding));
        } else {
            output::print(&screen::render(&finding, Palette::of_stdout()))?;
        }
    }
    std::panic::set_hook(hook);
    if args.json {
        output::print_json(findings.into())?;
    }
    Ok(verdict)
}

fn sources(args: &SimulateArgs) -> Result<Vec<ProgramSource>, CliError> {
    if args.traces.is_empty() {
        return Ok(vec![ProgramSource::Generated]);
    }
    args.traces.iter().map(|path| source(path, args)).collect()
}

fn source(path: &Path, args: &SimulateArgs) -> Result<ProgramSource, CliError> {
    let path = path.to_path_buf();
    let text = story_text(&path);
    let story = text.as_deref().map_or(Ok(None), story::read);
    let story = story.map_err(|source| CliError::Story { path: path.clone(), source })?;
    // A saved failure is also a trace, so the same bounds apply.
    let recording = Box::new(input::recording(&path, &args.reading)?);
    let job = Job::new(&recording).map_err(|source| CliError::Program { path: path.clone(), source })?;
    let config = job.config(&Options::default()).map_err(JobError::from);
    let checked = config.and_then(|config| job.check_addresses(&config).and_then(|()| job.check_work(&config)));
    let work = checked.map_err(|source| CliError::Job { path: path.clone(), source })?;
    let ranks = args.ranks.unwrap_or_else(|| work.ranks());
    Ok(match story {
        Some(plan) => ProgramSource::Story { path, plan: Box::new(plan) },
        None => ProgramSource::Recorded { path, recording, ranks },
    })
}

/// Returns the text of a file that may be a saved failure. Other files are left to the reader of recordings, which reports errors.
fn story_text(path: &Path) -> Option<String> {
    // Reading from a pipe would consume its data.
    let file = path.is_file().then(|| fs::File::open(path).ok())??;
    let mut bytes = Vec::new();
    file.take(STORY_BYTES_MAX + 1).read_to_end(&mut bytes).ok()?;
    let is_trace = bytes.starts_with(MAGIC.as_bytes()) && bytes.len() as u64 <= STORY_BYTES_MAX;
    is_trace.then(|| String::from_utf8(bytes).ok()).flatten()
}

fn find_out<'a>(source: &'a ProgramSource, args: &'a SimulateArgs) -> Result<SimulationFinding<'a>, CliError> {
    let start = Instant::now();
    let runs = source.runs(args);
    let resident_before = resident::bytes();
    let (outcome, failed, resident_peak) = if runs == 1 { one(source, args) } else { many(source, args, runs) };
    let elapsed = start.elapsed();
    let ranks = outcome.ranks.max(1);
    let state_bytes_per_rank =
        resident_before.zip(resident_peak).map(|(before, peak)| peak.saturating_sub(before) / ranks);
    let failure = failed.map(|(plan, failure)| save_shrunk(source, args, plan, failure)).transpose()?;
    Ok(SimulationFinding { source, args, runs, outcome, elapsed, state_bytes_per_rank, failure })
}

type Ran = (JobOutcome, Option<(JobPlan, Failure)>, Option<u64>);

/// Executes one run, with its ranks on all cores.
fn one(source: &ProgramSource, args: &SimulateArgs) -> Ran {
    let plan = source.plan(args, args.seed);
    let progress = Progress::new(&source.name(), 0, "steps");
    let mut resident_peak = None;
    let ran = run_plan(&plan, cores(), &mut |at| {
        progress.set(at.steps as u64, at.steps_total as u64);
        resident_peak = resident_peak.max(resident::bytes());
    });
    match ran {
        Ok(outcome) => (outcome, None, resident_peak),
        Err(failure) => (JobOutcome::default(), Some((plan, failure)), None),
    }
}

/// Executes many runs in parallel, one per core. The reported failure is the one with the lowest seed.
fn many(source: &ProgramSource, args: &SimulateArgs, runs: u64) -> Ran {
    let progress = Progress::new(&source.name(), runs, "runs");
    let (next, first_failed) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
    let work = || {
        let mut ran = Vec::new();
        loop {
            let run = next.fetch_add(1, Ordering::Relaxed);
            // After a failure, runs with lower seeds still execute, because the lowest failing seed is reported.
            if run >= runs.min(first_failed.load(Ordering::Relaxed)) {
                return ran;
            }
            let plan = source.plan(args, args.seed.wrapping_add(run));
            let result = run_plan(&plan, NonZeroUsize::MIN, &mut |_| ());
            if result.is_err() {
                first_failed.fetch_min(run, Ordering::Relaxed);
            }
            progress.step();
            ran.push((run, result.map_err(|failure| (plan, failure))));
        }
    };
    let mut ran: Vec<_> = on_threads(cores(), work).into_iter().flatten().collect();
    ran.sort_by_key(|(run, _)| *run);
    let mut outcome = JobOutcome::default();
    for (_, result) in ran {
        match result {
            Ok(one) => outcome += one,
            Err(failed) => return (outcome, Some(failed), None),
        }
    }
    (outcome, None, None)
}

fn cores() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Shrinks a failure and saves it as a trace.
fn save_shrunk(
    source: &ProgramSource,
    args: &SimulateArgs,
    plan: JobPlan,
    first: Failure,
) -> Result<SavedFailure, CliError> {
    let seed = plan.seed();
    let (ops, ranks) = (plan.steps().len(), plan.ranks().len());
    let runs_max = (SHRINK_STEPS / (ops * ranks).max(1)).clamp(50, SHRINK_RUNS_MAX);
    let shrunk = shrink(plan, first.clone(), runs_max);
    let story = args.out.join(format!("simulate-seed-{seed}.trace"));
    let found = match source {
        ProgramSource::Generated => format!("--seed {seed} --ranks {ranks} --ops {}", args.ops),
        _ => format!("{} --seed {seed} --ranks {ranks}", source.name()),
    };
    let comment = format!(
        "Found by `symmalloc simulate {found}` (version {}).\nShrunk from {ops} ops on {ranks} ranks. `symmalloc simulate` runs this file again.",
        env!("CARGO_PKG_VERSION")
    );
    let text = story::write(&shrunk.plan, &shrunk.failure, &comment)
        .map_err(|source| CliError::Write { path: story.clone(), source })?;
    fs::create_dir_all(&args.out)
        .and_then(|()| Draft::public(&story))
        .and_then(|mut draft| draft.write_all(text.as_ref()).and_then(|()| draft.finish()))
        .map_err(|source| CliError::Create { path: story.clone(), source })?;
    Ok(SavedFailure { shrunk, first, story })
}
