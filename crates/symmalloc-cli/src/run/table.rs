//! The text that `run` prints on stderr when the program has ended.

use super::process::Ended;
use super::summary::{Begun, DeviceSummary, Incomplete, Leak, Summaries, Summary};
use crate::args::RunArgs;
use crate::destination::shown;

use crate::output::{Cell, Palette, Table};
use crate::quantity::{count, counted, memory};
use std::time::Duration;
use symmalloc_text::visible_line;

/// Maximum number of leak sizes shown.
const LEAKS_MAX: usize = 5;

/// Returns the statistics, if requested, and the recordings.
pub(super) fn text(summaries: &Summaries, args: &RunArgs, ended: &Ended) -> String {
    let palette = Palette::of_stderr();
    let mut lines = Vec::new();
    if let Ended::Signal(signal) = ended {
        lines.push(format!("the program was terminated by signal {signal}"));
    }
    for summary in &summaries.ended {
        if args.stats {
            lines.extend(figures(summary, palette));
        }
        for trace in
            summary.devices.iter().filter_map(|device| device.trace.as_deref()).filter(|_| args.record.is_some())
        {
            if summary.incomplete.iter().all(|incomplete| incomplete.trace != trace) {
                lines.push(format!("recorded {}", shown(trace)));
            }
        }
        for Incomplete { trace, cause } in &summary.incomplete {
            lines.push(visible_line(&format!("the recording {} is incomplete: {cause}", shown(trace))).into_owned());
        }
    }
    for begun in &summaries.killed {
        lines.push(killed(begun, args));
    }
    for process in &summaries.unwritten {
        let process = visible_line(process);
        lines.push(format!("process {process} could not write its statistics: free space on the disk of TMPDIR"));
    }
    if summaries.ended.is_empty() && summaries.killed.is_empty() && summaries.unwritten.is_empty() {
        lines.push("no process allocated device memory through libcuda".to_owned());
    }
    lines.into_iter().map(|line| format!("symmalloc: {line}\n")).collect()
}

fn name(program: &str, process: u32, rank: Option<u64>) -> String {
    let program = program.rsplit('/').next().unwrap_or(program);
    match rank {
        Some(rank) => format!("rank {rank}, {program}, process {process}"),
        None => format!("{program}, process {process}"),
    }
}

fn killed(begun: &Begun, args: &RunArgs) -> String {
    let name = name(&begun.program, begun.process, begun.rank);
    let recording = if args.record.is_some() {
        ": its recording is truncated; read it with --accept-torn"
    } else {
        ": no statistics"
    };
    format!("{name} did not end normally (killed, or _exit){recording}")
}

fn figures(summary: &Summary, palette: Palette) -> Vec<String> {
    let name = name(&summary.program, summary.process, summary.rank);
    let mut lines = vec![format!(
        "{}: {}, {}",
        palette.title(&name),
        counted(summary.allocations, "allocation"),
        counted(summary.frees, "free"),
    )];
    let plain = |text: String| -> Cell { (text, None) };
    let mut table = Table::default();
    let mut row = |title: &str, value: String| table.row([plain(format!("  {title}")), plain(value)]);
    row("peak live", memory(summary.peak_live_bytes));
    for DeviceSummary { device, peak_reserved_bytes, growths, refused, .. } in &summary.devices {
        if let Some(bytes) = peak_reserved_bytes {
            row(&format!("peak reserved, device {device}"), memory(*bytes));
        }
        if let Some(growths) = growths {
            row(&format!("obtained from the device {device}"), counted(*growths, "time"));
        }
        if *refused > 0 {
            row(&format!("refused, device {device}"), count(*refused));
        }
    }
    row("without symmalloc, at least", memory(summary.peak_driver_bytes));
    if summary.passed_on > 0 {
        row("served by the driver", counted(summary.passed_on, "allocation"));
    }
    let calls = summary.allocations + summary.frees;
    if let Some(each) = summary.nanoseconds.checked_div(calls).filter(|_| !summary.watched) {
        let all = Duration::from_nanos(summary.nanoseconds);
        row("time in the allocator", format!("{all:.2?}, {} ns per call", count(each)));
    }
    lines.extend(table.lines(palette));
    for DeviceSummary { device, leaks, .. } in &summary.devices {
        lines.extend(leaks_of(*device, leaks));
    }
    lines
}

/// Describes the allocations that were never freed, by size.
fn leaks_of(device: u32, leaks: &[Leak]) -> Option<String> {
    let (number, bytes) =
        leaks.iter().fold((0, 0), |(number, bytes), leak| (number + leak.count, bytes + leak.count * leak.size_bytes));
    if number == 0 {
        return None;
    }
    let shown: Vec<String> = leaks
        .iter()
        .take(LEAKS_MAX)
        .map(|leak| format!("{} of {}", count(leak.count), memory(leak.size_bytes)))
        .collect();
    let more = if leaks.len() > LEAKS_MAX { ", ..." } else { "" };
    Some(format!(
        "  never freed, device {device}: {} in {}: {}{more}",
        memory(bytes),
        counted(number, "allocation"),
        shown.join(", ")
    ))
}
