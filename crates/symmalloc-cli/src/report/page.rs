//! The page of a report.

use super::{Findings, Fragmentation, PlanTrial, Trial};
use crate::chart::{file_name, history_figure, map_figure};
use crate::job::Options;
use crate::picture::svg::escape;
use crate::picture::timeline::{ALLOCATED, LIVE, RESERVED};
use crate::picture::{heap_name, page};
use crate::quantity::{count, counted, memory};

/// Rows of the table of holders.
const HOLDERS_SHOWN: usize = 12;

/// The whole page.
pub(super) fn html(findings: &Findings<'_>) -> String {
    let name = file_name(&findings.recorded.path);
    let mut body = format!("<h1>Memory of {}</h1>\n", escape(&name));
    body += &figures(findings);
    body += &advice(findings);
    body += &history_figure(&name, findings.recorded, &findings.timeline);
    body += &holders(findings);
    body += &fragmentation(findings);
    body += &map_figure(&name, findings.recorded, &findings.memory);
    body += &settings(findings);
    page::html(&format!("Memory of {name}"), &body)
}

fn figures(findings: &Findings<'_>) -> String {
    let peaks = &findings.timeline.total.peaks;
    let summary = &findings.recorded.recording.summary;
    let mut body = format!(
        "<p class=\"aside\">{}: {}, {}. Carried out on symmalloc with {}.</p>\n<div class=\"figures\">",
        counted(findings.timeline.op_count, "op"),
        counted(summary.allocations, "allocation"),
        counted(summary.streams, "stream"),
        code(&super::settings::text(&findings.recorded.config))
    );
    body += &format!(
        "<div><b>{}</b>peak reserved<br>over {} passes</div>",
        memory(findings.steady_bytes()),
        Options::default().passes
    );
    for (word, quantity) in [("in the first pass", RESERVED), ("peak allocated", ALLOCATED), ("peak live", LIVE)] {
        let peak = peaks[quantity];
        body += &format!("<div><b>{}</b>{word}<br>after op {}</div>", memory(peak.bytes), count(peak.op));
    }
    body += &format!("<div><b>{:.1} %</b>peak live<br>of peak reserved</div>", findings.efficiency() * 100.0);
    if findings.timeline.refused > 0 {
        body += &format!("<div><b>{}</b>allocations refused<br>by a limit</div>", count(findings.timeline.refused));
    }
    body + "</div>\n"
}

/// What to do, in two sentences.
fn advice(findings: &Findings<'_>) -> String {
    let own = findings.steady_bytes();
    let best = match findings.best() {
        Some(best) => format!(
            "<p>With {} the peak would be {} reserved, {} less. All settings that were tried stand below.</p>\n",
            code(&best.settings),
            memory(best.peak_reserved_bytes),
            memory(own - best.peak_reserved_bytes)
        ),
        None => "<p>None of the other settings that were tried holds less. They stand below.</p>\n".to_owned(),
    };
    let Some(PlanTrial { command, planned_bytes, efficiency }) = &findings.planned else { return best };
    best + &format!(
        "<p>Planned beforehand and followed, the job would need {}, of which {:.1} % is live at the peak. The plan is written by \
         <code>{}</code></p>\n",
        memory(*planned_bytes),
        efficiency * 100.0,
        escape(command)
    )
}

fn holders(findings: &Findings<'_>) -> String {
    let total: u64 = findings.holders.iter().map(|holder| holder.requested_bytes).sum();
    let mut body = format!(
        "<h2>What holds memory after op {}</h2>\n<table class=\"stacked\"><thead><tr><th>allocations</th>\
         <th class=\"n\">number</th><th class=\"n\">bytes</th><th class=\"n\">share</th></tr></thead><tbody>\n",
        count(findings.memory.op)
    );
    let mut row = |label: &str, number: usize, bytes: u64| {
        body += &format!(
            "<tr><td>{}</td><td class=\"n\" data-of=\"number\">{}</td><td class=\"n\" data-of=\"bytes\">{}</td>\
             <td class=\"n\" data-of=\"share\">{:.1} %</td></tr>\n",
            escape(label),
            count(number),
            memory(bytes),
            bytes as f64 * 100.0 / total.max(1) as f64
        );
    };
    for holder in findings.holders.iter().take(HOLDERS_SHOWN) {
        row(&holder.label(), holder.allocations, holder.requested_bytes);
    }
    if let Some(rest) = findings.holders.get(HOLDERS_SHOWN..).filter(|rest| !rest.is_empty()) {
        let number = rest.iter().map(|holder| holder.allocations).sum();
        row("all others", number, rest.iter().map(|holder| holder.requested_bytes).sum());
    }
    body + "</tbody></table>\n"
}

