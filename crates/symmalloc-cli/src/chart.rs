//! `symmalloc chart`: pictures of a job.

mod file;
mod share;

pub(crate) use file::file_name;

use crate::args::{ChartArgs, PolicyArgs};
use crate::beginning::lived_before;
use crate::destination::{Destination, shown};
use crate::diff::Diff;
use crate::error::CliError;
use crate::output::{self, Palette};
use crate::picture::history::{self, Words};
use crate::picture::memory::{Memory, has_placements, same_point};
use crate::picture::timeline::{ALLOCATED, JobCurves, LIVE, Peak, PlannedCurve, RESERVED};
use crate::picture::{NARROW, Selection, WIDE, figure, following, group_number, heap_name, map};
use crate::planned;
use crate::quantity::{count, memory};
use crate::recorded::Recorded;
use crate::verdict::Verdict;
use file::require_svg;
use serde_json::{Value, json};
use std::path::Path;
use symmalloc_core::Placement;
use symmalloc_core::config::Config;
use symmalloc_import::rerun::{Happened, Rerun};
use symmalloc_text::visible_line;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;

/// Returns a peak as JSON.
pub(crate) fn peak(peak: Peak) -> Value {
    json!({ "peak_bytes": peak.bytes, "op": peak.op })
}

/// Two ranks after the same op, drawn next to each other.
struct Beside {
    memories: [Memory; 2],
    /// Path of the other recording.
    trace: String,
    /// `true` if both ranks are drawn with their recorded placements, `false` if our allocator places them.
    are_recorded: bool,
    allocations: usize,
    differing_placements: usize,
    differing_live: usize,
}

/// Draws the requested pictures.
pub(crate) fn chart(args: &ChartArgs) -> Result<Verdict, CliError> {
    require_svg(&args.output)?;
    let inputs = std::iter::once(&args.input).chain(&args.beside).chain(&args.plan);
    let out = Destination::file_or_stream(&args.output, None, inputs)?;
    let recorded = Recorded::read(&args.input, &args.reading, &args.policy)?;
    if args.share {
        return share::share(args, &recorded, &out);
    }
    let selection = Selection { pool: args.pool, stream: args.stream };
    let mut timeline = timeline_of(&recorded, selection)?;
    let op = op_of(args.op, &recorded, &timeline)?;
    let mut planned = None;
    if let Some(plan) = &args.plan {
        let (file, curve, memory) = as_planned(plan, &recorded, op, selection)?;
        timeline.planned = Some(curve);
        planned = Some((file, memory));
    }
    let other = args.beside.as_deref().map(|path| Recorded::read(path, &args.reading, &args.policy)).transpose()?;
    let beside = other.map(|other| beside(&recorded, &other, op, selection)).transpose()?;
    let memory_map = Memory::replayed(&recorded, op, selection)?;
    let name = file_name(&recorded.path);
    let picture = match &beside {
        Some(beside) => beside_of(&name, beside, WIDE, "b", ""),
        None if args.map => match &planned {
            Some((file, memory)) => planned_map_of(&name, file, memory),
            None => map_of(&name, &recorded, &memory_map, WIDE, "m", ""),
        },
        None => history_of(&name, &recorded, &timeline, WIDE, "h", ""),
    };
    out.write(picture.as_bytes())?;
    if args.json {
        output::print_json(object(args, &timeline, op, beside.as_ref()))?;
    } else {
        let mut printed = screen(args, &timeline, op, beside.as_ref(), Palette::of_stdout());
        if let Some(before) = lived_before(&recorded.recording.summary) {
            printed += &format!("{before}\n");
        }
        output::print(&printed)?;
    }
    Ok(Verdict::Agree)
}

/// Returns a job that follows a plan. The flags apply only to the job without a plan.
fn as_planned(
    plan: &Path,
    recorded: &Recorded,
    op: usize,
    selection: Selection,
) -> Result<(PlanFile, PlannedCurve, Memory), CliError> {
    let (path, mut recording) = (&recorded.path, recorded.recording.clone());
    let file = planned::follow(plan, path, &mut recording, &PolicyArgs::default())?;
    let program = Program::new(&recording.records);
    let program = program.map_err(|source| CliError::Program { path: path.clone(), source })?;
    let (curve, memory) = following::follow(path, &program, &file, op, selection)?;
    Ok((file, curve, memory))
}

