//! Tests of `symmalloc plan`.

use crate::{CommandOutput, Folder, recorded, symmalloc};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// The six planned jobs, with one rank of each FSDP job.
const JOBS: [&str; 6] = [
    "fsdp1_train_rank0",
    "fsdp_train_rank0",
    "gpt2_train_varlen",
    "llama_generate",
    "moe_train",
    "resnet50_multiscale",
];

/// Returns the only planned job.
#[track_caller]
fn one(output: &CommandOutput) -> Value {
    let list = output.json(0);
    let [plan] = list.as_array().unwrap().as_slice() else { panic!("not one job: {list}") };
    plan.clone()
}

fn bytes(object: &Value, key: &str) -> u64 {
    object[key].as_u64().unwrap_or_else(|| panic!("no {key} in {object}"))
}

/// A job with two pools, one of which is symmetric, and two streams. The program trims.
const LINES: [&str; 15] = [
    "config segments:fixed,total_limit_mb:64",
    "stream s0",
    "pool p1 segments:expandable,symmetric:true,limit_mb:12",
    "stream s1",
    "reserve 4194304 s0",
    "a 0 3000000 s0",
    "a 1 3000000 s0 p1",
    "a 2 5000000 s1 p1",
    "f 1",
    "trim",
    "a 3 100 s1",
    "f 0",
    "f 3",
    "f 2",
    "destroy p1",
];

fn sizes(plan: &Value) -> Vec<u64> {
    plan["heaps"].as_array().unwrap().iter().map(|heap| heap["reserve_bytes"].as_u64().unwrap()).collect()
}

const NOTHING: fn() -> Value = || json!({ "memory_calls": 0, "registrations": 0 });

#[test]
fn a_recorded_job_of_two_ranks_obtains_no_memory_beyond_its_reservations() {
    let ranks = ["fsdp1_train_rank0.trace.zst", "fsdp1_train_rank1.trace.zst"].map(recorded);
    let plan = one(&symmalloc("plan {} {} --one-job --json", &[&ranks[0], &ranks[1]]));
    assert_eq!(sizes(&plan), [5_125_439_488, 67_108_864, 264_241_152, 492_830_720]);
    assert_eq!((&plan["with"]["first_pass"], &plan["with"]["second_pass"]), (&NOTHING(), &NOTHING()), "{plan}");
    assert_eq!(plan["without"]["first_pass"]["memory_calls"], 243);
    assert!(bytes(&plan, "planned_bytes") < bytes(&plan, "reserve_bytes"), "{plan}");
    // A reservation and a mapping for each heap, and a window for each segment.
    assert_eq!(plan["with"]["reserving"], json!({ "memory_calls": 8, "registrations": 4 }));
}

#[test]
fn a_job_that_grows_after_its_first_pass_is_reserved_for_its_steady_state() {
    let job = recorded("resnet50_multiscale.trace.zst");
    let plan = one(&symmalloc("plan {} --json", &[&job]));
    assert!(plan["without"]["second_pass"]["memory_calls"].as_u64().unwrap() > 0, "{plan}");
    assert_eq!((&plan["holds"], &plan["with"]["second_pass"]), (&json!(true), &NOTHING()));
}

#[test]
fn symmetric_pools_get_one_segment_per_heap_and_equal_sizes_within_a_pool() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &LINES);
    let plan = one(&symmalloc("plan {} --json", &[&job]));
    assert_eq!(plan["settings"], "segments:expandable,total_limit_mb:64");
    assert_eq!(sizes(&plan), [4 << 20, 2 << 20, 6 << 20, 6 << 20], "{plan}");
    let segments: Vec<&str> =
        plan["heaps"].as_array().unwrap().iter().map(|heap| heap["segments"].as_str().unwrap()).collect();
    assert_eq!(segments, ["expandable", "expandable", "reserved", "reserved"]);
    let pool = plan["lines"][1].as_str().unwrap();
    assert!(pool.starts_with("pool p1 segments:reserved,segment_mb:6,") && pool.contains("symmetric:true"), "{pool}");
    assert_eq!((&plan["with"]["first_pass"], &plan["with"]["second_pass"]), (&NOTHING(), &NOTHING()));
}