fn fragmentation(findings: &Findings<'_>) -> String {
    let mut body = format!(
        "<h2>Free memory after op {}</h2>\n<p class=\"aside\">Fragmentation is 1 - largest free block / all free memory: \
         0 when it is one piece.</p>\n<table class=\"stacked\"><thead><tr><th>heap</th><th class=\"n\">reserved</th>\
         <th class=\"n\">free</th><th class=\"n\">largest block</th><th class=\"n\">fragmentation</th></tr></thead><tbody>\n",
        count(findings.memory.op)
    );
    let mut row = |label: &str, reserved_bytes: u64, found: Fragmentation| {
        body += &format!(
            "<tr><td>{}</td><td class=\"n\" data-of=\"reserved\">{}</td><td class=\"n\" data-of=\"free\">{}</td>\
             <td class=\"n\" data-of=\"largest block\">{}</td><td class=\"n\" data-of=\"fragmentation\">{:.3}</td></tr>\n",
            escape(label),
            memory(reserved_bytes),
            memory(found.free_bytes),
            memory(found.largest_free_bytes),
            found.fragmentation
        );
    };
    for heap in &findings.memory.heaps {
        row(&heap_name(heap.owner), heap.size_bytes(), Fragmentation::of(heap.blocks()));
    }
    if findings.memory.heaps.len() > 1 {
        row("all heaps", findings.memory.size_bytes(), Fragmentation::of(findings.memory.blocks()));
    }
    body + "</tbody></table>\n"
}

fn settings(findings: &Findings<'_>) -> String {
    let own = findings.steady_bytes();
    let passes = Options::default().passes;
    let mut body = format!(
        "<h2>Settings to try</h2>\n<p class=\"aside\">The same ops, carried out {passes} times under each; what a program would do \
                    differently, and how fast, a replay does not know. Without a limit no setting gives memory back unasked. The command under each \
                    does it again.</p>\n\
                    <table class=\"stacked\"><thead><tr><th>default pool</th><th class=\"n\">peak reserved</th>\
                    <th class=\"n\">compared</th></tr></thead><tbody>\n"
    );
    for trial in &findings.trials {
        body += &format!(
            "<tr><td>{}<br><code class=\"aside\">{}</code></td><td class=\"n\" data-of=\"peak reserved\">{}</td>\
             <td class=\"n\" data-of=\"compared\">{}</td></tr>\n",
            if trial.is_own { format!("<b>as it is:</b> {}", code(&trial.settings)) } else { code(&trial.settings) },
            escape(&trial.command),
            memory(trial.peak_reserved_bytes),
            compared(trial, own)
        );
    }
    body + "</tbody></table>\n"
}

/// What a trial holds beside the job's own settings.
fn compared(trial: &Trial, own_bytes: u64) -> String {
    let percent = |bytes: u64| bytes as f64 * 100.0 / own_bytes.max(1) as f64;
    let bytes = trial.peak_reserved_bytes;
    let mut text = match bytes.cmp(&own_bytes) {
        std::cmp::Ordering::Less => {
            format!("{} less ({:.1} %)", memory(own_bytes - bytes), percent(own_bytes - bytes))
        }
        std::cmp::Ordering::Equal => "the same".to_owned(),
        std::cmp::Ordering::Greater => {
            format!("{} more ({:.1} %)", memory(bytes - own_bytes), percent(bytes - own_bytes))
        }
    };
    if trial.refused > 0 {
        text += &format!("<br>{} refused", count(trial.refused));
    }
    text
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escape(text))
}
