//! Foreign text: names, file names and flight records that try to deceive readers or to slow down the program.

use super::{CommandOutput, Folder, command, snapshot, symmalloc};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use symmalloc_harness::hostile::{HostileTrace, trace as hostile_trace};
use symmalloc_harness::is_night;
use symmalloc_import::compression::{Compression, Compressor};

/// All kinds of characters that change a screen or are invisible: escape sequence, title, DEL, C1, direction, zero width, line break.
const HOSTILE: &str =
    "\u{1b}[31mred\u{1b}]0;title\u{7}\r\t\u{7f}\u{9b}1m\u{85}\u{202e}lre\u{2066}\u{200b}\u{feff}\nops  the same";

/// Runs the program. Asserts that its output has no hidden characters, and no line that comes from a name.
#[track_caller]
fn run(args: &[&str], paths: &[&Path]) -> CommandOutput {
    let mut paths = paths.iter();
    let mut command = command();
    for arg in args {
        match *arg {
            "{}" => command.arg(paths.next().unwrap()),
            arg => command.arg(arg),
        };
    }
    let printed = CommandOutput::from(command.output().unwrap());
    for text in [&printed.stdout, &printed.stderr] {
        shows_everything(text);
        assert!(!text.lines().any(|line| line.starts_with("ops  the same")), "a foreign line:\n{text}");
    }
    printed
}