#[test]
fn all_ranks_reserve_the_maximum_plus_the_margin() {
    let folder = Folder::new();
    let small = folder.trace("small.trace", &["stream s0", "stream s1", "a 0 9000000 s0", "a 1 1 s1"]);
    let large = folder.trace("large.trace", &["stream s0", "stream s1", "a 0 90000000 s0", "a 1 100 s1"]);
    let plan = one(&symmalloc("plan {} {} --one-job --margin 10 --json", &[&small, &large]));
    assert_eq!(sizes(&plan), [96 << 20, 4 << 20]);
    assert_eq!((&plan["holds"], &plan["reserve_bytes"]), (&json!(true), &json!(100 << 20)));
}

#[test]
fn written_reservations_replay_and_equal_the_printed_ones() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &LINES);
    let planned = folder.path("planned.trace");
    let words = symmalloc("plan {} --reservations {}", &[&job, &planned]).exited(0).stdout.clone();
    let trace = fs::read_to_string(&planned).unwrap();
    for line in ["reserve 4194304 s0", "reserve 2097152 s1", "reserve 6291456 s0 p1", "reserve 6291456 s1 p1"] {
        assert!(words.contains(&format!("{line}\n")) && trace.contains(&format!("{line}\n")), "{line} in:\n{trace}");
    }
    assert!(words.contains("allocator.reserve(p1, s1, 6_291_456)?;"), "{words}");
    assert!(!trace.contains("trim") && trace.contains("destroy p1"), "{trace}");
    symmalloc("replay {} --json", &[&planned]).json(0);
    // Existing reservations do not add to the new ones.
    let again = one(&symmalloc("plan {} --json", &[&planned]));
    assert_eq!(sizes(&again), [4 << 20, 2 << 20, 6 << 20, 6 << 20]);
}

#[test]
fn a_reserved_job_with_shared_streams_gets_one_segment() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &["stream s0", "stream s1", "a 0 3000000 s0", "a 1 3000000 s1", "f 0", "f 1"]);
    let words = symmalloc("plan {} --reserved --streams shared", &[&job]).exited(0).stdout.clone();
    assert!(words.contains("SYMMALLOC_CONF=segments:reserved,segment_mb:6,streams:shared\n"), "{words}");
}

#[test]
fn reservations_beyond_a_limit_are_refused() {
    let folder = Folder::new();
    let refused = |name: &str, from: &str, to: &str| {
        let lines = LINES.map(|line| line.replace(from, to));
        let job = folder.trace(name, &lines.each_ref().map(String::as_str));
        let output = symmalloc("plan {} --reservations {}", &[&job, &folder.path("reserved.trace")]);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{}", output.stderr);
        output.stderr
    };
    let pool = refused("pool.trace", ",limit_mb:12", ",limit_mb:8");
    assert!(pool.contains("pool p1 needs 12.00 MiB, but the limit is 8.00 MiB"), "{pool}");
    let total = refused("total.trace", "total_limit_mb:64", "total_limit_mb:16");
    assert!(total.contains("all pools together need 18.00 MiB, but the limit is 16.00 MiB"), "{total}");
    let range = refused("range.trace", "segments:expandable", "segments:expandable,range_mb:4");
    assert!(range.contains("pool p1 needs") && range.contains("raise range_mb"), "{range}");
}

#[test]
fn recordings_of_different_jobs_and_two_outputs_are_refused() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &LINES);
    let b = folder.trace("b.trace", &LINES.map(|line| if line.starts_with("pool") { "pool p1" } else { line }));
    let output = symmalloc("plan {} {} --one-job", &[&a, &b]);
    assert_eq!(output.code, Some(2));
    assert!(output.stderr.contains("configure pool p1 differently"), "{}", output.stderr);
    for flag in ["-o", "--reservations"] {
        let output = symmalloc(&format!("plan {{}} {{}} --one-job {flag} {{}}"), &[&a, &a, &folder.path("out")]);
        assert!(
            output.code == Some(2) && output.stderr.contains(&format!("{flag} writes a file for one")),
            "{}",
            output.stderr
        );
    }
}

