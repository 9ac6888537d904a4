//! Tests of `symmalloc chart`.

use crate::{Folder, busy_trace, recorded, symmalloc};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Asserts that the tags are balanced, and that the file needs no external resources.
#[track_caller]
pub(crate) fn assert_stands_alone(text: &str) {
    let mut open = Vec::new();
    let markup = without_contents_of_scripts(text);
    for tag in markup.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').unwrap_or_else(|| panic!("a tag without an end: {tag}"));
        let name = tag.split([' ', '\n', '/']).next().unwrap();
        match tag.strip_prefix('/') {
            Some(closed) => assert_eq!(open.pop(), Some(closed), "closed out of order"),
            None if tag.ends_with('/') || ["!DOCTYPE", "meta", "br", "input"].contains(&name) => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
    let links = text.replace("http://www.w3.org/2000/svg", "");
    for word in ["http://", "https://", "@import", "url(//", "import(", "fetch(", "XMLHttpRequest", " src="] {
        assert!(!links.contains(word), "{word}");
    }
}

/// Returns a page whose scripts are empty. As in a browser, a script ends at the first end tag.
fn without_contents_of_scripts(text: &str) -> String {
    let mut parts = text.split("<script");
    let mut markup = parts.next().unwrap().to_owned();
    for part in parts {
        let (script, rest) = part.split_once("</script>").expect("the script ends");
        markup += &format!("<script{}></script>{rest}", script.split_once('>').expect("the tag ends").0);
    }
    markup
}

fn charted(args: &str, paths: &[&Path]) -> (Value, String) {
    let output = symmalloc(args, paths).json(0);
    let text = fs::read_to_string(output["picture"].as_str().unwrap()).unwrap();
    assert_stands_alone(&text);
    (output, text)
}

#[test]
fn peaks_are_those_of_a_replay() {
    let folder = Folder::new();
    let out = folder.path("out.svg");
    for job in [busy_trace(&folder), recorded("fsdp1_train_rank0.trace.zst"), recorded("llama_generate.trace.zst")] {
        for segments in ["expandable", "fixed"] {
            let (output, text) = charted(&format!("chart {{}} -o {{}} --json --segments {segments}"), &[&job, &out]);
            let args = format!("replay {{}} --json --ranks 1 --passes 1 --segments {segments}");
            let replayed = &symmalloc(&args, &[&job]).json(0)[0];
            assert_eq!(output["reserved"]["peak_bytes"], replayed["peak_reserved_bytes"]);
            assert_eq!(output["live"]["peak_bytes"], replayed["peak_live_bytes"]);
            assert_eq!(output["op"], output["allocated"]["op"]);
            assert!(text.len() < 200_000, "{} bytes of {}", text.len(), job.display());
        }
    }
}

#[test]
fn the_map_names_the_largest_allocations_at_the_given_op() {
    let folder = Folder::new();
    let lines = ["stream s0", "pool p1", "a 0 9000000 s0 \"kv <cache>\"", "a 7 4000000 s0 p1", "f 7", "f 0"];
    let (job, out) = (folder.trace("job.trace", &lines), folder.path("map.svg"));
    let (output, text) = charted("chart {} -o {} --map --json", &[&job, &out]);
    assert_eq!(output["op"], 3);
    assert!(text.contains("1 kv &lt;cache&gt;") && text.contains("allocation 1<"), "{text}");
    assert!(text.contains("3.81 MiB live, 189.50 KiB free (largest block 189.50 KiB)"), "{text}");
    let (_, text) = charted("chart {} -o {} --map --op 5 --json", &[&job, &out]);
    assert!(text.contains("0 B live, 10.00 MiB free") && !text.contains("kv"), "{text}");
    let (output, text) = charted("chart {} -o {} --map --pool p1 --stream s0 --json", &[&job, &out]);
    assert_eq!((&output["op"], &output["reserved"]["peak_bytes"]), (&3.into(), &(4 << 20).into()));
    assert!(text.contains("pool 1") && !text.contains("pool 0"), "{text}");
}

#[test]
fn two_ranks_are_drawn_side_by_side_with_differences_marked() {
    let folder = Folder::new();
    let out = folder.path("ranks.svg");
    let ranks = [recorded("fsdp1_train_rank0.pickle.gz"), recorded("fsdp1_train_rank1.pickle.gz")];
    let (output, text) = charted("chart {} --beside {} -o {} --json", &[&ranks[0], &ranks[1], &out]);
    let beside = &output["beside"];
    assert_eq!((&beside["placements"], &beside["allocs"]), (&"recorded".into(), &24_464.into()));
    assert_eq!((&beside["differing_placements"], &beside["differing_live"]), (&15_265.into(), &164.into()));
    assert!(text.contains("live, elsewhere on the other") && text.contains("The largest that lie elsewhere"));
}

#[test]
fn ranks_on_symmalloc_do_not_differ() {
    let folder = Folder::new();
    let out = folder.path("ranks.svg");
    let job = busy_trace(&folder);
    let (output, text) = charted("chart {} --beside {} -o {} --json", &[&job, &job, &out]);
    let beside = &output["beside"];
    assert_eq!((&beside["placements"], &beside["differing_placements"]), (&"replayed".into(), &0.into()));
    assert!(!text.contains("elsewhere on the other"));
}

#[test]
fn a_plan_is_drawn_beside_the_job() {
    let folder = Folder::new();
    let [plan, svg] = ["job.plan", "job.svg"].map(|name| folder.path(name));
    let job = recorded("fsdp1_train_rank0.trace.zst");
    let planned = symmalloc("plan {} -o {} --json", &[&job, &plan]).json(0)[0]["planned_bytes"].clone();
    let (output, text) = charted("chart {} --plan {} -o {} --json", &[&job, &plan, &svg]);
    assert_eq!((&output["plan"]["reserved"]["peak_bytes"], &output["plan"]["reserved"]["op"]), (&planned, &0.into()));
    assert!(output["reserved"]["peak_bytes"].as_u64() > planned.as_u64(), "{output}");
    for words in ["reserved by the plan: peak 4.66 GiB", "As planned: at most 4.66 GiB reserved."] {
        assert!(text.contains(words), "{words}");
    }
    // The map of the plan alone: one heap, in which the live memory of the peak has no significant gaps.
    let (_, text) = charted("chart {} --plan {} -o {} --map --json", &[&job, &plan, &svg]);
    for words in ["Planned memory after op", "pool 0, all streams", "4.66 GiB live, "] {
        assert!(text.contains(words), "{words} in {text}");
    }
    let words = symmalloc("chart {} --plan {} -o {}", &[&job, &plan, &svg]).exited(0).stdout.clone();
    assert!(words.contains("as planned: 4.66 GiB reserved, first after op 0"), "{words}");
}

#[test]
fn the_peaks_are_printed() {
    let folder = Folder::new();
    let (job, out) = (folder.trace("job.trace", &["stream s0", "a 0 3000000 s0"]), folder.path("out.svg"));
    let words = symmalloc("chart {} -o {}", &[&job, &out]).exited(0).stdout.clone();
    assert!(words.contains("peak reserved") && words.contains("4.00 MiB  after op 1"), "{words}");
}

#[test]
fn refused_requests_are_counted_and_not_drawn() {
    let folder = Folder::new();
    let lines = ["config limit_mb:4", "stream s0", "a 0 3000000 s0", "a 1 3000000 s0", "f 1"];
    let (job, out) = (folder.trace("job.trace", &lines), folder.path("out.svg"));
    let (output, _) = charted("chart {} -o {} --json", &[&job, &out]);
    assert_eq!((&output["refused"], &output["live"]["peak_bytes"]), (&1.into(), &3_000_000.into()));
}

#[test]
fn the_pictures_in_the_docs_equal_the_output_of_their_commands() {
    let folder = Folder::new();
    let out = folder.path("ranks.svg");
    let ranks = [recorded("fsdp1_train_rank0.pickle.gz"), recorded("fsdp1_train_rank1.pickle.gz")];
    symmalloc("chart {} --beside {} -o {}", &[&ranks[0], &ranks[1], &out]).exited(0);
    let share = folder.path("share.svg");
    symmalloc("chart fsdp1 --share -o {}", &[&share]).exited(0);
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    for (drawn, kept) in [(out, kept.join("fsdp1_ranks.svg")), (share, kept.join("fsdp1_share.svg"))] {
        assert!(fs::read(drawn).unwrap() == fs::read(kept).unwrap(), "run the command in docs/pictures.md again");
    }
}

#[test]
fn a_picture_is_reproducible() {
    let folder = Folder::new();
    let job = busy_trace(&folder);
    let [a, b] = ["a.svg", "b.svg"].map(|name| folder.path(name));
    for flags in ["", " --map"] {
        for out in [&a, &b] {
            symmalloc(&format!("chart {{}} -o {{}}{flags}"), &[&job, out]).exited(0);
        }
        assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap());
    }
}

