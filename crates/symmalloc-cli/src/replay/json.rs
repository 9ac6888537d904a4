//! The output of `replay --json`. Its keys are an interface: `symmalloc replay --help` lists them.

use super::finding::ReplayFinding;
use crate::job::{Decision, Divergence, Order, Outcome, Segments};
use serde_json::{Value, json};
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::Placement;
use symmalloc_import::Recording;

/// Returns the object of one trace, including the results of PyTorch's rule.
pub(super) fn object(recording: &Recording, finding: &ReplayFinding<'_>, others: &[Outcome]) -> Value {
    let ReplayFinding { path, job, outcome, nanoseconds_per_op } = finding;
    let mut object = json!({
        "trace": path.display().to_string(),
        "ops": job.program().ops().len(),
        "allocs": job.program().allocation_count(),
        "lived_before": recording.summary.lived_before,
        "lived_before_bytes": recording.summary.lived_before_bytes,
        "is_overwritten": recording.summary.is_overwritten,
    });
    extend(&mut object, of(outcome));
    let ours = json!({
        "ns_per_op": nanoseconds_per_op.map(|nanoseconds| rounded(nanoseconds, 1e2)),
        "digest": outcome.digest.map(|digest| format!("{digest:016x}")),
        "planned_ops_share": outcome.planned.map(|planned| rounded(planned.share(), 1e6)),
        "pytorch": others.iter().map(of).collect::<Vec<_>>(),
    });
    extend(&mut object, ours);
    object
}

/// Returns the keys that describe a job's outcome under one rule.
fn of(outcome: &Outcome) -> Value {
    json!({
        "ranks": outcome.ranks,
        "passes": outcome.passes,
        "order": match outcome.order {
            Order::Sequence => "sequence",
            Order::Address => "address",
        },
        "segments": segments_name(outcome.segments),
        "streams": streams_name(outcome.streams),
        "aligned": outcome.is_aligned(),
        "differing_placements": outcome.differing_placements,
        "refused": outcome.refused,
        "first_divergence": outcome.first_divergence.as_ref().map(first),
        "peak_live_bytes": outcome.peaks.live_bytes,
        "peak_reserved_bytes": outcome.peaks.reserved_bytes,
        "efficiency": rounded(outcome.peaks.efficiency(), 1e6),
        "first_pass": {
            "peak_reserved_bytes": outcome.first_pass.reserved_bytes,
            "efficiency": rounded(outcome.first_pass.efficiency(), 1e6),
            "refused": outcome.first_pass_refused,
        },
        "segment_count": outcome.segment_count,
    })
}

fn extend(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

fn first(divergence: &Divergence) -> Value {
    let on_rank = |(rank, decision): (usize, &Decision)| {
        let placement = decision.filter(|placement| *placement != Placement::NOWHERE);
        let segment = placement.map(|placement| placement.segment.0);
        json!({ "rank": rank, "segment": segment, "offset": placement.map(|placement| placement.offset_bytes) })
    };
    let ranks: Vec<Value> = divergence.decisions.iter().enumerate().map(on_rank).collect();
    let mut first = json!({ "op": divergence.op, "allocation": divergence.allocation });
    if let Some(name) = &divergence.name {
        first["name"] = json!(name);
    }
    if divergence.pass > 0 {
        first["pass"] = json!(divergence.pass);
    }
    first["ranks"] = json!(ranks);
    first
}

pub(super) fn segments_name(segments: Option<Segments>) -> &'static str {
    match segments {
        Some(Segments::Expandable) => "expandable",
        Some(Segments::Fixed) => "fixed",
        None => "reserved",
    }
}

pub(super) fn streams_name(streams: StreamPolicy) -> &'static str {
    streams.word()
}

/// Rounds to a multiple of `1 / scale`, to drop insignificant digits.
fn rounded(value: f64, scale: f64) -> f64 {
    (value * scale).round() / scale
}
