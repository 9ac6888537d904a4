//! Invalid input: errors on stderr with advice, exit code 2, and no panics.

use crate::{CommandOutput, Folder, command, recorded, symmalloc};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use symmalloc_import::compression::Compressor;
use symmalloc_watchdog::FlightRecord;

#[track_caller]
fn assert_refused(printed: &CommandOutput, wanted: &[&str]) {
    let CommandOutput { code, stdout, stderr } = printed;
    assert_eq!(*code, Some(2), "stderr:\n{stderr}");
    // With --json there is one document on stdout, with the same error.
    if !stdout.is_empty() {
        let error: Value = serde_json::from_str(stdout).unwrap_or_else(|error| panic!("{error} in:\n{stdout}"));
        assert_eq!((&error["schema_version"], &error["error"]["exit_code"]), (&1.into(), &2.into()), "{error}");
        assert!(stderr.contains(error["error"]["message"].as_str().unwrap()), "{error}");
    }
    for wanted in wanted {
        assert!(stderr.contains(wanted), "no {wanted:?} in:\n{stderr}");
    }
    assert!(!stderr.contains("panicked") && !stderr.contains('\x1b'), "{stderr}");
}

/// Asserts that every command rejects the file, names it, and prints all of `wanted`.
#[track_caller]
fn assert_unreadable(path: &Path, wanted: &[&str]) {
    let folder = Folder::new();
    let good = folder.trace("good.trace", &["stream s0"]);
    let out = folder.path("out.trace");
    let wanted = [&[path.to_str().unwrap()], wanted].concat();
    assert_refused(&symmalloc("replay {} --json", &[path]), &wanted);
    assert_refused(&symmalloc("replay {}", &[path]), &wanted);
    assert_refused(&symmalloc("diff {} {}", &[&good, path]), &wanted);
    assert_refused(&symmalloc("import {} {}", &[path, &out]), &wanted);
    let snapshot = folder.path("out.pickle");
    assert_refused(&symmalloc("export {} {} --json", &[path, &snapshot]), &wanted);
    let (picture, page) = (folder.path("out.svg"), folder.path("out.html"));
    assert_refused(&symmalloc("chart {} -o {}", &[path, &picture]), &wanted);
    assert_refused(&symmalloc("chart {} -o {} --beside {}", &[&good_job(&folder), &picture, path]), &wanted);
    assert_refused(&symmalloc("report {} -o {}", &[path, &page]), &wanted);
    assert_refused(&symmalloc("plan {}", &[path]), &wanted);
    assert!(!picture.exists() && !page.exists(), "a picture of an unreadable file was drawn");
    assert!(!out.exists() && !snapshot.exists(), "an output was written for an unreadable file");
    let left: Vec<_> = fs::read_dir(folder.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "good.trace" || name == "job.trace"), "left behind: {left:?}");
}

/// Writes a trace that can be drawn.
fn good_job(folder: &Folder) -> PathBuf {
    folder.trace("job.trace", &["stream s0", "a 0 512 s0"])
}

/// A snapshot of one device without entries.
const NOTHING_RECORDED: &[u8] = b"\x80\x02}X\x0d\x00\x00\x00device_traces]]as.";

#[test]
fn a_missing_file_is_reported() {
    let folder = Folder::new();
    assert_unreadable(&folder.path("nowhere.pickle"), &["cannot be opened", "check the path"]);
}

#[test]
fn a_folder_is_refused() {
    let folder = Folder::new();
    assert_unreadable(folder.0.path(), &["help: give a readable file"]);
}

#[test]
fn an_empty_file_is_refused() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("empty", ""), &["is empty", "record again"]);
}

#[test]
fn a_file_of_another_format_is_refused() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("letter.txt", "Dear reader,\n"), &["_dump_snapshot", "`symmalloc-trace`"]);
}

#[test]
fn a_torn_or_damaged_archive_is_refused() {
    let folder = Folder::new();
    let gzip = fs::read(recorded("fsdp1_train_rank0.pickle.gz")).unwrap();
    assert_unreadable(&folder.file("torn.pickle.gz", &gzip[..gzip.len() / 2]), &["ends early", "copy the file again"]);
    let mut zstd = fs::read(recorded("fsdp1_train_rank0.trace.zst")).unwrap();
    assert_unreadable(&folder.file("torn.trace.zst", &zstd[..zstd.len() - 7]), &["ends early", "copy the file again"]);
    // Damage a range that includes a block header. Damage within a block may decode to other text.
    let (middle, quarter) = (zstd.len() / 2, zstd.len() / 4);
    zstd[middle..middle + quarter].fill(0x5a);
    assert_unreadable(&folder.file("damaged.trace.zst", &zstd), &["copy the file again"]);
}

