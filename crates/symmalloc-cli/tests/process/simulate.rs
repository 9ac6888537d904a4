//! Tests of `symmalloc simulate`.

use crate::{Folder, command, recorded, symmalloc};
use std::fs;
use std::num::{NonZeroU32, NonZeroUsize};
use symmalloc_core::{AllocationId, Op};
use symmalloc_sim::job::{Deviation, JobPlan, Size, simulate, story};

const KEYS: [&str; 25] = [
    "caught",
    "checks",
    "device_bytes_peak",
    "differing",
    "digest",
    "failed_calls",
    "failure",
    "left",
    "losses",
    "ops",
    "out_of_memory",
    "planned",
    "private_ops",
    "ranks",
    "ranks_with_failed_calls",
    "refused",
    "restarts",
    "runs",
    "schema_version",
    "seconds",
    "seed",
    "small_devices",
    "state_bytes_per_rank",
    "syncs",
    "trace",
];

#[test]
fn generated_jobs_are_a_function_of_their_seeds() {
    let run = || {
        let mut json = symmalloc("simulate --seed 3 --seeds 6 --ranks 8 --ops 80 --json", &[]).json(0);
        let object = json[0].as_object_mut().unwrap();
        object.remove("seconds");
        json
    };
    let json = run();
    assert_eq!(run(), json);
    assert_eq!((json[0]["runs"].as_u64(), json[0]["ranks"].as_u64()), (Some(6), Some(48)));
    assert!(json[0]["failure"].is_null() && json[0]["trace"].is_null());
    assert!(json[0]["ops"].as_u64().unwrap() > 6 * 8 * 60, "{json}");
}

#[test]
fn json_has_the_keys_that_help_lists() {
    let json = symmalloc("simulate --ranks 2 --ops 10 --json", &[]).json(0);
    let keys: Vec<_> = json[0].as_object().unwrap().keys().map(String::as_str).collect();
    let mut sorted = keys.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, KEYS);
    let help = symmalloc("simulate --help", &[]).stdout;
    assert!(keys.iter().all(|key| help.contains(key)), "{help}");
}

#[test]
fn a_single_seed_is_printed_with_its_plan() {
    let printed = symmalloc("simulate --seed 7 --ranks 4 --ops 60", &[]);
    let printed = printed.exited(0);
    for wanted in ["seed 7: 60 ops", "on 4 ranks", "config segments:", "ops executed", "All ranks freed"] {
        assert!(printed.stdout.contains(wanted), "no {wanted:?} in:\n{}", printed.stdout);
    }
}

#[test]
fn a_recorded_job_is_simulated() {
    let job = recorded("fsdp_train_rank0.trace.zst");
    let json = symmalloc("simulate {} --ranks 3 --seed 2 --json", &[&job]).json(0);
    assert_eq!(json[0]["ranks"].as_u64(), Some(3));
    assert!(json[0]["syncs"].as_u64().unwrap() > 10, "{json}");
    assert_eq!(json[0]["trace"].as_str(), job.to_str());
}

/// Returns a saved failure in which a rank omits a free.
fn story_of_a_failure() -> String {
    let size = Size { ranks: NonZeroU32::new(4).unwrap(), ops: 150 };
    let fails = |seed| {
        let plan = JobPlan::from_seed(seed, &size);
        let freed = plan.steps().iter().find_map(|step| match step.op {
            Op::Free { id } => Some(id),
            _ => None,
        });
        let id: AllocationId = freed?;
        let rank = plan.ranks().iter().find(|rank| !rank.is_faulty())?.rank;
        let plan = plan.with_deviation(rank, Deviation::KeepAllocation { id });
        let failure = simulate(&plan, NonZeroUsize::MIN, &mut |_| ()).err()?;
        story::write(&plan, &failure, "A test.").ok()
    };
    (0..50).find_map(fails).expect("a missing free is detected")
}

#[test]
fn a_failure_is_shrunk_saved_and_reproduced() {
    let folder = Folder::new();
    let story = folder.file("failed.trace", story_of_a_failure());
    let json = symmalloc("simulate {} --out {} --json", &[&story, folder.0.path()]).json(3);
    let failure = &json[0]["failure"];
    assert!(failure["op"].as_str().unwrap().starts_with("f "), "{json}");
    assert_eq!(failure["shrunk_ranks"].as_u64(), Some(2), "{json}");
    assert!(failure["shrunk_ops"].as_u64().unwrap() <= 8, "{json}");
    let saved = folder.path(&format!("simulate-seed-{}.trace", failure["seed"]));
    assert_eq!(failure["trace"].as_str(), saved.to_str());
    let text = fs::read_to_string(&saved).unwrap();
    assert!(text.starts_with("symmalloc-trace 2\n") && text.contains("# Found by `symmalloc simulate"), "{text}");

    // The saved trace fails again by itself, and the output names the failing op.
    let printed = symmalloc("simulate {} --out {}", &[&saved, folder.0.path()]);
    let printed = printed.exited(3);
    let seed = failure["seed"].as_u64().unwrap();
    for wanted in ["FAILED", &format!("seed {seed}, rank"), "(`f ", "Saved as", saved.to_str().unwrap()] {
        assert!(printed.stdout.contains(wanted), "no {wanted:?} in:\n{}", printed.stdout);
    }
    // Other commands read it as a plain trace.
    symmalloc("replay {} --ranks 2 --json", &[&saved]).json(0);
}

#[test]
fn an_invalid_story_is_refused() {
    let folder = Folder::new();
    let stories = [
        ("#! seed:1 granularity:3", "line 2: invalid simulator word `granularity:3`"),
        ("#! seed:1 granularity:2097152", "no reference rank"),
    ];
    for (line, expected) in stories {
        let trace = format!("symmalloc-trace 1\n{line}\nstream s0\nend 1\n");
        let printed = symmalloc("simulate {}", &[&folder.file("bad.trace", trace)]);
        assert_eq!((printed.code, printed.stdout.as_str()), (Some(2), ""));
        assert!(printed.stderr.contains(expected) && printed.stderr.contains("help:"), "{}", printed.stderr);
    }
}

#[test]
fn invalid_arguments_of_simulate_are_refused() {
    for args in ["--ranks 0", "--seeds 0", "--ops 0", "--seed x"] {
        let output = command().arg("simulate").args(args.split(' ')).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}");
    }
}