/// Plans a job into a file.
fn planned(folder: &Folder, job: &Path, flags: &str) -> (PathBuf, Value) {
    let file = folder.path("job.plan");
    let plan = one(&symmalloc(&format!("plan {{}} -o {{}} --json{flags}"), &[job, &file]));
    assert_eq!(plan["plan"], file.to_str().unwrap());
    (file, plan)
}

#[test]
fn each_recorded_job_follows_a_plan_that_reserves_its_live_peak() {
    for job in JOBS {
        let folder = Folder::new();
        let job = recorded(&format!("{job}.trace.zst"));
        let (file, plan) = planned(&folder, &job, "");
        assert_eq!((&plan["job"], &plan["streams"]), (&job.to_str().unwrap().into(), &"shared".into()));
        let efficiency = plan["efficiency"].as_f64().unwrap();
        assert!(efficiency >= 0.9995, "{plan}");
        assert!(bytes(&plan, "planned_bytes") < bytes(&plan, "online_bytes") && plan["seconds"].is_number(), "{plan}");
        let replay = "replay {} --plan {} --passes 3 --ranks 4 --json";
        let followed = &symmalloc(replay, &[&job, &file]).json(0)[0];
        assert_eq!((&followed["efficiency"], &followed["aligned"]), (&plan["efficiency"], &true.into()), "{followed}");
        assert_eq!((&followed["differing_placements"], &followed["planned_ops_share"]), (&0.into(), &1.0.into()));
        assert_eq!(bytes(followed, "peak_reserved_bytes"), bytes(&plan, "planned_bytes"));
        assert_eq!(bytes(followed, "peak_live_bytes"), bytes(&plan, "peak_live_bytes"));
        assert_eq!(followed["streams"], "shared", "the plan's configuration");
    }
}

#[test]
fn each_pool_is_planned_separately_and_its_plan_is_followed_in_every_pass() {
    let folder = Folder::new();
    let lines = LINES.map(|line| line.replace("limit_mb:12", "limit_mb:64"));
    let job = folder.trace("job.trace", &lines.each_ref().map(String::as_str));
    let (file, plan) = planned(&folder, &job, "");
    // The job's own configuration determines its stream policy.
    assert_eq!((&plan["streams"], &plan["plans"]), (&"separate".into(), &4.into()), "{plan}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nplan p1 s1 key 0 allocations 1\na 5000000 s1 1 @0\nend 10\n"), "{text}");
    let replay = |flags: &str| symmalloc(&format!("replay {{}} --plan {{}} --json{flags}"), &[&job, &file]);
    let followed = &replay("").json(0)[0];
    assert_eq!((&followed["planned_ops_share"], &followed["aligned"]), (&1.0.into(), &true.into()), "{followed}");
    assert_eq!(followed["efficiency"], plan["efficiency"]);
    // Only the default pool is shared. Flags may repeat settings of the plan.
    let (file, plan) = planned(&folder, &job, " --streams shared");
    assert_eq!((&plan["streams"], &plan["plans"]), (&"shared".into(), &3.into()), "{plan}");
    let output = symmalloc("replay {} --plan {} --json --streams shared --segments fixed", &[&job, &file]).json(0);
    assert_eq!((&output[0]["planned_ops_share"], &output[0]["streams"]), (&1.0.into(), &"shared".into()), "{output}");
}

