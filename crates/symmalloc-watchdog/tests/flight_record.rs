//! Tests of flight records as files, and of the findings from the records of all ranks.

use std::fs;
use std::path::{Path, PathBuf};
use symmalloc_watchdog::{
    CollectiveRecord, CollectiveState, CommunicatorId, CommunicatorRecord, Finding, Findings, FlightRecord,
    FlightRecordError, Progress, Signature,
};
use tempfile::tempdir;

fn all_reduce(elements: u64) -> Signature {
    let word = |text: &str| Some(text.to_owned());
    Signature {
        kind: "all_reduce".to_owned(),
        elements: Some(elements),
        data_type: word("float32"),
        detail: word("sum"),
    }
}

/// Returns the record of a rank that submitted all-reduces of these `elements` and finished the first `finished`.
fn rank(rank: u32, ranks: u32, elements: &[u64], finished: u64) -> FlightRecord {
    let collective = |(at, elements): (usize, &u64)| {
        let number = at as u64 + 1;
        let state = match number {
            _ if number <= finished => CollectiveState::Finished,
            _ if number == finished + 1 => CollectiveState::Running,
            _ => CollectiveState::Submitted,
        };
        CollectiveRecord {
            number,
            is_point_to_point: false,
            signature: all_reduce(*elements),
            stream: Some(0),
            state,
            age_ms: 10,
        }
    };
    let communicator = CommunicatorRecord {
        id: CommunicatorId::of(b"world"),
        name: "world".to_owned(),
        rank,
        ranks,
        state: "ready".to_owned(),
        cause: None,
        progress: Progress { submitted: elements.len() as u64, finished, is_destroying: false },
        peers: Vec::new(),
        collectives: elements.iter().enumerate().map(collective).collect(),
    };
    FlightRecord::new("gpu7".to_owned(), "asked for".to_owned(), vec![communicator])
}

fn findings(records: &[FlightRecord]) -> Vec<Finding> {
    let mut found = Findings::new(records);
    assert_eq!(found.communicators.len(), 1);
    found.communicators.remove(0).2
}

#[test]
fn a_written_record_reads_back() {
    let folder = tempdir().expect("a folder should be created");
    let path = folder.path().join("rank0.json");
    let record = rank(0, 2, &[8, 8, 4], 2);
    fs::write(&path, "older").expect("the write should succeed");
    record.write(&path).expect("the write should succeed");
    assert_eq!(FlightRecord::read(&path).expect("the read should succeed"), record);
    assert_eq!(
        fs::read_dir(folder.path()).expect("the folder should be readable").count(),
        1,
        "no temporary file is left"
    );
}

#[test]
fn other_files_are_not_records() {
    let folder = tempdir().expect("a folder should be created");
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("the write should succeed");
        path
    };
    let whole = rank(0, 2, &[8, 8, 4], 2).to_json();
    let torn = file("torn.json", &whole[..whole.len() / 2]);
    assert!(matches!(FlightRecord::read(&torn), Err(FlightRecordError::Malformed { .. })));
    let other = file("other.json", "{\"a\": 1}");
    assert!(matches!(FlightRecord::read(&other), Err(FlightRecordError::Malformed { .. })));
    let later = file("later.json", "{\"symmalloc_flight_record\": 2, \"new\": true}");
    let error = FlightRecord::read(&later).expect_err("the version is not supported");
    assert!(matches!(error, FlightRecordError::Version { version: 2, .. }), "{error}");
    let missing = FlightRecord::read(&folder.path().join("missing.json"));
    assert!(matches!(missing, Err(FlightRecordError::Io { .. })));
    let record = rank(0, 2, &[], 0);
    assert!(matches!(record.write(&folder.path().join("no/folder.json")), Err(FlightRecordError::Io { .. })));
}

