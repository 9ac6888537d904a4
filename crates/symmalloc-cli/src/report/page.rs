//! The HTML page of a report.

use super::document;
use super::findings::{Findings, Fragmentation, PlanOutcome, PlanTrial, UNSERVED};
use super::recorded_reserved::RecordedReserved;
use super::settings::Trial;
use crate::beginning::lived_before;
use crate::chart::{file_name, history_figure, map_figure};
use crate::config_text;
use crate::explorer;
use crate::picture::heap_name;
use crate::picture::timeline::{ALLOCATED, LIVE, RESERVED};
use crate::quantity::{count, counted, memory};
use crate::streams;
use maud::{Markup, PreEscaped, html};
use std::cmp::Ordering;

/// Maximum number of rows in the table of holders.
const HOLDERS_SHOWN: usize = 12;

/// Returns the whole page.
pub(super) fn html(findings: &Findings<'_>) -> String {
    let name = file_name(&findings.recorded.path);
    if findings.recorded.recording.summary.state_only.is_some() {
        let body = html! {
            h1 { "Memory of " (name) }
            (state(findings))
            (holders(findings))
        };
        return document::html(&format!("Memory of {name}"), &body);
    }
    let body = html! {
        h1 { "Memory of " (name) }
        (failure(findings))
        (figures(findings))
        (advice(findings))
        (explorer::section(findings.recorded, &findings.layouts, findings.memory.op))
        div #still {
            (explorer::without_scripts(findings.timeline.op_count))
            (PreEscaped(history_figure(&name, findings.recorded, &findings.timeline)))
            (PreEscaped(map_figure(&name, findings.recorded, &findings.memory)))
        }
        (holders(findings))
        (fragmentation(findings))
        (settings(findings))
    };
    document::html(&format!("Memory of {name}"), &body)
}

/// Describes the request that failed.
fn failure(findings: &Findings<'_>) -> Markup {
    let Some(failure) = &findings.failure else { return html! {} };
    html! {
        h2 { "The request that failed" }
        table.stacked {
            tbody {
                @for (word, text) in failure.lines(&findings.recorded.recording, &findings.memory, findings.pools.as_ref()) {
                    tr { th { (word) } td { (text) } }
                }
            }
        }
        @if !failure.frames.is_empty() {
            details {
                summary { "Python stack of the request, innermost frame first" }
                @for frame in &failure.frames { code { (frame) } br; }
            }
        }
        p.aside {
            "The pictures and tables below show the memory before this request, unless " code { "--op" } " selects another op."
        }
    }
}

/// Describes the memory in a snapshot without history.
fn state(findings: &Findings<'_>) -> Markup {
    let summary = &findings.recorded.recording.summary;
    let state = summary.state_only.unwrap_or_default();
    let figures = [
        (state.reserved_bytes, "reserved", "by the recorded allocator".to_owned()),
        (state.allocated_bytes, "allocated", counted(summary.lived_before, "allocation")),
        (
            state.free_segment_bytes,
            "free as a whole",
            format!("{}: empty_cache() returns it", counted(state.free_segments, "segment")),
        ),
        (state.free_block_bytes, "free in used segments", counted(state.free_blocks, "block")),
        (state.largest_free_bytes, "largest free piece", String::new()),
    ];
    html! {
        @if let Some(before) = lived_before(summary) {
            p { b { "Note:" } " " (before) "." }
        }
        div.figures {
            @for (bytes, what, more) in figures {
                div { b { (memory(bytes)) } (what) br; (more) }
            }
        }
        p.aside { "Without a history, there is nothing to replay, so this page compares no settings." }
    }
}