#[track_caller]
fn shows_everything(text: &str) {
    let hides = |c: &char| {
        *c != '\n' && c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    assert_eq!(text.chars().find(hides), None, "hidden in:\n{}", text.escape_debug());
}

/// Quotes a name for a trace.
fn in_trace(name: &str) -> String {
    format!("{name:?}")
}

/// Writes a trace with hostile names to a file with a hostile name.
fn trace(folder: &Folder, name: &str, places: [u64; 2]) -> PathBuf {
    let name_of = in_trace(&HOSTILE.replace('\u{7}', ""));
    let [a, b] = places;
    folder.trace(
        &format!("{name}{}.trace", HOSTILE.replace('/', "")),
        &[
            "stream s0",
            "stream s1",
            &format!("a 0 4194304 s0 {name_of} -> 0@{a}"),
            "u 0 s1",
            &format!("a 1 4194304 s0 {name_of} -> 0@{b}"),
            "f 0",
            "f 1",
        ],
    )
}

#[test]
fn hostile_names_are_escaped_in_every_command() {
    let folder = Folder::new();
    let (one, other) = (trace(&folder, "one", [0, 4 << 20]), trace(&folder, "other", [8 << 20, 0]));
    let pickle = folder.file(&format!("{HOSTILE}.pickle"), snapshot(0x1000, &[], &[("alloc", 0x1000, 512)]));
    let out = |name: &str| folder.path(&format!("{name}{HOSTILE}.{name}"));
    run(&["diff", "{}", "{}"], &[&one, &other]).exited(3);
    run(&["diff", "{}", "{}", "--json"], &[&one, &other]).json(3);
    for job in [&one, &pickle] {
        for json in [&[][..], &["--json"]] {
            run(&[&["replay", "{}"], json].concat(), &[job]);
            run(&[&["simulate", "{}", "--ranks", "2"], json].concat(), &[job]);
            run(&[&["import", "{}", "{}"], json].concat(), &[job, &out("trace")]);
            run(&[&["export", "{}", "{}"], json].concat(), &[job, &out("pickle")]);
            run(&[&["export", "{}", "{}"], json].concat(), &[job, &out("json")]);
            run(&[&["plan", "{}", "-o", "{}"], json].concat(), &[job, &out("plan")]);
            for format in ["svg", "html"] {
                if format == "html" {
                    run(&[&["report", "{}", "-o", "{}"], json].concat(), &[job, &out(format)]).exited(0);
                } else {
                    run(&[&["chart", "{}", "-o", "{}"], json].concat(), &[job, &out(format)]).exited(0);
                    run(&[&["chart", "{}", "-o", "{}", "--share"], json].concat(), &[job, &out(format)]).exited(0);
                    run(&[&["chart", "{}", "-o", "{}", "--map"], json].concat(), &[job, &out(format)]).exited(0);
                }
                shows_everything(&fs::read_to_string(out(format)).unwrap());
            }
        }
    }
    run(&["chart", "{}", "--beside", "{}", "-o", "{}"], &[&one, &other, &out("svg")]).exited(0);
    shows_everything(&fs::read_to_string(out("svg")).unwrap());
    run(&["plan", "{}", "{}", "--one-job"], &[&one, &other]);
}

#[test]
fn errors_escape_the_text_that_they_quote() {
    let folder = Folder::new();
    let missing = folder.path(HOSTILE);
    for command in ["replay", "simulate", "plan", "diff"] {
        assert_eq!(run(&[command, "{}"], &[&missing]).code, Some(2));
        assert_eq!(run(&[command, "{}", "--json"], &[&missing]).code, Some(2));
    }
    let line = format!("symmalloc-trace 1\na 0 512 s0 {HOSTILE}\n");
    let (damaged, flight) = (folder.file("x.trace", line), folder.file("flight.json", format!("{{\"{HOSTILE}")));
    assert_eq!(run(&["replay", "{}"], &[&damaged]).code, Some(2));
    assert_eq!(run(&["diff", "{}"], &[&flight]).code, Some(2));
    // The argument parser repeats unknown commands, flags and values.
    let flag = format!("--{}", HOSTILE.replace('=', ""));
    for args in [&[HOSTILE][..], &["replay", &flag], &["replay", "gpt2", "--config", HOSTILE], &["man", HOSTILE]] {
        assert_eq!(run(args, &[]).code, Some(2), "{args:?}");
        assert_eq!(run(&[args, &["--json"]].concat(), &[]).code, Some(2), "{args:?}");
    }
}

/// Writes a flight record of these communicators.
fn flight(folder: &Folder, name: &str, communicators: impl Iterator<Item = serde_json::Value>) -> PathBuf {
    let record = serde_json::json!({
        "symmalloc_flight_record": 1, "host": HOSTILE, "process": 1, "reason": HOSTILE,
        "communicators": communicators.collect::<Vec<_>>(),
    });
    folder.file(name, record.to_string())
}

fn communicator(id: u64, rank: u32, ranks: u32, kind: &str) -> serde_json::Value {
    serde_json::json!({
        "id": id, "name": HOSTILE, "rank": rank, "ranks": ranks, "state": HOSTILE, "cause": HOSTILE,
        "progress": { "submitted": 1, "finished": 0 },
        "peers": [{ "rank": rank + 1, "progress": { "submitted": 0, "finished": 0 }, "condition": HOSTILE }],
        "collectives": [{ "number": 1, "kind": kind, "detail": HOSTILE, "state": "running", "age_ms": 1 }],
    })
}

#[test]
fn flight_records_are_escaped() {
    let folder = Folder::new();
    let kinds = [HOSTILE, "another"];
    let records = kinds.iter().zip(0..).map(|(kind, rank)| communicator(1, rank, 3, kind));
    let record = flight(&folder, HOSTILE, records);
    run(&["diff", "{}"], &[&record]).exited(3);
    run(&["diff", "{}", "--json"], &[&record]).json(3);
}

/// Regression test: each of these records took quadratic time, minutes instead of a second.
#[test]
fn large_flight_records_take_linear_time() {
    const RECORDS: u64 = 40_000;
    /// Returns the smallest communicator, because disks can be small.
    fn small(id: u64, rank: u64, ranks: u64, kind: &str) -> serde_json::Value {
        serde_json::json!({
            "id": id, "name": "n", "rank": rank, "ranks": ranks, "state": "s",
            "progress": { "submitted": 1, "finished": 0 },
            "collectives": [{ "number": 1, "kind": kind, "state": "running", "age_ms": 1 }],
        })
    }
    type Communicators = fn(u64) -> serde_json::Value;
    let records: [(&str, Communicators); 3] = [
        ("ids.json", |id| small(id, 0, 1, "k")),
        ("kinds.json", |rank| small(1, rank, RECORDS, &format!("k{rank}"))),
        ("ranks.json", |rank| small(1, 0, rank + 1, "k")),
    ];
    for (name, communicator) in records {
        let folder = Folder::new();
        let record = flight(&folder, name, (0..RECORDS).map(communicator));
        let printed = limited("-t 30", &["diff", "--json"], &[&record]);
        assert_eq!(printed.code, Some(3), "{name}: {}", printed.stderr);
    }
}

#[test]
fn exhausted_address_space_is_an_error_with_a_remedy() {
    let folder = Folder::new();
    // With a range of 512 GiB for each stream, 193 of them exceed the address space.
    let streams = 0..200;
    let mut lines: Vec<String> = streams.clone().map(|stream| format!("stream s{stream}")).collect();
    lines.extend(streams.map(|stream| format!("a {stream} 4194304 s{stream}")));
    let job = folder.trace("streams.trace", &lines.iter().map(String::as_str).collect::<Vec<_>>());
    for command in [&["plan", "{}"][..], &["replay", "{}", "--ranks", "2"]] {
        let printed = run(command, &[&job]);
        assert_eq!(printed.code, Some(2), "{}", printed.stdout);
        assert!(printed.stderr.contains("range_mb"), "{}", printed.stderr);
        run(&[command, &["--config", "range_mb:1024"]].concat(), &[&job]).exited(0);
        run(&[command, &["--streams", "shared"]].concat(), &[&job]).exited(0);
    }
}

/// Runs the program with a limit of the shell: `-t` seconds of processor time, which does not depend on other work of the machine, or
/// `-v` KiB of address space.
fn limited(limit: &str, args: &[&str], paths: &[&Path]) -> CommandOutput {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")]).arg(command().get_program());
    limited.args(args).args(paths).output().unwrap().into()
}

/// All commands that read a recording.
pub(super) const COMMANDS: [&str; 10] = [
    "replay JOB --ranks 2 --json",
    "replay JOB --ranks 2 --order address --json",
    "plan JOB --json",
    "report JOB --json -o out.html",
    "chart JOB --json -o out.svg",
    "export JOB out.pickle --json",
    "export JOB out.json --json",
    "import JOB out.trace --json",
    "simulate JOB --ranks 2 --json --out out.failures",
    "address 0@0 JOB --json",
];

/// Runs commands on a recording. Returns the outputs, each with the command.
pub(super) fn run_all(
    commands: &[&'static str],
    folder: &Folder,
    limit: &str,
    flags: &[&str],
    recording: &Path,
) -> Vec<(&'static str, CommandOutput)> {
    let run = |command: &&'static str| {
        let path = |word: &str| match word {
            "JOB" => recording.display().to_string(),
            out if out.starts_with("out.") => folder.path(out).display().to_string(),
            word => word.to_owned(),
        };
        let words: Vec<String> = command.split(' ').map(path).collect();
        let args: Vec<&str> = words.iter().map(String::as_str).chain(flags.iter().copied()).collect();
        (*command, limited(limit, &args, &[]))
    };
    commands.iter().map(run).collect()
}

/// Regression test: each of these recordings took minutes. A command now ends within seconds, with a result or with an error that states
/// why it gave up. By day, the recordings are shorter.
#[test]
fn hostile_traces_end_in_bounded_time() {
    let shared = |streams: usize, rounds: usize| {
        let mut lines: Vec<String> = (0..streams).map(|stream| format!("stream s{stream}")).collect();
        for id in 0..rounds {
            lines.push(format!("a {id} 512 s{}", id % streams));
            lines.push(format!("u {id} s{}", (id * 7 + 1) % streams));
            lines.extend(id.checked_sub(streams).map(|earlier| format!("f {earlier}")));
        }
        let text = format!("symmalloc-trace 1\nconfig streams:shared\n{}\nend {}\n", lines.join("\n"), lines.len());
        HostileTrace { name: format!("{streams} streams of a shared heap"), text }
    };
    let (part, limit) = if is_night() { (1, "-t 60") } else { (8, "-t 30") };
    let hostile_trace = |state, line, bytes: usize| hostile_trace(state, line, bytes / part);
    let traces = [
        shared(200, 5000 / part),
        shared(300, 5000 / part),
        shared(4000, 60_000 / part),
        hostile_trace("gaps", "trim", 600_000),
        hostile_trace("pools", "trim", 200_000),
        hostile_trace("gaps of segments", "trim", 600_000),
        hostile_trace("users of one block", "u of every stream", 1_500_000),
        hostile_trace("gaps", "a f revived", 2_300_000),
        hostile_trace("gaps of many sizes", "sleep keep wake", 200_000),
        hostile_trace("gaps of segments", "observe", 200_000),
        hostile_trace("heaps", "a f large", 200_000),
        hostile_trace("gaps of stitched granules", "a f stitched sizes", 200_000),
        hostile_trace("stitched ranges in use", "a stitched sizes f", 200_000),
        hostile_trace("stitched ranges in use", "sleep drop wake", 60_000),
        hostile_trace("heaps", "trim", 100_000),
        hostile_trace("heaps", "sleep drop wake", 100_000),
        hostile_trace("heaps", "observe forget", 100_000),
        hostile_trace("pools", "pool a", 200_000),
    ];
    for HostileTrace { name, text } in traces {
        let folder = Folder::new();
        let job = folder.file("hostile.trace", text);
        for (command, printed) in run_all(&COMMANDS, &folder, limit, &[], &job) {
            let code = printed.code;
            assert!(matches!(code, Some(0 | 2 | 3)), "{name}, {command}: {code:?} {}", printed.stderr);
            // `import` executes nothing.
            if name.contains("00 streams of")
                && !name.starts_with("200")
                && !command.starts_with("import")
                && !command.contains("address")
            {
                assert!(
                    printed.stderr.contains("streams share a heap of pool"),
                    "{name}, {command}: {}",
                    printed.stderr
                );
            }
        }
    }
}

/// Writes a compressed trace of allocations with these names.
fn named(folder: &Folder, names: impl Iterator<Item = String>) -> PathBuf {
    let path = folder.path("named.trace.gz");
    let mut out = Compressor::new(fs::File::create(&path).unwrap(), Compression::Gzip).unwrap();
    let mut allocations = 0;
    write!(out, "symmalloc-trace 1\nstream s0\n").unwrap();
    for name in names {
        writeln!(out, "a {allocations} 512 s0 {name:?}").unwrap();
        allocations += 1;
    }
    writeln!(out, "end {}", allocations + 1).unwrap();
    out.finish().unwrap();
    path
}

/// Regression test: each allocation had copies of its name, which took gigabytes.
#[test]
fn allocations_with_one_name_share_its_text() {
    let folder = Folder::new();
    let (names, limit) = if is_night() { (200_000, "-v 2000000") } else { (50_000, "-v 600000") };
    let job = named(&folder, (0..names).map(|_| "x".repeat(4000)));
    assert!(fs::metadata(&job).unwrap().len() < 4 << 20, "it is small");
    // The timeline of `export` repeats the names, and a simulation takes longer than the others.
    let commands =
        COMMANDS.into_iter().filter(|command| !command.contains("out.json") && !command.starts_with("simulate"));
    for (command, printed) in run_all(&commands.collect::<Vec<_>>(), &folder, limit, &[], &job) {
        assert_eq!(printed.code, Some(0), "{command}: {}", printed.stderr);
    }
}

/// The limit counts distinct names, records, and the copies that a command makes of them.
#[test]
fn the_memory_limit_applies_to_every_command() {
    let folder = Folder::new();
    let distinct = named(&folder, (0..300).map(|number| format!("{number} {}", "x".repeat(4000))));
    let job = folder.path("distinct.trace.gz");
    fs::rename(distinct, &job).unwrap();
    for (command, printed) in run_all(&COMMANDS, &folder, "-t 60", &["--memory-limit-mb", "1"], &job) {
        assert_eq!(printed.code, Some(2), "{command}: {}", printed.stderr);
        assert!(
            printed.stderr.contains("--memory-limit-mb") || printed.stdout.contains("--memory-limit-mb"),
            "{command}: {}",
            printed.stderr
        );
    }
    let printed = symmalloc("diff {} {} --memory-limit-mb 1", &[&job, &job]);
    assert_eq!(printed.code, Some(2), "{}", printed.stdout);
}

/// Regression test: a compressed file of 64 KB took 3.6 GB.
#[test]
fn small_compressed_recordings_take_little_memory() {
    let folder = Folder::new();
    // Every record takes many times the memory of its text, and so does every entry of a pickle's memo.
    let mut trace = b"symmalloc-trace 1\n".to_vec();
    (0..5_000_000).for_each(|_| trace.extend(b"sync\n"));
    trace.extend(b"end 5000000\n");
    let pickle = [b"\x80\x04]", &*vec![0x94; 30_000_000], b"."].concat();
    for (name, content) in [("job.trace", trace), ("job.pickle", pickle)] {
        for compression in [Compression::Gzip, Compression::Zstd] {
            let job = folder.path(name);
            let mut out = Compressor::new(fs::File::create(&job).unwrap(), compression).unwrap();
            out.write_all(&content).unwrap();
            out.finish().unwrap();
            assert!(fs::metadata(&job).unwrap().len() < 128 << 10, "it is small");
            for (command, printed) in run_all(&COMMANDS, &folder, "-v 900000", &[], &job) {
                assert_eq!(printed.code, Some(2), "{name}, {compression}, {command}: {}", printed.stderr);
                let told = printed.stderr + &printed.stdout;
                assert!(told.contains("raise --memory-limit-mb"), "{name}, {compression}, {command}: {told}");
            }
        }
    }
    let paths = [folder.path("job.trace"), folder.path("out.trace")];
    let printed = limited("-t 120", &["import", "--memory-limit-mb", "4096", "--json"], &[&paths[0], &paths[1]]);
    assert_eq!(printed.code, Some(0), "the limit can be raised: {}", printed.stderr);
}

/// Regression test: a trace with lines for the simulator had no bounds on its memory and its ranks.
#[test]
fn a_saved_failure_has_the_bounds_of_a_trace() {
    let folder = Folder::new();
    let marked = |ranks: u64, trace: &str| {
        let lines: String = (0..ranks).map(|rank| format!("#! rank:{rank} schedule:program\n")).collect();
        let (first, rest) = trace.split_once('\n').expect("several lines");
        format!("{first}\n#! seed:7 granularity:2097152\n{lines}{rest}")
    };
    let small = "symmalloc-trace 1\nstream s0\na 0 1048576 s0\nf 0\nend 3\n";
    let many = format!("symmalloc-trace 1\n{}end 20000\n", "sync\n".repeat(20_000));
    let jobs = [
        (marked(20_000, small), "20000 ranks"),
        (marked(1000, &many), "20000 steps on 1000 ranks"),
        (marked(2, &many), "raise --memory-limit-mb"),
    ];
    for (text, expected) in jobs {
        let job = folder.file("failure.trace", text);
        let printed = limited("-t 30", &["simulate", "--memory-limit-mb", "1"], &[&job]);
        assert_eq!(printed.code, Some(2), "{expected}: {}", printed.stderr);
        let without = limited("-t 30", &["simulate"], &[&job]);
        let told = printed.stderr + &without.stderr;
        assert!(told.contains(expected), "{expected}: {told}");
    }
    let job = folder.file("failure.trace", marked(2, small));
    limited("-t 30", &["simulate"], &[&job]).exited(0);
}

/// A pool takes the memory of its history on each rank, and a stream that of a clock for each other stream.
#[test]
fn a_simulation_of_many_heaps_or_streams_has_fewer_ranks() {
    let folder = Folder::new();
    let trace = |name: &str, pools: u64, streams: u64| {
        let registered = (0..streams).map(|stream| format!("stream s{stream}"));
        let created = (1..=pools).map(|pool| format!("pool p{} segments:fixed", 3 * pool));
        let used = (1..=pools).map(|pool| format!("a {pool} 512 s{} p{}", pool % streams, 3 * pool));
        let lines: Vec<String> = registered.chain(created).chain(used).collect();
        folder.trace(name, &lines.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let ranks = |job: &Path| run(&["simulate", "{}", "--json"], &[job]).json(0)[0]["ranks"].as_u64().unwrap();
    assert_eq!(ranks(&trace("few.trace", 2, 2)), 64);
    let many = ranks(&trace("many.trace", 400, 400));
    assert!((2..40).contains(&many), "{many}");
    let refused = run(&["simulate", "{}"], &[&trace("streams.trace", 0, 20_000)]);
    assert!(refused.code == Some(2) && refused.stderr.contains("units of work"), "{}", refused.stderr);
}

/// Regression test: the check of a plan took time for each step times each allocation of the plan, and for each pool times each stream.
#[test]
fn hostile_plans_are_checked_in_linear_time() {
    let folder = Folder::new();
    let written = |name: &str, first: &str, lines: Vec<String>, extra: usize| {
        let count = lines.iter().map(|line| line.lines().count()).sum::<usize>() + extra;
        folder.file(name, format!("{first}{}\nend {count}\n", lines.join("\n")))
    };
    let (trace, plan) = ("symmalloc-trace 1\nstream s0\n", "symmalloc-plan 1\nconfig segments:expandable\n");
    let steps = (0..30_000).map(|id| format!("begin_step 7\na {id} 512 s0\nf {id}\nend_step")).collect();
    let allocations = (0..300_000).map(|number| format!("a 512 s0 {} @0", number + 1));
    let long = std::iter::once("plan p0 s0 key 7 allocations 300000".to_owned()).chain(allocations).collect();
    let many = [written("steps.trace", trace, steps, 1), written("steps.plan", plan, long, 1)];

    const POOLS: usize = 10_000;
    let streams = (0..POOLS).map(|stream| format!("stream s{stream}"));
    let pools = (1..=POOLS).map(|pool| format!("pool p{pool}\na {pool} 512 s{} p{pool}\nf {pool}", POOLS - 1));
    let trace = written("pools.trace", "symmalloc-trace 1\n", streams.chain(pools).collect(), 0);
    let pools = (1..=POOLS).map(|pool| format!("pool p{pool}"));
    let plans = (1..=POOLS).map(|pool| {
        let stream = POOLS - 1;
        format!("plan p{pool} s{stream} key 0 allocations 1\na 512 s{stream} 1 @0")
    });
    let pools = [trace, written("pools.plan", plan, pools.chain(plans).collect(), 1)];
    for [job, plan] in [many, pools] {
        let plan = plan.display().to_string();
        let printed = limited("-t 30", &["replay", "--ranks", "1", "--plan", &plan], &[&job]);
        assert_eq!(printed.code, Some(2), "{plan}: {}", printed.stderr);
    }
}

/// Regression test: a snapshot was collected in memory before it was written. It has an entry for each memory change, and a sleep changes all
/// memory of its pool.
#[test]
fn the_memory_of_an_export_does_not_grow_with_its_output() {
    let folder = Folder::new();
    let mut text = String::from("symmalloc-trace 1\nconfig segments:fixed\nstream s0\n");
    (0..1000).for_each(|id| text += &format!("a {id} 20971520 s0\n"));
    text += &"sleep drop\nwake\n".repeat(1300);
    text += "end 3601\n";
    let job = folder.file("sleeps.trace", text.as_bytes());
    for out in ["sleeps.pickle", "sleeps.json"] {
        let out = folder.path(out);
        let printed = limited("-v 60000", &["export", "--memory-limit-mb", "16"], &[&job, &out]);
        assert_eq!(printed.code, Some(0), "{}: {}", out.display(), printed.stderr);
    }
    let size_bytes = fs::metadata(folder.path("sleeps.pickle")).unwrap().len();
    assert!(size_bytes > 100 << 20, "{size_bytes} bytes would fit into the limit");
}
