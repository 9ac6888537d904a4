//! Tests of `symmalloc replay`.

use crate::{CommandOutput, Folder, busy_trace, command, recorded, symmalloc};
use serde_json::Value;
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;

const KEYS: [&str; 25] = [
    "is_overwritten",
    "lived_before",
    "lived_before_bytes",
    "pytorch",
    "schema_version",
    "refused",
    "trace",
    "ops",
    "allocs",
    "ranks",
    "passes",
    "order",
    "segments",
    "streams",
    "aligned",
    "differing_placements",
    "first_divergence",
    "peak_live_bytes",
    "peak_reserved_bytes",
    "efficiency",
    "first_pass",
    "segment_count",
    "ns_per_op",
    "digest",
    "planned_ops_share",
];

const MODES: [&str; 4] = [
    "--segments expandable --streams separate",
    "--segments expandable --streams shared",
    "--segments fixed --streams separate",
    "--segments fixed --streams shared",
];

#[track_caller]
fn assert_keys(object: &Value, keys: &[&str]) {
    let mut found: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    let mut wanted = keys.to_vec();
    found.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
}

/// A job whose second pass reserves more than the first. The first pass grows beyond 12 MiB for the last request but one. A later
/// pass, which has all the memory from the start, takes the hole of 20 MiB for it.
const WORSE_LATER: &str = "symmalloc-trace 1
stream s0
a 0 20971520 s0
a 1 67108864 s0
f 0
a 2 10485760 s0
a 3 12582912 s0
a 4 10485760 s0
f 1
end 8
";

#[test]
fn peaks_are_reported_over_all_passes_and_for_the_first_pass() {
    let folder = Folder::new();
    let trace = folder.path("worse.trace");
    std::fs::write(&trace, WORSE_LATER).unwrap();
    let replay = |flags: &str| symmalloc(&format!("replay {{}} --json {flags}"), &[&trace]).json(0)[0].clone();
    let (one, many) = (replay("--passes 1"), replay("--passes 6"));
    assert_eq!((&one["passes"], &many["passes"]), (&1.into(), &6.into()));
    assert_eq!((&one["aligned"], &many["aligned"]), (&true.into(), &true.into()));
    assert_eq!((&one["efficiency"], &one["first_pass"]["efficiency"]), (&1.0.into(), &1.0.into()));
    assert_eq!((&many["efficiency"], &many["first_pass"]["efficiency"]), (&0.923077.into(), &1.0.into()));
    assert_eq!((&one["digest"], &many["digest"]), (&many["digest"], &one["digest"]));
    // `--repeat` is the former name of the flag.
    assert_eq!(replay("--repeat 6")["efficiency"], many["efficiency"]);
    let table = symmalloc("replay {}", &[&trace]).exited(0).stdout.clone();
    let row = |name: &str| table.lines().find(|line| line.contains(name)).expect(name).to_owned();
    assert!(row("peak live / reserved").contains("0.923") && row("in the first pass").contains("1.000"), "{table}");
    // The model of address order repeats the passes as well, so its peak can only rise.
    let model = |flags: &str| replay(&format!("--order address --segments expandable --ranks 1 {flags}"));
    let (one, many) = (model("--passes 1"), model("--passes 6"));
    assert_eq!(many["first_pass"]["peak_reserved_bytes"], one["peak_reserved_bytes"]);
    assert!(many["peak_reserved_bytes"].as_u64() >= one["peak_reserved_bytes"].as_u64());
}

#[test]
fn stitched_memory_counts_once() {
    let folder = Folder::new();
    let trace = folder.path("pieces.trace");
    // Three separate pieces of 8 MiB are free when the job requests 24 MiB, and then 26 MiB.
    let allocate = |number: u32, mib: u64| format!("a {number} {} s0\n", mib << 20);
    let blocks: String = (0..7).map(|number| allocate(number, 8)).collect();
    let text =
        format!("symmalloc-trace 1\nstream s0\n{blocks}f 1\nf 3\nf 5\n{}f 7\n{}", allocate(7, 24), allocate(8, 26));
    std::fs::write(&trace, text + "end 14\n").unwrap();
    let replay = |config: &str| {
        let printed =
            symmalloc(&format!("replay {{}} --json --passes 3 --ranks 3 --config {config}"), &[&trace]).json(0);
        assert_eq!(printed[0]["aligned"], true);
        (
            printed[0]["peak_live_bytes"].as_u64().unwrap() >> 20,
            printed[0]["peak_reserved_bytes"].as_u64().unwrap() >> 20,
        )
    };
    assert_eq!(replay("streams:separate"), (58, 82));
    assert_eq!(replay("stitching_granule_mb:2"), (58, 58));
    // Fewer than 8 granules of the default size are not stitched, and the range grows by whole granules.
    assert_eq!(replay("stitching:true"), (58, 96));
    // The table also has fixed segments, which are not stitched.
    let table = symmalloc("replay {} --config stitching_granule_mb:2", &[&trace]).exited(0).stdout.clone();
    assert!(table.contains("1.000"), "{table}");
}