/// A file with corrupt numbers, or an endless one, costs no more memory than a valid one.
#[test]
fn corrupt_records_cost_little_memory() {
    let endless = FlightRecord::from_reader(std::io::repeat(b' '), Path::new("endless"));
    assert!(matches!(endless, Err(FlightRecordError::TooLarge { .. })));
    let mut record = rank(0, u32::MAX, &[], 0);
    let one = record.communicators.remove(0);
    record.communicators = (0..1000).map(|id| CommunicatorRecord { id: CommunicatorId(id), ..one.clone() }).collect();
    let found = Findings::new(&[record]);
    let missing = |finding: &Finding| if let Finding::NoRecord { ranks } = finding { ranks.len() } else { 0 };
    let listed: usize = found.communicators.iter().flat_map(|(_, _, findings)| findings).map(missing).sum();
    assert_eq!((found.communicators.len(), listed), (1000, 1 << 20));
}

#[test]
fn even_ranks_are_not_a_problem() {
    let records = [rank(0, 2, &[8, 8], 2), rank(1, 2, &[8, 8], 2)];
    let found = findings(&records);
    assert_eq!(found, [Finding::Even { submitted: 2 }]);
    assert_eq!(found[0].to_string(), "all ranks with a record submitted the same 2 collectives, all done");
    assert!(!Findings::new(&records).is_trouble());
}

#[test]
fn a_rank_that_missed_a_collective_is_named() {
    let records = [rank(0, 3, &[8, 8, 4], 2), rank(1, 3, &[8, 8], 2), rank(2, 3, &[8, 8, 4], 2)];
    let found = findings(&records);
    let behind = Finding::Behind { number: 3, signature: Some(all_reduce(4)), ranks: vec![1] };
    assert_eq!(found, [behind]);
    assert_eq!(
        found[0].to_string(),
        "rank 1 did not reach collective 3 (all_reduce of 4 float32 sum), which others submitted"
    );
    assert!(Findings::new(&records).is_trouble());
}

#[test]
fn only_the_rank_that_is_furthest_behind_is_named() {
    let records = [rank(0, 3, &[8, 8, 4], 0), rank(1, 3, &[8, 8], 0), rank(2, 3, &[8], 0)];
    let behind = Finding::Behind { number: 2, signature: Some(all_reduce(8)), ranks: vec![2] };
    assert_eq!(findings(&records), [behind]);
    // No record contains the collective any longer.
    let mut records = [rank(0, 2, &[8, 8, 4], 3), rank(1, 2, &[], 0)];
    records[0].communicators[0].collectives.remove(0);
    let found = findings(&records);
    assert_eq!(found, [Finding::Behind { number: 1, signature: None, ranks: vec![1] }]);
    assert_eq!(found[0].to_string(), "rank 1 did not reach collective 1, which others submitted");
}

#[test]
fn the_first_collective_that_differs_is_named_with_what_each_called() {
    let records = [rank(0, 3, &[8, 8, 4], 1), rank(1, 3, &[8, 6, 4], 1), rank(2, 3, &[8, 8], 1)];
    let calls = vec![(all_reduce(8), vec![0, 2]), (all_reduce(6), vec![1])];
    let found = findings(&records);
    assert_eq!(found, [Finding::Differs { number: 2, calls }]);
    assert_eq!(
        found[0].to_string(),
        "collective 2 is the first that differs: ranks 0, 2 called all_reduce of 8 float32 sum; \
         rank 1 called all_reduce of 6 float32 sum"
    );
}

#[test]
fn a_rank_that_is_missing_before_the_first_difference_is_named_as_well() {
    let records = [rank(0, 3, &[8, 8, 4], 1), rank(1, 3, &[8, 8, 5], 1), rank(2, 3, &[8], 1)];
    let behind = Finding::Behind { number: 2, signature: Some(all_reduce(8)), ranks: vec![2] };
    let calls = vec![(all_reduce(4), vec![0]), (all_reduce(5), vec![1])];
    assert_eq!(findings(&records), [behind, Finding::Differs { number: 3, calls }]);
}