#[test]
fn a_job_with_steps_has_a_plan_for_each_key() {
    let folder = Folder::new();
    let mut lines = vec!["stream s0", "a 900 2000000 s0"];
    let step = |key: u32, base: u32, large: u32| {
        let [a, b, c] = [base, base + 1, base + 2];
        format!("begin_step {key}\na {a} 6000000 s0\na {b} 512 s0\nf {a}\na {c} {large} s0\nf {b}\nf {c}\nend_step")
    };
    let steps = [step(7, 0, 8_000_000), step(7, 10, 8_000_000), step(3, 20, 4_000_000), step(7, 30, 8_000_000)];
    lines.extend(steps.iter().flat_map(|step| step.lines()));
    let job = folder.trace("job.trace", &lines);
    let (file, plan) = planned(&folder, &job, "");
    let text = fs::read_to_string(&file).unwrap();
    assert!(
        text.contains("\nplan p0 shared key 3 allocations 3\n") && text.contains("\nplan p0 shared key 7 "),
        "{text}"
    );
    // All allocations except the one outside of steps.
    let share = (12.0_f64 / 13.0 * 1e6).round() / 1e6;
    assert_eq!((&plan["plans"], &plan["planned_ops_share"]), (&2.into(), &share.into()), "{plan}");
    let followed = &symmalloc("replay {} --plan {} --json", &[&job, &file]).json(0)[0];
    assert_eq!((&followed["planned_ops_share"], &followed["aligned"]), (&share.into(), &true.into()));
    assert_eq!(bytes(followed, "peak_reserved_bytes"), bytes(&plan, "planned_bytes"));
    // Every step of one key has a different size.
    let other = folder.trace(
        "other.trace",
        &lines
            .iter()
            .map(|line| line.replace("4000000", "4000001"))
            .collect::<Vec<_>>()
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>(),
    );
    let output = symmalloc("replay {} --plan {}", &[&other, &file]);
    assert!(
        output.code == Some(2)
            && output.stderr.contains("allocation 2 of p0 (op 22) requests 3.81 MiB (4,000,001 bytes)"),
        "{}",
        output.stderr
    );
}

#[test]
fn each_recording_is_planned_separately_and_the_gain_is_printed() {
    let folder = Folder::new();
    let small = folder.trace("small.trace", &["stream s0", "a 0 9000000 s0"]);
    let large = folder.trace("large.trace", &["stream s0", "a 0 90000000 s0"]);
    let output = symmalloc("plan {} {} --json", &[&small, &large]).json(0);
    let jobs: Vec<(u64, bool)> =
        output.as_array().unwrap().iter().map(|job| (bytes(job, "planned_bytes"), job["plan"].is_null())).collect();
    assert_eq!(jobs, [(10 << 20, true), (86 << 20, true)]);
    let file = folder.path("job.plan.gz");
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let page = symmalloc("plan {} -o {}", &[&job, &file]).exited(0).stdout.clone();
    for words in
        ["peak live    4.66 GiB", "1.000 of it live at the peak; streams shared, ", "gained     902.00 MiB   15.9 %"]
    {
        assert!(page.contains(words), "{words} in\n{page}");
    }
    // The printed command works, and the file is compressed according to its extension.
    assert!(page.contains(&format!("symmalloc replay {} --plan {}", job.display(), file.display())), "{page}");
    assert_eq!(fs::read(&file).unwrap()[..2], [0x1f, 0x8b]);
    let table = symmalloc("replay {} --plan {} --ranks 2", &[&job, &file]).exited(0).stdout.clone();
    let row =
        table.lines().find(|line| line.contains("allocations as planned")).expect("the table should have the row");
    assert!(row.contains("100.00 %") && table.contains("symmalloc, planned"), "{table}");
}

