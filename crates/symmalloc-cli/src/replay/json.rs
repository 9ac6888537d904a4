//! What `replay --json` prints. Its keys are an interface: `symmalloc replay --help` lists them.

use super::finding::Finding;
use crate::job::{Decision, Divergence, Order, Segments};
use serde::Serialize;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::Placement;

/// One trace.
#[derive(Debug, Serialize)]
pub(super) struct Object {
    trace: String,
    ops: usize,
    allocs: usize,
    ranks: u32,
    order: &'static str,
    segments: &'static str,
    streams: &'static str,
    aligned: bool,
    differing_placements: usize,
    first_divergence: Option<First>,
    peak_live_bytes: u64,
    peak_reserved_bytes: u64,
    efficiency: f64,
    segment_count: u64,
    ns_per_op: Option<f64>,
    digest: Option<String>,
}

#[derive(Debug, Serialize)]
struct First {
    op: usize,
    allocation: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Box<str>>,
    /// Only where it is not the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    repeat: Option<u32>,
    ranks: Vec<OnRank>,
}

#[derive(Debug, Serialize)]
struct OnRank {
    rank: usize,
    segment: Option<u32>,
    offset: Option<u64>,
}

impl Object {
    pub(super) fn new(finding: &Finding<'_>) -> Self {
        let Finding { path, job, outcome, nanoseconds_per_op } = finding;
        Object {
            trace: path.display().to_string(),
            ops: job.program().ops().len(),
            allocs: job.program().allocation_count(),
            ranks: outcome.ranks,
            order: match outcome.order {
                Order::Sequence => "sequence",
                Order::Address => "address",
            },
            segments: segments_name(outcome.segments),
            streams: streams_name(outcome.streams),
            aligned: outcome.is_aligned(),
            differing_placements: outcome.differing_placements,
            first_divergence: outcome.first_divergence.as_ref().map(First::new),
            peak_live_bytes: outcome.peak_live_bytes,
            peak_reserved_bytes: outcome.peak_reserved_bytes,
            efficiency: rounded(outcome.efficiency(), 1e6),
            segment_count: outcome.segment_count,
            ns_per_op: nanoseconds_per_op.map(|nanoseconds| rounded(nanoseconds, 1e2)),
            digest: outcome.digest.map(|digest| format!("{digest:016x}")),
        }
    }
}

impl First {
    fn new(divergence: &Divergence) -> Self {
        let on_rank = |(rank, decision): (usize, &Decision)| {
            let placement = decision.filter(|placement| *placement != Placement::NOWHERE);
            OnRank {
                rank,
                segment: placement.map(|placement| placement.segment.0),
                offset: placement.map(|placement| placement.offset_bytes),
            }
        };
        First {
            op: divergence.op,
            allocation: divergence.allocation,
            name: divergence.name.clone(),
            repeat: (divergence.repeat > 0).then_some(divergence.repeat),
            ranks: divergence.decisions.iter().enumerate().map(on_rank).collect(),
        }
    }
}

pub(super) fn segments_name(segments: Option<Segments>) -> &'static str {
    match segments {
        Some(Segments::Expandable) => "expandable",
        Some(Segments::Fixed) => "fixed",
        None => "reserved",
    }
}

pub(super) fn streams_name(streams: StreamPolicy) -> &'static str {
    match streams {
        StreamPolicy::Shared => "shared",
        _ => "separate",
    }
}

/// Rounded to one part of `scale`, so that what is printed has no digits that mean nothing.
fn rounded(value: f64, scale: f64) -> f64 {
    (value * scale).round() / scale
}

/// The array of all traces.
pub(super) fn text(objects: &[Object]) -> String {
    let mut text = serde_json::to_string_pretty(objects).expect("plain numbers and strings have a JSON form");
    text.push('\n');
    text
}