#[test]
fn a_collective_that_all_ranks_reached_and_that_hangs_is_named() {
    let records = [rank(0, 3, &[8, 8], 1), rank(1, 3, &[8, 8], 2), rank(2, 3, &[8, 8], 0)];
    let states = vec![(CollectiveState::Running, vec![2])];
    assert_eq!(findings(&records), [Finding::Unfinished { number: 1, signature: all_reduce(8), states }]);
    let found = findings(&[rank(0, 2, &[8, 8], 1), rank(1, 2, &[8, 8], 1)]);
    assert_eq!(
        found[0].to_string(),
        "all ranks with a record reached collective 2 (all_reduce of 8 float32 sum), which has not finished: \
         running on ranks 0, 1"
    );
}

#[test]
fn a_receive_that_hangs_is_named_and_a_send_of_one_rank_is_no_difference() {
    let receive = |record: &mut FlightRecord, state| {
        let mut last = record.communicators[0].collectives[1].clone();
        (last.is_point_to_point, last.state) = (true, state);
        last.signature = Signature { kind: "recv".to_owned(), detail: Some("from 0".to_owned()), ..last.signature };
        record.communicators[0].collectives.push(last);
    };
    let mut records = [rank(0, 2, &[8, 8], 2), rank(1, 2, &[8, 8], 2)];
    receive(&mut records[1], CollectiveState::Finished);
    assert_eq!(findings(&records), [Finding::Even { submitted: 2 }]);
    assert_eq!(records[1].communicators[0].first_unfinished(), None);
    receive(&mut records[1], CollectiveState::Running);
    let found = findings(&records);
    assert_eq!(
        found[0].to_string(),
        "all collectives have finished, but recv of 8 float32 from 0 has not: running on rank 1"
    );
    assert!(Findings::new(&records).is_trouble());
    let waits_for = records[1].communicators[0].first_unfinished().expect("the rank waits for a call");
    assert!(waits_for.is_point_to_point && waits_for.state == CollectiveState::Running);
}

#[test]
fn a_rank_without_a_record_is_named() {
    let found = findings(&[rank(0, 3, &[8], 0), rank(2, 3, &[8], 0)]);
    assert_eq!(found[0], Finding::NoRecord { ranks: vec![1] });
    assert_eq!(found[0].to_string(), "rank 1 left no record, or its file was not given");
    let missing = &findings(&[rank(0, 40, &[8], 1)])[0];
    let list = "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 23 more";
    assert_eq!(missing.to_string(), format!("{list} left no record, or their files were not given"));
    assert_eq!(findings(&[rank(0, 2, &[8], 1), rank(0, 2, &[8], 1)]), [Finding::RankTwice { rank: 0 }]);
    let differ = findings(&[rank(0, 2, &[8], 1), rank(1, 3, &[8], 1)]);
    assert_eq!(differ[0], Finding::RanksDiffer { said: vec![(2, vec![0]), (3, vec![1])] });
    assert_eq!(differ[0].to_string(), "the records disagree on the number of ranks: 2 on rank 0; 3 on rank 1");
}

#[cfg(unix)]
#[test]
fn a_planted_link_does_not_lead_a_record_to_another_file() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let folder = tempdir().expect("a folder should be created");
    let record = FlightRecord::new("node7".to_owned(), "asked for".to_owned(), Vec::new());
    let (victim, path) = (folder.path().join("victim"), folder.path().join("record.json"));
    fs::write(&victim, "precious").expect("the write should succeed");
    for name in ["record.json".to_owned(), format!("record.json.{}.part", std::process::id())] {
        symlink(&victim, folder.path().join(name)).expect("the link is created");
    }
    record.write(&path).expect("the write should succeed");
    assert_eq!(fs::read(&victim).expect("the file should be kept"), b"precious");
    let written = fs::symlink_metadata(&path).expect("the file should have been written");
    assert_eq!((written.is_file(), written.mode() & 0o777), (true, 0o600));
    assert_eq!(FlightRecord::read(&path).expect("the record is complete"), record);
}
