//! The text output of `replay`: the job, a table of our order and PyTorch's rule, and an explanation of the difference.

use super::finding::ReplayFinding;
use super::json::{segments_name, streams_name};
use crate::beginning::lived_before;
use crate::config_text;
use crate::format;
use crate::job::{Decision, Divergence, Options, Order, Outcome, Segments};
use crate::output::{Cell, Palette, Table};
use crate::quantity::{count, counted, memory, op_of_allocation};
use crate::streams;
use std::fmt::Write;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{Placement, PoolId};
use symmalloc_core::op::Op;
use symmalloc_import::Recording;

/// Data for the output of one trace.
pub(super) struct Screen<'a> {
    pub(super) recording: &'a Recording,
    /// Configuration of our allocator.
    pub(super) config: &'a Config,
    pub(super) finding: &'a ReplayFinding<'a>,
    /// Results of PyTorch's rule on the same job.
    pub(super) others: &'a [Outcome],
    pub(super) seed: u64,
}

impl Screen<'_> {
    pub(super) fn render(&self, palette: Palette) -> String {
        let mut out = self.job(palette);
        out += &self.table(palette);
        for line in self.meaning() {
            let _ = writeln!(out, "{line}");
        }
        out.push('\n');
        out
    }

    fn job(&self, palette: Palette) -> String {
        let ReplayFinding { path, job, outcome, .. } = self.finding;
        let program = job.program();
        let facts = [
            counted(program.ops().len(), "op"),
            counted(program.allocation_count(), "allocation"),
            counted(job.stream_count(), "stream"),
            format!("{} live at the peak", memory(outcome.peaks.live_bytes)),
        ];
        let mut out = format!(
            "{}  {}\n{}\n",
            palette.title(&path.display().to_string()),
            palette.aside(&format::describe(self.recording)),
            facts.join(", ")
        );
        let ours = if outcome.order == Order::Sequence { self.settings() } else { Vec::new() };
        ours.into_iter().for_each(|line| out += &format!("{line}\n"));
        out + "\n"
    }

    /// Returns a line for the default pool, and lines for the other pools, grouped by equal settings. Default settings
    /// are left out.
    fn settings(&self) -> Vec<String> {
        let pools = self.created_pools().map(|(pool, config)| {
            let alone = Config::builder().default_pool(config.clone()).build();
            (pool.to_string(), alone.map_or_else(|_| config.to_string(), |config| config_text::shortest(&config)))
        });
        let default_pool = ("settings".to_owned(), config_text::shortest(self.config));
        let mut groups: Vec<(String, String, usize)> = Vec::new();
        for (pool, settings) in std::iter::once(default_pool).chain(pools) {
            let alike = groups.iter_mut().skip(1).find(|(_, known, _)| *known == settings);
            match alike {
                Some((.., more)) => *more += 1,
                None => groups.push((pool, settings, 0)),
            }
        }
        groups.retain(|(_, settings, _)| settings != DEFAULT_SETTINGS);
        let hidden = groups.split_off(groups.len().min(POOLS_SHOWN));
        let line = |(pool, settings, more)| match more {
            0 => format!("{pool}: {settings}"),
            _ => format!("{pool} and {}: {settings}", counted(more, "more pool")),
        };
        let mut lines: Vec<String> = groups.into_iter().map(line).collect();
        let more: usize = hidden.iter().map(|(.., more)| 1 + more).sum();
        if more > 0 {
            lines.push(format!("and {} with other settings", counted(more, "pool")));
        }
        lines
    }

    fn created_pools(&self) -> impl Iterator<Item = (PoolId, &PoolConfig)> {
        self.finding.job.program().ops().iter().filter_map(|op| match op {
            Op::CreatePool { pool, config } if *pool != PoolId::DEFAULT => Some((*pool, &**config)),
            _ => None,
        })
    }

    fn table(&self, palette: Palette) -> String {
        let finding = self.finding;
        let columns: Vec<&Outcome> = std::iter::once(&finding.outcome).chain(self.others).collect();
        let allocations = count(finding.job.program().allocation_count());
        let mut table = Table::default();
        let mut row = |name: &str, cell: &dyn Fn(&Outcome) -> Cell| {
            let name = (name.to_owned(), None);
            table.row(std::iter::once(name).chain(columns.iter().map(|outcome| cell(outcome))));
        };
        for line in 0..HEAD_LINES {
            row("", &|outcome| (title(outcome).swap_remove(line), Some(Palette::title)));
        }
        row("ranks place alike", &|outcome| match outcome.is_aligned() {
            true => ("yes".to_owned(), Some(Palette::good)),
            false => ("NO".to_owned(), Some(Palette::bad)),
        });
        row("placements differing", &|outcome| {
            let text = format!("{} of {allocations}", count(outcome.differing_placements));
            (text, (outcome.differing_placements > 0).then_some(Palette::bad as _))
        });
        row("allocations refused", &|outcome| match outcome.refused {
            0 => ("0".to_owned(), None),
            refused => (format!("{} of {allocations}", count(refused)), Some(Palette::bad)),
        });
        if columns.iter().any(|outcome| outcome.refused != outcome.first_pass_refused) {
            row("  in the first pass", &|outcome| (count(outcome.first_pass_refused), None));
        }
        let mut plain = |name: &str, text: &dyn Fn(&Outcome) -> String| row(name, &|outcome| (text(outcome), None));
        plain("ranks", &|outcome| count(outcome.ranks));
        plain("first to differ, op", &|outcome| {
            outcome.first_divergence.as_ref().map_or_else(|| "-".to_owned(), |first| count(first.op))
        });
        plain("peak reserved", &|outcome| memory(outcome.peaks.reserved_bytes));
        plain("peak live / reserved", &|outcome| format!("{:.3}", outcome.peaks.efficiency()));
        if columns.iter().any(|outcome| outcome.first_pass != outcome.peaks) {
            plain("  in the first pass", &|outcome| format!("{:.3}", outcome.first_pass.efficiency()));
        }
        if finding.outcome.planned.is_some() {
            plain("allocations as planned", &|outcome| {
                outcome.planned.map_or_else(|| "-".to_owned(), |planned| format!("{:.2} %", planned.share() * 100.0))
            });
        }
        plain("segments at the end", &|outcome| count(outcome.segment_count));
        if let Some(nanoseconds) = finding.nanoseconds_per_op {
            plain("time per op", &|outcome| match outcome.order {
                Order::Sequence => format!("{nanoseconds:.0} ns"),
                Order::Address => "-".to_owned(),
            });
            plain("digest", &|outcome| {
                outcome.digest.map_or_else(|| "-".to_owned(), |digest| format!("{digest:016x}"))
            });
        }
        let ruled = |part: &Table| {
            let rule = "─".repeat(part.width());
            let lines = part.lines(palette);
            let (head, body) = lines.split_at(HEAD_LINES);
            format!("{rule}\n{}\n{rule}\n{}\n{rule}\n\n", head.join("\n"), body.join("\n"))
        };
        table.parts(palette).iter().map(ruled).collect()
    }

    /// Explains the meaning of the table for a program that passes these addresses to NCCL.
    fn meaning(&self) -> Vec<String> {
        let ranks = counted(self.finding.outcome.ranks, "simulated rank");
        let mut lines =
            vec![format!("{ranks} of seed {}, each with its own addresses, event timing, handles.", self.seed)];
        let job = self.finding.job;
        let (ranks, passes) = (job.replayed_ranks().get(), job.replayed_passes().get());
        if job.is_long() && (self.finding.outcome.ranks == ranks || self.finding.outcome.passes == passes) {
            let Options { ranks: usual_ranks, passes: usual_passes, .. } = Options::default();
            lines.push(format!(
                "The job is long: by default, {ranks} ranks run it {passes} times, instead of {usual_ranks} ranks {usual_passes} times (--ranks, --passes)."
            ));
        }
        let columns = || std::iter::once(&self.finding.outcome).chain(self.others);
        if columns().any(|outcome| outcome.order == Order::Address) {
            lines.push("PyTorch (model of 2.11): blocks by address, uses by other streams by polling.".to_owned());
        }
        let limits = std::iter::once(self.config.default_pool()).chain(self.created_pools().map(|(_, config)| config));
        let has_limit =
            self.config.total_limit_bytes().is_some() || limits.into_iter().any(|pool| pool.limit_bytes().is_some());
        if has_limit && columns().any(|outcome| outcome.order == Order::Address) {
            lines.push("The models of PyTorch have no limit: they reserve what the whole job needs.".to_owned());
        }
        if self.finding.outcome.refused > 0 {
            lines.push(
                "Refused allocations took no memory: the peaks are those of the remaining allocations.".to_owned(),
            );
        }
        lines.extend(lived_before(&self.recording.summary).map(|before| sentence(&before)));
        lines.extend(streams::legend(self.recording).map(|legend| sentence(&legend)));
        if let Some(first) = columns().find_map(|outcome| outcome.first_divergence.as_ref()) {
            lines.push(example(first));
            let default_pool = std::iter::once(self.config.default_pool());
            let mut pools = default_pool.chain(self.created_pools().map(|(_, config)| config));
            if pools.any(PoolConfig::symmetric) && self.finding.outcome.ranks > 1 {
                lines.push(NCCL.to_owned());
            }
        }
        lines
    }
}

