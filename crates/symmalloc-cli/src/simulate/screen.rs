//! The text output of `simulate`: the plan of a single run, the events on its ranks, and the result.

use super::finding::{ProgramSource, SavedFailure, SimulationFinding};
use crate::destination::shown;
use crate::output::{Palette, Table};
use crate::quantity::{count, counted, memory};
use std::fmt::Write;

pub(super) fn render(finding: &SimulationFinding<'_>, palette: Palette) -> String {
    let SimulationFinding { source, args, runs, outcome, .. } = finding;
    let mut out = String::new();
    let title = source.path().map_or_else(|| "generated jobs".to_owned(), |path| path.display().to_string());
    let seeds = match (source, runs) {
        (ProgramSource::Story { .. }, _) => "as saved".to_owned(),
        (_, 1) => format!("seed {}", args.seed),
        _ => format!("seeds {} to {}", args.seed, args.seed.wrapping_add(runs - 1)),
    };
    let _ = writeln!(out, "{}  {}", palette.title(&title), palette.aside(&seeds));
    if *runs == 1 && matches!(source, ProgramSource::Generated) {
        let _ = writeln!(out, "{}", source.plan(args, args.seed).to_string().trim_end());
    }
    out.push('\n');
    if let Some(saved) = &finding.failure {
        failure(&mut out, saved, palette);
        return out;
    }
    let faults = &outcome.faults;
    let refused = format!("{} on {}", counted(faults.failed_calls, "call"), counted(faults.ranks, "rank"));
    let mut rows = vec![
        ("runs", count(*runs)),
        ("ranks", count(outcome.ranks)),
        ("ops executed", count(outcome.ops)),
        ("  private", count(outcome.private_ops)),
        ("  placed by a plan", count(outcome.planned)),
        ("steps that left their plan", count(outcome.differing)),
        ("syncs", count(outcome.syncs)),
        ("scans of invariants", count(outcome.checks)),
        ("failed driver calls", refused),
        ("  memory refused", count(faults.out_of_memory)),
        ("  other calls refused", count(faults.refused)),
        ("  devices lost", count(faults.losses)),
        ("  devices too small", count(faults.small_devices)),
        ("ranks that diverged, all detected", count(outcome.caught)),
        ("ranks restarted", count(outcome.restarts)),
        ("ranks that left", count(outcome.left)),
        ("device memory, peak", memory(outcome.device_bytes_peak)),
    ];
    if let Some(bytes) = finding.state_bytes_per_rank {
        rows.push(("state per rank", memory(bytes)));
    }
    rows.push(("time", format!("{:.1} s", finding.elapsed.as_secs_f64())));
    let mut table = Table::default();
    for (name, value) in rows {
        table.row([(name.to_owned(), None), (value, None)]);
    }
    let _ = writeln!(out, "{}\n", table.lines(palette).join("\n"));
    let verdict =
        palette.good("All ranks without faults made the same placements. All ranks that diverged were detected.");
    let _ = writeln!(out, "{verdict}\nAll ranks freed and released all memory.");
    out
}

fn failure(out: &mut String, saved: &SavedFailure, palette: Palette) {
    let SavedFailure { shrunk, first, story } = saved;
    let _ = writeln!(out, "{}", palette.bad("FAILED"));
    let _ = writeln!(out, "{first}\n");
    let (ops, ranks) = (shrunk.plan.steps().len(), shrunk.plan.ranks().len());
    let _ = writeln!(out, "Shrunk to {} on {}: {}", counted(ops, "op"), counted(ranks, "rank"), shrunk.failure);
    let _ = writeln!(out, "Saved as {}; run it again with `symmalloc simulate {0}`.", shown(story));
}
