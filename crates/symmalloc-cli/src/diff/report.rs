//! The output of `symmalloc diff` for two recordings.

use super::{Diff, LateBeginning, OpDifference, PlacementDifference};
use crate::args::DiffArgs;
use crate::error::CliError;
use crate::format;
use crate::input;
use crate::output::{self, Palette};
use crate::quantity::{count, counted, exact_memory, memory, op_of_allocation};
use crate::verdict::Verdict;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_import::Recording;
use symmalloc_text::visible_line;

/// Maximum length of a file name, in characters, that the output uses instead of the letter A or B.
const NAME_CHARS_MAX: usize = 32;

/// Minimum number of common ops at which equality says something about the whole job.
const OPS_MIN: usize = 100;

/// Warning for a comparison of few ops.
const FEW: &str = "\n            Few ops were compared: record more of the job to tell whether the ranks agree";

/// Compares two recordings. The verdict is `Differ` if ops or placements differ.
pub(super) fn run(path_a: &Path, path_b: &Path, args: &DiffArgs) -> Result<Verdict, CliError> {
    let (a, b) = (input::recording(path_a, &args.reading)?, input::recording(path_b, &args.reading)?);
    if let Some((path, _)) = [(path_a, &a), (path_b, &b)].iter().find(|(_, one)| one.summary.state_only.is_some()) {
        return Err(CliError::DiffOfState { path: path.to_path_buf() });
    }
    let diff = Diff::new(&a, &b);
    if args.json {
        output::print_json(object(&diff))?;
    } else {
        let palette = Palette::of_stdout();
        let mut text = header("A", path_a, &a, palette);
        text.push_str(&header("B", path_b, &b, palette));
        text.push_str(&findings(&diff, [path_a, path_b], palette));
        output::print(&text)?;
    }
    Ok(if diff.is_same() { Verdict::Agree } else { Verdict::Differ })
}

impl Diff {
    /// Returns `true` if the recordings show different parts of a job and have few ops in common.
    fn is_of_few_ops(&self) -> bool {
        let is_part = self.ops_after != [0, 0] || self.late.is_some_and(|late| late.ops_before != [0, 0]);
        is_part && self.compared_ops < OPS_MIN
    }
}

fn header(letter: &str, path: &Path, recording: &Recording, palette: Palette) -> String {
    format!(
        "{letter}  {}  {}\n   {}, {}\n",
        palette.title(&path.display().to_string()),
        palette.aside(&format::describe(recording)),
        counted(recording.records.len(), "op"),
        counted(recording.summary.allocations, "allocation"),
    )
}

fn findings(diff: &Diff, paths: [&Path; 2], palette: Palette) -> String {
    let mut out = diff.late.map_or_else(String::new, |late| beginning(&late));
    let others = diff.compared_ops - diff.allocations;
    let compared = format!("{} and {}", counted(diff.allocations, "allocation"), counted(others, "other op"));
    let _ = match &diff.first_op {
        None => {
            let few = if diff.is_of_few_ops() { FEW } else { "" };
            writeln!(out, "\nops         {}: {compared}{few}{}", palette.good("the same"), end(diff.ops_after))
        }
        Some(difference) => writeln!(
            out,
            "\nops         {} after {compared}\n            A {}\n            B {}",
            palette.bad("differ"),
            named(position(difference.a.as_ref()), difference.names[0].as_deref()),
            named(position(difference.b.as_ref()), difference.names[1].as_deref())
        ),
    };
    if let Some(cause) = diff.first_op.as_ref().and_then(|difference| cause(diff, difference, paths)) {
        let _ = writeln!(out, "cause       {cause}");
    }
    if let Some([a, b]) = diff.uses_left_out.filter(|uses| uses.iter().any(|uses| *uses > 0)) {
        let _ = writeln!(
            out,
            "            not compared: uses by other streams, {} in A and {} in B, whose records depend on event polling,\n            \
             and the registration of streams",
            count(a),
            count(b)
        );
    }
    let before = if diff.same_ops() { "" } else { " before that op" };
    let allocations = count(diff.allocations);
    let _ = match (diff.differing_placements, &diff.first) {
        (None, _) if diff.late.is_some_and(|late| late.ops_before != [0, 0]) => {
            writeln!(out, "placements  not compared: each recording numbers segments from its own beginning")
        }
        (None, _) => {
            let which = match diff.with_placements {
                [false, false] => "neither recording contains placements",
                [true, false] => "B contains no placements",
                _ => "A contains no placements",
            };
            writeln!(out, "placements  {which}; `symmalloc replay --record` adds those of symmalloc, to compare them")
        }
        (Some(differing), Some(first)) => writeln!(
            out,
            "placements  {}{before}\nfirst       {}",
            palette.bad(&format!("{} of {allocations} differ", count(differing))),
            first_place(first)
        ),
        (Some(_), None) => writeln!(out, "placements  {} of {allocations}{before}", palette.good("0 differ")),
    };
    out
}

