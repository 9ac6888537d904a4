//! Tests of `symmalloc report`.

use crate::chart::assert_stands_alone;
use crate::{Folder, busy_trace, command, recorded, symmalloc};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::read::DeflateDecoder;
use serde_json::{Value, json};
use std::fs;
use std::io::Read;

#[test]
fn the_page_shows_the_holders_of_memory_and_the_fragmentation() {
    let folder = Folder::new();
    let lines =
        ["stream s0", "a 0 4194304 s0 \"<kv>\"", "a 1 2097152 s0", "a 2 4194304 s0 \"<kv>\"", "a 3 2097152 s0", "f 1"];
    let (job, out) = (folder.trace("job.trace", &lines), folder.path("report.html"));
    let printed = symmalloc("report {} -o {} --op 5 --json", &[&job, &out]).json(0);
    let holders = printed["holders"].as_array().unwrap();
    assert_eq!((&holders[0]["name"], &holders[0]["allocations"]), (&"<kv>".into(), &2.into()), "{printed}");
    assert_eq!((&holders[1]["name"], &holders[1]["each_bytes"]), (&Value::Null, &(2 << 20).into()), "{printed}");
    assert_eq!((&printed["free_bytes"], &printed["fragmentation"]), (&(2 << 20).into(), &0.0.into()), "{printed}");
    assert_eq!(printed["efficiency"], 1.0);
    assert_eq!(printed["plan"]["planned_bytes"], 12 << 20, "{printed}");
    let text = fs::read_to_string(&out).unwrap();
    assert_stands_alone(&text);
    for words in ["&lt;kv&gt;", "without a name, 2.00 MiB each", "80.0 %", "Settings to try", "after op 5"] {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}

#[test]
fn free_memory_that_another_stream_still_uses_counts_in_the_fragmentation() {
    let folder = Folder::new();
    let sizes = [4, 2, 4, 6, 1].into_iter().enumerate();
    let mut lines: Vec<String> = ["stream s0", "stream s1"].map(String::from).into();
    lines.extend(sizes.map(|(id, size)| format!("a {id} {} s0", size << 20)));
    lines.extend(["u 1 s1", "f 1", "f 3"].map(String::from));
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let (job, out) = (folder.trace("job.trace", &lines), folder.path("report.html"));
    let printed = symmalloc("report {} -o {} --op 9 --json", &[&job, &out]).json(0);
    let found = ["free_bytes", "largest_free_bytes", "fragmentation"].map(|key| printed[key].as_f64());
    // The two freed blocks, and the rest of the last granule of 2 MiB.
    let mib = f64::from(1 << 20);
    assert_eq!(found, [Some(9.0 * mib), Some(6.0 * mib), Some(0.333333)], "{printed}");
}

#[test]
fn every_command_on_the_page_reproduces_its_numbers() {
    let folder = Folder::new();
    let (job, out) = (busy_trace(&folder), folder.path("report.html"));
    let printed = symmalloc("report {} -o {} --json", &[&job, &out]).json(0);
    let page = fs::read_to_string(&out).unwrap();
    let settings = printed["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 8, "{printed}");
    let own: Vec<&Value> = settings.iter().filter(|trial| trial["is_own"] == true).collect();
    assert_eq!((own.len(), &own[0]["peak_reserved_bytes"]), (1, &printed["steady_reserved_bytes"]));
    let run = |text: &str| {
        let words: Vec<&str> = text.split(' ').map(|word| word.trim_matches('\'')).collect();
        assert_eq!(words[0], "symmalloc");
        let output = command().args(&words[1..]).arg("--json").current_dir(folder.0.path()).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let plan = run(printed["plan"]["command"].as_str().unwrap());
    assert_eq!(
        (&plan[0]["planned_bytes"], &plan[0]["efficiency"]),
        (&printed["plan"]["planned_bytes"], &printed["plan"]["efficiency"])
    );
    assert!(folder.path("job.plan").exists());
    for trial in settings {
        let text = trial["command"].as_str().unwrap();
        assert!(page.contains(text), "{text}");
        assert!(text.contains("--passes 5"), "{text}");
        assert_eq!(run(text)[0]["peak_reserved_bytes"], trial["peak_reserved_bytes"], "{text}");
    }
}

#[test]
fn the_best_settings_are_named_and_the_page_is_reproducible() {
    let folder = Folder::new();
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let pages = ["a.html", "b.html"].map(|name| folder.path(name));
    let words = pages.each_ref().map(|page| symmalloc("report {} -o {}", &[&job, page]).exited(0).stdout.clone());
    assert!(
        words[0].contains("best settings: segments:expandable,streams:shared,stitching_granule_mb:2"),
        "{}",
        words[0]
    );
    // The output includes the cost of sharing, and the memory that PyTorch reserved in the recording.
    assert!(words[0].contains("waits of a stream for another per pass, each a fence"), "{}", words[0]);
    assert!(words[0].contains("in the recording: at least 7."), "{}", words[0]);
    let text = fs::read_to_string(&pages[0]).unwrap();
    assert!(
        text.contains("With <code>segments:expandable,streams:shared,stitching_granule_mb:2</code> the peak would be")
    );
    assert!(text == fs::read_to_string(&pages[1]).unwrap());
    let (to_try, others) = text.split_once("Settings that are not better").expect("fixed segments hold more");
    assert!(to_try.contains("streams:shared"));
    assert!(!to_try.contains(" more ("), "worse settings are recommended");
    // A trace gives a lower bound only, which is not ranked.
    assert!(!to_try.contains("<b>in the recording:</b>"));
    assert!(others.contains("<code>segments:fixed</code>") && !others.contains(" less ("));
    assert!(text.contains("by the recorded allocator"));
    assert!(text.contains("With a plan, the job would need 4.66 GiB, of which 100.0 % is live"));
}

#[test]
fn requests_refused_by_a_limit_are_reported() {
    let folder = Folder::new();
    let lines = ["config limit_mb:4", "stream s0", "a 0 3000000 s0", "a 1 3000000 s0", "f 1"];
    let (job, out) = (folder.trace("a job.trace", &lines), folder.path("report.html"));
    let words = symmalloc("report {} -o {}", &[&job, &out]).exited(0).stdout.clone();
    assert!(!words.contains("best settings"), "settings that refuse more are recommended: {words}");
    let text = fs::read_to_string(&out).unwrap();
    assert!(
        text.contains("1 refused per pass (5 in 5 passes)")
            && text.contains("a job.trace' --ranks 1 --passes 5 --config segments:expandable,limit_mb:4"),
        "{text}"
    );
}

#[test]
fn stitching_is_tried_and_its_cost_is_reported() {
    let folder = Folder::new();
    let out = folder.path("report.html");
    let printed = symmalloc("report gnn -o {} --config segments:expandable,streams:shared --json", &[&out]).json(0);
    let settings = printed["settings"].as_array().unwrap();
    let best = &settings[0];
    assert_eq!(best["settings"], "segments:expandable,streams:shared,stitching_granule_mb:2");
    let own = settings.iter().find(|trial| trial["is_own"] == true).unwrap();
    assert!(best["maps"].as_u64() > own["maps"].as_u64(), "{printed}");
    let words = symmalloc("report gnn -o {} --config segments:expandable,streams:shared", &[&out]).stdout;
    assert!(words.contains("per pass that map or unmap memory"), "{words}");
}

#[test]
fn the_recorded_allocators_memory_is_exact_for_a_snapshot() {
    let folder = Folder::new();
    let (snapshot, out) = (recorded("fsdp1_train_rank0.pickle.gz"), folder.path("report.html"));
    let printed = symmalloc("report {} -o {} --json", &[&snapshot, &out]).json(0);
    let held = &printed["recorded_reserved"];
    assert_eq!(held["is_exact"], true);
    let trace = symmalloc("report fsdp1 -o {} --json", &[&out]).json(0);
    let at_least = &trace["recorded_reserved"];
    assert_eq!(at_least["is_exact"], false);
    assert!(at_least["peak_bytes"].as_u64() <= held["peak_bytes"].as_u64(), "{at_least} {held}");
    let own = trace["settings"].as_array().unwrap().iter().find(|trial| trial["is_own"] == true).unwrap();
    assert_eq!(own["is_better"], false);
    let shared = trace["settings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|trial| trial["settings"] == "segments:expandable,streams:shared");
    assert!(shared.unwrap()["waits"].as_u64() > own["waits"].as_u64(), "{trace}");
    let help = symmalloc("report --help", &[]).stdout;
    for key in trace.as_object().unwrap().keys().chain(own.as_object().unwrap().keys()) {
        assert!(help.contains(key.as_str()), "{key} is not in the help");
    }
}

#[test]
fn a_snapshot_that_begins_in_the_middle_counts_earlier_allocations() {
    let folder = Folder::new();
    let blocks =
        [(0x1000, 3 << 20, "active_allocated"), (0x90_0000, 2 << 20, "active_allocated"), (0xf0_0000, 512, "inactive")];
    // One allocation is freed in the trace, one is live at the end and never named, and one is allocated in the trace.
    let entries =
        [("free_requested", 0x70_0000, 1 << 20), ("free_completed", 0x70_0000, 1 << 20), ("alloc", 0x90_0000, 2 << 20)];
    let snapshot = folder.file("middle.pickle", crate::snapshot(20 << 20, &blocks, &entries));
    let out = folder.path("report.html");
    let printed = symmalloc("report {} -o {} --json", &[&snapshot, &out]).json(0);
    assert_eq!((&printed["lived_before"], &printed["lived_before_bytes"]), (&2.into(), &(4 << 20).into()), "{printed}");
    assert_eq!(printed["live"]["peak_bytes"], 5 << 20, "{printed}");
    assert_eq!(printed["recorded_reserved"], serde_json::json!({ "peak_bytes": 20 << 20, "is_exact": true }));
    let wanted = "begins in the middle of a job: 2 allocations of 4.00 MiB already live";
    assert!(fs::read_to_string(&out).unwrap().contains(wanted));
    for command in ["report {} -o {}", "import {} {}"] {
        let out = if command.starts_with("import") { folder.path("middle.trace") } else { out.clone() };
        let words = symmalloc(command, &[&snapshot, &out]).exited(0).stdout.clone();
        assert!(words.contains(wanted), "{words}");
    }
    let replayed = symmalloc("replay {}", &[&snapshot]).exited(0).stdout.clone();
    assert!(replayed.contains(&wanted[1..]), "{replayed}");
}

#[test]
fn python_frames_name_the_holders_of_memory() {
    let folder = Folder::new();
    let snapshot = recorded("../../crates/symmalloc-import/tests/fixtures/job.protocol4.pickle.gz");
    let out = folder.path("report.html");
    let printed = symmalloc("report {} -o {} --json", &[&snapshot, &out]).json(0);
    let holders = printed["holders"].as_array().unwrap();
    let name = holders[0]["name"].as_str().unwrap_or_else(|| panic!("the first holder has no name: {printed}"));
    assert!(name.starts_with("job/module_") && name.contains(" forward_"), "{name}");
    assert!(fs::read_to_string(&out).unwrap().contains(name));
}

/// Returns the header of the data of a page's picture.
fn header_of(page: &str) -> Value {
    let data = page.split_once("type=\"application/base64\">").unwrap().1.split_once('<').unwrap().0;
    let mut bytes = Vec::new();
    DeflateDecoder::new(&*STANDARD.decode(data).unwrap()).read_to_end(&mut bytes).unwrap();
    // The length of the header is a number of 7 bits per byte.
    let start = bytes.iter().position(|byte| *byte < 0x80).unwrap() + 1;
    let length = bytes[..start].iter().rev().fold(0, |length, byte| length << 7 | usize::from(byte & 0x7f));
    serde_json::from_slice(&bytes[start..start + length]).unwrap()
}

#[test]
fn the_page_of_a_snapshot_has_each_stack_and_each_frame_once() {
    let folder = Folder::new();
    let fixtures = "../../crates/symmalloc-import/tests/fixtures";
    let [header, of_trace] = ["job.protocol4.pickle.gz", "job.trace"].map(|name| {
        let out = folder.path("report.html");
        symmalloc("report {} -o {}", &[&recorded(&format!("{fixtures}/{name}")), &out]).exited(0);
        header_of(&fs::read_to_string(&out).unwrap())
    });
    let frames = header["frames"].as_array().unwrap();
    // The job has 30 frames and 30 stacks, and a thousand allocations.
    assert_eq!((frames.len(), &header["stacks"]), (30, &30.into()));
    assert!(frames.contains(&"/home/usér/job/module_22.py:22 forward_22".into()), "{frames:?}");
    assert_eq!((&of_trace["frames"], &of_trace["stacks"]), (&json!([]), &0.into()));
}

#[test]
fn a_page_has_its_still_pictures_twice_and_one_explorer() {
    let folder = Folder::new();
    let (job, out) = (busy_trace(&folder), folder.path("report.html"));
    symmalloc("report {} -o {} --op 91", &[&job, &out]).exited(0);
    let text = fs::read_to_string(&out).unwrap();
    assert_stands_alone(&text);
    assert_eq!((text.matches("class=\"wide\"").count(), text.matches("class=\"narrow\"").count()), (2, 2));
    assert!(text.contains("pool 0, stream 1") && text.contains("free, fenced"), "no heap, or no fence");
    let ids: Vec<&str> = text.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(ids.len(), ids.iter().collect::<std::collections::BTreeSet<_>>().len(), "{ids:?}");
    // One data block and one script, which the policy names by its hash.
    assert_eq!(text.matches("<script").count(), 2);
    assert!(text.contains("default-src 'none'; script-src 'sha256-"), "no policy");
}

#[test]
fn a_name_cannot_leave_the_page_text() {
    let folder = Folder::new();
    let name = "</script><script>document.title='owned'</script><img onerror=alert(1)>";
    let job = folder.trace("job.trace", &["stream s0", &format!("a 0 4194304 s0 {name:?}")]);
    let out = folder.path("report.html");
    symmalloc("report {} -o {}", &[&job, &out]).exited(0);
    let text = fs::read_to_string(&out).unwrap();
    assert_stands_alone(&text);
    assert_eq!((text.matches("<script").count(), text.matches("<img").count()), (2, 0), "{text}");
    assert!(text.contains("&lt;/script&gt;&lt;script&gt;document.title"), "the name is missing");
}

#[test]
fn pages_of_long_recordings_are_small() {
    let folder = Folder::new();
    let out = folder.path("report.html");
    for job in ["fsdp1", "llama"] {
        symmalloc(&format!("report {job} -o {{}}"), &[&out]).exited(0);
        let bytes = fs::metadata(&out).unwrap().len();
        assert!(bytes < 3_000_000, "{bytes} bytes of {job}");
    }
}