#[test]
fn a_torn_trace_is_refused() {
    let folder = Folder::new();
    let trace = folder.file("torn.trace", "symmalloc-trace 1\nstream s0\na 0 512 s0\nf");
    assert_unreadable(&trace, &["line 4"]);
}

#[test]
fn an_inconsistent_trace_is_refused() {
    let folder = Folder::new();
    assert_unreadable(
        &folder.trace("twice.trace", &["stream s0", "a 0 512 s0", "f 0", "f 0"]),
        &["line 5", "already freed"],
    );
    assert_unreadable(&folder.trace("unknown.trace", &["stream s0", "allocate 0 512 s0"]), &["line 3"]);
}

#[test]
fn a_pickle_that_is_not_a_snapshot_is_refused() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("other.pickle", b"\x80\x04}."), &["device_traces", "_dump_snapshot"]);
    assert_unreadable(&folder.file("torn.pickle", &NOTHING_RECORDED[..12]), &[]);
    assert_unreadable(&folder.file("evil.pickle", b"\x80\x02cos\nsystem\n(S'true'\ntR."), &[]);
    assert_unreadable(&folder.file("nothing.pickle", NOTHING_RECORDED), &["_record_memory_history"]);
}

#[test]
fn a_device_that_was_not_recorded_is_refused() {
    let snapshot = recorded("fsdp1_train_rank1.pickle.gz");
    let wanted = ["nothing of device 7", "device 1", "--device"];
    assert_refused(&symmalloc("replay {} --device 7", &[&snapshot]), &wanted);
    assert_refused(&symmalloc("diff {} {} --device 7", &[&snapshot, &snapshot]), &wanted);
    let folder = Folder::new();
    assert_refused(&symmalloc("import {} {} --device 7", &[&snapshot, &folder.path("out.trace")]), &wanted);
}

#[test]
fn invalid_arguments_are_refused() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    for (args, wanted) in [
        ("replay {} --ranks 0", "--ranks"),
        ("replay {} --ranks 4294967295", "1..=1048576"),
        ("chart {} -o out.html", "`symmalloc report` for a page"),
        ("chart {} -o out.png", "unsupported picture extension"),
        ("chart {} -o out.png", "use .svg, or `symmalloc report` for a page (.html); to convert an .svg, use"),
        ("chart {} -o out.svg --share --map", "cannot be used with"),
        ("replay {} --passes 0", "--passes"),
        ("replay {} --order random", "sequence"),
        ("replay {} --segments reserved", "expandable"),
        ("replay {} --device -1", "-1"),
        ("replay {} --sead 3", "--seed"),
        ("diff {}", "two recordings, but 1 are given"),
        ("replay {} --config segments:fixd", "fixed"),
        ("export {} out.pickle --config max_split_mb:3", "max_split_size_mb"),
        ("play {}", "replay"),
    ] {
        assert_refused(&symmalloc(args, &[&trace]), &[wanted]);
    }
    assert_refused(&symmalloc("replay", &[]), &["TRACE"]);
    assert_refused(&symmalloc("diff", &[]), &["FILE"]);
    assert_refused(&symmalloc("diff {} {} {}", &[&trace, &trace, &trace]), &["3 are given", "flight records"]);
}

#[test]
fn contradictory_and_unsupported_flags_are_refused() {
    let folder = Folder::new();
    let trace = good_job(&folder);
    for command in ["replay {}", "plan {}", "export {} out.pickle", "chart {} -o out.svg", "report {} -o out.html"] {
        let refused = |flags: &str, wanted: &[&str]| {
            assert_refused(&symmalloc(&format!("{command} {flags}"), &[&trace]), wanted);
        };
        refused(
            "--config segments:fixed --segments expandable",
            &["--segments contradicts --config", "`segments:fixed`"],
        );
        refused(
            "--segments fixed --config expandable_segments:True",
            &["--segments contradicts --config", "expandable`"],
        );
        refused(
            "--config streams:shared --streams separate --json",
            &["--streams contradicts --config", "`streams:shared`"],
        );
    }
    // A flag may set a policy that --config leaves out.
    symmalloc("replay {} --config total_limit_mb:64,streams:shared --segments fixed --streams shared", &[&trace])
        .exited(0);
    for (setting, named) in [
        ("--config total_limit_mb:64", "`total_limit_mb:64`"),
        ("--config segments:reserved,segment_mb:64", "`segments:reserved`"),
        ("--streams shared", "`streams:shared`"),
    ] {
        let printed = symmalloc(&format!("replay {{}} --order address {setting}"), &[&trace]);
        assert_refused(&printed, &["--order address does not support", named, "--order sequence"]);
    }
}