/// Explains a difference between the sizes of two requests, and what to do about it. Returns `None` for any other difference.
fn cause(diff: &Diff, difference: &OpDifference, paths: [&Path; 2]) -> Option<String> {
    let (Some((number, a)), Some((_, b))) = (&difference.a, &difference.b) else { return None };
    let (
        Op::Allocate { size_bytes: a_bytes, .. } | Op::Reserve { size_bytes: a_bytes, .. },
        Op::Allocate { size_bytes: b_bytes, .. } | Op::Reserve { size_bytes: b_bytes, .. },
    ) = (a, b)
    else {
        return None;
    };
    if a_bytes == b_bytes {
        return None;
    }
    let [a_name, b_name] = names(paths);
    let frame = difference.names[0].as_deref().map_or_else(String::new, |name| format!(", {}", visible_line(name)));
    let others = match diff.differing_sizes {
        None | Some(0) => "",
        Some(1) => "\n            All other ops are the same",
        Some(sizes) => &format!(
            "\n            {} differ in size, and all other ops are the same",
            counted(sizes - 1, "later request")
        ),
    };
    // Sizes that differ only slightly look alike when they are rounded.
    let amount = |bytes: u64| match memory(*a_bytes) == memory(*b_bytes) {
        true => exact_memory(bytes),
        false => memory(bytes),
    };
    Some(format!(
        "ranks must make the same requests. The first difference is op {}{frame}:\n            \
         {} in {a_name} and {} in {b_name}. Make it equal on all ranks{others}",
        count(*number),
        amount(*a_bytes),
        amount(*b_bytes)
    ))
}

/// Returns the names of the files, if they are short and differ, or else the letters of the recordings.
fn names(paths: [&Path; 2]) -> [String; 2] {
    let [a, b] = paths.map(|path| path.file_name().unwrap_or_default().to_string_lossy());
    if a == b || [&a, &b].iter().any(|name| name.is_empty() || name.chars().count() > NAME_CHARS_MAX) {
        return ["A", "B"].map(str::to_owned);
    }
    [a, b].map(|name| visible_line(&name).into_owned())
}

/// Describes where the recordings that begin late begin.
fn beginning(late: &LateBeginning) -> String {
    let which = match late.is_late {
        [true, true] => "both recordings begin",
        [true, false] => "A begins",
        _ => "B begins",
    };
    let from = match late.ops_before {
        _ if !late.is_aligned => {
            ";\n            they have too few ops in common to be aligned: record more of the job (max_entries)"
                .to_owned()
        }
        [0, 0] => "; both have the same first op".to_owned(),
        skipped => format!(";\n            {}, and they are compared from there", begins_after(skipped)),
    };
    let others = late.nearest_alignment.map_or_else(String::new, |nearest| {
        let number = counted(late.other_alignments, "other alignment");
        let verb = if late.other_alignments == 1 { "fits" } else { "fit" };
        let nearest = begins_after(nearest);
        format!(
            "\n            {number} {verb} as well, because the job repeats itself. In the nearest, {nearest}.\n            \
             If the ranks are whole repetitions apart, record more of the job (max_entries) to see it"
        )
    });
    format!("\nbeginning   {which} in the middle of the job{from}{others}")
}

/// Describes an alignment by the numbers of ops of A, and of B, before the first common op.
fn begins_after(skipped: [usize; 2]) -> String {
    match skipped {
        [0, 0] => "both begin at the same op".to_owned(),
        [ops, 0] => format!("B begins {} after A", counted(ops, "op")),
        [_, ops] => format!("A begins {} after B", counted(ops, "op")),
    }
}

/// Describes which recording ends earlier.
fn end(ops_after: [usize; 2]) -> String {
    match ops_after {
        [0, 0] => String::new(),
        [ops, 0] => format!("\nend         B ends {} earlier", counted(ops, "op")),
        [_, ops] => format!("\nend         A ends {} earlier", counted(ops, "op")),
    }
}

/// Adds the name of the allocation.
fn named(position: String, name: Option<&str>) -> String {
    match name {
        Some(name) => format!("{position}, {}", visible_line(name)),
        None => position,
    }
}

