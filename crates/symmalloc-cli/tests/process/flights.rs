//! `symmalloc diff` of flight records: missing ranks, ranks that are behind, and differences.

use crate::{CommandOutput, Folder, symmalloc};
use serde_json::json;
use std::path::{Path, PathBuf};
use symmalloc_watchdog::{
    CollectiveRecord, CollectiveState, CommunicatorId, CommunicatorRecord, FlightRecord, PeerRecord, Progress,
    Signature,
};

const GONE: &str = "gone: its process ended";

fn signature(kind: &str, elements: u64) -> Signature {
    let (data_type, detail) = (Some("float32".to_owned()), None);
    Signature { kind: kind.to_owned(), elements: Some(elements), data_type, detail }
}

/// Returns the record of one of four ranks, with its calls, of which the first `finished` are done.
fn record(rank: u32, calls: &[(&str, u64)], finished: u64) -> FlightRecord {
    let collective = |(number, (kind, elements)): (u64, &(&str, u64))| {
        let state = match number {
            _ if number <= finished => CollectiveState::Finished,
            _ if number == finished + 1 => CollectiveState::Running,
            _ => CollectiveState::Submitted,
        };
        let signature = signature(kind, *elements);
        CollectiveRecord { number, is_point_to_point: false, signature, stream: Some(0), state, age_ms: 10_240 }
    };
    let communicator = CommunicatorRecord {
        id: CommunicatorId::of(b"world"),
        name: "world".to_owned(),
        rank,
        ranks: 4,
        state: "ready".to_owned(),
        cause: None,
        progress: Progress { submitted: calls.len() as u64, finished, is_destroying: false },
        peers: Vec::new(),
        collectives: (1..).zip(calls).map(collective).collect(),
    };
    FlightRecord::new("gpu7".to_owned(), "asked for".to_owned(), vec![communicator])
}

/// Makes the rank abort its communicator because of `cause`.
fn failed(mut record: FlightRecord, cause: &str) -> FlightRecord {
    let communicator = &mut record.communicators[0];
    let rank = communicator.rank;
    let cause = format!("communicator \"world\", rank {rank}: {cause}. Here it waited. Look at that rank");
    (communicator.state, communicator.cause) = ("aborted".to_owned(), Some(cause));
    record
}

/// Adds an observation of another rank.
fn saw(mut record: FlightRecord, rank: u32, submitted: u64, condition: &str) -> FlightRecord {
    let progress = Progress { submitted, finished: submitted, is_destroying: false };
    record.communicators[0].peers.push(PeerRecord { rank, progress, condition: condition.to_owned() });
    record
}

const EVEN: [(&str, u64); 3] = [("all_reduce", 8), ("all_gather", 8), ("all_reduce", 4)];

fn written(folder: &Folder, records: &[FlightRecord]) -> Vec<PathBuf> {
    let file = |record: &FlightRecord| {
        let path = folder.path(&format!("symmalloc-flight-world-rank{}.json", record.communicators[0].rank));
        record.write(&path).unwrap();
        path
    };
    records.iter().map(file).collect()
}

/// Compares these records.
fn compared(records: &[FlightRecord], flags: &str) -> CommandOutput {
    let folder = Folder::new();
    let paths = written(&folder, records);
    let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    symmalloc(&format!("diff{}{flags}", " {}".repeat(paths.len())), &paths)
}

#[track_caller]
fn assert_says(output: &CommandOutput, code: i32, wanted: &[&str]) {
    let text = &output.exited(code).stdout;
    for wanted in wanted {
        assert!(text.contains(wanted), "no {wanted:?} in:\n{text}");
    }
}

#[test]
fn ranks_with_equal_collectives_are_even() {
    let ranks = [0, 1, 2, 3].map(|rank| record(rank, &EVEN, 3));
    let wanted = ["communicator \"world\"  4 ranks, 4 records", "the same 3 collectives, all done", "asked for"];
    assert_says(&compared(&ranks, ""), 0, &wanted);
    let object = compared(&ranks, " --json").json(0);
    let communicator = &object["communicators"][0];
    assert_eq!((&object["trouble"], &communicator["records"]), (&json!(false), &json!(4)));
    let text = "all ranks with a record submitted the same 3 collectives, all done";
    assert_eq!(communicator["findings"], json!([{ "finding": "even", "submitted": 3, "text": text }]));
    assert_eq!(communicator["by_rank"][3]["waits_for"], json!(null));
}