fn figures(findings: &Findings<'_>) -> Markup {
    let peaks = &findings.timeline.total.peaks;
    let summary = &findings.recorded.recording.summary;
    let of_op = [("in the first pass", RESERVED), ("peak allocated", ALLOCATED), ("peak live", LIVE)];
    html! {
        p.aside {
            (counted(findings.timeline.op_count, "op")) ": " (counted(summary.allocations, "allocation")) ", "
            (counted(summary.streams, "stream")) ". Replayed on symmalloc with "
            code { (config_text::shortest(&findings.recorded.config)) } "."
        }
        @if let Some(before) = lived_before(summary) {
            p { b { "Note:" } " " (before) "." }
        }
        @if let Some(legend) = streams::legend(&findings.recorded.recording) { p.aside { (legend) "." } }
        div.figures {
            @if let Some(recorded) = findings.recorded_reserved {
                div {
                    b { @if !recorded.is_exact { "≥ " } (memory(recorded.peak_bytes)) }
                    "peak reserved" br; "by the recorded allocator"
                }
            }
            div {
                b { (memory(findings.steady_bytes())) }
                "peak reserved" br; "over " (counted(findings.recorded.job.steady_passes().get(), "pass"))
            }
            @for (word, quantity) in of_op {
                div { b { (memory(peaks[quantity].bytes)) } (word) br; "after op " (count(peaks[quantity].op)) }
            }
            div { b { (format!("{:.1} %", findings.efficiency() * 100.0)) } "peak live" br; "of peak reserved" }
            @if findings.timeline.refused > 0 {
                div {
                    b { (count(findings.timeline.refused)) }
                    @if findings.timeline.refused == 1 { "allocation refused" } @else { "allocations refused" }
                    br; "in the first pass"
                }
            }
        }
    }
}

/// Summarizes the best settings and the plan.
fn advice(findings: &Findings<'_>) -> Markup {
    let own = findings.steady_bytes();
    html! {
        p {
            @match findings.best() {
                _ if findings.is_unserved() => { (UNSERVED) ". All tested settings are listed below." }
                Some(best) => {
                    "With " code { (best.settings) }
                    @if let Some(refused) = findings.refusals(best) { ", " (refused) ", and" }
                    " the peak would be " (memory(best.peak_reserved_bytes)) " reserved"
                    @if own > best.peak_reserved_bytes { ", " (memory(own - best.peak_reserved_bytes)) " less" }
                    @if let Some(cost) = findings.cost(best) { ", at the cost of " (cost) }
                    ". All tested settings are listed below."
                }
                None => "None of the other tested settings is better. They are listed below.",
            }
        }
        @if let Some(pools) = &findings.pools { p { b { "Private pools:" } " " (pools.advice()) "." } }
        @match &findings.planned {
            PlanOutcome::Planned(PlanTrial { command, planned_bytes, efficiency, .. }) => p {
                "With a plan, the job would need " (memory(*planned_bytes)) ", of which "
                (format!("{:.1} %", efficiency * 100.0)) " is live at the peak. To write the plan: " code { (command) }
            },
            PlanOutcome::Failed(no_plan) => @if findings.tells(no_plan) {
                p { "There is no plan of this job: " (no_plan.reason) "." }
            },
            PlanOutcome::Empty => {}
        }
    }
}

fn holders(findings: &Findings<'_>) -> Markup {
    let total: u64 = findings.holders.iter().map(|holder| holder.requested_bytes).sum();
    let (shown, rest) = findings.holders.split_at(HOLDERS_SHOWN.min(findings.holders.len()));
    let row = |label: &str, number: usize, bytes: u64| {
        html! {
            tr {
                td { (label) }
                td.n data-of="number" { (count(number)) }
                td.n data-of="bytes" { (memory(bytes)) }
                td.n data-of="share" { (format!("{:.1} %", bytes as f64 * 100.0 / total.max(1) as f64)) }
            }
        }
    };
    html! {
        h2 { "What holds memory after op " (count(findings.memory.op)) }
        table.stacked {
            thead { tr { th { "allocations" } th.n { "number" } th.n { "bytes" } th.n { "share" } } }
            tbody {
                @for holder in shown { (row(&holder.label(), holder.allocations, holder.requested_bytes)) }
                @if !rest.is_empty() {
                    (row(
                        "all others",
                        rest.iter().map(|holder| holder.allocations).sum(),
                        rest.iter().map(|holder| holder.requested_bytes).sum(),
                    ))
                }
            }
        }
    }
}

