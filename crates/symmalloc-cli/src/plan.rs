//! `symmalloc plan`: a placement for every allocation of a job, and reservations for running without a plan.
//!
//! ```text
//! recording ──► planned        an offset for every allocation, written to a file, and followed on a simulated device
//!      │           └──► figures    the results, compared with the job without a plan
//!      └──────► reservations   memory to reserve, so that the job obtains and registers nothing while it runs without a plan
//! ```

mod figures;
mod heap;
mod job_plan;
mod program;
mod proof;
mod rectangles;
mod reservations;
mod screen;
mod sizes;

use crate::args::PlanArgs;
use crate::content::Content;
use crate::destination::Destination;
use crate::diff::{OpDifference, other_job, position_without_size};
use crate::error::CliError;
use crate::output::{self, Palette};
use crate::picture::group_number;
use crate::planned;
use crate::quantity::rounded;
use crate::recorded::Recorded;
use crate::verdict::Verdict;
use figures::Figures;
use heap::HeapPlan;
use job_plan::JobPlan;
use reservations::ReservationPlan;
use serde_json::{Value, json};
use std::path::PathBuf;
use symmalloc_core::ids::HeapId;
use symmalloc_core::op::Op;
use symmalloc_trace::plan::{PlanFile, to_text};

/// Plans each job, or each table of rectangles. The verdict is `Differ` if a rank obtains memory despite its reservations.
pub(crate) fn plan(args: &PlanArgs) -> Result<Verdict, CliError> {
    for (flag, wanted) in [("-o", &args.output), ("--reservations", &args.reservations)] {
        if wanted.is_some() && args.traces.len() != 1 {
            return Err(CliError::PlanOfSeveral { flag, traces: args.traces.len() });
        }
    }
    if args.traces.iter().any(|path| rectangles::is_table(path)) {
        rectangles::plan(args)?;
        return Ok(Verdict::Agree);
    }
    let outputs = Outputs::of(args)?;
    let ranks = if args.one_job { args.traces.len() } else { 1 };
    let mut objects = Vec::new();
    let mut verdict = Verdict::Agree;
    for traces in args.traces.chunks(ranks) {
        let plan = JobPlan::new(traces, args, &outputs)?;
        if plan.reservations.as_ref().is_ok_and(|reservations| !reservations.with.holds()) {
            verdict = Verdict::Differ;
        }
        if args.json {
            objects.push(object(args, &plan));
        } else {
            output::print(&screen::render(args, &plan, Palette::of_stdout()))?;
        }
    }
    if args.json {
        output::print_json(objects.into())?;
    }
    Ok(verdict)
}

impl<'a> JobPlan<'a> {
    fn new(traces: &'a [PathBuf], args: &PlanArgs, outputs: &Outputs) -> Result<Self, CliError> {
        let read = |path| Recorded::read(path, &args.reading, &args.policy);
        let jobs = traces.iter().map(|path| read(path)).collect::<Result<Vec<Recorded>, CliError>>()?;
        if let Some((other, difference)) =
            jobs[1..].iter().find_map(|job| other_job(&jobs[0].recording, &job.recording).map(|found| (job, found)))
        {
            let OpDifference { a, b, .. } = difference;
            return Err(CliError::NotRanksOfOneJob {
                path: jobs[0].path.clone(),
                other: other.path.clone(),
                did: position_without_size(a.as_ref()),
                other_did: position_without_size(b.as_ref()),
            });
        }
        let reservations = match ReservationPlan::new(&jobs, args) {
            // Without reservations, the job may fit within its limit because it reuses memory that it releases, or refuses requests.
            // Reservations must all fit at the same time.
            Err(error @ (CliError::PlanBeyondLimit { .. } | CliError::PlanBeyondRange { .. }))
                if outputs.reservations.is_none() =>
            {
                Err(error)
            }
            reservations => Ok(reservations?),
        };
        let mut figures = Figures::default();
        for job in &jobs {
            let seconds = args.seconds.unwrap_or(if job.job.is_long() {
                planned::SECONDS_FOR_LONG_JOBS
            } else {
                planned::SECONDS
            });
            let (file, of_rank) = Figures::of(job, &args.policy, planned::budget(seconds))?;
            figures = figures.max(of_rank);
            if let Some(out) = &outputs.plan {
                write(job, &file, out, outputs.content)?;
            }
        }
        if let (Some(out), Ok(reservations)) = (&outputs.reservations, &reservations) {
            reservations.write(&jobs[0], out)?;
        }
        Ok(JobPlan { traces, figures, reservations })
    }
}