#[test]
fn an_input_is_not_overwritten_and_file_names_must_match_their_contents() {
    let folder = Folder::new();
    let job = good_job(&folder);
    let text = fs::read(&job).unwrap();
    let (link, plan) = (folder.path("link.trace"), folder.path("job.plan"));
    fs::hard_link(&job, &link).unwrap();
    symmalloc("plan {} -o {}", &[&job, &plan]).exited(0);
    let other = folder.file("same.pickle", &text);
    let wanted = ["is also an input", "write to another file"];
    for out in [&job, &link] {
        assert_refused(&symmalloc("import {} {}", &[&job, out]), &wanted);
        assert_refused(&symmalloc("replay {} --record {}", &[&job, out]), &wanted);
        assert_refused(&symmalloc("plan {} --reservations {}", &[&job, out]), &wanted);
    }
    assert_refused(&symmalloc("export {} {} --json", &[&other, &other]), &wanted);
    assert_refused(&symmalloc("export {} {} --format snapshot", &[&job, &job]), &wanted);
    let named = |name: &str| folder.file(name, &text);
    for name in ["in.html", "in.svg"] {
        let file = named(name);
        let command = if name.ends_with("html") { "report {} -o {}" } else { "chart {} -o {}" };
        assert_refused(&symmalloc(command, &[&file, &file]), &wanted);
        assert_eq!(fs::read(&file).unwrap(), text);
    }
    assert!(fs::read(&job).unwrap() == text && fs::read(&other).unwrap() == text);
    for (command, says, is) in [
        ("export {} out.html", "a page", "a snapshot"),
        ("export {} out.trace.zst", "a trace", "a snapshot"),
        ("export {} out.zip", "an archive", "a snapshot"),
        ("import {} out.trace.xz", "an archive", "a trace"),
        ("import {} out.pickle.gz", "a snapshot", "a trace"),
        ("import {} out.json", "a timeline", "a trace"),
        ("replay {} --record out.svg", "a picture", "a trace"),
        ("plan {} -o out.trace", "a trace", "a plan"),
    ] {
        assert_refused(
            &symmalloc(command, &[&job]),
            &[&format!("the file name is that of {says}, but the content is {is}")],
        );
    }
    assert_refused(&symmalloc("chart {} -o -", &[&job]), &["unsupported picture extension"]);
    for command in ["plan {} -o -", "plan {} --reservations -", "replay {} --record -"] {
        assert_refused(&symmalloc(command, &[&job]), &["not to standard output", "only import and export"]);
    }
    assert!(!Path::new("-").exists());
}

#[test]
fn recordings_of_two_jobs_are_not_ranks_of_one_job() {
    let folder = Folder::new();
    let one = folder.trace("one.trace", &["stream s0", "a 0 512 s0", "f 0"]);
    let other = folder.trace("other.trace", &["stream s0", "a 0 512 s0", "a 1 512 s0"]);
    let printed = symmalloc("plan {} {} --one-job", &[&one, &other]);
    let wanted = ["not ranks of one job", "one.trace at op 2 frees allocation 0", "other.trace at op 2 allocates"];
    assert_refused(&printed, &wanted);
    assert_refused(&symmalloc("plan moe gpt2 --one-job --json", &[]), &["moe and gpt2 are not ranks of one job"]);
}

#[test]
fn an_unknown_name_is_reported_with_the_nearest_job() {
    let wanted = ["gtp2: cannot be opened", "did you mean gpt2?", "resnet50"];
    assert_refused(&symmalloc("replay gtp2", &[]), &wanted);
    let printed = symmalloc("replay zzzzzz", &[]);
    assert_refused(&printed, &["zzzzzz: cannot be opened", "check the path"]);
    assert!(!printed.stderr.contains("did you mean"), "{}", printed.stderr);
}

