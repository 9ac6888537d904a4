//! The numbers of `plan`, `report`, `chart --share` and `replay --plan`, which must be correct and agree on small unusual jobs.

use crate::{Folder, symmalloc};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// Returns the path of a job in the folder `tests/jobs`. Each file describes its job.
fn job(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jobs").join(name)
}

fn bytes(object: &Value, key: &str) -> u64 {
    object[key].as_u64().unwrap_or_else(|| panic!("no {key} in {object}"))
}

/// Numbers of a job on which all commands agree.
#[derive(Debug, PartialEq)]
struct Numbers {
    /// `None` if there is no plan.
    planned_bytes: Option<u64>,
    online_bytes: u64,
    /// Refused requests in all passes, without a plan.
    refused: u64,
}

/// Runs every command on a job, and asserts that all of them succeed and agree.
#[track_caller]
fn numbers(job: &Path) -> Numbers {
    let folder = Folder::new();
    let [page, picture, file] = ["report.html", "share.svg", "job.plan"].map(|name| folder.path(name));
    let report = symmalloc("report {} -o {} --json", &[job, &page]).json(0);
    let share = symmalloc("chart {} --share -o {} --json", &[job, &picture]).json(0);
    let replayed = &symmalloc("replay {} --ranks 1 --json", &[job]);
    let replayed: Value = serde_json::from_str::<Value>(&replayed.stdout).unwrap()[0].take();
    let own = report["settings"].as_array().unwrap().iter().find(|trial| trial["is_own"] == true).unwrap();
    let online_bytes = bytes(own, "peak_reserved_bytes");
    assert_eq!(bytes(&replayed, "peak_reserved_bytes"), online_bytes, "replay and report");
    assert_eq!(bytes(&share, "symmalloc_bytes"), online_bytes, "chart --share and report");
    assert_eq!(share["refused"], own["refused"], "chart --share and report");
    let planned_bytes = report["plan"]["planned_bytes"].as_u64();
    assert_eq!(share["planned_bytes"].as_u64(), planned_bytes, "chart --share and report");
    assert_eq!(share["no_plan"], report["no_plan"], "chart --share and report");
    let reason = report["no_plan"].as_str();
    assert!(planned_bytes.is_none() || reason.is_none(), "{report}");
    if let Some(reason) = reason {
        assert!(fs::read_to_string(&page).unwrap().contains("There is no plan of this job: "), "{reason}");
    } else {
        for flags in ["", " -o {}"] {
            let paths = [job, &file];
            let output = symmalloc(&format!("plan {{}} --json{flags}"), &paths[..1 + flags.len() / 6]).json(0);
            assert_eq!(bytes(&output[0], "online_bytes"), online_bytes, "plan and report");
            let is_planned = output[0]["plans"] != 0;
            assert_eq!(is_planned.then(|| bytes(&output[0], "planned_bytes")), planned_bytes, "plan and report");
            assert_eq!(output[0]["online_refused"], own["refused"], "plan and report");
            if !flags.is_empty() {
                let followed = symmalloc("replay {} --plan {} --ranks 2 --json", &[job, &file]);
                let followed: Value = serde_json::from_str(&followed.stdout).expect("the plan is followed");
                assert_eq!(followed[0]["peak_reserved_bytes"], output[0]["planned_bytes"], "replay --plan and plan");
                assert_eq!(followed[0]["aligned"], true);
            }
        }
    }
    Numbers { planned_bytes, online_bytes, refused: bytes(own, "refused") }
}

fn planned(planned_bytes: u64, online_bytes: u64) -> Numbers {
    Numbers { planned_bytes: Some(planned_bytes), online_bytes, refused: 0 }
}