#[test]
fn pictures_have_tooltips() {
    let folder = Folder::new();
    let lines = ["stream s0", "a 0 9000000 s0 \"kv <cache>\"", "a 1 4000000 s0", "a 2 4000000 s0", "f 1"];
    let (job, out) = (folder.trace("job.trace", &lines), folder.path("map.svg"));
    let (_, map) = charted("chart {} -o {} --map --op 4 --json", &[&job, &out]);
    assert!(map.contains("<title>kv &lt;cache&gt;: 8.58 MiB, segment 0 at 0 B</title>"), "{map}");
    assert!(map.contains("<title>free: 3.81 MiB in segment 0</title>"), "{map}");
    let (_, history) = charted("chart {} -o {} --json", &[&job, &out]);
    assert!(history.contains("<title>ops 4 to 4: at most 18.00 MiB reserved, "), "{history}");
}

#[test]
fn the_picture_to_share_compares_pytorch_symmalloc_and_the_plan() {
    let folder = Folder::new();
    let svg = folder.path("fsdp1.svg");
    let output = symmalloc("chart fsdp1 --share -o {} --json", &[&svg]).json(0);
    let replayed = symmalloc("replay fsdp1 --ranks 1 --json", &[]).json(0);
    let planned = symmalloc("plan fsdp1 --json", &[]).json(0);
    assert_eq!(output["pytorch_expandable_bytes"], replayed[0]["pytorch"][0]["peak_reserved_bytes"]);
    assert_eq!(output["pytorch_bytes"], replayed[0]["pytorch"][1]["peak_reserved_bytes"]);
    assert_eq!(output["symmalloc_bytes"], replayed[0]["peak_reserved_bytes"]);
    assert_eq!(output["planned_bytes"], planned[0]["planned_bytes"]);
    let words = symmalloc("chart fsdp1 --share -o {}", &[&svg]).exited(0).stdout.clone();
    assert!(words.contains("symmalloc, planned"), "{words}");
    let text = fs::read_to_string(&svg).unwrap();
    assert_stands_alone(&text);
    for wanted in
        ["PyTorch, its default", "38 % less", "4.66 GiB live at the peak", "51,429 recorded ops, replayed 5 times"]
    {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}