fn sentence(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    first + characters.as_str() + "."
}

/// The reason why differing placements matter.
const NCCL: &str = "\
Buffers in symmetric windows: NCCL's kernels address a peer's buffer by the window and
their own offset. If the offsets differ, an all-reduce returns wrong numbers and
ncclSuccess: on 2 GPUs with NCCL 2.28.9, 262,144 of 262,144 elements were wrong.";

/// The default settings, which are not listed.
const DEFAULT_SETTINGS: &str = "segments:expandable";
/// Maximum number of pools whose settings are listed.
const POOLS_SHOWN: usize = 4;

/// Number of heading lines of a column.
const HEAD_LINES: usize = 3;

fn title(outcome: &Outcome) -> Vec<String> {
    let segments = format!("{} segments", segments_name(outcome.segments));
    let (rule, note) = match (outcome.order, outcome.segments) {
        (Order::Sequence, _) if outcome.planned.is_some() => {
            ("symmalloc, planned", format!("{} streams", streams_name(outcome.streams)))
        }
        (Order::Sequence, _) => ("symmalloc", format!("{} streams", streams_name(outcome.streams))),
        (Order::Address, Some(Segments::Fixed)) => ("PyTorch (model)", "(its default)".to_owned()),
        (Order::Address, _) => ("PyTorch (model)", String::new()),
    };
    vec![rule.to_owned(), segments, note]
}

/// Describes the first placement that differs, on two ranks.
fn example(first: &Divergence) -> String {
    let other = first.decisions.iter().position(|decision| *decision != first.decisions[0]).unwrap_or(0);
    format!(
        "The first to differ is {}: {} on rank 0,\n{} on rank {other}. Ops and allocations are counted from 0.",
        op_of_allocation(first.op, first.allocation, first.name.as_deref()),
        place(&first.decisions[0]),
        place(&first.decisions[other]),
    )
}

fn place(decision: &Decision) -> String {
    match decision {
        None => "no placement (refused)".to_owned(),
        Some(Placement::NOWHERE) => "no placement (no bytes)".to_owned(),
        Some(Placement { segment, offset_bytes }) => format!("segment {} offset {}", segment.0, count(*offset_bytes)),
    }
}