fn fragmentation(findings: &Findings<'_>) -> Markup {
    let row = |label: &str, reserved_bytes: u64, found: Fragmentation| {
        html! {
            tr {
                td { (label) }
                td.n data-of="reserved" { (memory(reserved_bytes)) }
                td.n data-of="free" { (memory(found.free_bytes)) }
                td.n data-of="largest block" { (memory(found.largest_free_bytes)) }
                td.n data-of="fragmentation" { (format!("{:.3}", found.fragmentation)) }
            }
        }
    };
    let drawn = &findings.memory;
    html! {
        h2 { "Free memory after op " (count(drawn.op)) }
        p.aside { "Fragmentation is 1 - largest free block / all free memory: 0 when it is one piece." }
        table.stacked {
            thead {
                tr {
                    th { "heap" } th.n { "reserved" } th.n { "free" } th.n { "largest block" } th.n { "fragmentation" }
                }
            }
            tbody {
                @for heap in &drawn.heaps {
                    (row(&heap_name(heap.owner), heap.size_bytes(), Fragmentation::of(heap.blocks())))
                }
                @if drawn.heaps.len() > 1 {
                    (row("all heaps", drawn.size_bytes(), Fragmentation::of(drawn.blocks())))
                }
            }
        }
    }
}

fn settings(findings: &Findings<'_>) -> Markup {
    let times = counted(findings.recorded.job.steady_passes().get(), "time");
    let better: Vec<&Trial> = findings.better().collect();
    let others: Vec<&Trial> =
        findings.trials.iter().filter(|trial| !trial.is_own && !trial.is_better_than(findings.own())).collect();
    html! {
        h2 { "Settings to try" }
        p.aside {
            "The same ops, replayed " (times) " under each setting. A replay shows neither speed nor changes in \
             the program's behavior. Without a limit, memory is only released on request. Waits are waits of a stream for another \
             that the reuse of memory requires in a pass. Each is a fence on the device. Maps are calls that map or unmap memory in a \
             pass. Each takes microseconds on the host. The command below each setting reproduces its results."
        }
        (trials(findings, findings.recorded_reserved.filter(|recorded| recorded.is_exact), std::iter::once(findings.own()).chain(better)))
        @if !others.is_empty() {
            h2 { "Settings that are not better" }
            (trials(findings, None, others))
        }
        @for impossible in &findings.impossible {
            p { "The job cannot run with " code { (impossible.settings) } ": " (impossible.reason) "." }
        }
        @if !findings.left_out.is_empty() {
            p { "Not tried, because the job is long: "
                @for (index, settings) in findings.left_out.iter().enumerate() { @if index > 0 { ", " } code { (settings) } } "." }
        }
    }
}

fn trials<'a>(
    findings: &Findings<'_>,
    recorded: Option<RecordedReserved>,
    trials: impl IntoIterator<Item = &'a Trial>,
) -> Markup {
    html! {
        table.stacked {
            thead {
                tr { th { "default pool" } th.n { "peak reserved" } th.n { "compared" } th.n { "waits" } th.n { "maps" } }
            }
            tbody {
                @if let Some(recorded) = recorded {
                    tr {
                        td { b { "in the recording:" } " the recorded allocator" }
                        td.n data-of="peak reserved" { (memory(recorded.peak_bytes)) }
                        td.n data-of="compared" { (compared(recorded.peak_bytes, findings.steady_bytes())) }
                        td.n data-of="waits" { "-" }
                        td.n data-of="maps" { "-" }
                    }
                }
                @for trial in trials {
                    tr {
                        td {
                            @if trial.is_own { b { "current settings:" } " " }
                            code { (trial.settings) } br; code.aside { (trial.command) }
                        }
                        td.n data-of="peak reserved" { (memory(trial.peak_reserved_bytes)) }
                        td.n data-of="compared" {
                            (compared(trial.peak_reserved_bytes, findings.steady_bytes()))
                            @if trial.refused > 0 { br; (trial.refusals(" refused")) }
                        }
                        td.n data-of="waits" { (count(trial.waits)) }
                        td.n data-of="maps" { (count(trial.maps)) }
                    }
                }
            }
        }
    }
}

/// Compares a trial's memory with the job's own settings.
fn compared(bytes: u64, own_bytes: u64) -> String {
    let percent = |bytes: u64| bytes as f64 * 100.0 / own_bytes.max(1) as f64;
    match bytes.cmp(&own_bytes) {
        Ordering::Less => format!("{} less ({:.1} %)", memory(own_bytes - bytes), percent(own_bytes - bytes)),
        Ordering::Equal => "the same".to_owned(),
        Ordering::Greater => format!("{} more ({:.1} %)", memory(bytes - own_bytes), percent(bytes - own_bytes)),
    }
}