#[test]
fn a_plan_fits_where_best_fit_does_not() {
    let folder = Folder::new();
    // Best fit puts the second request into a hole that the third one needs.
    let lines = [
        "config limit_mb:95",
        "stream s0",
        "a 0 20971520 s0",
        "a 1 67108864 s0",
        "f 0",
        "a 2 10485760 s0",
        "a 3 12582912 s0",
        "f 1",
        "f 2",
        "f 3",
    ];
    let job = folder.trace("job.trace", &lines);
    let output = symmalloc("plan {}", &[&job]).exited(0).stdout.clone();
    assert!(output.contains("but the limit is 95.00 MiB"), "{output}");
    let (file, plan) = planned(&folder, &job, "");
    assert_eq!((bytes(&plan, "planned_bytes"), plan.get("reserve_bytes")), (86 << 20, None), "{plan}");
    let followed = &symmalloc("replay {} --plan {} --json", &[&job, &file]).json(0)[0];
    assert_eq!(followed["efficiency"], 1.0, "{followed}");
    let page = symmalloc("plan {} -o {}", &[&job, &file]).exited(0).stdout.clone();
    assert!(page.contains("No reservation fits the whole job without a plan: pool p0 needs"), "{page}");
}

#[test]
fn a_symmetric_pool_has_one_window_of_the_planned_size() {
    let folder = Folder::new();
    let lines = [
        "config segments:reserved,segment_mb:64,symmetric:true,streams:shared",
        "stream s0",
        "stream s1",
        "a 0 3000000 s0",
        "a 1 9000000 s1",
        "f 0",
        "a 2 3000000 s0",
    ];
    let job = folder.trace("job.trace", &lines);
    let (file, plan) = planned(&folder, &job, "");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nconfig segments:reserved,segment_mb:12,"), "{text}");
    assert_eq!((bytes(&plan, "planned_bytes"), bytes(&plan, "online_bytes")), (12 << 20, 64 << 20));
    assert_eq!((&plan["waits"], &plan["planned_ops_share"]), (&0.into(), &1.0.into()), "{plan}");
    let followed = &symmalloc("replay {} --plan {} --json", &[&job, &file]).json(0)[0];
    assert_eq!((&followed["segment_count"], &followed["efficiency"]), (&1.into(), &plan["efficiency"]), "{followed}");
}

#[test]
fn a_plan_that_reserves_more_prints_the_loss() {
    let folder = Folder::new();
    let lines = ["stream s0", "stream s1", "a 0 31457280 s0", "f 0", "trim", "a 1 31457280 s1", "f 1", "trim"];
    let job = folder.trace("job.trace", &lines);
    let shared = symmalloc("plan {}", &[&job]).exited(0).stdout.clone();
    assert!(shared.contains("\ngained            0 B   0.0 %\n"), "{shared}");
    // Each heap has separate memory, although only one is in use at a time.
    let separate = symmalloc("plan {} --streams separate", &[&job]).exited(0).stdout.clone();
    assert!(separate.contains("\nlost        30.00 MiB   100.0 %\n"), "{separate}");
}

#[test]
fn a_job_in_which_nothing_repeats_has_no_plan_to_write() {
    let folder = Folder::new();
    let job = folder.trace("job.trace", &["stream s0", "a 0 0 s0", "f 0"]);
    let file = folder.path("job.plan");
    assert_eq!(one(&symmalloc("plan {} --json", &[&job]))["plans"], 0);
    let output = symmalloc("plan {} -o {}", &[&job, &file]);
    assert!(output.code == Some(2) && output.stderr.contains("there is nothing to plan"), "{}", output.stderr);
    assert!(!file.exists());
}

/// The example of `google/minimalloc`, whose optimum is its lower bound.
const TABLE: [&str; 6] = ["id,lower,upper,size", "b1,0,3,4", "b2,3,9,4", "b3,0,9,4", "b4,9,21,4", "b5,0,21,4"];

