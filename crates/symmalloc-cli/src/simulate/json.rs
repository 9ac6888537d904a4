//! The output of `simulate --json`. Its keys are an interface: `symmalloc simulate --help` lists them.

use super::finding::{SavedFailure, SimulationFinding};
use serde_json::{Value, json};

/// Returns the object of one trace, or of the generated jobs.
pub(super) fn object(finding: &SimulationFinding<'_>) -> Value {
    let outcome = &finding.outcome;
    json!({
        "trace": finding.source.path().map(|path| path.display().to_string()),
        "seed": finding.args.seed,
        "runs": finding.runs,
        "ranks": outcome.ranks,
        "ops": outcome.ops,
        "private_ops": outcome.private_ops,
        "planned": outcome.planned,
        "differing": outcome.differing,
        "syncs": outcome.syncs,
        "failed_calls": outcome.faults.failed_calls,
        "ranks_with_failed_calls": outcome.faults.ranks,
        "out_of_memory": outcome.faults.out_of_memory,
        "refused": outcome.faults.refused,
        "losses": outcome.faults.losses,
        "small_devices": outcome.faults.small_devices,
        "restarts": outcome.restarts,
        "left": outcome.left,
        "caught": outcome.caught,
        "checks": outcome.checks,
        "device_bytes_peak": outcome.device_bytes_peak,
        "state_bytes_per_rank": finding.state_bytes_per_rank,
        "seconds": (finding.elapsed.as_secs_f64() * 1e3).round() / 1e3,
        "digest": format!("{:016x}", outcome.digest),
        "failure": finding.failure.as_ref().map(failed),
    })
}

fn failed(saved: &SavedFailure) -> Value {
    let SavedFailure { shrunk, first, story } = saved;
    json!({
        "seed": first.seed,
        "rank": first.rank,
        "step": first.step,
        "op": first.op.clone(),
        "cause": first.cause.to_string(),
        "report": first.report.clone(),
        "trace": story.display().to_string(),
        "shrunk_ops": shrunk.plan.steps().len(),
        "shrunk_ranks": shrunk.plan.ranks().len(),
    })
}