#[test]
fn json_has_the_documented_keys_and_types() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    let printed = symmalloc("replay {} --json", &[&trace]).json(0);
    let [object] = printed.as_array().unwrap().as_slice() else { panic!("not one object: {printed}") };
    assert_keys(object, &KEYS);
    assert_eq!(object["trace"], trace.to_str().unwrap());
    assert_eq!((&object["ops"], &object["allocs"], &object["ranks"]), (&273.into(), &121.into(), &8.into()));
    assert_eq!(object["order"], "sequence");
    assert_eq!((&object["segments"], &object["streams"]), (&"expandable".into(), &"separate".into()));
    assert_eq!((&object["aligned"], &object["differing_placements"]), (&true.into(), &0.into()));
    assert!(object["first_divergence"].is_null());
    let (live, reserved) =
        (object["peak_live_bytes"].as_u64().unwrap(), object["peak_reserved_bytes"].as_u64().unwrap());
    assert!(live > 400 << 20 && reserved >= live);
    let efficiency = object["efficiency"].as_f64().unwrap();
    assert!((efficiency - live as f64 / reserved as f64).abs() < 1e-5);
    assert_eq!((&object["segment_count"], &object["planned_ops_share"]), (&2.into(), &Value::Null));
    assert!(object["ns_per_op"].as_f64().unwrap() > 0.0);
    let digest = object["digest"].as_str().unwrap();
    assert!(digest.len() == 16 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
}

#[test]
fn every_mode_places_alike_whatever_the_seed() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    for mode in MODES {
        let run =
            |seed: u64| symmalloc(&format!("replay {{}} --json --seed {seed} --passes 3 {mode}"), &[&trace]).json(0);
        let (one, other) = (run(1), run(77));
        for printed in [&one, &other] {
            assert_eq!(
                (&printed[0]["aligned"], &printed[0]["differing_placements"]),
                (&true.into(), &0.into()),
                "{mode}"
            );
        }
        assert_eq!(one[0]["digest"], other[0]["digest"], "{mode}");
    }
}

#[test]
fn a_recorded_job_places_alike_in_every_mode_but_not_in_address_order() {
    let trace = recorded("fsdp1_train_rank0.pickle.gz");
    let bars = [0.838, 0.938, 0.63, 0.63];
    for (mode, bar) in MODES.into_iter().zip(bars) {
        let printed = symmalloc(&format!("replay {{}} --json --ranks 3 --passes 2 {mode}"), &[&trace]).json(0);
        assert_eq!((&printed[0]["aligned"], &printed[0]["allocs"]), (&true.into(), &24_464.into()), "{mode}");
        assert!(printed[0]["efficiency"].as_f64().unwrap() >= bar, "{mode}: {}", printed[0]["efficiency"]);
    }
    let printed = symmalloc("replay {} --json --ranks 3 --order address --segments fixed", &[&trace]).json(3);
    assert_eq!(printed[0]["aligned"], false);
    assert!(printed[0]["differing_placements"].as_u64().unwrap() > 10_000);
}

#[test]
fn address_order_differs_and_shows_the_first_difference_on_every_rank() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    let printed = symmalloc("replay {} --json --order address --segments fixed --ranks 5", &[&trace]).json(3);
    let object = &printed[0];
    assert_keys(object, &KEYS);
    assert_eq!((&object["order"], &object["aligned"]), (&"address".into(), &false.into()));
    assert!(object["ns_per_op"].is_null() && object["digest"].is_null());
    let first = &object["first_divergence"];
    assert_keys(first, &["op", "allocation", "ranks"]);
    assert!(first["op"].as_u64().unwrap() > first["allocation"].as_u64().unwrap());
    let ranks = first["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 5);
    for (number, rank) in ranks.iter().enumerate() {
        assert_keys(rank, &["rank", "segment", "offset"]);
        assert_eq!(rank["rank"], number);
    }
    let place = |rank: &Value| (rank["segment"].as_u64().unwrap(), rank["offset"].as_u64().unwrap());
    assert!(ranks.iter().any(|rank| place(rank) != place(&ranks[0])));
    assert!(object["differing_placements"].as_u64().unwrap() > 0);
}