#[test]
fn an_archive_that_decompresses_to_gigabytes_is_refused() {
    let folder = Folder::new();
    let bomb = folder.path("bomb.trace.zst");
    let mut compressor = Compressor::create(&bomb).unwrap();
    compressor.write_all(b"symmalloc-trace 1\n").unwrap();
    // Few lines: many blank ones would be refused for another reason.
    let comment = [&[b'#'; 60_000][..], b"\n"].concat();
    (0..9000).for_each(|_| compressor.write_all(&comment).unwrap());
    compressor.finish().unwrap();
    assert!(fs::metadata(&bomb).unwrap().len() < 256 << 10);
    let begun = Instant::now();
    assert_refused(&symmalloc("replay {} --json", &[&bomb]), &["grow to more than", "decompress it yourself"]);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
#[cfg(target_os = "linux")]
fn a_pipe_without_a_writer_is_reported() {
    let folder = Folder::new();
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let wanted = ["waiting for the other end of the pipe", "no program opened the other end"];
    assert_refused(&symmalloc("replay {}", &[&pipe]), &wanted);
    // A report that nobody reads changes nothing.
    let mut child = command().arg("replay").arg(&pipe).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

#[test]
fn a_snapshot_with_fields_of_other_types_is_refused() {
    let folder = Folder::new();
    let entry = |action: &[u8], size: &[u8]| {
        let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes()].concat();
        let parts = [
            &b"\x80\x04}("[..],
            &text("device_traces"),
            b"]](}(",
            &text("action"),
            action,
            &text("addr"),
            b"K\x01",
            &text("size"),
            size,
            &text("stream"),
            b"K\x00uea",
        ];
        parts.concat()
    };
    let alloc = [&[0x8c, 5][..], b"alloc"].concat();
    let segments = [&entry(&alloc, b"K\x01")[..], &[0x8c, 8], b"segmentsK\x05u."].concat();
    assert_unreadable(&folder.file("segments.pickle", segments), &["'segments' is a number, but must be a list"]);
    let action = [&entry(b"K\x07", b"K\x01")[..], b"u."].concat();
    assert_unreadable(&folder.file("action.pickle", action), &["'action' of entry 0", "is a number, but must be text"]);
    let size = [&entry(&alloc, b"\x8a\x09\0\0\0\0\0\0\0\x80\0")[..], b"u."].concat();
    assert_unreadable(&folder.file("size.pickle", size), &["entry 0", "allocates 8.00 EiB", "1.00 TiB"]);
}

#[test]
fn flight_records_that_cannot_be_compared_are_refused() {
    let folder = Folder::new();
    let whole = FlightRecord::new("gpu7".to_owned(), "asked for".to_owned(), Vec::new()).to_json();
    let record = folder.file("rank0.json", &whole);
    let trace = folder.trace("good.trace", &["stream s0"]);
    for [a, b] in [[&record, &trace], [&trace, &record]] {
        let wanted = ["rank0.json is a flight record", "good.trace is a recording", "flight records alone"];
        assert_refused(&symmalloc("diff {} {} --json", &[a, b]), &wanted);
    }
    let later = whole.replace("\"symmalloc_flight_record\": 1", "\"symmalloc_flight_record\": 2");
    for (name, content, wanted) in [
        ("torn.json", &whole[..whole.len() / 2], &["is not a flight record", "symmalloc-flight-*.json"][..]),
        ("begun.json", "{", &["is not a flight record"]),
        ("empty.json", "", &["is not a flight record"]),
        ("foreign.json", "{\"a\": 1}", &["is not a flight record", "symmalloc_flight_record"]),
        ("later.json", &later, &["version 2", "reads only version 1", "help: read it with"]),
    ] {
        let path = folder.file(name, content);
        let wanted = [&[name], wanted].concat();
        assert_refused(&symmalloc("diff {} {}", &[&record, &path]), &wanted);
        if !content.is_empty() {
            assert_refused(&symmalloc("diff {}", &[&path]), &wanted);
        }
    }
    assert_refused(&symmalloc("diff {} {}", &[&record, &folder.path("nowhere.json")]), &["nowhere.json"]);
    assert_refused(&symmalloc("diff {} {}", &[&record, folder.0.path()]), &[folder.0.path().to_str().unwrap()]);
}

#[test]
fn an_output_that_cannot_be_written_is_reported() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let out = folder.path("no/such/folder/out.trace");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("import {} {}", &[&trace, &out]), &wanted);
    assert_refused(&symmalloc("replay {} --json --record {}", &[&trace, &out]), &wanted);
    let out = folder.path("no/such/folder/out.pickle");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("export {} {}", &[&trace, &out]), &wanted);
    let out = folder.path("no/such/folder/out.svg");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("chart {} -o {}", &[&good_job(&folder), &out]), &wanted);
    let out = folder.path("no/such/folder/out.html");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("report {} -o {}", &[&good_job(&folder), &out]), &wanted);
}

