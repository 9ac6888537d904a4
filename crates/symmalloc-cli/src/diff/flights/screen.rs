//! The text output of `diff` for flight records: findings about each communicator, and a line for each rank.

use super::rows::{CommunicatorFlights, RankFlight};
use crate::output::{Palette, Table};
use crate::quantity::{count, counted};
use std::fmt::Write;
use symmalloc_watchdog::{CollectiveRecord, Finding, Progress};

/// Maximum number of rows per communicator. For a larger communicator, the rows of the ranks furthest behind are shown.
const ROWS_MAX: usize = 64;
/// Maximum length of a reason, in characters.
const REASON_CHARS: usize = 80;
/// Maximum number of conditions shown per rank.
const SEEN_MAX: usize = 3;
/// The normal condition of a rank, which is not worth reporting.
const ALIVE: &str = "alive";

pub(super) fn render(communicators: &[CommunicatorFlights<'_>], palette: Palette) -> String {
    let mut out = String::new();
    for flights in communicators {
        let (ranks, records) = (counted(flights.ranks, "rank"), counted(flights.records, "record"));
        let title = palette.title(&format!("communicator \"{}\"", flights.name));
        let _ = writeln!(out, "{title}  {}", palette.aside(&format!("{ranks}, {records}, id {}", flights.id)));
        for finding in flights.findings {
            let is_good = matches!(finding, Finding::Even { .. });
            let text = finding.to_string();
            let _ = writeln!(out, "  {}", if is_good { palette.good(&text) } else { palette.bad(&text) });
        }
        let _ = writeln!(out, "\n{}\n", table(flights, palette));
    }
    if communicators.is_empty() {
        out.push_str("the records contain no communicator\n");
    }
    out
}

fn table(flights: &CommunicatorFlights<'_>, palette: Palette) -> String {
    let mut rows: Vec<(u32, &RankFlight<'_>)> = flights.rows.iter().map(|(rank, row)| (*rank, row)).collect();
    let hidden = rows.len().saturating_sub(ROWS_MAX);
    if hidden > 0 {
        rows.sort_by_key(|(_, row)| (row.progress().submitted, row.progress().finished));
        rows.truncate(ROWS_MAX);
    }
    let waits = to_the_left("waits for", rows.iter().map(|(_, row)| waits_for(row)));
    let whys = to_the_left("why", rows.iter().map(|(rank, row)| why(*rank, row, flights.name)));
    let mut table = Table::default();
    let head = ["  rank", "submitted", "finished", "state", &waits[0], &whys[0]];
    table.row(head.map(|cell| (cell.to_owned(), Some(Palette::aside as _))));
    for ((rank, row), (waits, why)) in rows.into_iter().zip(waits[1..].iter().zip(&whys[1..])) {
        let Progress { submitted, finished, .. } = row.progress();
        let (state, paint) = match &row.record {
            Some(record) => (record.communicator.state.clone(), None),
            None => ("no record".to_owned(), Some(Palette::bad as _)),
        };
        let plain = [format!("  {rank}"), count(submitted), count(finished)].map(|cell| (cell, None));
        table.row(plain.into_iter().chain([(state, paint), (waits.clone(), None), (why.clone(), None)]));
    }
    let mut lines = table.lines(palette);
    if hidden > 0 {
        lines.push(format!("  and {} at least as far; --json lists all", counted(hidden, "rank")));
    }
    lines.join("\n")
}

/// Pads the cells of a column to the same width, which aligns them to the left in a right-aligned column.
fn to_the_left(head: &str, cells: impl Iterator<Item = String>) -> Vec<String> {
    let cells: Vec<String> = std::iter::once(head.to_owned()).chain(cells).collect();
    let width = cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
    cells.into_iter().map(|cell| format!("{cell:<width$}")).collect()
}

/// Describes the first unfinished call of the rank.
fn waits_for(row: &RankFlight<'_>) -> String {
    let Some(record) = &row.record else { return "unknown".to_owned() };
    let Some(CollectiveRecord { number, is_point_to_point, signature, state, age_ms, .. }) =
        record.communicator.first_unfinished()
    else {
        return "nothing".to_owned();
    };
    let after = if *is_point_to_point { "after " } else { "" };
    format!("{after}{number}: {signature}, {state}, submitted {:.1} s ago", *age_ms as f64 / 1000.0)
}

/// Returns why the communicator failed or, if it did not, why the rank wrote its record and what other ranks observed.
fn why(rank: u32, row: &RankFlight<'_>, name: &str) -> String {
    let cause = row.record.as_ref().and_then(|record| record.communicator.cause.as_deref());
    let own = cause.or(row.record.as_ref().map(|record| &*record.process.reason));
    let mut printed: Vec<String> = own.map(|own| shortened(own, name, rank)).into_iter().collect();
    if cause.is_none() {
        let is_news = |condition: &str| condition != ALIVE || row.record.is_none() && row.seen.len() == 1;
        for (condition, by) in row.seen.iter().filter(|(condition, _)| is_news(condition)).take(SEEN_MAX) {
            let by = if let [one] = by[..] { format!("rank {one}") } else { counted(by.len(), "rank") };
            printed.push(format!("{} (seen by {by})", shortened(condition, name, rank)));
        }
    }
    printed.join("; ")
}

/// Returns the first sentence, without the names of the communicator and the rank, which the context shows.
fn shortened(reason: &str, name: &str, rank: u32) -> String {
    let of_all = format!("communicator \"{name}\", ");
    let reason = reason.replace(&format!("{of_all}rank {rank}: "), "").replace(&of_all, "");
    let sentence = reason.split_once(". ").map_or(&*reason, |(first, _)| first);
    let mut text: String = sentence.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((at, _)) = text.char_indices().nth(REASON_CHARS) {
        text.replace_range(at.., "...");
    }
    text
}