/// Writes the plan as a plan file or as a table.
fn write(job: &Recorded, file: &PlanFile, out: &Destination, content: Content) -> Result<(), CliError> {
    // A file without plans contains only configurations. It is useful only for a job that allocates memory and has no steps.
    let takes_memory = |op: &Op| matches!(op, Op::Allocate { size_bytes: 1.., .. });
    let can_do_without = !job.program().has_steps() && job.program().ops().iter().any(takes_memory);
    if file.plans().next().is_none() && !can_do_without {
        return Err(CliError::NothingToPlan { path: job.path.clone() });
    }
    match content {
        Content::Table => out.write(&rectangles::of_plan(&job.path, file)?),
        _ => out.write(to_text(file).as_bytes()),
    }
}

/// Destinations of the plan, and of the job with its reservations.
struct Outputs {
    plan: Option<Destination>,
    /// Content of the plan's file: a plan or a table.
    content: Content,
    reservations: Option<Destination>,
}

impl Outputs {
    fn of(args: &PlanArgs) -> Result<Self, CliError> {
        let file = |path: &Option<PathBuf>, content, others: &Option<PathBuf>| {
            let inputs = args.traces.iter().chain(others);
            path.as_ref().map(|path| Destination::file(path, content, inputs)).transpose()
        };
        let content = if rectangles::is_output(args) { Content::Table } else { Content::Plan };
        Ok(Outputs {
            plan: file(&args.output, content, &None)?,
            content,
            reservations: file(&args.reservations, Content::Trace, &args.output)?,
        })
    }
}

/// Returns the output of `plan --json` for a job. Its keys are an interface: `symmalloc plan --help` lists them.
fn object(args: &PlanArgs, plan: &JobPlan<'_>) -> Value {
    let Figures { peak_live_bytes, planned_bytes, online_bytes, seconds, .. } = plan.figures;
    let figures = &plan.figures;
    let mut object = json!({
        "job": plan.traces[0].display().to_string(),
        "peak_live_bytes": peak_live_bytes,
        "planned_bytes": planned_bytes,
        "efficiency": rounded(figures.efficiency()),
        "online_bytes": online_bytes,
        "seconds": rounded(seconds),
        "streams": figures.streams(),
        "plans": figures.plans,
        "plan_bytes": figures.plan_bytes,
        "planned_ops_share": rounded(figures.planned_ops_share()),
        "waits": figures.waits,
        "online_waits": figures.online_waits,
        "refused": figures.refused,
        "online_refused": figures.online_refused,
        "plan": args.output.as_ref().map(|path| path.display().to_string()),
    });
    let reservations = match &plan.reservations {
        Ok(reservations) => reservations,
        Err(error) => {
            object["no_reservations"] = error.to_string().into();
            return object;
        }
    };
    let heap = |(owner, heap): (&HeapId, &HeapPlan)| {
        json!({
            "pool": owner.pool.0,
            "stream": owner.stream().map(|stream| stream.0),
            "group": group_number(*owner),
            "for_stream": heap.stream.0,
            "segments": if reservations.is_reserved(owner.pool) { "reserved" } else { "expandable" },
            "peak_live_bytes": heap.peak_live_bytes,
            "grown_bytes": heap.grown_bytes,
            "reserve_bytes": heap.reserve_bytes,
        })
    };
    let more = json!({
        "traces": plan.traces.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
        "margin_percent": args.margin,
        "settings": reservations.settings(),
        "lines": reservations.lines(),
        "reserve_bytes": reservations.reserve_bytes(),
        "heaps": reservations.heaps.iter().map(heap).collect::<Vec<_>>(),
        "holds": reservations.with.holds(),
        "without": reservations.without,
        "with": reservations.with,
    });
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}