#[test]
fn refusals_are_counted_over_all_passes_and_never_recommended() {
    let job = job("refuses_from_the_second_pass.trace");
    assert_eq!(numbers(&job), Numbers { planned_bytes: None, online_bytes: 60 * MIB, refused: 4 });
    let folder = Folder::new();
    let page = folder.path("report.html");
    let report = symmalloc("report {} -o {} --json", &[&job, &page]).json(0);
    assert_eq!(report["refused"], 0, "the first pass refuses nothing");
    for trial in report["settings"].as_array().unwrap() {
        assert!(trial["is_better"] == false || bytes(trial, "refused") <= 4, "{trial}");
    }
    assert!(fs::read_to_string(&page).unwrap().contains("4 refused in 5 passes"));
    // A setting that reserves less only because it refuses more is not better, even if few passes refuse.
    let lines = [
        "config segments:fixed,limit_mb:60",
        "stream s0",
        "a 0 12582912 s0",
        "a 1 1572864 s0",
        "f 1",
        "a 2 20971520 s0",
        "f 0",
        "f 2",
    ];
    let job = folder.trace("job.trace", &lines);
    let report = symmalloc("report {} -o {} --json", &[&job, &page]).json(0);
    let settings = report["settings"].as_array().unwrap();
    let own = settings.iter().find(|trial| trial["is_own"] == true).unwrap();
    for trial in settings {
        let is_better = bytes(trial, "peak_reserved_bytes") < bytes(own, "peak_reserved_bytes")
            && bytes(trial, "refused") <= bytes(own, "refused");
        assert_eq!(trial["is_better"], is_better, "{trial}");
    }
}

#[test]
fn a_reserved_pool_is_planned_with_the_segment_size_that_it_needs() {
    assert_eq!(numbers(&job("reserved_pool.trace")), planned(6 * MIB, 64 * MIB));
    let folder = Folder::new();
    let lines = ["stream s0", "pool p1 segments:reserved,segment_mb:4", "a 0 5242880 s0 p1", "f 0"];
    let small = folder.trace("small.trace", &lines);
    // The recorded segment is too small for the job, but the planned one is large enough.
    let expected = Numbers { planned_bytes: Some(6 * MIB), online_bytes: 0, refused: 5 };
    let found = numbers(&small);
    assert_eq!((found.planned_bytes, found.refused), (expected.planned_bytes, expected.refused), "{found:?}");
    let lines = [
        "config segments:reserved,segment_mb:256,symmetric:true",
        "stream s0",
        "stream s1",
        "pool p1 segments:reserved,segment_mb:32,symmetric:true,streams:shared",
        "a 0 5242880 s0",
        "a 1 9437184 s1",
        "a 2 3145728 s0 p1",
        "a 3 3145728 s1 p1",
    ];
    // Both heaps of the default pool have a segment of 10 MiB, and p1 has one of 6 MiB.
    assert_eq!(numbers(&folder.trace("symmetric.trace", &lines)), planned(26 * MIB, 544 * MIB));
}

#[test]
fn a_reserved_pool_with_steps_is_planned_with_the_segment_size_that_it_needs() {
    let folder = Folder::new();
    let steps = |from: u64, pool: &'static str| {
        (from..from + 2).flat_map(move |step| {
            let (a, b) = (2 * step, 2 * step + 1);
            let lines = ["begin_step 0@", "a A 5242880 s0@", "a B 1048576 s1@", "f A", "f B", "end_step@"];
            let named = |line: &str| line.replace('A', &a.to_string()).replace('B', &b.to_string()).replace('@', pool);
            lines.map(named)
        })
    };
    for (segment_mb, online_bytes, refused) in [(64, 128 * MIB, 0), (4, 4 * MIB, 10)] {
        let pool = format!("pool p1 segments:reserved,segment_mb:{segment_mb},symmetric:true");
        let lines: Vec<String> = ["stream s0", "stream s1", &pool].map(str::to_owned).into_iter().collect();
        let lines: Vec<String> = lines.into_iter().chain(steps(0, " p1")).collect();
        let job = folder.trace("steps.trace", &lines.iter().map(String::as_str).collect::<Vec<_>>());
        // Two heaps, each with the segment of the larger one.
        let expected = Numbers { planned_bytes: Some(12 * MIB), online_bytes, refused };
        assert_eq!(numbers(&job), expected, "{pool}");
    }
    // Allocations between the steps fit as well.
    let outside = ["a 8 3145728 s0".to_owned(), "f 8".to_owned()];
    let lines: Vec<String> = ["config segments:reserved,segment_mb:4,streams:shared", "stream s0", "stream s1"]
        .map(str::to_owned)
        .into_iter()
        .chain(steps(0, ""))
        .chain(outside)
        .chain(steps(2, ""))
        .collect();
    let job = folder.trace("outside.trace", &lines.iter().map(String::as_str).collect::<Vec<_>>());
    let found = numbers(&job);
    assert_eq!((found.planned_bytes, found.refused), (Some(10 * MIB), 20), "{found:?}");
}

