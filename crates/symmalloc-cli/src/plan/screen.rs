//! The text output of `plan`: what the plan saves, and the reservations without a plan: sizes, lines to paste, and the proof.

use super::job_plan::JobPlan;
use super::rectangles;
use super::reservations::ReservationPlan;
use crate::args::PlanArgs;
use crate::escape::quoted;
use crate::output::Palette;
use crate::quantity::{count, counted, memory};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use std::fmt::Write;
use std::path::Path;
use symmalloc_core::PoolId;

pub(super) fn render(args: &PlanArgs, plan: &JobPlan<'_>, palette: Palette) -> String {
    let mut out = String::new();
    for path in plan.traces {
        let _ = writeln!(out, "{}", palette.title(&path.display().to_string()));
    }
    out += &figures(args, plan);
    match &plan.reservations {
        Ok(reservations) => out += &reserved(plan.traces.len(), reservations, palette),
        Err(error) => {
            let _ = writeln!(out, "\nNo reservation fits the whole job without a plan: {error}.");
        }
    }
    out
}

/// Describes what the plan saves.
fn figures(args: &PlanArgs, plan: &JobPlan<'_>) -> String {
    let figures = &plan.figures;
    let mut out = String::new();
    let mut line = |name: &str, bytes: u64, remark: &str| {
        let _ = writeln!(out, "{}", format!("{name:<10} {:>10}   {remark}", memory(bytes)).trim_end());
    };
    let waits = |waits: u64| {
        if waits > 0 { format!(", {} per pass", counted(waits, "wait")) } else { String::new() }
    };
    line("peak live", figures.peak_live_bytes, "");
    let refused = |refused: u64| {
        if refused > 0 { format!("; {} refused", counted(refused, "request")) } else { String::new() }
    };
    let planned = format!("{:.3} of it live at the peak; streams {}", figures.efficiency(), figures.streams());
    line("planned", figures.planned_bytes, &(planned + &waits(figures.waits) + &refused(figures.refused)));
    let mut online = format!(
        "{:.3} over {}; streams {}",
        figures.online_efficiency(),
        counted(figures.passes, "pass"),
        figures.online_streams()
    );
    online += &(waits(figures.online_waits) + &refused(figures.online_refused));
    line("online", figures.online_bytes, &online);
    let (word, bytes) = if figures.planned_bytes <= figures.online_bytes {
        ("gained", figures.online_bytes - figures.planned_bytes)
    } else {
        // Without a plan, heaps that are used one after the other, and pools that do not exist at the same time, may need less memory.
        ("lost", figures.planned_bytes - figures.online_bytes)
    };
    line(word, bytes, &format!("{:.1} %", bytes as f64 * 100.0 / figures.online_bytes.max(1) as f64));
    let _ = writeln!(
        out,
        "{} of {}, found in {:.1} s and followed by {:.2} % of the allocations",
        counted(figures.plans, "plan"),
        memory(figures.plan_bytes),
        figures.seconds,
        figures.planned_ops_share() * 100.0
    );
    if let (Some(file), [trace], false) = (&args.output, plan.traces, rectangles::is_output(args)) {
        let of = |path: &Path| quoted(&path.to_string_lossy());
        let _ = writeln!(out, "follow it with: symmalloc replay {} --plan {}", of(trace), of(file));
    }
    out
}

/// Describes the reservations for running without a plan.
fn reserved(ranks: usize, plan: &ReservationPlan, palette: Palette) -> String {
    let mut out = format!("\n{}\n", palette.aside("reservations for running without a plan"));
    let mut table = table(["heap", "segments", "peak live", "grows to", "to reserve"], 2, palette);
    for (owner, heap) in &plan.heaps {
        table.add_row([
            format!("{} {}", owner.pool, owner.group),
            if plan.is_reserved(owner.pool) { "reserved" } else { "expandable" }.to_owned(),
            memory(heap.peak_live_bytes),
            memory(heap.grown_bytes),
            memory(heap.reserve_bytes),
        ]);
    }
    let all = memory(plan.reserve_bytes());
    table.add_row(["all", "", "", "", all.as_str()]);
    let _ = writeln!(out, "{}", table.trim_fmt());
    let _ = writeln!(out, "\n{}", palette.aside("in a trace"));
    out += &(plan.lines().join("\n") + "\n");
    let _ = writeln!(out, "\n{}", palette.aside("in Rust"));
    out += &(rust(plan).join("\n") + "\n");
    if plan.is_reserved(PoolId::DEFAULT) {
        // The heap's first use obtains a whole segment, so the settings alone are sufficient for this pool.
        let _ = writeln!(out, "\n{}\nSYMMALLOC_CONF={}", palette.aside("in the environment"), plan.settings());
    }
    let _ = write!(out, "\n{}", proof(ranks, plan, palette));
    out
}

/// Returns the Rust calls that make the reservations. Streams and pools have the numbers of the recorded program.
fn rust(plan: &ReservationPlan) -> Vec<String> {
    let mut lines = vec![format!("let config: Config = \"{}\".parse()?;", plan.settings())];
    let others = plan.pools.iter().filter(|(pool, _)| **pool != PoolId::DEFAULT);
    lines.extend(others.map(|(pool, config)| format!("let {pool} = allocator.create_pool(\"{config}\".parse()?)?;")));
    for (owner, heap) in &plan.heaps {
        let pool = if owner.pool == PoolId::DEFAULT { "PoolId::DEFAULT".to_owned() } else { owner.pool.to_string() };
        lines.push(format!("allocator.reserve({pool}, {}, {})?;", heap.stream, digits(heap.reserve_bytes)));
    }
    lines
}

/// Formats a number as in Rust source code.
fn digits(number: u64) -> String {
    count(number).replace(',', "_")
}

fn proof(ranks: usize, plan: &ReservationPlan, palette: Palette) -> String {
    let ReservationPlan { without, with, .. } = plan;
    let verdict = if with.holds() {
        palette.good("holds: the job obtains and registers nothing after its reservations")
    } else {
        palette.bad("DOES NOT HOLD: the job obtains memory after its reservations, or requests are refused")
    };
    let head = ["", "memory calls", "with reservations", "registrations", "with reservations"];
    let mut table = table(head, 1, palette);
    for (name, before, after) in [
        ("reserving", without.reserving, with.reserving),
        ("first pass", without.first_pass, with.first_pass),
        ("second pass", without.second_pass, with.second_pass),
    ] {
        let numbers = [before.memory_calls, after.memory_calls, before.registrations, after.registrations].map(count);
        table.add_row(std::iter::once(name.to_owned()).chain(numbers));
    }
    if without.refused > 0 || with.refused > 0 {
        table.add_row(["refused".to_owned(), count(without.refused), count(with.refused)]);
    }
    let peaks = [without.peak_reserved_bytes, with.peak_reserved_bytes].map(memory);
    table.add_row(std::iter::once("peak reserved".to_owned()).chain(peaks));
    format!(
        "{verdict}\n{} replayed twice on a device that counts its calls; maximum over all ranks:\n\n{}\n",
        counted(ranks, "rank"),
        table.trim_fmt()
    )
}

/// Returns a table without borders, at most as wide as the stream. The first `words` columns are text, and the others are numbers.
fn table(head: [&str; 5], words: usize, palette: Palette) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(head);
    if let Some(columns) = palette.columns() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(columns);
    }
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 1));
        if number >= words {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