#[test]
fn a_table_of_rectangles_gets_offsets_and_its_quality() {
    let folder = Folder::new();
    let table = folder.file("input.12.csv", TABLE.join("\n"));
    let offsets = folder.path("offsets.csv");
    let plan = one(&symmalloc("plan {} -o {} --json", &[&table, &offsets]));
    assert_eq!((bytes(&plan, "rectangles"), bytes(&plan, "lower_bound"), bytes(&plan, "height")), (5, 12, 12));
    assert_eq!((&plan["quality"], &plan["is_optimal"]), (&json!(1.0), &json!(true)), "{plan}");
    let text = fs::read_to_string(&offsets).unwrap();
    assert_eq!(text.lines().next(), Some("id,lower,upper,size,offset"));
    assert_eq!(text.lines().skip(1).map(|row| row.rsplit_once(',').unwrap().0).collect::<Vec<_>>(), TABLE[1..]);
    let shown = symmalloc("plan {}", &[&table]);
    let shown = &shown.exited(0).stdout;
    for part in ["5 rectangles", "lower bound", "lower bound / height 1.0000: optimal", "found in"] {
        assert!(shown.contains(part), "{shown}");
    }
    // The same problem with the names of columns as a spreadsheet may write them.
    let capital =
        folder.file("capital.csv", TABLE.join("\n").replace("id,lower,upper,size", "\"ID\",Lower,Upper,Size"));
    symmalloc("plan {} -o {}", &[&capital, &offsets]).exited(0);
    assert_eq!(fs::read_to_string(&offsets).unwrap(), text);
    // The same problem with inclusive ends.
    let inclusive = ["id,start,end,size", "b1,0,2,4", "b2,3,8,4", "b3,0,8,4", "b4,9,20,4", "b5,0,20,4"];
    let inclusive = folder.file("inclusive.csv", inclusive.join("\n"));
    symmalloc("plan {} -o {}", &[&inclusive, &offsets]).exited(0);
    assert_eq!(fs::read_to_string(&offsets).unwrap(), text);
}

/// The table of a job's plan has the sizes of its blocks, and other planners can read it.
#[test]
fn the_plan_of_a_job_is_written_as_a_table() {
    let folder = Folder::new();
    let lines = ["stream s0", "stream s1", "a 0 1000 s0", "a 1 512 s1", "f 0", "a 2 1024 s0", "f 2", "f 1"];
    let job = folder.trace("job.trace", &lines);
    let table = folder.path("job.csv");
    let shown = symmalloc("plan {} -o {}", &[&job, &table]);
    assert!(!shown.exited(0).stdout.contains("follow it with"), "a table is not a plan to follow");
    let text = fs::read_to_string(&table).unwrap();
    // The second allocation lives in all sections, so it lies at the bottom.
    assert_eq!(text, "id,lower,upper,size,offset\n0,0,2,1024,512\n1,1,3,512,0\n2,2,3,1024,512\n");
    let rectangles: String = text.lines().map(|row| row.rsplit_once(',').unwrap().0.to_owned() + "\n").collect();
    let plan = one(&symmalloc("plan {} --json", &[&folder.file("again.csv", rectangles)]));
    assert_eq!((bytes(&plan, "rectangles"), bytes(&plan, "height")), (3, 1536));
    fs::remove_file(&table).unwrap();
    let separate = ["stream s0", "stream s1", "pool p0 streams:separate", "a 0 1000 s0", "a 1 512 s1", "f 0", "f 1"];
    // The second allocation of each step is freed in the next one.
    let step = |number: u32| {
        let (early, first, second) = (2 * number, 2 * number + 1, 2 * number + 2);
        format!("begin_step 7 p0\na {first} 512 s0\nf {early}\na {second} 4096 s0\nf {first}\nend_step p0")
    };
    let steps = format!("stream s0\na 0 4096 s0\n{}", (0..4).map(step).collect::<Vec<_>>().join("\n"));
    let steps: Vec<&str> = steps.lines().collect();
    let lasting =
        ["stream s0", "begin_step 7 p0", "a 0 512 s0", "end_step p0", "begin_step 7 p0", "a 1 512 s0", "end_step p0"];
    for (lines, reason) in [
        (&separate[..], "the job has 2 plans, which a table cannot express"),
        (&steps[..], "allocation 1 of a step does not end with the step, which a table cannot express"),
        (&lasting[..], "allocation 0 of a step does not end with the step"),
    ] {
        let output = symmalloc("plan {} -o {}", &[&folder.trace("job.trace", lines), &table]);
        assert!(output.code == Some(2) && output.stderr.contains(reason), "{}", output.stderr);
        assert!(output.stderr.contains("write a plan file: -o FILE.plan"), "{}", output.stderr);
        assert!(!table.exists());
    }
}