#[test]
fn late_ranks_and_missing_records_are_named_with_the_collective_that_others_wait_for() {
    let gone = "rank 3 is gone: its process ended";
    let ranks = [
        saw(saw(failed(record(0, &EVEN, 2), gone), 1, 2, "silent for 4250 ms"), 3, 2, GONE),
        saw(record(1, &EVEN[..2], 2), 3, 1, "alive"),
        saw(saw(failed(record(2, &EVEN, 2), gone), 1, 2, "alive"), 3, 2, GONE),
    ];
    let output = compared(&ranks, "");
    let wanted = [
        "communicator \"world\"  4 ranks, 3 records",
        "rank 3 left no record, or its file was not given",
        "rank 1 did not reach collective 3 (all_reduce of 4 float32), which others submitted",
        "  0             3         2    aborted  3: all_reduce of 4 float32, running, submitted 10.2 s ago  \
         rank 3 is gone: its process ended\n",
        "  1             2         2      ready  nothing                                                    \
         asked for; silent for 4250 ms (seen by rank 0)\n",
        "  3             2         2  no record  unknown                                                    \
         gone: its process ended (seen by 2 ranks)\n",
    ];
    assert_says(&output, 3, &wanted);
    let object = compared(&ranks, " --json").json(3);
    let communicator = &object["communicators"][0];
    assert_eq!(communicator["findings"][1]["ranks"], json!([1]));
    assert_eq!(communicator["by_rank"][0]["waits_for"]["kind"], "all_reduce");
    assert_eq!(communicator["by_rank"][1]["host"], "gpu7");
    let missing = &communicator["by_rank"][3];
    let seen = json!([{ "as": "alive", "by": [1] }, { "as": GONE, "by": [0, 2] }]);
    assert_eq!((&missing["record"], &missing["submitted"], &missing["seen"]), (&json!(null), &json!(2), &seen));
}

#[test]
fn sizes_that_differ_are_reported_by_rank() {
    let other = [EVEN[0], ("all_gather", 6)];
    let ranks = [0, 1, 2, 3].map(|rank| record(rank, if rank == 2 { &other } else { &EVEN[..2] }, 1));
    let wanted = "collective 2 is the first that differs: ranks 0, 1, 3 called all_gather of 8 float32; \
                  rank 2 called all_gather of 6 float32\n";
    assert_says(&compared(&ranks, ""), 3, &[wanted]);
    let object = compared(&ranks, " --json").json(3);
    let calls = json!([[signature("all_gather", 8), [0, 1, 3]], [signature("all_gather", 6), [2]]]);
    assert_eq!(object["communicators"][0]["findings"][0]["calls"], calls);
}

#[test]
fn an_order_that_differs_is_reported_by_rank() {
    let swapped = [EVEN[1], EVEN[0]];
    let ranks = [0, 1, 2, 3].map(|rank| record(rank, if rank == 1 { &swapped } else { &EVEN[..2] }, 0));
    let wanted = "collective 1 is the first that differs: ranks 0, 2, 3 called all_reduce of 8 float32; \
                  rank 1 called all_gather of 8 float32\n";
    assert_says(&compared(&ranks, ""), 3, &[wanted]);
}

#[test]
fn a_single_record_reports_what_its_rank_knew() {
    let cause = "rank 2 gave up: communicator \"world\", rank 2: out of\nmemory";
    let alone = saw(saw(failed(record(0, &EVEN, 2), cause), 1, 3, "alive"), 3, 2, GONE);
    let wanted = [
        "ranks 1, 2, 3 left no record, or their files were not given",
        "rank 2 gave up: rank 2: out of memory\n",
        "alive (seen by rank 0)",
        "gone: its process ended (seen by rank 0)",
    ];
    assert_says(&compared(&[alone], ""), 3, &wanted);
}

#[test]
fn a_receive_that_a_rank_waits_for_is_shown() {
    let mut ranks = [0, 1, 2, 3].map(|rank| record(rank, &EVEN[..1], 1));
    let mut receive = ranks[1].communicators[0].collectives[0].clone();
    (receive.is_point_to_point, receive.state) = (true, CollectiveState::Running);
    receive.signature = signature("recv", 8);
    ranks[1].communicators[0].collectives.push(receive);
    assert_says(&compared(&ranks, ""), 3, &["recv of 8 float32 has not", "after 1: recv of 8 float32, running"]);
}

#[test]
fn the_ranks_that_are_furthest_behind_are_shown() {
    let ranks: Vec<FlightRecord> = (0..80).map(|rank| record(rank, &EVEN[..usize::from(rank != 70)], 0)).collect();
    let output = compared(&ranks, "");
    assert_says(&output, 3, &["  70            0  ", "and 16 ranks at least as far"]);
    assert!(output.stdout.lines().count() < 80, "{}", output.stdout);
}