#[test]
fn a_picture_without_memory_to_show_is_refused() {
    let folder = Folder::new();
    let (job, out) = (good_job(&folder), folder.path("out.svg"));
    for (args, wanted) in [
        ("chart {} -o {} --op 2", &["no op 2", "the recording has 2"][..]),
        ("chart {} -o {} --op -1", &["-1"]),
        ("chart {} -o {} --pool 7", &["no memory to show", "--pool", "pool 0, stream 0"]),
        ("chart {} -o {} --stream s1", &["no memory to show", "pool 0, stream 0"]),
        ("chart {} -o {} --pool x1", &["invalid value"]),
    ] {
        assert_refused(&symmalloc(args, &[&job, &out]), wanted);
    }
    let far = folder.trace("far.trace", &["stream s0", "a 0 512 s0 -> 0@18446744073709551000"]);
    let printed = symmalloc("chart {} -o {} --beside {}", &[&job, &out, &far]);
    assert_eq!(printed.code, Some(0), "{}", printed.stderr);
    fs::remove_file(&out).unwrap();
    let printed = symmalloc("chart {} -o {} --beside {}", &[&far, &out, &far]);
    assert_refused(&printed, &["far.trace", "op 1", "exceeds the memory of any device"]);
    let page = folder.path("out.html");
    assert_refused(&symmalloc("report {} -o {} --op 2", &[&job, &page]), &["no op 2", "the recording has 2"]);
    assert_refused(&symmalloc("report {} -o {}", &[&job, &out]), &["out.svg", "use a file name that ends in .html"]);
    assert!(!page.exists());
    let nothing = folder.trace("nothing.trace", &["stream s0"]);
    assert_refused(&symmalloc("report {} -o {}", &[&nothing, &page]), &["no memory to show"]);
    assert_refused(&symmalloc("chart {} -o {}", &[&nothing, &out]), &["no memory to show", "allocates something"]);
    for name in ["out.gif", "out.html", "out", "svg"] {
        let wanted = [name, "unsupported picture extension", "symmalloc report"];
        assert_refused(&symmalloc("chart {} -o {}", &[&job, &folder.path(name)]), &wanted);
    }
    assert!(!out.exists());
}

#[test]
fn recording_several_traces_to_one_file_is_refused() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let out = folder.path("out.trace");
    let printed = symmalloc("replay {} {} --record {}", &[&trace, &trace, &out]);
    assert_refused(&printed, &["--record", "one by one"]);
}

#[test]
fn destroying_a_pool_in_use_is_refused() {
    let folder = Folder::new();
    let trace = folder.trace("pool.trace", &["stream s0", "pool p1", "a 0 512 s0 p1", "destroy p1"]);
    let wanted = ["op 3", "free it first", "repair the trace"];
    assert_refused(&symmalloc("replay {}", &[&trace]), &wanted);
    let out = folder.path("out.pickle");
    assert_refused(&symmalloc("export {} {}", &[&trace, &out]), &wanted);
    assert!(!out.exists(), "a snapshot of half a job was written");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_stdout_is_reported() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let printed: CommandOutput = command().arg("replay").arg(&trace).stdout(full).output().unwrap().into();
    assert_refused(&printed, &["stdout"]);
}

/// If the result is on stdout, the summary on stderr may be lost.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_stderr_does_not_fail_a_command_whose_result_is_on_stdout() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    for json in [&[][..], &["--json"]] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let printed = command().arg("import").arg(&trace).arg("-").args(json).stderr(full).output().unwrap();
        assert_eq!(printed.status.code(), Some(0), "{json:?}");
        assert!(String::from_utf8_lossy(&printed.stdout).contains("stream s0"), "{json:?}");
    }
}

