//! What `replay` shows to people, on one screen: the job, our order beside the old rule, and what the difference means.

use super::Finding;
use super::json::{segments_name, streams_name};
use crate::job::{Decision, Divergence, Order, Outcome, Segments};
use crate::output::Palette;
use crate::quantity::{count, counted, memory};
use comfy_table::{Attribute, Cell, CellAlignment, Color, LineStyle, Table, presets};
use std::fmt::Write;
use symmalloc_core::ids::Placement;
use symmalloc_import::{Format, Recording};

/// One trace on one screen.
pub(super) struct Screen<'a> {
    pub(super) recording: &'a Recording,
    pub(super) finding: &'a Finding<'a>,
    /// The old rule on the same job.
    pub(super) others: &'a [Outcome],
    pub(super) seed: u64,
}

impl Screen<'_> {
    pub(super) fn render(&self, palette: Palette) -> String {
        let mut out = self.job(palette);
        let _ = writeln!(out, "{}\n", self.table(palette).trim_fmt());
        for line in self.meaning() {
            let _ = writeln!(out, "{line}");
        }
        out.push('\n');
        out
    }

    fn job(&self, palette: Palette) -> String {
        let Finding { path, job, outcome, .. } = self.finding;
        let program = job.program();
        let facts = [
            counted(program.ops().len(), "op"),
            counted(program.allocation_count(), "allocation"),
            counted(job.stream_count(), "stream"),
            format!("{} live at the peak", memory(outcome.peak_live_bytes)),
        ];
        format!(
            "{}  {}\n{}\n\n",
            palette.title(&path.display().to_string()),
            palette.aside(&kind_of(self.recording)),
            facts.join(", ")
        )
    }

    fn table(&self, palette: Palette) -> Table {
        let finding = self.finding;
        let columns: Vec<&Outcome> = std::iter::once(&finding.outcome).chain(self.others).collect();
        let allocations = count(finding.job.program().allocation_count());
        let row = |name: &str, cell: &dyn Fn(&Outcome) -> Cell| -> Vec<Cell> {
            std::iter::once(Cell::new(name)).chain(columns.iter().map(|outcome| cell(outcome))).collect()
        };
        let plain = |name: &str, text: &dyn Fn(&Outcome) -> String| row(name, &|outcome| Cell::new(text(outcome)));
        let mut table = Table::new();
        let rule = LineStyle::none().fill('─').junction('─');
        table.load_style(presets::NOTHING.top_border(rule).header_separator(rule).bottom_border(rule));
        if palette.is_colourful() {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        table.set_header(row("", &|outcome| Cell::new(title(outcome)).add_attribute(Attribute::Bold)));
        table.add_row(row("ranks place alike", &|outcome| {
            if outcome.is_aligned() { good("yes") } else { bad("NO") }
        }));
        table.add_row(row("placements differing", &|outcome| {
            let text = format!("{} of {allocations}", count(outcome.differing_placements));
            if outcome.differing_placements == 0 { Cell::new(text) } else { bad(&text) }
        }));
        table.add_row(plain("  on ranks", &|outcome| count(outcome.ranks)));
        table.add_row(plain("  first at op", &|outcome| {
            outcome.first_divergence.as_ref().map_or_else(|| "-".to_owned(), |first| count(first.op))
        }));
        table.add_row(plain("peak reserved", &|outcome| memory(outcome.peak_reserved_bytes)));
        table.add_row(plain("peak live / reserved", &|outcome| format!("{:.3}", outcome.efficiency())));
        table.add_row(plain("segments at the end", &|outcome| count(outcome.segment_count)));
        if columns.iter().any(|outcome| outcome.refused > 0) {
            table.add_row(plain("allocations refused", &|outcome| count(outcome.refused)));
        }
        if let Some(nanoseconds) = finding.nanoseconds_per_op {
            table.add_row(plain("time per op", &|outcome| match outcome.order {
                Order::Sequence => format!("{nanoseconds:.0} ns"),
                Order::Address => "-".to_owned(),
            }));
            table.add_row(plain("digest", &|outcome| {
                outcome.digest.map_or_else(|| "-".to_owned(), |digest| format!("{digest:016x}"))
            }));
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            let alignment = if index == 0 { CellAlignment::Left } else { CellAlignment::Right };
            column.set_padding((1, 0)).set_cell_alignment(alignment);
        }
        table
    }

    /// What the table means for a program that hands these addresses to NCCL.
    fn meaning(&self) -> Vec<String> {
        let ranks = counted(self.finding.outcome.ranks, "simulated rank");
        let mut lines =
            vec![format!("{ranks} of seed {}, each with its own addresses, event timing, handles.", self.seed)];
        let columns = || std::iter::once(&self.finding.outcome).chain(self.others);
        if columns().any(|outcome| outcome.order == Order::Address) {
            lines.push("PyTorch (model): free blocks by address, uses by other streams found by polling.".to_owned());
        }
        if let Some(first) = columns().find_map(|outcome| outcome.first_divergence.as_ref()) {
            lines.push(example(first));
            lines.push(NCCL.to_owned());
        }
        lines
    }
}

/// Why a placement that differs matters.
const NCCL: &str = "\
NCCL's symmetric kernels find a peer's buffer at (window, their own offset). Where
these differ, an all-reduce returns wrong numbers and ncclSuccess: on 2 GPUs with
NCCL 2.28.9, 262,144 elements of 262,144 were wrong.";

fn good(text: &str) -> Cell {
    Cell::new(text).fg(Color::Green).add_attribute(Attribute::Bold)
}

fn bad(text: &str) -> Cell {
    Cell::new(text).fg(Color::Red).add_attribute(Attribute::Bold)
}

/// The head of a column, in lines.
fn title(outcome: &Outcome) -> String {
    let segments = segments_name(outcome.segments);
    match (outcome.order, outcome.segments) {
        (Order::Sequence, _) => format!("symmalloc\n{segments} segments\n{} streams", streams_name(outcome.streams)),
        (Order::Address, Some(Segments::Fixed)) => format!("PyTorch (model)\n{segments} segments\n(its default)"),
        (Order::Address, _) => format!("PyTorch (model)\n{segments} segments"),
    }
}

/// A placement that differs, on two ranks.
fn example(first: &Divergence) -> String {
    let other = first.decisions.iter().position(|decision| *decision != first.decisions[0]).unwrap_or(0);
    let name = first.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
    format!(
        "The first to differ is allocation {}{name}: {} on rank 0,\n{} on rank {other}.",
        count(first.allocation),
        place(&first.decisions[0]),
        place(&first.decisions[other]),
    )
}

fn place(decision: &Decision) -> String {
    match decision {
        None => "no place (refused)".to_owned(),
        Some(Placement::NOWHERE) => "no place (no bytes)".to_owned(),
        Some(Placement { segment, offset_bytes }) => format!("segment {} offset {}", segment.0, count(*offset_bytes)),
    }
}

/// What kind of recording it is.
pub(crate) fn kind_of(recording: &Recording) -> String {
    let kind = match recording.format {
        Format::PyTorchSnapshot => "PyTorch snapshot",
        Format::RmmLog => "RMM log",
        Format::Trace => "symmalloc trace",
        _ => "recording",
    };
    match recording.summary.device {
        Some(device) => format!("{kind}, device {device}"),
        None => kind.to_owned(),
    }
}
