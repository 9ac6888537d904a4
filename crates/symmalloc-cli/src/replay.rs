//! `symmalloc replay`: recorded jobs on many ranks, for people beside the old rule, for programs as JSON.

mod finding;
mod json;
mod screen;

use crate::Verdict;
use crate::args::ReplayArgs;
use crate::error::CliError;
use crate::job::{Job, Options, Order, Outcome, Segments};
use crate::output::{self, Palette};
use crate::planned::follow;
use crate::progress::ProgressLine;
use crate::recorded::reconfigure;
use crate::timing;
use finding::ReplayFinding;
use screen::Screen;
pub(crate) use screen::kind_of as describe;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use symmalloc_core::config::Config;
use symmalloc_core::op::Op;
use symmalloc_import::compression::Compressor;
use symmalloc_import::{ReadOptions, Recording, read_path};
use symmalloc_trace::TraceWriter;

/// The old rule is shown on at most this many ranks: more of them differ no less.
const COMPARISON_RANKS_MAX: u32 = 8;

/// Replays every trace; the verdict is `Differ` if the ranks of any of them do.
pub(crate) fn replay(args: &ReplayArgs) -> Result<Verdict, CliError> {
    if args.record.is_some() && args.traces.len() != 1 {
        return Err(CliError::RecordOfSeveral { traces: args.traces.len() });
    }
    if args.plan.is_some() && args.traces.len() != 1 {
        return Err(CliError::PlanForSeveral { traces: args.traces.len() });
    }
    let mut objects = Vec::new();
    let mut verdict = Verdict::Agree;
    for path in &args.traces {
        let mut recording = read_path(path, &ReadOptions::from(&args.reading))?;
        let mut options = options(args);
        if let Some(plan) = &args.plan {
            options.plan = Some(Arc::new(follow(plan, path, &mut recording, &args.policy)?));
        } else if let Some(config) = &args.policy.config {
            reconfigure(&mut recording, config);
        }
        let job = Job::new(&recording).map_err(|source| CliError::Program { path: path.clone(), source })?;
        let finding = find_out(path, &job, &options)?;
        if !finding.outcome.is_aligned() {
            verdict = Verdict::Differ;
        }
        if let Some(out) = &args.record {
            let config = job.config(&options).map_err(|error| failed(path, error.into()))?;
            record(out, &config, &recording, &finding.outcome)?;
        }
        if args.json {
            objects.push(json::object(&finding));
        } else {
            // Each trace is shown as soon as it is done.
            let others = comparison(path, &job, args)?;
            let screen = Screen { recording: &recording, finding: &finding, others: &others, seed: args.seed };
            output::print(&screen.render(Palette::of_stdout()))?;
        }
    }
    if args.json {
        output::print_json(&objects)?;
    }
    Ok(verdict)
}

fn options(args: &ReplayArgs) -> Options {
    Options {
        ranks: at_least_one(args.ranks),
        order: args.order.unwrap_or_default(),
        segments: args.policy.segments,
        streams: args.policy.streams.map(Into::into),
        seed: args.seed,
        passes: at_least_one(args.passes),
        plan: None,
    }
}

/// The arguments are checked to be at least one where they are parsed.
fn at_least_one(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN)
}

fn find_out<'a>(path: &'a Path, job: &'a Job, options: &Options) -> Result<ReplayFinding<'a>, CliError> {
    let outcome = run(path, job, options)?;
    let nanoseconds_per_op = match options.order {
        Order::Address => None,
        Order::Sequence => Some(
            job.config(options)
                .map_err(Into::into)
                .and_then(|config| timing::nanoseconds_per_op(job, &config, options))
                .map_err(|source| failed(path, source))?,
        ),
    };
    Ok(ReplayFinding { path, job, outcome, nanoseconds_per_op })
}

/// What the old rule makes of the job, in the form that holds less first. Nothing if it was asked for itself.
fn comparison(path: &Path, job: &Job, args: &ReplayArgs) -> Result<Vec<Outcome>, CliError> {
    let options = options(args);
    if options.order == Order::Address {
        return Ok(Vec::new());
    }
    let ranks = at_least_one(args.ranks.min(COMPARISON_RANKS_MAX));
    [Segments::Expandable, Segments::Fixed]
        .into_iter()
        .map(|segments| {
            let options = Options { order: Order::Address, segments: Some(segments), ranks, ..options.clone() };
            run(path, job, &options)
        })
        .collect()
}

fn run(path: &Path, job: &Job, options: &Options) -> Result<Outcome, CliError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let progress = ProgressLine::new(&name, options.ranks.get().into(), "ranks");
    job.replay(options, &|| progress.step()).map_err(|source| failed(path, source))
}

fn failed(path: &Path, source: crate::job::JobError) -> CliError {
    CliError::Job { path: path.to_path_buf(), source }
}

/// Writes the recorded ops with rank 0's placements.
fn record(out: &Path, config: &Config, recording: &Recording, outcome: &Outcome) -> Result<(), CliError> {
    let created = |source| CliError::Create { path: out.to_path_buf(), source };
    let config = (outcome.order == Order::Sequence).then_some(config);
    let mut trace = TraceWriter::new(Compressor::create(out).map_err(created)?, config).map_err(created)?;
    let mut decisions = outcome.decisions.iter();
    for record in &recording.records {
        // This allocator has no pending frees: what a recording of another one says of them is not rank 0's.
        let mut record = record.clone();
        record.pending = None;
        if let Op::Allocate { size_bytes, .. } = record.op {
            record.placement = decisions.next().copied().flatten().filter(|_| size_bytes > 0);
        }
        trace.write(&record).map_err(|source| CliError::Write { path: out.to_path_buf(), source })?;
    }
    trace.finish().and_then(Compressor::finish).map(drop).map_err(created)
}
