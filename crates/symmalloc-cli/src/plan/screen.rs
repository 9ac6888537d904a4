//! A job's plan for people: what it gains; and without it what each heap needs, the lines to paste, and the proof.

use super::JobPlan;
use super::reservations::ReservationPlan;
use crate::args::PlanArgs;
use crate::escape::quoted;
use crate::output::Palette;
use crate::quantity::{count, counted, memory};
use comfy_table::{CellAlignment, Table, presets};
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
            let _ = writeln!(out, "\nWithout a plan nothing can be reserved for the whole job: {error}.");
        }
    }
    out
}

/// What planning gains.
fn figures(args: &PlanArgs, plan: &JobPlan<'_>) -> String {
    let figures = &plan.figures;
    let mut out = String::new();
    let mut line = |name: &str, bytes: u64, remark: &str| {
        let _ = writeln!(out, "{}", format!("{name:<10} {:>10}   {remark}", memory(bytes)).trim_end());
    };
    let waits = |waits: u64| {
        if waits > 0 { format!(", {} between them a pass", counted(waits, "wait")) } else { String::new() }
    };
    line("peak live", figures.peak_live_bytes, "");
    let refused = |refused: u64| {
        if refused > 0 { format!("; {} refused", counted(refused, "request")) } else { String::new() }
    };
    let planned = format!("{:.3} of it live at the peak; streams {}", figures.efficiency(), figures.streams());
    line("planned", figures.planned_bytes, &(planned + &waits(figures.waits) + &refused(figures.refused)));
    let mut online = format!(
        "{:.3} over {} passes; streams {}",
        figures.online_efficiency(),
        figures.passes,
        figures.online_streams()
    );
    online += &(waits(figures.online_waits) + &refused(figures.online_refused));
    line("online", figures.online_bytes, &online);
    let (word, bytes) = if figures.planned_bytes <= figures.online_bytes {
        ("gained", figures.online_bytes - figures.planned_bytes)
    } else {
        // Heaps that are used one after the other, and pools that come and go, may hold less without a plan.
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
    if let (Some(file), [trace]) = (&args.output, plan.traces) {
        let of = |path: &Path| quoted(&path.to_string_lossy());
        let _ = writeln!(out, "written; follow it: symmalloc replay {} --plan {}", of(trace), of(file));
    }
    out
}

/// What to reserve without a plan.
fn reserved(ranks: usize, plan: &ReservationPlan, palette: Palette) -> String {
    let mut out = format!("\n{}\n", palette.aside("without a plan, so that nothing is obtained while it runs"));
    let mut table = table(["heap", "segments", "peak live", "grows to", "to reserve"], 2);
    for (owner, heap) in &plan.heaps {
        let stream = owner.stream.map_or_else(|| "shared".to_owned(), |stream| stream.to_string());
        table.add_row([
            format!("{} {stream}", owner.pool),
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
        // A segment is obtained whole at the heap's first use, so the settings alone are the plan of this pool.
        let _ = writeln!(out, "\n{}\nSYMMALLOC_CONF={}", palette.aside("in the environment"), plan.settings());
    }
    let _ = write!(out, "\n{}", proof(ranks, plan, palette));
    out
}

/// The calls that reserve it. Streams and pools have the numbers that the program gave them.
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

/// A number as Rust's own code writes it.
fn digits(number: u64) -> String {
    count(number).replace(',', "_")
}

fn proof(ranks: usize, plan: &ReservationPlan, palette: Palette) -> String {
    let ReservationPlan { without, with, .. } = plan;
    let verdict = if with.holds() {
        palette.good("holds: nothing is obtained or registered after what is reserved")
    } else {
        palette.bad("DOES NOT HOLD: memory is obtained in spite of it, or is not enough")
    };
    let head = ["", "memory calls", "with what is reserved", "registrations", "with what is reserved"];
    let mut table = table(head, 1);
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
        "{verdict}\n{} carried out twice on a device that counts; of several the most:\n\n{}\n",
        counted(ranks, "rank"),
        table.trim_fmt()
    )
}

/// A table without lines, whose first columns are words and the others numbers.
fn table(head: [&str; 5], words: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(head);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if number == 0 { 0 } else { 1 }, 1));
        if number >= words {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