fn first_place(first: &PlacementDifference) -> String {
    let place = |placement: Placement| {
        format!("segment {} offset {}", count(placement.segment.0), count(placement.offset_bytes))
    };
    let PlacementDifference { allocation, op, name, a, b } = first;
    let at = op_of_allocation(*op, *allocation, name.as_deref());
    format!("{at} of A, counted from 0: A {}, B {}", place(*a), place(*b))
}

/// Describes a call by its number and op.
fn position(call: Option<&(usize, Op)>) -> String {
    match call {
        None => "has ended".to_owned(),
        Some((number, op)) => format!("at op {} {}", count(*number), line(op)),
    }
}

/// Describes a call without its size.
pub(crate) fn position_without_size(call: Option<&(usize, Op)>) -> String {
    match call {
        Some((number, Op::Allocate { id, pool, stream, .. })) => {
            format!("at op {} allocates on {stream} in {pool} (allocation {})", count(*number), count(id.0))
        }
        other => position(other),
    }
}

/// Describes an op.
fn line(op: &Op) -> String {
    match op {
        Op::Allocate { id, pool, stream, size_bytes } => {
            format!("allocates {} on {stream} in {pool} (allocation {})", exact_memory(*size_bytes), count(id.0))
        }
        Op::Free { id } => format!("frees allocation {}", count(id.0)),
        Op::RecordUse { id, stream } => format!("uses allocation {} on {stream}", count(id.0)),
        Op::RegisterStream { stream, group } if group != stream => {
            format!("registers {stream} in the group of {group}")
        }
        Op::RegisterStream { stream, .. } => format!("registers {stream}"),
        Op::CreatePool { pool, config } => format!("creates {pool} ({config})"),
        Op::DestroyPool { pool } => format!("destroys {pool}"),
        Op::Wait { stream, on } => format!("lets {stream} wait for {on}"),
        Op::Synchronize { stream } => format!("synchronizes {stream}"),
        Op::Reserve { pool, stream, size_bytes } => {
            format!("reserves {} on {stream} in {pool}", exact_memory(*size_bytes))
        }
        Op::Refuse { pool, stream, size_bytes, .. } => {
            format!("is refused {} on {stream} in {pool}", exact_memory(*size_bytes))
        }
        Op::Trim { pool: Some(pool) } => format!("trims {pool}"),
        Op::Trim { pool: None } => "trims all pools".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Returns the output of `diff --json`. Its keys are an interface: `symmalloc diff --help` lists them.
fn object(diff: &Diff) -> Value {
    let call = |call: &Option<(usize, Op)>| call.as_ref().map(|(op, what)| json!({ "op": op, "did": line(what) }));
    let place = |at: Placement| json!({ "segment": at.segment.0, "offset": at.offset_bytes });
    let first = |first: &PlacementDifference| {
        let mut object = json!({ "allocation": first.allocation, "op": first.op });
        if let Some(name) = &first.name {
            object["name"] = json!(name);
        }
        object["a"] = place(first.a);
        object["b"] = place(first.b);
        object
    };
    let mut object = json!({
        "same_ops": diff.same_ops(),
        "compared_ops": diff.compared_ops,
        "uses_left_out": diff.uses_left_out.map(|[a, b]| json!({ "a": a, "b": b })),
        "allocs": diff.allocations,
        "differing_placements": diff.differing_placements,
        "first": diff.first.as_ref().map(first),
    });
    if diff.ops_after != [0, 0] {
        let [a, b] = diff.ops_after;
        object["ops_after"] = json!({ "a": a, "b": b });
    }
    if let Some(late) = diff.late {
        let LateBeginning { ops_before: [a, b], is_late: [a_is_late, b_is_late], .. } = late;
        object["late"] = json!({
            "a": { "is_late": a_is_late, "ops_before": a },
            "b": { "is_late": b_is_late, "ops_before": b },
            "is_aligned": late.is_aligned,
            "other_alignments": late.other_alignments,
            "nearest_alignment": late.nearest_alignment.map(|[a, b]| json!({ "a": a, "b": b })),
        });
    }
    if let Some(OpDifference { a, b, names: [name_a, name_b] }) = &diff.first_op {
        let call = |of: &Option<(usize, Op)>, name: &Option<Box<str>>| {
            call(of).map(|mut object| {
                if let Some(name) = name {
                    object["name"] = json!(name);
                }
                object
            })
        };
        object["first_op_difference"] = json!({ "a": call(a, name_a), "b": call(b, name_b) });
    }
    object
}