#[test]
fn the_table_shows_both_rules_and_the_exit_code_is_that_of_symmalloc() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    let printed = symmalloc("replay {}", &[&trace]);
    let screen = &printed.exited(0).stdout;
    for wanted in ["busy.trace", "0 of 121", "PyTorch (model)", "its default", "peak reserved", "digest"] {
        assert!(screen.contains(wanted), "no {wanted:?} in:\n{screen}");
    }
    assert!(!screen.contains("ncclSuccess"), "the warning appears, but no buffer is in a window:\n{screen}");
    let symmetric = symmalloc("replay {} --config symmetric:true,total_limit_mb:64 --allow-refusals", &[&trace]).stdout;
    for wanted in ["settings: segments:expandable,symmetric:true,total_limit_mb:64", "ncclSuccess", "have no limit"] {
        assert!(symmetric.contains(wanted), "no {wanted:?} in:\n{symmetric}");
    }
    assert!(!screen.contains("settings:") && !screen.contains("have no limit"), "{screen}");
    // The first line has the path, and can be longer.
    let widest = screen.lines().skip(1).map(|line| line.chars().count()).max().unwrap();
    assert!(screen.lines().count() <= 30 && widest <= 90, "larger than a screen:\n{screen}");
    assert!(!screen.contains('\x1b'), "colors in a pipe:\n{screen}");
    let old_rule = symmalloc("replay {} --order address --segments fixed", &[&trace]);
    assert!(!old_rule.exited(3).stdout.contains("symmalloc\n"));
}

#[test]
fn a_long_job_is_replayed_less_by_default_and_the_answer_says_so() {
    let folder = Folder::new();
    let job =
        |ops: usize| folder.trace("long.trace", &[&["stream s0", "a 0 512 s0"], &vec!["sync"; ops - 2][..]].concat());
    let repeated = |line: &str, trace: &PathBuf| {
        let object = &symmalloc(line, &[trace]).json(0)[0];
        ["ranks", "passes"].map(|key| object[key].as_u64().unwrap())
    };
    assert_eq!(repeated("replay {} --json", &job(499_999)), [8, 5]);
    let long = job(500_000);
    assert_eq!(repeated("replay {} --json", &long), [2, 2]);
    assert_eq!(repeated("replay {} --json --ranks 3 --passes 1", &long), [3, 1]);
    let less = "The job is long: by default, 2 ranks run it 2 times, instead of 8 ranks 5 times (--ranks, --passes).";
    assert!(symmalloc("replay {}", &[&long]).exited(0).stdout.contains(less));
    assert!(symmalloc("replay {} --ranks 3", &[&long]).exited(0).stdout.contains(less));
    assert!(!symmalloc("replay {} --ranks 3 --passes 1", &[&long]).exited(0).stdout.contains("The job is long"));
}

/// Regression test: with the former limit on stitched granules, this job reserved more than PyTorch's expandable
/// segments.
#[test]
fn the_stitched_job_prints_its_settings_and_reserves_less_than_the_model_of_pytorch() {
    let printed = &symmalloc("replay gnn --ranks 1 --json", &[]).json(0)[0];
    assert!(printed["efficiency"].as_f64() > Some(0.99), "{printed}");
    assert!(printed["pytorch"][0]["efficiency"].as_f64() < Some(0.8), "{printed}");
    let screen = symmalloc("replay gnn --ranks 1", &[]).stdout;
    assert!(
        screen.contains("settings: segments:expandable,streams:shared,stitching_granule_mb:2,pointer_lookup:exact"),
        "{screen}"
    );
}

#[test]
fn each_trace_has_its_json_object_and_any_difference_sets_the_exit_code() {
    let folder = Folder::new();
    let quiet = folder.trace("quiet.trace", &["stream s0", "a 0 512 s0", "f 0"]);
    let busy = busy_trace(&folder);
    let printed = symmalloc("replay {} {} --json --order address --segments fixed", &[&quiet, &busy]).json(3);
    assert_eq!((&printed[0]["aligned"], &printed[1]["aligned"]), (&true.into(), &false.into()));
    assert_eq!(printed.as_array().unwrap().len(), 2);
}

