//! `symmalloc replay`: recorded jobs on many ranks, as text with PyTorch's rule for comparison, or as JSON.

mod finding;
mod json;
mod screen;

use crate::args::ReplayArgs;
use crate::content::Content;
use crate::destination::Destination;
use crate::error::CliError;
use crate::input;
use crate::job::{Job, JobError, Options, Order, Outcome, Segments, UnknownToModel, request_again};
use crate::output::{self, Palette};
use crate::planned::follow;
use crate::progress::Progress;
use crate::recorded::reconfigure;
use crate::timing;
use crate::verdict::Verdict;
use finding::ReplayFinding;
use screen::Screen;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use symmalloc_core::config::Config;
use symmalloc_core::op::Op;
use symmalloc_import::Recording;
use symmalloc_trace::plan::PlanFile;

/// Maximum number of ranks in the comparison with PyTorch's rule. More ranks do not change its result.
const COMPARISON_RANKS_MAX: NonZeroU32 = NonZeroU32::new(8).expect("8 is not zero");

/// Replays every trace. The verdict is `Differ` if the ranks of any trace differ.
pub(crate) fn replay(args: &ReplayArgs) -> Result<Verdict, CliError> {
    if args.record.is_some() && args.traces.len() != 1 {
        return Err(CliError::RecordOfSeveral { traces: args.traces.len() });
    }
    if args.plan.is_some() && args.traces.len() != 1 {
        return Err(CliError::PlanForSeveral { traces: args.traces.len() });
    }
    let out =
        args.record.as_ref().map(|out| Destination::file(out, Content::Trace, args.traces.iter().chain(&args.plan)));
    let out = out.transpose()?;
    let mut objects = Vec::new();
    let mut verdict = Verdict::Agree;
    for path in &args.traces {
        let mut recording = input::recording(path, &args.reading)?;
        let mut plan = None;
        if let Some(file) = &args.plan {
            plan = Some(Arc::new(follow(file, path, &mut recording, &args.policy)?));
        } else if let Some(config) = args.policy.config() {
            // Under a limit, the question is whether the whole job fits, including the requests that were refused.
            let has_limit = config.total_limit_bytes().is_some() || config.default_pool().limit_bytes().is_some();
            if has_limit && recording.failure.is_some() {
                request_again(&mut recording);
            }
            reconfigure(&mut recording, config);
        }
        let job = Job::new(&recording).map_err(|source| CliError::Program { path: path.clone(), source })?;
        let options = options(args, &job, plan);
        if options.order == Order::Address {
            UnknownToModel::of(args.policy.config(), args.policy.streams.map(Into::into))?;
        }
        if options.order == Order::Sequence {
            let config = job.config(&options).map_err(|error| failed(path, error.into()))?;
            job.check_addresses(&config).map_err(|source| failed(path, source))?;
        }
        let finding = find_out(path, &job, &options)?;
        if !finding.outcome.is_aligned() {
            verdict = Verdict::Differ;
        } else if finding.outcome.refused > 0 && !args.allow_refusals && verdict == Verdict::Agree {
            verdict = Verdict::Refused;
        }
        if let Some(out) = &out {
            let config = job.config(&options).map_err(|error| failed(path, error.into()))?;
            record(out, &config, &recording, &finding.outcome)?;
        }
        let others = comparison(path, &job, &options)?;
        if args.json {
            objects.push(json::object(&recording, &finding, &others));
        } else {
            // Show each trace as soon as it is done.
            let config = job.config(&options).map_err(|error| failed(path, error.into()))?;
            let (recording, finding, others) = (&recording, &finding, &others[..]);
            let screen = Screen { recording, config: &config, finding, others, seed: args.seed };
            output::print(&screen.render(Palette::of_stdout()))?;
        }
    }
    if args.json {
        output::print_json(objects.into())?;
    }
    Ok(verdict)
}

fn options(args: &ReplayArgs, job: &Job, plan: Option<Arc<PlanFile>>) -> Options {
    // The argument parser has checked that the numbers are at least one.
    let stated = |number: Option<u32>| number.and_then(NonZeroU32::new);
    Options {
        ranks: stated(args.ranks).unwrap_or_else(|| job.replayed_ranks()),
        order: args.order.unwrap_or_default(),
        segments: args.policy.segments,
        streams: args.policy.streams.map(Into::into),
        seed: args.seed,
        passes: stated(args.passes).unwrap_or_else(|| job.replayed_passes()),
        plan,
    }
}

fn find_out<'a>(path: &'a Path, job: &'a Job, options: &Options) -> Result<ReplayFinding<'a>, CliError> {
    let outcome = run(path, options, |step| job.replay(options, step))?;
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

/// Returns the results of PyTorch's rule on the job, first with expandable segments, which reserve less. Empty if the command
/// replays that rule itself.
fn comparison(path: &Path, job: &Job, options: &Options) -> Result<Vec<Outcome>, CliError> {
    if options.order == Order::Address {
        return Ok(Vec::new());
    }
    let ranks = options.ranks.min(COMPARISON_RANKS_MAX);
    [Segments::Expandable, Segments::Fixed]
        .into_iter()
        .map(|segments| {
            let options = Options { ranks, ..options.clone() };
            run(path, &options, |step| job.replay_as_pytorch(segments, &options, step))
        })
        .collect()
}

fn run(
    path: &Path,
    options: &Options,
    replayed: impl FnOnce(&(dyn Fn() + Sync)) -> Result<Outcome, JobError>,
) -> Result<Outcome, CliError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let progress = Progress::new(&name, options.ranks.get().into(), "ranks");
    replayed(&|| progress.step()).map_err(|source| failed(path, source))
}

fn failed(path: &Path, source: JobError) -> CliError {
    CliError::Job { path: path.to_path_buf(), source }
}

/// Writes the recorded ops with rank 0's placements.
fn record(out: &Destination, config: &Config, recording: &Recording, outcome: &Outcome) -> Result<(), CliError> {
    let config = (outcome.order == Order::Sequence).then_some(config);
    let mut decisions = outcome.decisions.iter();
    let records = recording.records.iter().map(|record| {
        // Our allocator has no pending frees. Those of the recording belong to the recorded allocator, not to rank 0.
        let mut record = record.clone();
        record.pending = None;
        if let Op::Allocate { size_bytes, .. } = record.op {
            record.placement = decisions.next().copied().flatten().filter(|_| size_bytes > 0);
        }
        record
    });
    out.write_trace(config, records)
}
