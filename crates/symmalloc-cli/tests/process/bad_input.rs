//! What is wrong with the input is said on stderr with what to do, and the exit code is 2. Nothing panics.

use crate::{Folder, Said, command, recorded, symmalloc};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use symmalloc_watchdog::FlightRecord;

#[track_caller]
fn assert_refused(said: &Said, wanted: &[&str]) {
    let Said { code, stdout, stderr } = said;
    assert_eq!((*code, stdout.as_str()), (Some(2), ""), "stderr:\n{stderr}");
    for wanted in wanted {
        assert!(stderr.contains(wanted), "no {wanted:?} in:\n{stderr}");
    }
    assert!(!stderr.contains("panicked") && !stderr.contains('\x1b'), "{stderr}");
}

/// Every command refuses the file, names it, and says all of `wanted`.
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
    assert_refused(&symmalloc("export {} {}", &[path, &out]), &wanted);
    let picture = folder.path("out.html");
    assert_refused(&symmalloc("chart {} -o {}", &[path, &picture]), &wanted);
    assert_refused(&symmalloc("chart {} -o {} --beside {}", &[&good_job(&folder), &picture, path]), &wanted);
    assert_refused(&symmalloc("report {} -o {}", &[path, &picture]), &wanted);
    assert_refused(&symmalloc("plan {}", &[path]), &wanted);
    assert!(!picture.exists(), "a picture was drawn of what cannot be read");
    assert!(!out.exists(), "a trace was written of what cannot be read");
}

/// A trace that can be drawn.
fn good_job(folder: &Folder) -> PathBuf {
    folder.trace("job.trace", &["stream s0", "a 0 512 s0"])
}

/// A snapshot of one device without entries.
const NOTHING_RECORDED: &[u8] = b"\x80\x02}X\x0d\x00\x00\x00device_traces]]as.";

#[test]
fn a_missing_file() {
    let folder = Folder::new();
    assert_unreadable(&folder.path("nowhere.pickle"), &["cannot be opened", "check the path"]);
}

#[test]
fn a_folder() {
    let folder = Folder::new();
    assert_unreadable(folder.0.path(), &["help: give a file"]);
}

#[test]
fn an_empty_file() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("empty", ""), &["is empty", "record again"]);
}

#[test]
fn something_else() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("letter.txt", "Dear reader,\n"), &["_dump_snapshot", "symmalloc-trace 1"]);
}

#[test]
fn a_torn_or_damaged_archive() {
    let folder = Folder::new();
    let gzip = fs::read(recorded("fsdp1_train_rank0.pickle.gz")).unwrap();
    assert_unreadable(&folder.file("torn.pickle.gz", &gzip[..gzip.len() / 2]), &["ends early", "copy the file again"]);
    let mut zstd = fs::read(recorded("fsdp1_train_rank0.trace.zst")).unwrap();
    assert_unreadable(&folder.file("torn.trace.zst", &zstd[..zstd.len() - 7]), &["ends early", "copy the file again"]);
    // So much of it that the header of a block is among it: damage within one may decode to other text.
    let (middle, quarter) = (zstd.len() / 2, zstd.len() / 4);
    zstd[middle..middle + quarter].fill(0x5a);
    assert_unreadable(&folder.file("damaged.trace.zst", &zstd), &["copy the file again"]);
}

#[test]
fn a_torn_trace() {
    let folder = Folder::new();
    let trace = folder.file("torn.trace", "symmalloc-trace 1\nstream s0\na 0 512 s0\nf");
    assert_unreadable(&trace, &["line 4"]);
}

#[test]
fn a_trace_that_contradicts_itself() {
    let folder = Folder::new();
    assert_unreadable(
        &folder.trace("twice.trace", &["stream s0", "a 0 512 s0", "f 0", "f 0"]),
        &["line 5", "freed already"],
    );
    assert_unreadable(&folder.trace("unknown.trace", &["stream s0", "allocate 0 512 s0"]), &["line 3"]);
}

#[test]
fn a_pickle_of_something_else() {
    let folder = Folder::new();
    assert_unreadable(&folder.file("other.pickle", b"\x80\x04}."), &["device_traces", "_dump_snapshot"]);
    assert_unreadable(&folder.file("torn.pickle", &NOTHING_RECORDED[..12]), &[]);
    assert_unreadable(&folder.file("evil.pickle", b"\x80\x02cos\nsystem\n(S'true'\ntR."), &[]);
    assert_unreadable(&folder.file("nothing.pickle", NOTHING_RECORDED), &["_record_memory_history"]);
}

#[test]
fn a_device_that_was_not_recorded() {
    let snapshot = recorded("fsdp1_train_rank1.pickle.gz");
    let wanted = ["no trace of device 7", "device 1", "--device"];
    assert_refused(&symmalloc("replay {} --device 7", &[&snapshot]), &wanted);
    assert_refused(&symmalloc("diff {} {} --device 7", &[&snapshot, &snapshot]), &wanted);
    let folder = Folder::new();
    assert_refused(&symmalloc("import {} {} --device 7", &[&snapshot, &folder.path("out.trace")]), &wanted);
}