#[test]
fn flags_override_the_default_pools_configuration_in_the_trace() {
    let folder = Folder::new();
    let by_config = folder.trace("config.trace", &["config segments:fixed,streams:shared", "stream s0", "a 0 512 s0"]);
    let by_pool = folder.trace("pool.trace", &["pool p0 segments:reserved,segment_mb:64", "stream s0", "a 0 512 s0"]);
    let printed = symmalloc("replay {} {} --json", &[&by_config, &by_pool]).json(0);
    assert_eq!((&printed[0]["segments"], &printed[0]["streams"]), (&"fixed".into(), &"shared".into()));
    assert_eq!((&printed[1]["segments"], &printed[1]["peak_reserved_bytes"]), (&"reserved".into(), &(64 << 20).into()));
    let printed =
        symmalloc("replay {} {} --json --segments expandable --streams separate", &[&by_config, &by_pool]).json(0);
    for object in printed.as_array().unwrap() {
        assert_eq!((&object["segments"], &object["streams"]), (&"expandable".into(), &"separate".into()));
    }
}

#[test]
fn pools_of_the_program_keep_their_own_configuration() {
    let folder = Folder::new();
    let lines = ["stream s0", "pool p1 segments:reserved,segment_mb:64", "a 0 512 s0 p1", "f 0", "destroy p1"];
    let trace = folder.trace("pools.trace", &lines);
    let printed = symmalloc("replay {} --json --segments fixed", &[&trace]).json(0);
    assert_eq!((&printed[0]["segments"], &printed[0]["peak_reserved_bytes"]), (&"fixed".into(), &(64 << 20).into()));
}

#[test]
fn a_refused_request_is_a_decision_and_fails_the_replay() {
    let folder = Folder::new();
    let lines =
        ["config total_limit_mb:16", "stream s0", "a 0 8388608 s0", "a 1 67108864 s0", "u 1 s0", "f 1", "a 2 512 s0"];
    let trace = folder.trace("limit.trace", &lines);
    let printed = symmalloc("replay {} --json", &[&trace]).json(3);
    assert_eq!((&printed[0]["aligned"], &printed[0]["allocs"]), (&true.into(), &3.into()));
    assert_eq!((&printed[0]["refused"], &printed[0]["first_pass"]["refused"]), (&1.into(), &1.into()));
    let screen = symmalloc("replay {}", &[&trace]);
    let row = screen
        .exited(3)
        .stdout
        .lines()
        .find(|line| line.contains("allocations refused"))
        .expect("the table should have the row");
    assert!(row.contains("1 of 3"), "{row}");
    let allowed = symmalloc("replay {} --json --allow-refusals", &[&trace]).json(0);
    assert_eq!(allowed[0]["refused"], 1);
}

#[test]
fn a_limit_that_refuses_requests_fails_the_replay() {
    let printed = symmalloc("replay fsdp1 --json --ranks 2 --config total_limit_mb:1000", &[]).json(3);
    assert_eq!((&printed[0]["first_pass"]["refused"], &printed[0]["trace"]), (&17_142.into(), &"fsdp1".into()));
    assert!(printed[0]["refused"].as_u64().unwrap() >= 17_142);
}

#[test]
fn the_model_applies_the_settings_that_it_supports() {
    let reserved = |flags: &str, code| {
        let printed = symmalloc(&format!("replay fsdp1 --json --ranks 2 --passes 2 {flags}"), &[]).json(code);
        printed[0]["peak_reserved_bytes"].as_u64().unwrap()
    };
    let plain = reserved("--order address --config segments:fixed", 3);
    for settings in ["max_split_size_mb:64", "large_segment_size_mb:32", "roundup_power2_divisions:2"] {
        let flags = format!("--config segments:fixed,{settings}");
        let model = reserved(&format!("--order address {flags}"), 3);
        assert_ne!(model, plain, "{settings} is ignored");
        // Our allocator has the same size rules, but breaks ties in a different order.
        let ours = reserved(&flags, 0);
        assert!(model.abs_diff(ours) <= ours / 20, "{settings}: {model} in the model, {ours} in ours");
    }
}

#[test]
fn a_program_that_does_nothing_wastes_nothing() {
    let folder = Folder::new();
    let trace = folder.file("empty.trace", "symmalloc-trace 1\nend 0\n");
    let printed = symmalloc("replay {} --json --passes 1", &[&trace]).json(0);
    assert_eq!((&printed[0]["allocs"], &printed[0]["efficiency"]), (&0.into(), &1.0.into()));
    symmalloc("replay {}", &[&trace]).exited(0);
}