/// Returns the curves of a job over its ops.
///
/// # Errors
/// Returns an error if the selection contains no heap. A job whose requests are all refused is not an error: its curves
/// are empty.
pub(crate) fn timeline_of(recorded: &Recorded, selection: Selection) -> Result<JobCurves, CliError> {
    let timeline = JobCurves::of(recorded, selection)?;
    let failed = recorded.recording.failure.is_some();
    if timeline.heaps.is_empty() && timeline.refused == 0 && !failed {
        let all = JobCurves::of(recorded, Selection::default())?;
        let heaps = all.heaps.iter().map(|(owner, _)| heap_name(*owner)).collect();
        return Err(CliError::NothingToShow { path: recorded.path.clone(), heaps });
    }
    Ok(timeline)
}

/// Returns the requested op, or else the op after which the most memory is allocated.
pub(crate) fn op_of(wanted: Option<usize>, recorded: &Recorded, timeline: &JobCurves) -> Result<usize, CliError> {
    let ops = recorded.op_count();
    match wanted {
        Some(op) if op >= ops => Err(CliError::NoSuchOp { path: recorded.path.clone(), op, ops }),
        Some(op) => Ok(op),
        None => Ok(timeline.total.peaks[ALLOCATED].op),
    }
}

fn beside(one: &Recorded, other: &Recorded, op: usize, selection: Selection) -> Result<Beside, CliError> {
    let other_op = same_point(one, op, other);
    let are_recorded = has_placements(one) && has_placements(other);
    let mut memories = if are_recorded {
        [Memory::recorded(one, op, selection)?, Memory::recorded(other, other_op, selection)?]
    } else {
        [Memory::replayed(one, op, selection)?, Memory::replayed(other, other_op, selection)?]
    };
    let [a, b] = &mut memories;
    let as_they_were = a.clone();
    let differing_live = a.mark(b);
    b.mark(&as_they_were);
    let (allocations, differing_placements) = if are_recorded {
        let diff = Diff::new(&one.recording, &other.recording);
        (diff.allocations, diff.differing_placements.unwrap_or(0))
    } else {
        let [a, b] = [placements(one)?, placements(other)?];
        (a.len().min(b.len()), a.iter().zip(&b).filter(|(a, b)| a != b).count())
    };
    let trace = other.path.display().to_string();
    Ok(Beside { memories, trace, are_recorded, allocations, differing_placements, differing_live })
}

/// Returns our allocator's placement of every allocation; `None` for an allocation without bytes, or one that was
/// refused.
fn placements(recorded: &Recorded) -> Result<Vec<Option<Placement>>, CliError> {
    let failed = |error| recorded.failed(error);
    let mut placements = vec![None; recorded.program().allocation_count()];
    let mut rerun = Rerun::new(recorded.program(), &recorded.config).map_err(failed)?;
    rerun
        .run(recorded.op_count(), |moment| {
            if let Happened::Allocated(live) = &moment.happened {
                placements[live.id.index()] = Some(live.placement);
            }
            Ok(())
        })
        .map_err(failed)?;
    Ok(placements)
}

pub(crate) fn history_figure(name: &str, recorded: &Recorded, timeline: &JobCurves) -> String {
    let [wide, narrow] = [(WIDE, "hw", "wide"), (NARROW, "hn", "narrow")]
        .map(|(width, prefix, class)| history_of(name, recorded, timeline, width, prefix, class));
    figure(&wide, &narrow)
}

pub(crate) fn map_figure(name: &str, recorded: &Recorded, memory: &Memory) -> String {
    let [wide, narrow] = [(WIDE, "mw", "wide"), (NARROW, "mn", "narrow")]
        .map(|(width, prefix, class)| map_of(name, recorded, memory, width, prefix, class));
    figure(&wide, &narrow)
}

fn history_of(
    name: &str,
    recorded: &Recorded,
    timeline: &JobCurves,
    width: u32,
    prefix: &'static str,
    class: &str,
) -> String {
    let title = format!("Memory over the ops of {name}");
    history::draw(timeline, width, prefix, class, &Words { title: &title, aside: &configuration(recorded) })
}

fn map_of(name: &str, recorded: &Recorded, memory: &Memory, width: u32, prefix: &'static str, class: &str) -> String {
    let title = format!("Segments and blocks of {name} after op {}", count(memory.op));
    map::draw(memory, width, prefix, class, &Words { title: &title, aside: &configuration(recorded) })
}

