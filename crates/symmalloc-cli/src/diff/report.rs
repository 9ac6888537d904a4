//! What `symmalloc diff` prints.

use super::{Diff, OpDifference, PlacementDifference};
use crate::Verdict;
use crate::args::DiffArgs;
use crate::error::CliError;
use crate::output::{self, Palette};
use crate::quantity::{count, counted};
use crate::replay::describe;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use symmalloc_core::ids::Placement;
use symmalloc_core::op::Op;
use symmalloc_import::{ReadOptions, Recording, read_path};

/// Compares two recordings; the verdict is `Differ` if ops or placements do.
pub(crate) fn run(args: &DiffArgs) -> Result<Verdict, CliError> {
    let options = ReadOptions::from(&args.reading);
    let (a, b) = (read_path(&args.a, &options)?, read_path(&args.b, &options)?);
    let diff = Diff::new(&a, &b);
    let text = if args.json {
        json(&diff)
    } else {
        let palette = Palette::of_stdout();
        let mut text = header("A", &args.a, &a, palette);
        text.push_str(&header("B", &args.b, &b, palette));
        text.push_str(&findings(&diff, palette));
        text
    };
    output::print(&text)?;
    Ok(if diff.is_same() { Verdict::Agree } else { Verdict::Differ })
}

fn header(letter: &str, path: &Path, recording: &Recording, palette: Palette) -> String {
    format!(
        "{letter}  {}  {}\n   {}, {}\n",
        palette.title(&path.display().to_string()),
        palette.aside(&describe(recording)),
        counted(recording.records.len(), "op"),
        counted(recording.summary.allocations, "allocation"),
    )
}

fn findings(diff: &Diff, palette: Palette) -> String {
    let mut out = String::new();
    let _ = match &diff.first_op {
        None => writeln!(out, "\nops         {}", palette.good("the same")),
        Some(difference) => writeln!(
            out,
            "\nops         {}\n            A {}\n            B {}",
            palette.bad("differ"),
            told(difference.a.as_ref()),
            told(difference.b.as_ref())
        ),
    };
    let before = if diff.same_ops() { "" } else { " before that op" };
    let allocations = count(diff.allocations);
    let _ = match (diff.differing_placements, &diff.first) {
        (None, _) => {
            writeln!(out, "placements  not recorded in both; `symmalloc replay --record` writes our decisions")
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

fn first_place(first: &PlacementDifference) -> String {
    let name = first.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
    let place = |placement: Placement| {
        format!("segment {} offset {}", count(placement.segment.0), count(placement.offset_bytes))
    };
    let PlacementDifference { allocation, op, a, b, .. } = first;
    format!("allocation {}{name} at op {}: A {}, B {}", count(*allocation), count(*op), place(*a), place(*b))
}

/// A call and its number, as a trace says it.
fn told(call: Option<&(usize, Op)>) -> String {
    match call {
        None => "has ended".to_owned(),
        Some((number, op)) => format!("at op {} {}", count(*number), line(op)),
    }
}

/// The op in words.
fn line(op: &Op) -> String {
    match op {
        Op::Allocate { id, pool, stream, size_bytes } => {
            format!("allocates {} bytes on {stream} in {pool} (allocation {})", count(*size_bytes), count(id.0))
        }
        Op::Free { id } => format!("frees allocation {}", count(id.0)),
        Op::RecordUse { id, stream } => format!("uses allocation {} on {stream}", count(id.0)),
        Op::RegisterStream { stream } => format!("registers {stream}"),
        Op::CreatePool { pool, config } => format!("makes {pool} ({config})"),
        Op::DestroyPool { pool } => format!("destroys {pool}"),
        Op::Wait { stream, on } => format!("lets {stream} wait for {on}"),
        Op::Synchronize { stream } => format!("synchronizes {stream}"),
        Op::Reserve { pool, stream, size_bytes } => {
            format!("reserves {} bytes on {stream} in {pool}", count(*size_bytes))
        }
        Op::Trim { pool: Some(pool) } => format!("trims {pool}"),
        Op::Trim { pool: None } => "trims all pools".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

#[derive(Serialize)]
struct Object {
    same_ops: bool,
    allocs: usize,
    differing_placements: Option<usize>,
    first: Option<First>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_op_difference: Option<FirstOp>,
}

#[derive(Serialize)]
struct First {
    allocation: usize,
    op: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Box<str>>,
    a: PlacementObject,
    b: PlacementObject,
}

#[derive(Serialize)]
struct PlacementObject {
    segment: u32,
    offset: u64,
}

#[derive(Serialize)]
struct FirstOp {
    a: Option<Did>,
    b: Option<Did>,
}

#[derive(Serialize)]
struct Did {
    op: usize,
    did: String,
}

impl From<Placement> for PlacementObject {
    fn from(placement: Placement) -> Self {
        PlacementObject { segment: placement.segment.0, offset: placement.offset_bytes }
    }
}

fn json(diff: &Diff) -> String {
    let did = |call: &Option<(usize, Op)>| call.as_ref().map(|(op, what)| Did { op: *op, did: line(what) });
    let first = |first: &PlacementDifference| First {
        allocation: first.allocation,
        op: first.op,
        name: first.name.clone(),
        a: first.a.into(),
        b: first.b.into(),
    };
    let object = Object {
        same_ops: diff.same_ops(),
        allocs: diff.allocations,
        differing_placements: diff.differing_placements,
        first: diff.first.as_ref().map(first),
        first_op_difference: diff.first_op.as_ref().map(|OpDifference { a, b }| FirstOp { a: did(a), b: did(b) }),
    };
    let mut text = serde_json::to_string_pretty(&object).expect("plain numbers and strings have a JSON form");
    text.push('\n');
    text
}
