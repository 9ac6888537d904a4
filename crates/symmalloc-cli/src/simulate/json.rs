//! What `simulate --json` prints. Its keys are an interface: `symmalloc simulate --help` lists them.

use super::{Finding, Told};
use serde::Serialize;

/// The runs of one trace, or of generated jobs.
#[derive(Debug, Serialize)]
pub(super) struct Object {
    trace: Option<String>,
    seed: u64,
    runs: u64,
    ranks: u64,
    ops: u64,
    private_ops: u64,
    syncs: u64,
    failed_calls: u64,
    ranks_with_failed_calls: u64,
    out_of_memory: u64,
    refused: u64,
    losses: u64,
    small_devices: u64,
    restarts: u64,
    left: u64,
    caught: u64,
    checks: u64,
    device_bytes_peak: u64,
    state_bytes_per_rank: Option<u64>,
    seconds: f64,
    digest: String,
    failure: Option<Failed>,
}

#[derive(Debug, Serialize)]
struct Failed {
    seed: u64,
    rank: Option<u32>,
    step: Option<usize>,
    op: Option<Box<str>>,
    cause: String,
    report: Option<Box<str>>,
    trace: String,
    shrunk_ops: usize,
    shrunk_ranks: usize,
}

impl Object {
    pub(super) fn new(finding: &Finding<'_>) -> Self {
        let outcome = &finding.outcome;
        Object {
            trace: finding.source.path().map(|path| path.display().to_string()),
            seed: finding.args.seed,
            runs: finding.runs,
            ranks: outcome.ranks,
            ops: outcome.ops,
            private_ops: outcome.private_ops,
            syncs: outcome.syncs,
            failed_calls: outcome.faults.failed_calls,
            ranks_with_failed_calls: outcome.faults.ranks,
            out_of_memory: outcome.faults.out_of_memory,
            refused: outcome.faults.refused,
            losses: outcome.faults.losses,
            small_devices: outcome.faults.small_devices,
            restarts: outcome.restarts,
            left: outcome.left,
            caught: outcome.caught,
            checks: outcome.checks,
            device_bytes_peak: outcome.device_bytes_peak,
            state_bytes_per_rank: finding.state_bytes_per_rank,
            seconds: (finding.elapsed.as_secs_f64() * 1e3).round() / 1e3,
            digest: format!("{:016x}", outcome.digest),
            failure: finding.failure.as_ref().map(Failed::new),
        }
    }
}

impl Failed {
    fn new(told: &Told) -> Self {
        let Told { shrunk, first, story } = told;
        Failed {
            seed: first.seed,
            rank: first.rank,
            step: first.step,
            op: first.op.clone(),
            cause: first.cause.to_string(),
            report: first.report.clone(),
            trace: story.display().to_string(),
            shrunk_ops: shrunk.plan.steps().len(),
            shrunk_ranks: shrunk.plan.ranks().len(),
        }
    }
}

/// The array of all objects.
pub(super) fn text(objects: &[Object]) -> String {
    let mut text = serde_json::to_string_pretty(objects).expect("plain numbers and strings have a JSON form");
    text.push('\n');
    text
}
