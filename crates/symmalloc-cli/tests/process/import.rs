//! Tests of `symmalloc import`.

use crate::{Folder, command, recorded, snapshot, symmalloc};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

const RMM_LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
    7,12:00:00.000000,allocate,0x30a000000,1048576,0x2\n\
    7,12:00:00.000001,free,0x30b000000,512,0x2\n\
    7,12:00:00.000002,free,0x30a000000,1048576,0x2\n";

#[test]
fn an_rmm_log_becomes_a_trace_and_omissions_are_reported() {
    let folder = Folder::new();
    let log = folder.file("rmm.csv", RMM_LOG);
    let trace = folder.path("rmm.trace");
    let printed = symmalloc("import {} {}", &[&log, &trace]);
    let words = &printed.exited(0).stdout;
    assert!(words.contains("RMM log") && words.contains("1 allocation of 512 B already live"), "{words}");
    assert_eq!(
        fs::read_to_string(&trace).unwrap(),
        "symmalloc-trace 2\nstream s0 \"the default stream of thread 0\"\na 0 512 s0\na 1 1048576 s0\nf 0\nf 1\nend 5\n"
    );
}

#[test]
fn the_extension_selects_the_compression_and_every_format_reads_back() {
    let folder = Folder::new();
    let snapshot = recorded("fsdp1_train_rank1.pickle.gz");
    let [plain, gzip, zstd] = ["t.trace", "t.trace.gz", "t.trace.zst"].map(|name| folder.path(name));
    symmalloc("import {} {}", &[&snapshot, &plain]).exited(0);
    symmalloc("import {} {}", &[&plain, &gzip]).exited(0);
    symmalloc("import {} {}", &[&gzip, &zstd]).exited(0);
    let starts = [&plain, &gzip, &zstd].map(|path| fs::read(path).unwrap()[..2].to_vec());
    assert_eq!(starts, [b"sy".to_vec(), vec![0x1f, 0x8b], vec![0x28, 0xb5]]);
    // The project's own copy of this job was converted in the same way.
    let (again, kept) = (folder.path("again.trace"), folder.path("kept.trace"));
    symmalloc("import {} {}", &[&zstd, &again]).exited(0);
    symmalloc("import {} {}", &[&recorded("fsdp1_train_rank1.trace.zst"), &kept]).exited(0);
    assert!(fs::read(&again).unwrap() == fs::read(&plain).unwrap(), "{}", again.display());
    // That copy has no names of streams.
    let names = ["\"the default stream\"", "\"0x"];
    let text = fs::read_to_string(&plain).unwrap();
    let (registered, others): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("stream "));
    assert!(
        registered.len() > 1 && registered.iter().all(|line| names.iter().any(|name| line.contains(name))),
        "{registered:?}"
    );
    let text = fs::read_to_string(&kept).unwrap();
    let (of_kept, others_kept): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("stream "));
    let unnamed: Vec<&str> = registered.iter().map(|line| line.split(" \"").next().unwrap()).collect();
    assert!(unnamed == of_kept && others == others_kept, "{}", kept.display());
}

#[test]
fn the_configuration_of_a_trace_is_kept() {
    let folder = Folder::new();
    let a = folder.trace("a.trace", &["config total_limit_mb:64", "stream s0"]);
    let b = folder.path("b.trace");
    symmalloc("import {} {}", &[&a, &b]).exited(0);
    assert!(fs::read_to_string(&b).unwrap().contains("total_limit_mb:64"));
}

#[test]
fn standard_input_and_output_are_read_and_written() {
    let folder = Folder::new();
    let (log, trace) = (folder.file("rmm.csv", RMM_LOG), folder.path("rmm.trace"));
    symmalloc("import {} {}", &[&log, &trace]).exited(0);
    let piped = |args: &[&str], input: &[u8]| {
        let mut child =
            command().args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let (written, printed) = piped(&["import", "-", "-"], RMM_LOG.as_bytes());
    assert_eq!(written, fs::read(&trace).unwrap());
    assert!(printed.contains("written to standard output"), "{printed}");
    // With --json, the message on stderr is JSON.
    let (_, printed) = piped(&["import", "-", "-", "--json"], RMM_LOG.as_bytes());
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&printed["allocs"], &printed["lived_before"]), (&2.into(), &1.into()), "{printed}");
    let (snapshot, _) = piped(&["export", "-", "-"], &written);
    let file = folder.path("rmm.pickle");
    symmalloc("export {} {}", &[&trace, &file]).exited(0);
    assert_eq!(snapshot, fs::read(&file).unwrap());
    let (replayed, _) = piped(&["replay", "-", "--json", "--ranks", "2"], &snapshot);
    assert!(String::from_utf8(replayed).unwrap().contains("\"allocs\": 2"));
    assert!(!Path::new("-").exists());
}

