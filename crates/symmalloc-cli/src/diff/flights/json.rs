//! The output of `diff --json` for flight records. Its keys are an interface: `symmalloc diff --help` lists them.

use super::rows::{CommunicatorFlights, RankFlight};
use serde_json::{Value, json};
use symmalloc_watchdog::Finding;

pub(super) fn object(communicators: &[CommunicatorFlights<'_>], is_trouble: bool) -> Value {
    let communicators: Vec<Value> = communicators.iter().map(communicator).collect();
    json!({ "trouble": is_trouble, "communicators": communicators })
}

fn communicator(flights: &CommunicatorFlights<'_>) -> Value {
    json!({
        "communicator": flights.name,
        "id": flights.id.to_string(),
        "ranks": flights.ranks,
        "records": flights.records,
        "findings": flights.findings.iter().map(finding).collect::<Vec<_>>(),
        "by_rank": flights.rows.iter().map(|(rank, of)| row(*rank, of)).collect::<Vec<_>>(),
    })
}

/// Returns a finding as JSON, with its text.
fn finding(finding: &Finding) -> Value {
    let mut object = serde_json::to_value(finding).expect("plain numbers and strings have a JSON form");
    object["text"] = json!(finding.to_string());
    object
}

fn row(rank: u32, row: &RankFlight<'_>) -> Value {
    let (record, of) = (row.record.as_ref(), row.record.as_ref().map(|record| record.communicator));
    json!({
        "rank": rank,
        "submitted": row.progress().submitted,
        "finished": row.progress().finished,
        "record": record.map(|record| record.path.display().to_string()),
        "host": record.map(|record| &record.process.host),
        "process": record.map(|record| record.process.process),
        "reason": record.map(|record| &record.process.reason),
        "state": of.map(|of| &of.state),
        "cause": of.and_then(|of| of.cause.as_ref()),
        "waits_for": of.and_then(|of| of.first_unfinished()),
        "seen": row.seen.iter().map(|(as_what, by)| json!({ "as": as_what, "by": by })).collect::<Vec<_>>(),
    })
}
