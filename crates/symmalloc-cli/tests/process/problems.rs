//! Answers to the questions of people with a problem: what failed, why, and what to change. The recordings of `tests/reports` come from
//! public reports.

use crate::{Folder, symmalloc};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn reported(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reports").join(name)
}

/// Returns the JSON, the text and the page of a report.
fn report(recording: &Path) -> (Value, String, String) {
    let folder = Folder::new();
    let out = folder.path("report.html");
    let object = symmalloc("report {} -o {} --json", &[recording, &out]).json(0);
    let text = symmalloc("report {} -o {}", &[recording, &out]).exited(0).stdout.clone();
    (object, text, fs::read_to_string(&out).unwrap())
}

const GIB: u64 = 1 << 30;

#[test]
fn a_request_that_cannot_fit_is_the_center_of_the_report() {
    let (object, text, page) = report(&reported("oom.pickle"));
    let failure = &object["failure"];
    assert_eq!((&failure["op"], &failure["size_bytes"], &object["op"]), (&json!(2), &json!(10 * GIB), &json!(2)));
    assert_eq!((&failure["cause"], &failure["capacity_bytes"]), (&json!("too much"), &json!(5 * GIB / 2)));
    assert_eq!(failure["held"]["reserved_bytes"], 2 * GIB);
    assert!(failure["attempts"].as_array().unwrap().iter().all(|attempt| attempt["is_served"] == false), "{failure}");
    for wanted in [
        "requested 10.00 GiB in pool 0 on stream 0 (the default stream), and PyTorch refused it",
        "2.00 GiB live, 2.00 GiB reserved, nothing of it free; 512.00 MiB free on the device",
        "need 12.00 GiB, but only 2.50 GiB is available to the allocator: 9.50 GiB are missing",
        "no allocator can serve it: free 9.50 GiB before this op, or request less",
        "2.00 GiB in 1 allocation of 2.00 GiB without a name",
    ] {
        assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    assert!(page.find("The request that failed") < page.find("peak reserved"), "the failure comes first");
    // The request is a part of limit checks, in the limit that PyTorch had and in others.
    for (limit_mb, code) in [(2560, 3), (12_000, 3), (12_288, 0)] {
        let command = format!("replay {{}} --config total_limit_mb:{limit_mb}");
        assert_eq!(symmalloc(&command, &[&reported("oom.pickle")]).code, Some(code), "{limit_mb} MiB");
    }
}

/// A refused reservation is a failure, too, although no allocation is refused.
#[test]
fn a_refused_reservation_is_the_center_of_the_report() {
    let folder = Folder::new();
    let config = "config segments:expandable,total_limit_mb:64";
    let (object, text, _) =
        report(&folder.trace("reserve.trace", &[config, "stream s0", "a 0 1048576 s0", "reserve 134217728 s0", "f 0"]));
    assert_eq!(
        (&object["failure"]["op"], &object["failure"]["size_bytes"]),
        (&json!(2), &json!(134_217_728)),
        "{text}"
    );
}

#[test]
fn a_request_that_fails_by_fragmentation_is_served_within_the_same_memory() {
    let (object, text, page) = report(&reported("oom_fragmented.pickle"));
    let failure = &object["failure"];
    assert_eq!((&failure["cause"], &failure["live_bytes"]), (&json!("fragmentation"), &json!(2 * GIB)));
    let own = &failure["attempts"][0];
    assert_eq!(
        (&own["settings"], &own["is_served"]),
        (&json!("segments:expandable,total_limit_mb:6656"), &json!(true))
    );
    for wanted in [
        "6.00 GiB reserved, 4.00 GiB of it free in 2 pieces, the largest of 2.00 GiB",
        "symmalloc serves it within the same 6,656 MiB with segments:expandable",
    ] {
        assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    let fixed = failure["attempts"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["settings"] == "segments:fixed,total_limit_mb:6656");
    assert_eq!(fixed.unwrap()["is_served"], true, "whole segments go back to the device: {failure}");
    for command in [own["command"].as_str().unwrap(), "replay {} --config total_limit_mb:6656"] {
        let path = reported("oom_fragmented.pickle");
        let output = match command.strip_prefix("symmalloc ") {
            Some(command) => {
                let words: Vec<&str> = command.split(' ').collect();
                let command: Vec<&str> =
                    words.iter().map(|word| if word.contains(".pickle") { "{}" } else { *word }).collect();
                symmalloc(&command.join(" "), &[&path])
            }
            None => symmalloc(command, &[&path]),
        };
        assert!(output.exited(0).stdout.contains("allocations refused"), "{command}");
    }
    assert_eq!(
        symmalloc("replay {} --config total_limit_mb:6143", &[&reported("oom_fragmented.pickle")]).code,
        Some(3)
    );
}

#[test]
fn failures_of_logs_and_of_traces_are_found_too() {
    let folder = Folder::new();
    let log = "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x100,3145728,0x7\n1,0,allocate failure,(nil),1048576,0x7\n\
               1,0,free,0x100,3145728,0x7\n1,0,allocate failure,(nil),4194304,0x7\n1,0,allocate,0x100,1024,0x7\n";
    let log = folder.file("log.csv", log);
    let trace = folder.path("log.trace");
    symmalloc("import {} {}", &[&log, &trace]).exited(0);
    for path in [&log, &trace] {
        let (object, text, _) = report(path);
        let failure = &object["failure"];
        assert_eq!(
            (&failure["size_bytes"], &failure["live_bytes"], &failure["others"]),
            (&json!(4 << 20), &json!(0), &json!(1))
        );
        assert!(text.contains("1 other request failed before"), "{text}");
        assert_eq!(symmalloc("replay {} --config total_limit_mb:2", &[path]).code, Some(3));
        symmalloc("replay {} --config total_limit_mb:4", &[path]).exited(0);
    }
    // A name survives the import.
    let named = folder.trace("named.trace", &["stream s0", "refuse 512 s0 driver \"model.py:40 forward\""]);
    let (object, text, _) = report(&named);
    assert_eq!(object["failure"]["name"], "model.py:40 forward");
    assert!(text.contains("requested 512 B by model.py:40 forward"), "{text}");
    // A job that nothing refuses has no failure.
    assert_eq!(report(&reported("cached_full_history.pickle")).0["failure"], Value::Null);
}

/// A failed request is judged by the limits that apply to it, each with the memory that counts under it, and in any pool.
#[test]
fn a_request_is_judged_by_the_limits_of_its_pool() {
    let folder = Folder::new();
    // The settings; pool 1's settings; the size of the request in MiB, and its pool; the expected limit and cause.
    let cases = [
        // 60 MiB are live in pool 0, and 20 MiB in pool 1.
        (
            "total_limit_mb:1000",
            "limit_mb:40",
            30,
            1,
            "pool",
            "too much",
            "limit_mb of pool 1 from 40 to at least 50 (50.00 MiB)",
        ),
        (
            "total_limit_mb:1000,limit_mb:64",
            "",
            30,
            0,
            "pool",
            "too much",
            "limit_mb of pool 0 from 64 to at least 90 (90.00 MiB)",
        ),
        // The limit of one pool is none of the other.
        (
            "total_limit_mb:100,limit_mb:64",
            "",
            30,
            1,
            "total",
            "too much",
            "total_limit_mb from 100 to at least 110 (110.00 MiB)",
        ),
        (
            "total_limit_mb:100,limit_mb:64",
            "limit_mb:200",
            30,
            1,
            "total",
            "too much",
            "total_limit_mb from 100 to at least 110 (110.00 MiB)",
        ),
        // Both are exceeded; the one that lacks more decides, and both must be raised.
        (
            "total_limit_mb:100",
            "limit_mb:30",
            30,
            1,
            "pool",
            "too much",
            "limit_mb of pool 1 from 30 to at least 50 (50.00 MiB) and total_limit_mb from 100 to at least 110 (110.00 MiB)",
        ),
        (
            "",
            "segments:reserved,segment_mb:32",
            30,
            1,
            "segment",
            "too much",
            "segment_mb of pool 1 from 32 to at least 50 (50.00 MiB)",
        ),
    ];
    for (config, pool, size, of, limit, cause, setting) in cases {
        for recorded in [false, true] {
            let config = format!("config {}", if config.is_empty() { "segments:expandable" } else { config });
            let pool = format!("pool p1 {}", if pool.is_empty() { "segments:expandable" } else { pool });
            let bytes = size << 20;
            let request = match recorded {
                true => format!("refuse {bytes} s0 p{of} limit"),
                false => format!("a 9 {bytes} s0 p{of}"),
            };
            let lines = [&config, "stream s0", &pool, "a 0 62914560 s0", "a 1 20971520 s0 p1", &request];
            let (object, text, page) = report(&folder.trace("limits.trace", &lines));
            let failure = &object["failure"];
            let told = format!("{lines:?}: {failure}\n{text}");
            assert_eq!((&failure["limit"], &failure["cause"]), (&json!(limit), &json!(cause)), "{told}");
            assert_eq!(failure["pool_live_bytes"], [60 << 20, 20 << 20][of], "{told}");
            assert_eq!(failure["live_bytes"], 80 << 20, "{told}");
            let wanted = format!("remedy: raise {setting}, free ");
            assert!(text.contains(&wanted) && page.contains(setting), "no {wanted:?} in {told}");
            let places = ["pool 0: 60.00 MiB live", "pool 1: 20.00 MiB live", ", of the request: "];
            let [zero, one, own] = places.map(|place| text.contains(place));
            assert!(own && (zero || of == 0) && (one || of == 1), "{told}");
        }
    }
}

/// Free memory that the request cannot use: in pieces, in other streams, or in another pool. The replay varies the settings of the request's pool.
#[test]
fn a_request_in_any_pool_gets_the_settings_of_its_pool() {
    let folder = Folder::new();
    for pool in [0, 1] {
        // 32 MiB are free in stream 0, and stream 1 requests 40 of the pool's 64.
        let settings = "segments:expandable,limit_mb:64,reclaim:never";
        let config = format!("config {settings}");
        let of_pool = format!("pool p1 {settings}");
        let [kept, freed] = [0, 1].map(|id| format!("a {id} 33554432 s0 p{pool}"));
        let request = format!("a 2 25165824 s1 p{pool}");
        let lines = [&config, "stream s0", "stream s1", &of_pool, &kept, &freed, "f 1", &request];
        let (object, text, page) = report(&folder.trace("streams.trace", &lines));
        let failure = &object["failure"];
        assert_eq!((&failure["limit"], &failure["cause"]), (&json!("pool"), &json!("fragmentation")), "{failure}");
        for wanted in [
            "the pool's limit (64.00 MiB) is reserved as a whole, and the request needs 24.00 MiB; the 32.00 MiB that are free are \
             in other streams of the pool",
            "symmalloc serves it within the pool's 64 MiB",
        ] {
            assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
        }
        assert!(text.contains("(reclaim:pool instead of reclaim:never)"), "{text}");
        assert!(text.contains("reclaim:never keeps the free segments"), "{text}");
        let attempts = failure["attempts"].as_array().unwrap();
        let is_served = |settings: &str| {
            let tried = attempts.iter().find(|attempt| attempt["settings"].as_str().unwrap().contains(settings));
            tried.unwrap_or_else(|| panic!("{settings} is not tried: {failure}"))["is_served"] == true
        };
        assert!(is_served("streams:shared") && is_served("reclaim:pool"), "{failure}");
        assert_eq!(text.contains("for pool 1"), pool == 1, "{text}");
        assert_eq!(failure["attempts"][0]["is_served"], false);
    }
    // Another pool holds what the total limit lacks.
    let lines = [
        "config total_limit_mb:64,reclaim:never",
        "stream s0",
        "pool p1 reclaim:never",
        "a 0 41943040 s0 p1",
        "f 0",
        "a 1 33554432 s0",
    ];
    let (object, text, _) = report(&folder.trace("pools.trace", &lines));
    assert_eq!((&object["failure"]["limit"], &object["failure"]["cause"]), (&json!("total"), &json!("fragmentation")));
    for wanted in [
        "the 40.00 MiB that are free are in 1 other pool, where it cannot use them",
        "pool 0, of the request: 0 B live, 0 B free; pool 1: 0 B live, 40.00 MiB free",
        "trim pool 1, which holds 40.00 MiB free",
    ] {
        assert!(text.contains(wanted), "no {wanted:?} in:\n{text}");
    }
}

/// `--config` replaces the default pool's line, and thereby moves the numbers of all later ops.
#[test]
fn a_failure_is_found_under_another_configuration() {
    let folder = Folder::new();
    let lines = ["pool p0 segments:fixed", "stream s0", "a 0 1048576 s0", "refuse 4194304 s0 driver \"late\""];
    let trace = folder.trace("job.trace", &lines);
    let out = folder.path("out.html");
    for config in ["", " --config segments:expandable", " --config total_limit_mb:2"] {
        let object = symmalloc(&format!("report {{}} -o {{}} --json{config}"), &[&trace, &out]).json(0);
        let failure = &object["failure"];
        assert_eq!((&failure["name"], &failure["size_bytes"]), (&json!("late"), &json!(4 << 20)), "{config}: {object}");
        let limit = if config.contains("limit") { json!("total") } else { Value::Null };
        assert_eq!(failure["limit"], limit, "{config}: {failure}");
    }
}

#[test]
fn a_state_without_history_is_not_compared() {
    let (object, text, page) = report(&reported("cached_state_only.pickle"));
    assert_eq!(object["state"]["free_segment_bytes"], 10 * GIB);
    let wanted = "the recorded allocator holds 11.00 GiB: 10.00 GiB free in 1 whole segment, which torch.cuda.empty_cache() returns";
    assert!(text.contains(wanted) && page.contains(wanted), "{text}");
    for compared in ["1000.0 %", " more (", "settings tried", "with a plan"] {
        assert!(!text.contains(compared) && !page.contains(compared), "{compared} in {text}");
    }
    assert_eq!(object["settings"].as_array().unwrap().len(), 1, "only the job's own settings");
    let (_, text, _) = report(&reported("segments_list.pickle"));
    assert!(text.contains("20.00 MiB: 8.00 MiB free in 2 blocks of used segments, which it cannot return"), "{text}");
    let (object, text, _) = report(&reported("cached_full_history.pickle"));
    assert_eq!(object["state"], Value::Null);
    assert!(text.contains("settings tried"), "{text}");
}

#[test]
fn fewer_refusals_are_better_than_fewer_bytes() {
    let (object, text, page) = report(&reported("rmm2039.trace"));
    let settings = object["settings"].as_array().unwrap();
    let refused: Vec<u64> = settings.iter().map(|trial| trial["refused"].as_u64().unwrap()).collect();
    assert!(refused.is_sorted() && refused[0] == 0, "{refused:?}");
    let better = settings.iter().filter(|trial| trial["is_better"] == true).count();
    assert_eq!(better, refused.iter().filter(|refused| **refused == 0).count());
    for wanted in
        ["nothing refused instead of 1 per pass (5 in 5 passes)", "segments:expandable,streams:shared,limit_mb:64"]
    {
        assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    for wanted in [
        "that are free are in other streams of the pool, where it cannot use them",
        "stream 1, of the request: 0 B live, 0 B free; stream 0: 0 B live, 64.00 MiB free",
    ] {
        assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
    }
}

#[test]
fn recordings_that_begin_late_are_aligned() {
    let [a, b] = ["rank0_ring150.pickle", "rank1_ring160.pickle"].map(reported);
    let object = symmalloc("diff {} {} --json", &[&a, &b]).json(0);
    assert_eq!((&object["same_ops"], &object["compared_ops"]), (&json!(true), &json!(90)));
    assert_eq!(
        object["late"],
        json!({
            "a": { "is_late": true, "ops_before": 7 },
            "b": { "is_late": true, "ops_before": 0 },
            "is_aligned": true,
            "other_alignments": 0,
            "nearest_alignment": null,
        })
    );
    let text = symmalloc("diff {} {}", &[&a, &b]).exited(0).stdout.clone();
    for wanted in
        ["both recordings begin in the middle of the job", "B begins 7 ops after A", "the same: 45 allocations"]
    {
        assert!(text.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    let text = symmalloc("diff {} {}", &[&b, &a]).exited(0).stdout.clone();
    assert!(text.contains("A begins 7 ops after B"), "{text}");
    let text = symmalloc("diff {} {}", &[&a, &a]).exited(0).stdout.clone();
    assert!(text.contains("both have the same first op"), "{text}");
}

/// A rank's part of a job on two streams: a log with separate handles and addresses. Each step allocates, and frees an older
/// allocation.
struct Part {
    /// The steps in the log.
    steps: std::ops::Range<usize>,
    /// A step whose allocation has another size.
    changed: Option<usize>,
    /// The job repeats itself after so many steps.
    period: usize,
}

impl Part {
    fn write(&self, folder: &Folder, name: &str, base: u64) -> PathBuf {
        let mut lines = vec!["Action,Pointer,Size,Stream".to_owned()];
        let at = |step: usize| base * 0x10000 + 0x1000 * (step as u64 % 7 + 1);
        let stream = |step: usize| base + step as u64 % 2;
        let size = |step: usize| {
            let kind = step % self.period;
            1000 + (kind * kind % 1009) * 512 + usize::from(self.changed == Some(step))
        };
        for step in self.steps.clone() {
            lines.push(format!("allocate,{:#x},{},{:#x}", at(step), size(step), stream(step)));
            if let Some(old) = step.checked_sub(5) {
                lines.push(format!("free,{:#x},{},{:#x}", at(old), size(old), stream(old)));
            }
        }
        folder.file(name, lines.join("\n") + "\n")
    }
}

/// The ranks of a job record any parts of it. The comparison covers exactly the common steps, whichever rank begins or ends first.
#[test]
fn late_recordings_differ_only_where_the_job_does() {
    let folder = Folder::new();
    let never = usize::MAX;
    for (a, b, changed) in [
        (100..400, 100..400, never),
        (100..400, 180..400, never),
        (180..400, 100..400, never),
        // One ends earlier.
        (100..400, 180..390, never),
        (100..390, 180..400, never),
        (180..400, 100..390, never),
        // One lies in the other, or begins at its beginning.
        (100..400, 200..300, never),
        (200..300, 100..400, never),
        (100..300, 100..400, never),
        (0..300, 100..400, never),
        // They have only a small part in common.
        (100..300, 290..500, never),
        // The job differs at a common step, or before or after all of them.
        (100..400, 180..390, 300),
        (180..390, 100..400, 181),
        (100..400, 180..390, 389),
        (100..400, 180..390, 120),
        (100..390, 180..400, 395),
    ] {
        let part = |steps: &std::ops::Range<usize>, changed| Part { steps: steps.clone(), changed, period: never };
        let path_a = part(&a, None).write(&folder, "a.csv", 0x50);
        let path_b = part(&b, Some(changed)).write(&folder, "b.csv", 0x90);
        let common = a.start.max(b.start)..a.end.min(b.end);
        let is_same = !common.contains(&changed);
        let object = symmalloc("diff {} {} --json", &[&path_a, &path_b]).json(if is_same { 0 } else { 3 });
        let told = format!("{a:?} {b:?}, changed {changed}: {object}");
        assert_eq!(object["same_ops"], is_same, "{told}");
        // Each step is two ops, except the first five of the job.
        let ops = |from: usize, to: usize| (from..to).map(|step| 1 + usize::from(step >= 5)).sum::<usize>();
        let before = [a.start, b.start].map(|start| ops(start, common.start));
        let late = &object["late"];
        assert_eq!(
            (&late["a"]["ops_before"], &late["b"]["ops_before"]),
            (&json!(before[0]), &json!(before[1])),
            "{told}"
        );
        assert_eq!((&late["is_aligned"], &late["other_alignments"]), (&json!(true), &json!(0)), "{told}");
        let compared = if is_same { ops(common.start, common.end) } else { ops(common.start, changed) };
        assert_eq!(object["compared_ops"], compared, "{told}");
        let after = [a.end, b.end].map(|end| ops(common.end, end));
        let expected = if is_same && after != [0, 0] { json!({ "a": after[0], "b": after[1] }) } else { Value::Null };
        assert_eq!(object["ops_after"], expected, "{told}");
    }
    // Parts without a common step are not aligned.
    let [a, b] = [("a.csv", 100..200), ("b.csv", 300..400)]
        .map(|(name, steps)| Part { steps, changed: None, period: never }.write(&folder, name, 0x50));
    let text = symmalloc("diff {} {}", &[&a, &b]).exited(3).stdout.clone();
    assert!(text.contains("they have too few ops in common to be aligned"), "{text}");
}

/// A job that repeats itself fits at several alignments. The output mentions them, even if the chosen one is right.
#[test]
fn alignments_of_a_job_that_repeats_itself_are_not_unique() {
    let folder = Folder::new();
    let part = |name: &str, steps, changed| Part { steps, changed, period: 10 }.write(&folder, name, 0x50);
    for (a, b, changed, chosen, is_same) in [
        // The ends decide.
        (100..200, 123..200, None, 23, true),
        // Else the largest common part: B ends 40 steps earlier than A, and seems to begin 3 steps after it.
        (100..200, 123..160, None, 3, true),
        // A difference is seen at every alignment.
        (100..200, 123..200, Some(170), 23, false),
    ] {
        let (path_a, path_b) = (part("a.csv", a.clone(), None), part("b.csv", b.clone(), changed));
        let output = symmalloc("diff {} {} --json", &[&path_a, &path_b]).json(if is_same { 0 } else { 3 });
        let late = &output["late"];
        assert_eq!(output["same_ops"], is_same, "{output}");
        let ops = late["a"]["ops_before"].as_u64().unwrap();
        assert_eq!((ops / 2 % 10, late["b"]["ops_before"].as_u64()), (chosen % 10, Some(0)), "{output}");
        assert!(late["other_alignments"].as_u64().unwrap() > 0, "{output}");
        assert_ne!(late["nearest_alignment"], Value::Null, "{output}");
        let text = symmalloc("diff {} {}", &[&path_a, &path_b]).exited(if is_same { 0 } else { 3 }).stdout.clone();
        assert!(text.contains("as well, because the job repeats itself"), "{text}");
    }
}

/// A state without history cannot be compared, and a torn recording is compared up to its end.
#[test]
fn states_are_not_compared_and_torn_recordings_are_up_to_their_end() {
    let folder = Folder::new();
    let (state, history) = (reported("cached_state_only.pickle"), reported("cached_full_history.pickle"));
    for files in [[&state, &history], [&history, &state], [&state, &state]] {
        let output = symmalloc("diff {} {}", &[files[0], files[1]]);
        assert_eq!(output.code, Some(2));
        assert!(output.stderr.contains("a state without history has no ops to compare"), "{}", output.stderr);
    }
    let lines = ["stream s0", "a 0 512 s0", "a 1 1024 s0", "f 0", "f 1"];
    let whole = folder.trace("whole.trace", &lines);
    for kept in 1..lines.len() {
        let torn = folder.file("torn.trace", format!("symmalloc-trace 1\n{}\n", lines[..kept].join("\n")));
        let object = symmalloc("diff {} {} --accept-torn --json", &[&whole, &torn]).json(0);
        assert_eq!((&object["same_ops"], &object["ops_after"]["a"]), (&json!(true), &json!(lines.len() - kept)));
        // A recording that is not torn ends where its rank does.
        let ended = folder.trace("ended.trace", &lines[..kept]);
        symmalloc("diff {} {}", &[&whole, &ended]).exited(3);
    }
}

#[test]
fn the_device_that_is_meant_is_found_or_asked_for() {
    let path = reported("two_devices_state_only.pickle");
    let output = symmalloc("report {} -o out.html", &[&path]);
    assert_eq!(output.code, Some(2));
    for wanted in ["device 0: no history and 8.00 MiB live", "device 1: no history and 4.00 MiB live", "--device"] {
        assert!(output.stderr.contains(wanted), "no {wanted:?} in:\n{}", output.stderr);
    }
}

#[test]
fn frames_are_those_of_the_program_and_libraries_can_be_named() {
    for name in ["frames_windows.pickle", "frames_torchdir.pickle"] {
        let (object, ..) = report(&reported(name));
        let holder = object["holders"][0]["name"].as_str().unwrap().to_owned();
        assert!(holder.ends_with("proj/model.py:40 forward"), "{name}: {holder}");
    }
    let folder = Folder::new();
    let out = folder.path("out.html");
    let printed = symmalloc(
        "report {} -o {} --libraries einops,transformers --json",
        &[&reported("frames_windows.pickle"), &out],
    )
    .json(0);
    let command = printed["settings"][0]["command"].as_str().unwrap();
    assert!(command.contains(" --libraries einops,transformers "), "{command}");
}

#[test]
fn the_model_of_pytorch_completes_frees_when_the_recording_did() {
    let output = symmalloc("replay {} --ranks 1 --json", &[&reported("pt147168_record_stream.pickle")]).json(0);
    for model in output[0]["pytorch"].as_array().unwrap() {
        assert_eq!(model["peak_reserved_bytes"], 10 * GIB, "{model}");
    }
    assert_eq!(output[0]["peak_reserved_bytes"], GIB);
    // FSDP1's rank 0 ended with 149 segments on the GPU, and rank 1 with 145.
    for (job, segments) in [("fsdp1", 149), ("fsdp1_rank1", 145)] {
        let output = symmalloc(&format!("replay {job} --ranks 1 --passes 1 --json"), &[]).json(0);
        assert_eq!(output[0]["pytorch"][1]["segment_count"], segments, "{job}");
    }
}

#[test]
fn texts_say_which_numbers_they_are() {
    let (_, text, _) = report(&reported("vllm51205.trace"));
    assert!(text.contains("peak reserved 8.00 MiB over 5 passes"), "{text}");
    let (object, text, page) = report(&reported("sleep_ok.trace"));
    let wanted = "in 5 passes, the plan refuses 5 requests; without a plan, none is refused";
    assert!(text.contains(wanted) && page.contains(wanted) && object["no_plan"] == wanted, "{text}");
    // The stream of the first allocation has number 0, whatever its handle is.
    let folder = Folder::new();
    let log = "Action,Pointer,Size,Stream\nallocate,0x100,4096,0x5581\nallocate,0x200,4096,0x0\n";
    let log = folder.file("log.csv", log);
    let (_, text, page) = report(&log);
    let wanted = "streams, by first use: 0 is 0x5581, 1 is the default stream";
    assert!(text.contains(wanted) && page.contains(wanted), "{text}");
    let replayed = symmalloc("replay {}", &[&log]).exited(0).stdout.clone();
    assert!(replayed.contains(&wanted[1..]), "{replayed}");
    // An import keeps the names, and a trace may state any. A job with the default stream alone needs none.
    let trace = folder.path("log.trace");
    symmalloc("import {} {}", &[&log, &trace]).exited(0);
    assert!(fs::read_to_string(&trace).unwrap().contains("stream s0 \"0x5581\"\n"), "{trace:?}");
    assert!(report(&trace).1.contains(wanted));
    let named =
        folder.trace("named.trace", &["stream s0 \"prefetch\"", "stream s1", "a 0 512 s1", "refuse 512 s0 driver"]);
    let (_, text, _) = report(&named);
    for wanted in ["streams, by first use: 0 is prefetch, 1 is not named", "in pool 0 on stream 0 (prefetch)"] {
        assert!(text.contains(wanted), "no {wanted:?} in:\n{text}");
    }
    let plain = folder.file("plain.csv", "Action,Pointer,Size,Stream\nallocate,0x100,4096,0x0\n");
    symmalloc("import {} {}", &[&plain, &trace]).exited(0);
    assert!(fs::read_to_string(&trace).unwrap().contains("stream s0\n"), "{trace:?}");
}

#[test]
fn a_lower_bound_is_no_row_of_a_ranking() {
    let folder = Folder::new();
    let mut lines = vec!["stream s0".to_owned()];
    lines.extend((1..=3).map(|pool| format!("pool p{pool}")));
    lines.extend((0..4).map(|pool| format!("a {pool} 16777216 s0 p{pool} -> 0@0")));
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let (object, text, page) = report(&folder.trace("pools.trace", &lines));
    assert_eq!(object["recorded_reserved"], json!({ "peak_bytes": 64 << 20, "is_exact": false }));
    assert!(text.contains("in the recording: at least 64.00 MiB reserved"), "{text}");
    assert!(
        !page.contains("the recorded allocator</td>") && !page.contains("<b>in the recording:</b>"),
        "a ranked bound"
    );
}

#[test]
fn destroyed_pools_count_in_digests_and_pictures() {
    let folder = Folder::new();
    let job = |name: &str, size: u64| {
        let allocated = format!("a 0 {size} s0 p1 \"kv cache\" -> 0@0");
        let lines = ["stream s0", "pool p1", &allocated, "f 0", "destroy p1", "a 1 2097152 s0 \"weights\" -> 0@0"];
        folder.trace(name, &lines)
    };
    let (a, b) = (job("a.trace", 512), job("b.trace", 70_000_000));
    let digest = |path: &Path| symmalloc("replay {} --json", &[path]).json(0)[0]["digest"].clone();
    assert_ne!(digest(&a), digest(&b));
    assert_eq!(digest(&a), digest(&job("c.trace", 512)));
    // The op that differs has a name in both recordings.
    let text = symmalloc("diff {} {}", &[&a, &b]).exited(3).stdout.clone();
    assert_eq!(text.matches("(allocation 0), kv cache").count(), 2, "{text}");
    let object = symmalloc("diff {} {} --json", &[&a, &b]).json(3);
    assert_eq!(object["first_op_difference"]["b"]["name"], "kv cache");
    // After its destruction, a pool holds nothing.
    let picture = folder.path("beside.svg");
    symmalloc("chart {} --beside {} --op 5 -o {}", &[&b, &b, &picture]).exited(0);
    let svg = fs::read_to_string(&picture).unwrap();
    assert!(!svg.contains("pool 1"), "{svg}");
    assert!(svg.contains("pool 0"), "{svg}");
}

#[test]
fn many_private_pools_deserve_the_advice_to_share_one() {
    let folder = Folder::new();
    let mut lines = vec!["stream s0".to_owned()];
    for pool in 1..=6 {
        lines.push(format!("pool p{pool}"));
        lines.push(format!("a {pool} 40000000 s0 p{pool}"));
        lines.push(format!("f {pool}"));
    }
    lines.push("a 9 1000 s0".to_owned());
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let (object, text, page) = report(&folder.trace("graphs.trace", &lines));
    let pools = &object["private_pools"];
    let peaks = ["peak_reserved_bytes", "peak_reserved_bytes_as_one"].map(|key| pools[key].as_u64().unwrap());
    assert!(peaks[0] > 5 * peaks[1], "{pools}");
    assert!(text.contains("if they share one") && page.contains("if they share one"), "{text}");
    // If the request that failed fits only then, that is the remedy.
    let mut failing = vec!["config total_limit_mb:200"];
    failing.extend(&lines[..lines.len() - 1]);
    let (object, text, _) = report(&folder.trace("failing.trace", &failing));
    assert_eq!((&object["failure"]["size_bytes"], &object["failure"]["pool"]), (&json!(40_000_000), &json!(6)));
    assert!(text.contains("are in 5 other pools, where it cannot use them"), "{text}");
    assert!(
        text.contains("share one (torch.cuda.graph(..., pool=...), or one MemPool): the request is then served")
            || text.contains("symmalloc serves it within"),
        "{text}"
    );
    let lines = &lines[..lines.len() - 10];
    assert_eq!(report(&folder.trace("few.trace", lines)).0["private_pools"], Value::Null);
}

#[test]
fn unknown_actions_are_listed_by_name() {
    let folder = Folder::new();
    let entries = [("alloc", 0x1000, 512), ("user_defined", 0, 0), ("user_defined", 0, 0), ("weather", 0, 0)];
    let snapshot = folder.file("named.pickle", crate::snapshot(20 << 20, &[], &entries));
    let out = folder.path("out.trace");
    let text = symmalloc("import {} {}", &[&snapshot, &out]).exited(0).stdout.clone();
    assert!(text.contains("entries that are not about memory: 2 of 'user_defined', 1 of 'weather'"), "{text}");
}

/// Memory of a sleeping pool is not on the device, so it is no place where memory could be found.
#[test]
fn sleeping_pools_hold_no_memory() {
    let folder = Folder::new();
    let lines = [
        "config total_limit_mb:64",
        "stream s0",
        "pool p1",
        "a 0 41943040 s0 p1 \"kv cache\"",
        "a 1 20971520 s0 \"weights\"",
    ];
    for (asleep, request) in [(true, "a 2 62914560 s0"), (true, "refuse 62914560 s0 limit"), (false, "a 2 62914560 s0")]
    {
        let mut lines = lines.to_vec();
        if asleep {
            lines.push("sleep keep p1");
        }
        lines.push(request);
        let (object, text, _) = report(&folder.trace("asleep.trace", &lines));
        assert_eq!(object["failure"]["live_bytes"], if asleep { 20 << 20 } else { 60 << 20 }, "{text}");
        let explained = text.lines().filter(|line| line.starts_with("where:") || line.starts_with("held:"));
        let explained = explained.collect::<Vec<_>>().join("\n");
        assert!(explained.contains("weights"), "{text}");
        for of_pool in ["kv cache", "pool 1"] {
            assert_eq!(explained.contains(of_pool), !asleep, "{lines:?}: {text}");
        }
    }
}

/// Whatever the limits are, a size that no device has is a bug of the program, such as -1 as an unsigned number.
#[test]
fn a_request_that_no_device_could_serve_is_a_bug() {
    let folder = Folder::new();
    for size in [(1_u64 << 40) + 1, 1 << 50, u64::MAX - 511] {
        for config in ["segments:expandable", "total_limit_mb:64", "limit_mb:64"] {
            for request in [format!("a 1 {size} s0"), format!("refuse {size} s0 driver")] {
                let config = format!("config {config}");
                let (_, text, page) =
                    report(&folder.trace("huge.trace", &[&config, "stream s0", "a 0 512 s0", &request]));
                let wanted = "the size is probably a bug of the program, such as a negative number or an overflow";
                assert!(text.contains(wanted) && page.contains(wanted), "no {wanted:?} in:\n{text}");
                assert!(!text.contains("remedy: raise"), "{text}");
            }
        }
    }
    let (_, text, _) =
        report(&folder.trace("large.trace", &["config total_limit_mb:64", "stream s0", "a 0 1099511627776 s0"]));
    assert!(text.contains("remedy: raise range_mb of pool 0"), "{text}");
}

/// Equal parts of a job say little if they are short.
#[test]
fn few_common_ops_are_called_few() {
    let folder = Folder::new();
    for (common, is_few) in [(10, true), (40, true), (60, false)] {
        let part = |name: &str, steps, pointer| {
            Part { steps, changed: None, period: usize::MAX }.write(&folder, name, pointer)
        };
        let (a, b) = (part("a.csv", 100..300, 0x50), part("b.csv", 300 - common..500, 0x90));
        let text = symmalloc("diff {} {}", &[&a, &b]).exited(0).stdout.clone();
        assert_eq!(text.contains("Few ops were compared"), is_few, "{common} steps: {text}");
    }
    // Whole jobs may be short.
    let whole = folder.trace("whole.trace", &["stream s0", "a 0 512 s0", "f 0"]);
    let text = symmalloc("diff {} {}", &[&whole, &whole]).exited(0).stdout.clone();
    assert!(!text.contains("Few ops were compared"), "{text}");
}

#[test]
fn a_hard_table_is_planned_within_its_seconds() {
    let table = reported("plan_perfect400.csv");
    let output = symmalloc("plan {} --seconds 1 --json", &[&table]).json(0);
    let work = output[0]["steps"].as_u64().unwrap();
    assert!(work <= 3_000_000, "{work}");
    assert_eq!(symmalloc("plan {} --seconds 1 --json", &[&table]).json(0)[0]["height"], output[0]["height"]);
    assert_eq!((&output[0]["quality"], &output[0]["is_optimal"]), (&json!(1.0), &json!(true)), "{output}");
}