#[test]
fn arguments_that_cannot_be() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    for (args, wanted) in [
        ("replay {} --ranks 0", "--ranks"),
        ("replay {} --passes 0", "--passes"),
        ("replay {} --order random", "sequence"),
        ("replay {} --segments reserved", "expandable"),
        ("replay {} --device -1", "-1"),
        ("replay {} --sead 3", "--seed"),
        ("diff {}", "two recordings, and is given 1"),
        ("replay {} --config segments:fixd", "fixed"),
        ("export {} out.pickle --config max_split_mb:3", "max_split_size_mb"),
        ("play {}", "replay"),
    ] {
        assert_refused(&symmalloc(args, &[&trace]), &[wanted]);
    }
    assert_refused(&symmalloc("replay", &[]), &["TRACE"]);
    assert_refused(&symmalloc("diff", &[]), &["FILE"]);
    assert_refused(&symmalloc("diff {} {} {}", &[&trace, &trace, &trace]), &["is given 3", "flight records"]);
}

#[test]
fn flight_records_that_cannot_be_compared() {
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
        ("torn.json", &whole[..whole.len() / 2], &["is no flight record", "symmalloc-flight-*.json"][..]),
        ("begun.json", "{", &["is no flight record"]),
        ("empty.json", "", &["is no flight record"]),
        ("foreign.json", "{\"a\": 1}", &["is no flight record", "symmalloc_flight_record"]),
        ("later.json", &later, &["version 2", "reads version 1", "help: read it with"]),
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
fn a_trace_that_cannot_be_written() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let out = folder.path("no/such/folder/out.trace");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("import {} {}", &[&trace, &out]), &wanted);
    assert_refused(&symmalloc("replay {} --json --record {}", &[&trace, &out]), &wanted);
    assert_refused(&symmalloc("export {} {}", &[&trace, &out]), &wanted);
    let out = folder.path("no/such/folder/out.svg");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("chart {} -o {}", &[&good_job(&folder), &out]), &wanted);
    let out = folder.path("no/such/folder/out.html");
    let wanted = [out.to_str().unwrap(), "cannot be written", "choose a path"];
    assert_refused(&symmalloc("report {} -o {}", &[&good_job(&folder), &out]), &wanted);
}

#[test]
fn a_picture_of_what_is_not_there() {
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
    let said = symmalloc("chart {} -o {} --beside {}", &[&job, &out, &far]);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    fs::remove_file(&out).unwrap();
    let said = symmalloc("chart {} -o {} --beside {}", &[&far, &out, &far]);
    assert_refused(&said, &["far.trace", "op 1", "beyond any device's memory"]);
    let page = folder.path("out.html");
    assert_refused(&symmalloc("report {} -o {} --op 2", &[&job, &page]), &["no op 2", "the recording has 2"]);
    assert_refused(&symmalloc("report {} -o {}", &[&job, &out]), &["out.svg", "name it .html"]);
    assert!(!page.exists());
    let nothing = folder.trace("nothing.trace", &["stream s0"]);
    assert_refused(&symmalloc("report {} -o {}", &[&nothing, &page]), &["no memory to show"]);
    assert_refused(&symmalloc("chart {} -o {}", &[&nothing, &out]), &["no memory to show", "allocates something"]);
    for name in ["out.png", "out", "svg"] {
        let wanted = [name, "no kind of picture", ".html"];
        assert_refused(&symmalloc("chart {} -o {}", &[&job, &folder.path(name)]), &wanted);
    }
    assert!(!out.exists());
}

#[test]
fn decisions_of_several_traces_for_one_file() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let out = folder.path("out.trace");
    let said = symmalloc("replay {} {} --record {}", &[&trace, &trace, &out]);
    assert_refused(&said, &["--record", "one by one"]);
}

#[test]
fn a_pool_that_cannot_be_destroyed_yet() {
    let folder = Folder::new();
    let trace = folder.trace("pool.trace", &["stream s0", "pool p1", "a 0 512 s0 p1", "destroy p1"]);
    let wanted = ["op 3", "free them first", "repair the trace"];
    assert_refused(&symmalloc("replay {}", &[&trace]), &wanted);
    let out = folder.path("out.pickle");
    assert_refused(&symmalloc("export {} {}", &[&trace, &out]), &wanted);
    assert!(!out.exists(), "a snapshot was written of half a job");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_stdout() {
    let folder = Folder::new();
    let trace = folder.trace("good.trace", &["stream s0"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let said: Said = command().arg("replay").arg(&trace).stdout(full).output().unwrap().into();
    assert_refused(&said, &["stdout"]);
}

#[test]
fn a_torn_trace_is_taken_up_to_there_when_asked() {
    let folder = Folder::new();
    let torn = folder.file("torn.trace", "symmalloc-trace 1\nstream s0\na 0 512 s0\na 1 5");
    assert_unreadable(&torn, &["torn after 2 whole records", "--accept-torn"]);
    let said = symmalloc("replay {} --json --accept-torn", &[&torn]);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.contains("\"allocs\": 1"), "{}", said.stdout);
}

#[test]
fn a_trace_beyond_the_memory_limit() {
    let folder = Folder::new();
    let lines = (0..20_000).map(|id| format!("a {id} 512 s0\nf {id}\n")).collect::<String>();
    let large = folder.file("large.trace", format!("symmalloc-trace 1\nstream s0\n{lines}end 40001\n"));
    assert_eq!(symmalloc("replay {} --json --passes 1", &[&large]).code, Some(0));
    assert_refused(&symmalloc("replay {} --json --memory-limit-mb 1", &[&large]), &["raise --memory-limit-mb"]);
}

#[test]
fn a_device_of_a_recording_without_devices() {
    let folder = Folder::new();
    let trace = folder.trace("one.trace", &["stream s0"]);
    assert_refused(&symmalloc("replay {} --device 1", &[&trace]), &["only a PyTorch snapshot has"]);
}