#[test]
fn lost_entries_of_a_snapshot_are_reported() {
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let settings = [&text("allocator_settings")[..], b"}", &text("trace_alloc_overflowed"), b"\x88s"].concat();
    let folder = Folder::new();
    let (file, trace) = (folder.path("job.pickle"), folder.path("job.trace"));
    let (first, next) = (("free_completed", 0x2000, 4096), ("alloc", 0x3000, 4096));
    for (entries, lived, words) in [
        (
            &[("free_requested", 0x2000, 4096), first, next][..],
            1,
            "1 allocation of 4.00 KiB already live (allocated first)",
        ),
        (&[first, next], 0, "no allocation is known to be live already"),
    ] {
        let plain = snapshot(2 << 20, &[(0x3000, 4096, "active_allocated")], entries);
        let (start, rest) = plain.split_at(4);
        fs::write(&file, [start, &settings, rest].concat()).unwrap();
        let printed = symmalloc("import {} {} --json", &[&file, &trace]).json(0);
        assert_eq!((&printed["is_overwritten"], &printed["lived_before"]), (&true.into(), &lived.into()), "{printed}");
        fs::write(&file, &plain).unwrap();
        assert_eq!(symmalloc("import {} {} --json", &[&file, &trace]).json(0)["is_overwritten"], false);
        fs::write(&file, [start, &settings, rest].concat()).unwrap();
        let (page, picture) = (folder.path("job.html"), folder.path("job.svg"));
        for (command, paths) in [
            ("import {} {}", &[&*file, &*trace][..]),
            ("replay {} --ranks 2", &[&file]),
            ("report {} -o {}", &[&file, &page]),
            ("chart {} -o {}", &[&file, &picture]),
        ] {
            let printed = symmalloc(command, paths).exited(0).stdout.clone();
            let printed = printed.split_whitespace().collect::<Vec<_>>().join(" ");
            for words in [words, "its oldest entries were overwritten"] {
                assert!(printed.contains(words), "{command}: {words} in {printed}");
            }
        }
        assert!(fs::read_to_string(&page).unwrap().contains("its oldest entries were overwritten"));
    }
}

#[test]
fn an_import_prints_its_findings_as_json() {
    let folder = Folder::new();
    let (log, trace) = (folder.file("rmm.csv", RMM_LOG), folder.path("rmm.trace"));
    let printed = symmalloc("import {} {} --json", &[&log, &trace]).json(0);
    let help = symmalloc("import --help", &[]).stdout;
    for key in printed.as_object().unwrap().keys() {
        assert!(help.contains(key.as_str()), "{key} is not in the help");
    }
    assert_eq!((&printed["schema_version"], &printed["format"]), (&1.into(), &"RMM log".into()), "{printed}");
}

#[test]
fn the_output_of_a_conversion_is_an_argument_or_a_flag() {
    let folder = Folder::new();
    let log = folder.file("rmm.csv", RMM_LOG);
    for (command, name) in [("import", "a.trace"), ("export", "a.pickle")] {
        let [argument, flag] = [name.to_owned(), format!("flag-{name}")].map(|name| folder.path(&name));
        symmalloc(&format!("{command} {{}} {{}}"), &[&log, &argument]).exited(0);
        symmalloc(&format!("{command} {{}} -o {{}}"), &[&log, &flag]).exited(0);
        assert!(fs::read(&argument).unwrap() == fs::read(&flag).unwrap(), "{command}");
        let both = symmalloc(&format!("{command} {{}} {{}} --output {{}}"), &[&log, &argument, &flag]);
        assert!(both.code == Some(2) && both.stderr.contains("cannot be used with"), "{}", both.stderr);
        let neither = symmalloc(&format!("{command} {{}}"), &[&log]);
        let usage = format!("{command} [OPTIONS]");
        assert!(neither.code == Some(2) && neither.stderr.contains(&usage), "{}", neither.stderr);
    }
}
