//! Tests of `symmalloc address`.

use crate::{Folder, symmalloc};
use serde_json::Value;

const RMM_LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    7,12:00:00.000000,allocate,0x30a000000,4096,0x2\n\
    7,12:00:00.000001,allocate,0x30a001000,4096,0x2\n\
    7,12:00:00.000002,allocate,0x30a002000,4096,0x2\n\
    7,12:00:00.000003,free,0x30a001000,4096,0x2\n\
    7,12:00:00.000004,allocate,0x30a001000,1024,0x2\n";

#[test]
fn an_address_names_the_allocations_that_contained_it_and_their_neighbors() {
    let folder = Folder::new();
    let log = folder.file("rmm.csv", RMM_LOG);
    let printed = symmalloc("address 0x30a001010 {}", &[&log]);
    let words = &printed.exited(0).stdout;
    assert!(words.starts_with("0x30a001010 was in 2 allocations\n  byte 16 of allocation 3: 1.00 KiB"), "{words}");
    assert!(words.contains("allocation 1: 4.00 KiB at 0x30a001000, p0, s0, op 2 to 4"), "{words}");
    let printed = symmalloc("address 0x30a001010 {} --json", &[&log]);
    let found: Value = serde_json::from_str(&printed.exited(0).stdout).expect("JSON");
    assert_eq!(found["containing"][0]["freed_at_op"], Value::Null);
    assert_eq!((&found["before"]["allocation"], &found["after"]["allocation"]), (&0.into(), &2.into()));
    let printed = symmalloc("address 0x30a001800 {}", &[&log]);
    assert!(printed.exited(0).stdout.contains("was in 1 allocation\n"), "past the second one's end");
    let printed = symmalloc("address 16 {}", &[&log]);
    assert!(printed.exited(0).stdout.contains("was in 0 allocations\nafter it, at the end: allocation 0"));
}

#[test]
fn a_trace_has_places_and_no_addresses() {
    let folder = Folder::new();
    let trace = folder.file("job.trace", "symmalloc-trace 2\nstream s0\na 0 4096 s0 \"scores\" -> 0@512\nf 0\nend 3\n");
    let printed = symmalloc("address 0@600 {}", &[&trace]);
    let words = &printed.exited(0).stdout;
    assert!(words.contains("byte 88 of allocation 0 (scores): 4.00 KiB at 0@512, p0, s0, op 1 to 2"), "{words}");
    let refused = symmalloc("address 0x600 {}", &[&trace]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("a trace contains no addresses"), "{}", refused.stderr);
    let refused = symmalloc("address x {}", &[&trace]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("expected an address as in 0x7f1234567000"), "{}", refused.stderr);
}

#[test]
fn a_flight_record_names_live_and_freed_allocations() {
    let folder = Folder::new();
    let record = r#"{"symmalloc_flight_record": 1, "host": "", "process": 1, "reason": "a fault", "communicators": [], "memory": [
        {"device": 0, "address": 4096, "size_bytes": 4096, "name": "scores", "pool": 0, "stream": 1, "allocated_at_op": 7, "freed_at_op": 9},
        {"device": 0, "address": 4096, "size_bytes": 512, "name": "weights", "pool": 0, "stream": 1, "used_by": [2]},
        {"device": 0, "address": 8192, "size_bytes": 512, "pool": 3, "stream": 0}]}"#;
    let file = folder.file("flight.json", record);
    let printed = symmalloc("address 0x1010 {}", &[&file]);
    let words = &printed.exited(0).stdout;
    assert!(
        words.starts_with(
            "0x1010 was in 2 allocations\n  byte 16 of allocation 1 (weights): 512 B at 0x1000, p0, s1, not freed"
        ),
        "{words}"
    );
    assert!(words.contains("allocation 0 (scores): 4.00 KiB at 0x1000, p0, s1, op 7 to 9"), "{words}");
    assert!(words.contains("after it, at the end: allocation 2: 512 B at 0x2000, p3, s0, not freed"), "{words}");
    let empty =
        folder.file("empty.json", record.split(", \"memory\"").next().map(|head| format!("{head}}}")).expect("a head"));
    let refused = symmalloc("address 0x1010 {}", &[&empty]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("no addresses"), "{}", refused.stderr);
}