#[test]
fn every_command_works_without_a_plan_for_a_job_that_cannot_be_planned() {
    let job = job("pools_take_turns.trace");
    assert_eq!(numbers(&job), Numbers { planned_bytes: None, online_bytes: 60 * MIB, refused: 4 });
    let folder = Folder::new();
    let output = symmalloc("plan {} -o {}", &[&job, &folder.path("job.plan")]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{}", output.stderr);
    for words in ["cannot be planned, in pool p2", "the allocator's limit is 100.00 MiB", "raise the pool's limit_mb"] {
        assert!(output.stderr.contains(words), "{words} in {}", output.stderr);
    }
}

#[test]
fn a_job_that_releases_memory_under_its_limit_is_planned_within_it() {
    assert_eq!(numbers(&job("gives_back_under_limit.trace")), planned(250 * MIB, 250 * MIB));
    let job = job("gives_back_under_limit.trace");
    let output = symmalloc("plan {}", &[&job]).exited(0).stdout.clone();
    let wanted = "No reservation fits the whole job without a plan: all pools together need 350.00 MiB, but the limit is 260.00 MiB.";
    assert!(output.contains(wanted), "{output}");
    let folder = Folder::new();
    let out = folder.path("reserved.trace");
    let output = symmalloc("plan {} --reservations {}", &[&job, &out]);
    assert!(output.code == Some(2) && output.stderr.contains("need 350.00 MiB"), "{}", output.stderr);
    assert!(!out.exists());
}

#[test]
fn a_plan_rounds_sizes_as_the_pool_does() {
    assert_eq!(numbers(&job("unsplit_pool.trace")), planned(4 * MIB, 4 * MIB));
    let folder = Folder::new();
    for (pool, planned_bytes) in [
        ("segments:expandable,roundup_power2_divisions:[>:2]", 24 * MIB),
        ("segments:expandable,roundup_power2_divisions:4", 20 * MIB),
        ("segments:fixed,roundup_power2_divisions:[256:1,>:2]", 18 * MIB),
        ("segments:fixed,unsplit:true", 20 * MIB),
        ("segments:reserved,segment_mb:64,roundup_power2_divisions:2", 24 * MIB),
    ] {
        let pool = format!("pool p1 {pool}");
        // Two requests of 8.5 MiB.
        let lines = ["stream s0", &pool, "a 0 8912896 s0 p1", "a 1 8912896 s0 p1", "f 0", "f 1"];
        let found = numbers(&folder.trace("job.trace", &lines));
        assert_eq!(found.planned_bytes, Some(planned_bytes), "{pool}");
    }
}

#[test]
fn pools_sleep_in_jobs_without_steps() {
    // Allocations that stay live while the pool sleeps are not planned.
    let sleeps = job("sleeps_without_steps.trace");
    assert_eq!(numbers(&sleeps), Numbers { planned_bytes: None, online_bytes: 8 * MIB, refused: 0 });
    let folder = Folder::new();
    let lines = ["stream s0", "pool p1 segments:expandable", "a 0 8388608 s0 p1", "f 0", "sleep drop p1"];
    let asleep_at_the_end = folder.trace("asleep.trace", &lines);
    assert_eq!(numbers(&asleep_at_the_end), planned(8 * MIB, 8 * MIB));
    let lines = ["stream s0", "a 0 8388608 s0", "sleep keep"];
    let default_pool = folder.trace("default.trace", &lines);
    assert_eq!(numbers(&default_pool), Numbers { planned_bytes: None, online_bytes: 8 * MIB, refused: 0 });
    // The part before the sleep and the part after it have separate plans.
    let lines = [
        "stream s0",
        "a 0 4194304 s0",
        "a 1 8388608 s0",
        "f 0",
        "f 1",
        "sleep drop",
        "wake",
        "a 2 6291456 s0",
        "f 2",
        "sleep drop",
        "sleep drop",
        "wake",
        "wake",
        "a 3 2097152 s0",
        "f 3",
    ];
    assert_eq!(numbers(&folder.trace("parts.trace", &lines)), planned(12 * MIB, 12 * MIB));
    // Pools sleep in turn, under a limit that fits one of them.
    let lines = [
        "config total_limit_mb:100",
        "stream s0",
        "pool p1 segments:expandable",
        "pool p2 segments:expandable",
        "a 0 62914560 s0 p1",
        "f 0",
        "sleep drop p1",
        "a 1 62914560 s0 p2",
        "f 1",
    ];
    let found = numbers(&folder.trace("turns.trace", &lines));
    assert_eq!((found.online_bytes, found.refused), (60 * MIB, 0), "p2 releases its free memory when p1 wakes");
}

#[test]
fn a_job_may_end_inside_a_step() {
    let folder = Folder::new();
    let step = ["begin_step 0", "a 0 4194304 s0", "a 1 2097152 s0", "f 0", "f 1"];
    let lines = [&["stream s0"][..], &step].concat();
    assert_eq!(numbers(&folder.trace("open.trace", &lines)), planned(6 * MIB, 6 * MIB));
    let lines = [
        "stream s0",
        "pool p1 segments:expandable",
        "begin_step 0 p1",
        "a 0 4194304 s0 p1",
        "f 0",
        "end_step p1",
        "sleep keep p1",
    ];
    assert_eq!(numbers(&folder.trace("asleep.trace", &lines)), planned(4 * MIB, 4 * MIB));
}

#[test]
fn a_job_with_refused_requests_has_a_plan_that_is_followed_or_none() {
    let folder = Folder::new();
    // Best fit refuses the last request of the step, but a plan places it.
    let step = |from: u64| {
        [
            "begin_step 0".to_owned(),
            format!("a {from} 20971520 s0"),
            format!("a {} 67108864 s0", from + 1),
            format!("f {from}"),
            format!("a {} 10485760 s0", from + 2),
            format!("a {} 12582912 s0", from + 3),
            format!("f {}", from + 1),
            format!("f {}", from + 2),
            format!("f {}", from + 3),
            "end_step".to_owned(),
        ]
    };
    let steps: Vec<String> = (0..3).flat_map(|number| step(number * 4)).collect();
    let lines: Vec<&str> =
        ["config limit_mb:86,reclaim:never", "stream s0"].into_iter().chain(steps.iter().map(String::as_str)).collect();
    let found = numbers(&folder.trace("steps.trace", &lines));
    assert_eq!((found.planned_bytes, found.refused > 0), (Some(86 * MIB), true), "{found:?}");
    // The second request does not fit.
    for step in [["begin_step 0", "end_step"], ["trim", "trim"]] {
        let lines =
            ["config limit_mb:8", "stream s0", step[0], "a 0 6291456 s0", "a 1 6291456 s0", "f 0", "f 1", step[1]];
        let found = numbers(&folder.trace("refused.trace", &lines));
        assert_eq!((found.planned_bytes, found.refused), (None, 5), "{step:?}");
        let output = symmalloc("plan {} -o {}", &[&folder.path("refused.trace"), &folder.path("refused.plan")]);
        assert!(output.code == Some(2) && output.stderr.contains("limit"), "{}", output.stderr);
    }
}

#[test]
fn the_last_stream_of_a_trace_is_planned() {
    let folder = Folder::new();
    let streams: Vec<String> = (0..u16::MAX).map(|stream| format!("stream s{stream}")).collect();
    let mut lines: Vec<&str> = streams.iter().map(String::as_str).collect();
    lines.extend(["a 0 8388608 s65534", "f 0"]);
    let job = folder.trace("job.trace", &lines);
    let output = symmalloc("plan {} --json", &[&job]).json(0);
    assert_eq!((bytes(&output[0], "planned_bytes"), &output[0]["holds"]), (8 * MIB, &true.into()), "{output}");
    let [page, picture, snapshot, trace] =
        ["job.html", "job.svg", "job.pickle", "again.trace"].map(|name| folder.path(name));
    symmalloc("replay {} --ranks 2", &[&job]).exited(0);
    symmalloc("report {} -o {}", &[&job, &page]).exited(0);
    symmalloc("chart {} --share -o {}", &[&job, &picture]).exited(0);
    symmalloc("chart {} -o {}", &[&job, &picture]).exited(0);
    symmalloc("export {} {}", &[&job, &snapshot]).exited(0);
    symmalloc("import {} {}", &[&job, &trace]).exited(0);
    symmalloc("diff {} {}", &[&job, &trace]).exited(0);
    // The next number is not a valid id.
    lines.insert(usize::from(u16::MAX), "stream s65535");
    let job = folder.trace("job.trace", &lines);
    for (command, paths) in [
        ("replay {}", &[&*job][..]),
        ("report {} -o {}", &[&job, &page]),
        ("plan {}", &[&job]),
        ("chart {} -o {}", &[&job, &picture]),
        ("chart {} --share -o {}", &[&job, &picture]),
        ("export {} {}", &[&job, &snapshot]),
        ("import {} {}", &[&job, &trace]),
        ("diff {} {}", &[&job, &trace]),
        ("simulate {} --out {}", &[&job, &folder.path("failures")]),
    ] {
        let output = symmalloc(command, paths);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{command}");
        assert!(
            output.stderr.contains("line 65537, column 8: the number is too large; the largest here is 65534"),
            "{}",
            output.stderr
        );
    }
}

#[test]
fn a_pool_with_a_quota_runs_without_a_plan() {
    let folder = Folder::new();
    for step in [["begin_step 0", "end_step"], ["trim", "trim"]] {
        let lines = [
            "stream s0",
            "pool p1 segments:expandable,growth_mb:0,streams:shared",
            "reserve 8388608 s0 p1",
            step[0],
            "a 0 4194304 s0 p1",
            "a 1 4194304 s0",
            "f 0",
            "f 1",
            step[1],
        ];
        assert_eq!(numbers(&folder.trace("quota.trace", &lines)), planned(12 * MIB, 12 * MIB), "{step:?}");
    }
}

#[test]
fn a_job_that_fails_with_its_plan_gets_no_plan_but_a_reason() {
    let folder = Folder::new();
    // The plan holds 16 MiB of the default pool that the job releases before p1 wakes.
    let lines = [
        "config total_limit_mb:26,release_threshold_mb:0",
        "stream s0",
        "pool p1 segments:expandable",
        "pool p2 segments:expandable,growth_mb:0,streams:shared",
        "a 0 16777216 s0",
        "f 0",
        "a 1 8388608 s0 p1",
        "sleep keep p1",
        "reserve 10485760 s0 p2",
        "wake p1",
        "f 1",
        "trim p2",
    ];
    let job = folder.trace("job.trace", &lines);
    assert_eq!(numbers(&job), Numbers { planned_bytes: None, online_bytes: 24 * MIB, refused: 0 });
    let output = symmalloc("plan {}", &[&job]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{}", output.stderr);
    for words in ["cannot be carried out as planned", "op 8", "limit is 26.00 MiB", "raise total_limit_mb"] {
        assert!(output.stderr.contains(words), "{words} in {}", output.stderr);
    }
}

#[test]
fn a_reservation_that_is_refused_does_not_stop_a_plan() {
    let folder = Folder::new();
    let lines = ["config limit_mb:8", "stream s0", "reserve 16777216 s0", "a 0 4194304 s0", "f 0"];
    assert_eq!(numbers(&folder.trace("job.trace", &lines)), planned(4 * MIB, 4 * MIB));
}

#[test]
fn a_reservation_for_a_stitching_pool_is_sufficient() {
    let folder = Folder::new();
    let lines = [
        "config segments:expandable,stitching_granule_mb:2,stitching_least_mb:4",
        "stream s0",
        "a 0 6291456 s0",
        "a 1 6291456 s0",
        "a 2 6291456 s0",
        "a 3 6291456 s0",
        "f 0",
        "f 2",
        "a 4 12582912 s0",
        "f 1",
        "f 3",
        "f 4",
    ];
    let job = folder.trace("job.trace", &lines);
    assert_eq!(numbers(&job), planned(24 * MIB, 24 * MIB));
    let output = symmalloc("plan {} --json", &[&job]).json(0);
    assert_eq!(
        (&output[0]["holds"], &output[0]["with"]["first_pass"]["memory_calls"]),
        (&true.into(), &0.into()),
        "{output}"
    );
}