#[test]
fn a_torn_trace_is_read_with_accept_torn() {
    let folder = Folder::new();
    let torn = folder.file("torn.trace", "symmalloc-trace 1\nstream s0\na 0 512 s0\na 1 5");
    assert_unreadable(&torn, &["torn after 2 whole records", "--accept-torn"]);
    let printed = symmalloc("replay {} --json --accept-torn", &[&torn]);
    assert_eq!(printed.code, Some(0), "{}", printed.stderr);
    assert!(printed.stdout.contains("\"allocs\": 1"), "{}", printed.stdout);
}

#[test]
fn a_trace_beyond_the_memory_limit_is_refused() {
    let folder = Folder::new();
    let lines = (0..20_000).map(|id| format!("a {id} 512 s0\nf {id}\n")).collect::<String>();
    let large = folder.file("large.trace", format!("symmalloc-trace 1\nstream s0\n{lines}end 40001\n"));
    assert_eq!(symmalloc("replay {} --json --passes 1", &[&large]).code, Some(0));
    assert_refused(&symmalloc("replay {} --json --memory-limit-mb 1", &[&large]), &["raise --memory-limit-mb"]);
}

#[test]
fn a_device_is_refused_for_a_recording_without_devices() {
    let folder = Folder::new();
    let trace = folder.trace("one.trace", &["stream s0"]);
    assert_refused(&symmalloc("replay {} --device 1", &[&trace]), &["only a PyTorch snapshot has"]);
}

/// A job with two streams.
const PLANNED_JOB: [&str; 6] = ["stream s0", "stream s1", "a 0 1000 s0", "a 1 1000 s1", "f 0", "f 1"];

/// Asserts that replay and chart reject the plan before anything runs, and print all of `wanted`.
#[track_caller]
fn assert_not_followed(folder: &Folder, job: &Path, plan: &Path, wanted: &[&str]) {
    let picture = folder.path("plan.svg");
    let wanted = [&[plan.to_str().unwrap()], wanted].concat();
    assert_refused(&symmalloc("replay {} --plan {} --json", &[job, plan]), &wanted);
    assert_refused(&symmalloc("replay {} --plan {}", &[job, plan]), &wanted);
    assert_refused(&symmalloc("chart {} --plan {} -o {}", &[job, plan, &picture]), &wanted);
    assert!(!picture.exists(), "a picture of an invalid plan was drawn");
}

#[test]
fn invalid_and_torn_plans_and_other_versions_are_refused() {
    let folder = Folder::new();
    let (job, plan) = (folder.trace("job.trace", &PLANNED_JOB), folder.path("job.plan"));
    symmalloc("plan {} -o {}", &[&job, &plan]).exited(0);
    let text = fs::read_to_string(&plan).unwrap();
    let plan_of = |text: &str| folder.file("bad.plan", text);
    let assert_bad = |text: &str, wanted: &[&str]| assert_not_followed(&folder, &job, &plan_of(text), wanted);
    assert_not_followed(&folder, &job, &folder.path("nowhere"), &["cannot be opened", "symmalloc plan JOB -o FILE"]);
    assert_not_followed(&folder, &job, &job, &["not a plan: the first line must be `symmalloc-plan 1`"]);
    assert_bad(&text.replace("plan 1", "plan 7"), &["has version 7", "use a newer one, or plan the job again"]);
    assert_bad(text.split_once("a 1000 s1").unwrap().0, &["line 5: the plan is torn; plan the job again"]);
    assert_bad(&text.replace("end 4", "end 5"), &["line 6: the plan states 5 lines, but has 4", "`end 4`"]);
    assert_bad(&text.replace("a 1000 s1", "b 1000 s1"), &["line 5, column 1: unknown keyword"]);
    assert_bad(&text.replace("s1 2 @", "s1 5 @"), &["line 5: allocation 1 of the plan is not valid"]);
    assert_bad(&text.replace("shared key", "s0 key"), &["line 5: allocation 1 of the plan is not valid"]);
    let overlapping = text.replace("@1024", "@512");
    assert_ne!(overlapping, text);
    assert_bad(&overlapping, &["cannot be followed, in pool p0", "allocations 0 and 1 of the plan overlap"]);
    // Rounded sizes of a different configuration overlap as well.
    let rounded =
        text.replace("reclaim:heap,", "reclaim:heap,roundup_power2_divisions:[256:1,512:1,1024:1,2048:1,>:1],");
    symmalloc("replay {} --plan {} --json", &[&job, &plan_of(&rounded)]).exited(0);
    let small = text.replace("shared,", "shared,limit_mb:1,");
    assert_bad(&small, &["no memory for the plan", "raise the pool's limit_mb"]);
    let printed = symmalloc("replay {} --plan {}", &[&job, &plan_of(&small)]);
    assert_eq!(printed.stderr.matches("out of memory").count(), 1, "the cause is repeated in:\n{}", printed.stderr);
}