fn planned_map_of(name: &str, file: &PlanFile, memory: &Memory) -> String {
    let title = format!("Planned memory after op {} of {name}", count(memory.op));
    let aside = settings_of(file.config());
    map::draw(memory, WIDE, "p", "", &Words { title: &title, aside: &aside })
}

fn beside_of(name: &str, beside: &Beside, width: u32, prefix: &'static str, class: &str) -> String {
    let Beside { memories: [a, b], trace, are_recorded, allocations, differing_placements, differing_live } = beside;
    let other = file_name(Path::new(trace));
    let title =
        format!("Two ranks after op {}: {} live allocations lie elsewhere", count(a.op), count(*differing_live));
    let how = match are_recorded {
        true => "Where the recorded allocator placed them; segments as far as allocations reached.",
        false => "As our allocator places them.",
    };
    let aside = format!(
        "{how} Over the whole job {} of {} allocations differ.",
        count(*differing_placements),
        count(*allocations)
    );
    let names = [name, other.as_str()];
    map::draw_beside([a, b], names, width, prefix, class, &Words { title: &title, aside: &aside })
}

/// Describes the allocator's settings.
fn configuration(recorded: &Recorded) -> String {
    settings_of(&recorded.config)
}

fn settings_of(config: &Config) -> String {
    format!("Settings: {}", config.default_pool().to_string().replace(',', ", "))
}

/// Returns the output of `chart --json`. Its keys are an interface: `symmalloc chart --help` lists them.
fn object(args: &ChartArgs, timeline: &JobCurves, op: usize, beside: Option<&Beside>) -> Value {
    let peaks = timeline.total.peaks;
    let heaps = timeline.heaps.iter().map(|(owner, curve)| {
        json!({
            "pool": owner.pool.0,
            "stream": owner.stream().map(|stream| stream.0),
            "group": group_number(*owner),
            "live": peak(curve.peaks[LIVE]),
            "allocated": peak(curve.peaks[ALLOCATED]),
            "reserved": peak(curve.peaks[RESERVED]),
        })
    });
    let mut object = json!({
        "trace": args.input.display().to_string(),
        "picture": args.output.display().to_string(),
        "ops": timeline.op_count,
        "op": op,
        "refused": timeline.refused,
        "live": peak(peaks[LIVE]),
        "allocated": peak(peaks[ALLOCATED]),
        "reserved": peak(peaks[RESERVED]),
        "heaps": heaps.collect::<Vec<_>>(),
    });
    if let Some(beside) = beside {
        object["beside"] = json!({
            "trace": beside.trace,
            "placements": if beside.are_recorded { "recorded" } else { "replayed" },
            "allocs": beside.allocations,
            "differing_placements": beside.differing_placements,
            "differing_live": beside.differing_live,
        });
    }
    if let (Some(file), Some(planned)) = (&args.plan, &timeline.planned) {
        object["plan"] = json!({ "file": file.display().to_string(), "reserved": peak(planned.peak) });
    }
    object
}

fn screen(args: &ChartArgs, timeline: &JobCurves, op: usize, beside: Option<&Beside>, palette: Palette) -> String {
    let mut out = format!("{}\n", palette.title(&args.input.display().to_string()));
    for (name, quantity) in [("reserved", RESERVED), ("allocated", ALLOCATED), ("live", LIVE)] {
        let Peak { bytes, op } = timeline.total.peaks[quantity];
        out += &format!("peak {name:<9}  {:>10}  after op {}\n", memory(bytes), count(op));
    }
    if let Some(planned) = &timeline.planned {
        let Peak { bytes, op } = planned.peak;
        out += &format!("as planned: {} reserved, first after op {}\n", memory(bytes), count(op));
    }
    if timeline.refused > 0 {
        out += &format!("refused by a limit: {} allocations\n", count(timeline.refused));
    }
    if let Some(beside) = beside {
        out += &format!(
            "compared with {}: {} of {} placements differ, {} of those live after op {}\n",
            visible_line(&beside.trace),
            count(beside.differing_placements),
            count(beside.allocations),
            count(beside.differing_live),
            count(op)
        );
    }
    out + &format!("written to {}\n", shown(&args.output))
}
