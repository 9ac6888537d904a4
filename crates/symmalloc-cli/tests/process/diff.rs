//! Tests of `symmalloc diff`.

use crate::{Folder, recorded, symmalloc};
use serde_json::json;

#[test]
fn two_ranks_of_a_recorded_job_made_the_same_calls_and_placed_most_of_them_differently() {
    for extension in ["pickle.gz", "trace.zst"] {
        let [a, b] = [0, 1].map(|rank| recorded(&format!("fsdp1_train_rank{rank}.{extension}")));
        let output = symmalloc("diff {} {} --json", &[&a, &b]).json(3);
        assert_eq!(
            output,
            json!({
                "schema_version": 1,
                "same_ops": true,
                "compared_ops": 48_883,
                "uses_left_out": { "a": 2_542, "b": 2_010 },
                "allocs": 24_464,
                "differing_placements": 15_265,
                "first": {
                    "allocation": 143,
                    "op": 271,
                    "a": { "segment": 33, "offset": 0 },
                    "b": { "segment": 40, "offset": 0 },
                },
            })
        );
        let words = symmalloc("diff {} {}", &[&a, &b]);
        let words = &words.exited(3).stdout;
        for wanted in [
            "15,265 of 24,464 differ",
            "op 271 (allocation 143) of A",
            "the same: 24,464 allocations and 24,419 other ops",
            "uses by other streams, 2,542 in A and 2,010 in B",
        ] {
            assert!(words.contains(wanted), "no {wanted:?} in:\n{words}");
        }
    }
}

#[test]
fn a_job_without_polling_differs_less_but_differs() {
    let [a, b] = [0, 1].map(|rank| recorded(&format!("fsdp_train_rank{rank}.trace.zst")));
    let output = symmalloc("diff {} {} --json", &[&a, &b]).json(3);
    assert_eq!((&output["same_ops"], &output["allocs"]), (&true.into(), &30_386.into()));
    assert_eq!(output["differing_placements"], 446);
}

#[test]
fn a_recording_and_its_import_are_the_same() {
    let folder = Folder::new();
    let snapshot = recorded("fsdp1_train_rank0.pickle.gz");
    let trace = folder.path("imported.trace.gz");
    symmalloc("import {} {}", &[&snapshot, &trace]).exited(0);
    let output = symmalloc("diff {} {} --json", &[&snapshot, &trace]).json(0);
    assert_eq!((&output["same_ops"], &output["allocs"]), (&true.into(), &24_464.into()));
    assert_eq!((&output["differing_placements"], &output["first"]), (&0.into(), &json!(null)));
}

#[test]
fn the_first_op_that_differs_is_reported_for_both_recordings() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &["stream s0", "a 0 512 s0 -> 0@0", "a 1 1024 s0 -> 0@512", "f 0"]);
    let b = folder.trace("b.trace", &["stream s0", "a 5 512 s0 -> 0@0", "a 6 2048 s0 -> 0@512", "f 5"]);
    let output = symmalloc("diff {} {} --json", &[&a, &b]).json(3);
    assert_eq!((&output["same_ops"], &output["allocs"]), (&false.into(), &1.into()));
    assert_eq!(output["first_op_difference"]["a"]["op"], 2);
    let words = symmalloc("diff {} {}", &[&a, &b]);
    let words = &words.exited(3).stdout;
    assert!(words.contains("1,024 bytes") && words.contains("2,048 bytes"), "{words}");
}

#[test]
fn recordings_without_placements_are_compared_by_their_ops() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &["stream s0", "a 0 512 s0"]);
    let output = symmalloc("diff {} {} --json", &[&a, &a]).json(0);
    assert_eq!((&output["same_ops"], &output["compared_ops"], &output["allocs"]), (&true.into(), &1.into(), &1.into()));
    assert_eq!((&output["differing_placements"], &output["first"]), (&json!(null), &json!(null)));
    assert!(symmalloc("diff {} {}", &[&a, &a]).exited(0).stdout.contains("neither recording contains placements"));
}