#[test]
fn plans_of_another_job_or_configuration_are_refused() {
    let folder = Folder::new();
    let (job, plan) = (folder.trace("job.trace", &PLANNED_JOB), folder.path("job.plan"));
    symmalloc("plan {} -o {}", &[&job, &plan]).exited(0);
    let assert_other = |from: &str, to: &str, wanted: &str| {
        let lines: Vec<String> = PLANNED_JOB.iter().map(|line| line.replace(from, to)).collect();
        let lines: Vec<&str> = lines.iter().flat_map(|line| line.lines()).collect();
        let other = folder.trace("other.trace", &lines);
        assert_not_followed(&folder, &other, &plan, &["other.trace", wanted, "plan it now"]);
    };
    assert_other(
        "1000 s1",
        "1001 s1",
        "allocation 1 of p0 (op 3) requests 1,001 bytes on s1, but the plan expects 1,000 bytes on s1",
    );
    assert_other(
        "1000 s1",
        "1000 s0",
        "allocation 1 of p0 (op 3) requests 1,000 bytes on s0, but the plan expects 1,000 bytes on s1",
    );
    assert_other("f 1", "a 2 5 s0", "allocation 2 of p0 (op 5) requests 5 bytes on s0, but the plan expects no more");
    assert_other(
        "a 1 1000 s1",
        "a 1 0 s1",
        "the plan expects 1,000 bytes on s1 as allocation 1 of p0, but the job ends before it",
    );
    assert_other(
        "stream s1",
        "stream s1\npool p1\na 9 7 s1 p1",
        "the job creates pool p1, which the plan does not configure",
    );
    assert_other("f 0", "begin_step 4\nend_step", "the plan has steps 0 of p0, in which the job requests no memory");
    // The first allocation is freed immediately in one job and stays live in the other.
    let early = folder.trace("early.trace", &["stream s0", "a 0 1000 s0", "f 0", "a 1 1000 s0", "f 1"]);
    let late = folder.trace("late.trace", &["stream s0", "a 0 1000 s0", "a 1 1000 s0", "f 0", "f 1"]);
    symmalloc("plan {} -o {}", &[&early, &plan]).exited(0);
    let wanted = "allocation 0 of p0 (op 1) is freed later than the plan expects: before allocation 2, not 1";
    assert_not_followed(&folder, &late, &plan, &[wanted]);
    // A plan of the other job allows longer lifetimes than this job has.
    symmalloc("plan {} -o {}", &[&late, &plan]).exited(0);
    symmalloc("replay {} --plan {} --json", &[&early, &plan]).exited(0);
    // Streams that do not share have separate heaps.
    symmalloc("plan {} -o {} --streams separate", &[&job, &plan]).exited(0);
    let text = fs::read_to_string(&plan).unwrap();
    let (first, rest) = text.split_once("plan p0 s1").unwrap();
    assert_eq!(rest.lines().count(), 3, "{text}");
    let half = folder.file("half.plan", format!("{first}end 3\n"));
    assert_not_followed(&folder, &job, &half, &["op 3 requests memory of p0 s1, which has no plan"]);
    for (flags, wanted) in [
        ("--streams shared", "--streams contradicts the plan, which has `streams:separate`"),
        ("--segments fixed", "--segments contradicts the plan, which has `segments:expandable`"),
        ("--config streams:shared", "--config contradicts the plan, which has other settings"),
    ] {
        let printed = symmalloc(&format!("replay {{}} --plan {{}} {flags}"), &[&job, &plan]);
        assert_refused(&printed, &["made for a different configuration", wanted, "remove the flag"]);
    }
    assert_refused(
        &symmalloc("replay {} {} --plan {}", &[&job, &job, &plan]),
        &["--plan is for one job, but 2 are given"],
    );
    assert_refused(&symmalloc("replay {} --plan {} --order address", &[&job, &plan]), &["cannot be used with"]);
}