#[test]
fn recorded_decisions_are_the_same_under_every_seed_and_replay_to_the_same_digest() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    let (one, other) = (folder.path("one.trace.zst"), folder.path("other.trace.gz"));
    let printed = symmalloc("replay {} --json --segments fixed --seed 1 --record {}", &[&trace, &one]).json(0);
    symmalloc("replay {} --json --segments fixed --seed 2 --record {}", &[&trace, &other]).json(0);
    let diff = symmalloc("diff {} {} --json", &[&one, &other]).json(0);
    assert_eq!(
        (&diff["same_ops"], &diff["allocs"], &diff["differing_placements"]),
        (&true.into(), &121.into(), &0.into())
    );
    let again = symmalloc("replay {} --json", &[&one]).json(0);
    assert_eq!((&again[0]["digest"], &again[0]["segments"]), (&printed[0]["digest"], &"fixed".into()));
    let expandable = folder.path("expandable.trace");
    symmalloc("replay {} --json --record {}", &[&trace, &expandable]).json(0);
    let diff = symmalloc("diff {} {} --json", &[&one, &expandable]).json(3);
    assert_eq!(diff["same_ops"], true);
    assert!(diff["differing_placements"].as_u64().unwrap() > 0);
}

#[test]
fn thousands_of_ranks_are_replayed() {
    let folder = Folder::new();
    let trace = folder.trace("quiet.trace", &["stream s0", "a 0 512 s0", "f 0"]);
    let printed = symmalloc("replay {} --json --ranks 4096", &[&trace]).json(0);
    assert_eq!((&printed[0]["ranks"], &printed[0]["aligned"]), (&4096.into(), &true.into()));
}

#[test]
fn a_closed_stdout_is_not_an_error() {
    let folder = Folder::new();
    let trace = busy_trace(&folder);
    for args in [vec!["replay", "--json"], vec!["replay"], vec!["replay", "--help"]] {
        let mut child = command().args(args).arg(&trace).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""));
    }
}

#[test]
fn json_has_the_columns_of_the_table() {
    let printed = symmalloc("replay fsdp1 --ranks 12 --json", &[]).json(0);
    let pytorch = printed[0]["pytorch"].as_array().unwrap();
    assert_eq!((pytorch.len(), &printed[0]["ranks"]), (2, &12.into()));
    let screen = symmalloc("replay fsdp1 --ranks 12", &[]);
    let screen = &screen.exited(0).stdout;
    for (column, segments) in pytorch.iter().zip(["expandable", "fixed"]) {
        assert_eq!((&column["order"], &column["segments"]), (&"address".into(), &segments.into()));
        assert_eq!((&column["aligned"], &column["ranks"], &column["refused"]), (&false.into(), &8.into(), &0.into()));
        let gib = column["peak_reserved_bytes"].as_u64().unwrap() as f64 / f64::from(1 << 30);
        assert!(screen.contains(&format!("{gib:.2} GiB")), "{gib} in\n{screen}");
        assert_eq!(column["first_divergence"]["ranks"].as_array().unwrap().len(), 8);
    }
    let alone = symmalloc("replay fsdp1 --ranks 2 --order address --json", &[]).json(3);
    assert_eq!(alone[0]["pytorch"].as_array().unwrap().len(), 0);
}

#[test]
fn jobs_without_symmetric_pools_are_not_warned_of_nccl() {
    let warns = |args: &str| symmalloc(args, &[]).exited(0).stdout.contains("NCCL");
    assert!(warns("replay fsdp1 --ranks 2 --config segments:expandable,symmetric:true"));
    assert!(!warns("replay fsdp1 --ranks 2"));
    for job in ["gpt2", "moe"] {
        let printed = symmalloc(&format!("replay {job} --ranks 2 --passes 2"), &[]);
        let screen = &printed.exited(0).stdout;
        assert!(screen.contains("The first to differ is op") && !screen.contains("NCCL"), "{screen}");
    }
}

#[test]
fn a_table_that_is_too_wide_is_printed_in_parts() {
    let lines_of = |columns: &str| {
        let args = ["replay", "moe", "--ranks", "1", "--passes", "1"];
        let printed: CommandOutput = command().args(args).env("COLUMNS", columns).output().unwrap().into();
        let table = printed.exited(0).stdout.lines().skip(3).take_while(|line| !line.contains("simulated rank"));
        table.map(str::to_owned).collect::<Vec<String>>()
    };
    let widest = |lines: &[String]| lines.iter().map(|line| line.chars().count()).max().unwrap();
    let (whole, parts) = (lines_of("80"), lines_of("50"));
    assert!(widest(&whole) > 50 && widest(&whole) <= 80 && widest(&parts) <= 50, "{whole:#?} {parts:#?}");
    let rows = |lines: &[String]| lines.iter().filter(|line| line.starts_with("peak reserved")).count();
    assert_eq!((rows(&whole), rows(&parts)), (1, 3), "{parts:#?}");
}