#[test]
fn a_table_that_cannot_be_planned_is_refused() {
    let folder = Folder::new();
    let table = folder.file("table.csv", TABLE.join("\n"));
    let bad = folder.file("bad.csv", "id,lower,upper,size\na,3,1,4\n");
    let aligned = folder.file("aligned.csv", "id,lower,upper,size,alignment\na,0,1,4,8\n");
    let without_size = folder.file("unsized.csv", "id,lower,upper\na,0,1\n");
    let untitled = folder.file("untitled.csv", "a,0,1,4\nb,1,3,4\n");
    let semicolons = folder.file("semicolons.csv", "id;lower;upper;size\na;0;1;4\n");
    let job = folder.trace("job.trace", &LINES);
    let offsets = folder.path("offsets.csv");
    let plan = folder.path("offsets.plan");
    for (args, paths, part) in [
        ("plan {}", vec![&bad], "rectangle 0 lives from 3 to 1"),
        ("plan {}", vec![&aligned], "column `alignment`"),
        ("plan {}", vec![&without_size], "no column `size`; it has id, lower, upper"),
        ("plan {}", vec![&untitled], "begin with the columns id"),
        ("plan {}", vec![&semicolons], "separated by commas"),
        ("plan {} --streams separate", vec![&table], "--streams is for recordings"),
        ("plan {} --one-job", vec![&table], "--one-job is for recordings"),
        ("plan {} {}", vec![&table, &job], "job.trace is a recording, but other inputs are tables"),
        ("plan {} {} -o {}", vec![&table, &bad, &offsets], "-o writes a file for one recording"),
        ("plan {} -o {}", vec![&table, &plan], "offsets.plan"),
        ("plan {} -o {}", vec![&table, &table], "table.csv"),
    ] {
        let paths: Vec<&Path> = paths.into_iter().map(PathBuf::as_path).collect();
        let output = symmalloc(args, &paths);
        assert_eq!(output.code, Some(2), "{args}");
        assert!(output.stderr.contains(part), "{args}: {}", output.stderr);
    }
    assert_eq!((offsets.exists(), plan.exists()), (false, false));
    assert_eq!(fs::read_to_string(&table).unwrap().lines().collect::<Vec<_>>(), TABLE);
}

/// A job whose second stream is in the group of the first, or not.
fn job_of_groups(group: &str) -> String {
    format!(
        "symmalloc-trace 2\nconfig streams:grouped\nstream s0\nstream s1{group}\na 0 6000000 s0\nf 0\na 1 6000000 s1\nf 1\n\
         a 2 3000000 s0\nf 2\nend 8\n"
    )
}

// The streams of a run that follows the plan are in the groups of the recording.
#[test]
fn a_plan_of_a_group_of_streams_is_followed() {
    let folder = Folder::new();
    let job = folder.file("job.trace", job_of_groups(" in s0"));
    let plan = folder.path("job.plan");
    let planned = one(&symmalloc("plan {} -o {} --json", &[&job, &plan]));
    let followed = symmalloc("replay {} --plan {} --ranks 1 --json", &[&job, &plan]).json(0);
    assert_eq!(followed[0]["peak_reserved_bytes"], planned["planned_bytes"], "{planned} {followed}");
    assert!(bytes(&planned, "planned_bytes") <= bytes(&planned, "online_bytes"), "{planned}");
    assert!(fs::read_to_string(&plan).unwrap().contains("plan p0 s0+ "), "the plan is for the group's heap");
    // A stream outside of the group makes it another job.
    let apart = folder.file("apart.trace", job_of_groups(""));
    let refused = symmalloc("replay {} --plan {} --ranks 1", &[&apart, &plan]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let ranks = symmalloc("plan {} {} --one-job", &[&job, &apart]);
    assert!(ranks.stderr.contains("register s1 in different groups of streams"), "{}", ranks.stderr);
}
