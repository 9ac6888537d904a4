//! Numbers in the documentation that the program can verify.

use super::{Folder, recorded, symmalloc};
use serde_json::Value;
use std::fs;
use std::path::Path;

const MEASURED: &str = "docs/measured/memory.md";
const COSTS: &str = "docs/costs.md";

/// Recorded jobs: their names on the page, and for the program.
const JOBS: [(&str, &str); 6] = [
    ("gpt2_train_varlen", "gpt2"),
    ("moe_train", "moe"),
    ("resnet50_multiscale", "resnet50"),
    ("llama_generate", "llama"),
    ("fsdp_train_rank0", "fsdp"),
    ("fsdp1_train_rank0", "fsdp1"),
];

fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)).unwrap()
}

/// Returns the cells after the first one of a job's row, in the first table of a section that has one.
fn row(section: &str, job: &str) -> Vec<String> {
    let text = page(MEASURED);
    let from = text.find(&format!("\n## {section}\n")).unwrap_or_else(|| panic!("no section {section}"));
    let line = text[from..].lines().find(|line| line.trim_start_matches("| ").trim_matches('`').starts_with(job));
    let line = line.unwrap_or_else(|| panic!("no row of {job} in {section}"));
    line.split('|').skip(2).map(|cell| cell.trim().to_owned()).collect()
}

/// Returns the JSON of each recorded job, and of `gnn` with these flags.
fn counted(command: &str, flags_of_gnn: &str) -> Vec<(&'static str, Value)> {
    let names = JOBS.map(|(_, name)| name).join(" ");
    let [jobs, gnn] = [(&*names, ""), ("gnn", flags_of_gnn)].map(|(names, flags)| {
        let line = [command, names, flags, "--json"].map(str::to_owned).into_iter().filter(|part| !part.is_empty());
        symmalloc(&line.collect::<Vec<_>>().join(" "), &[]).json(0)
    });
    let found = jobs.as_array().unwrap().iter().chain(gnn.as_array().unwrap()).cloned();
    JOBS.iter().map(|(page, _)| *page).chain(["gnn_sampled"]).zip(found).collect()
}

fn rounded(value: &Value) -> String {
    format!("{:.3}", value.as_f64().unwrap())
}

/// The pages state the efficiency of every recorded job, and the page of costs states the highest ratios of reserved to live memory: ours
/// with stitching, which is the default under PyTorch, ours with shared streams, and that of PyTorch's expandable segments. Stitching
/// reserves no more than the latter on any job.
#[test]
fn pages_state_the_efficiencies_of_the_recorded_jobs() {
    let separate = counted("replay --ranks 1 --passes 6", "--config segments:expandable");
    let shared = counted("replay --ranks 1 --passes 6 --streams shared", "--config segments:expandable,streams:shared");
    let stitched = counted("replay --ranks 1 --passes 6 --config streams:shared,stitching:true", "");
    // The lowest efficiencies, ours and that of expandable segments: with stitching on all jobs, shared on all but `gnn`.
    let (mut least_stitched, mut least_shared) = ([1.0_f64; 2], [1.0_f64; 2]);
    let lower = |least: &mut [f64; 2], ours: &Value, pytorch: &Value| {
        *least =
            [(least[0], ours), (least[1], pytorch)].map(|(least, of)| least.min(of["efficiency"].as_f64().unwrap()));
    };
    for (((job, found), (_, shared)), (_, stitched)) in separate.iter().zip(&shared).zip(&stitched) {
        let cells = row("Recorded jobs", job);
        let models = &found["pytorch"];
        let numbers = [&found["first_pass"], found, stitched, shared, &models[0], &models[1]]
            .map(|of| rounded(&of["efficiency"]));
        let stated = [&cells[0], &cells[1], &cells[2], &cells[3], &cells[5], &cells[6]];
        assert_eq!(stated, numbers.each_ref(), "{job} in {MEASURED}");
        let peak = |of: &Value| of["peak_reserved_bytes"].as_u64().unwrap();
        assert!(peak(stitched) <= peak(&models[0]), "{job}: stitching reserves more than expandable segments");
        lower(&mut least_stitched, stitched, &models[0]);
        if *job != "gnn_sampled" {
            lower(&mut least_shared, shared, &models[0]);
        }
    }
    for [ours, pytorch] in [least_stitched, least_shared] {
        let cell = format!("| **{:.3}** | {:.3}, expandable (simulated) |", 1.0 / ours, 1.0 / pytorch);
        assert!(page(COSTS).contains(&cell), "{COSTS} has no cell {cell}");
    }
    let stitched = symmalloc("replay gnn --ranks 1 --passes 6 --json", &[]).json(0);
    let [first, six] = [&stitched[0]["first_pass"], &stitched[0]].map(|of| rounded(&of["efficiency"]));
    let sentence = format!("stitches: {first} in the first pass and {six} in six");
    assert!(page(MEASURED).contains(&sentence), "{MEASURED}: {sentence}");
}

/// The pages state the plans of all recorded jobs. The page of costs states the highest ratio of reserved to live memory, and the page
/// about plans that of `gnn`.
#[test]
fn pages_state_the_plans_of_the_recorded_jobs() {
    let thousands = |bytes: &Value, digits: usize| {
        let text = format!("{:.digits$}", bytes.as_f64().unwrap() / f64::from(1 << 20));
        let whole = text.find('.').unwrap_or(text.len());
        if whole > 3 { format!("{},{}", &text[..whole - 3], &text[whole - 3..]) } else { text }
    };
    let mut least = 1.0_f64;
    for (job, found) in counted("plan", "") {
        let [live, planned, online] = ["peak_live_bytes", "planned_bytes", "online_bytes"].map(|key| &found[key]);
        let efficiency = found["efficiency"].as_f64().unwrap();
        let gained = (online.as_f64().unwrap() - planned.as_f64().unwrap()) / f64::from(1 << 20);
        let of_online = live.as_f64().unwrap() / online.as_f64().unwrap();
        let waits = |key: &str| found[key].to_string();
        let [waits, online_waits] = ["waits", "online_waits"].map(|key| match waits(key) {
            text if text.len() > 3 => format!("{},{}", &text[..text.len() - 3], &text[text.len() - 3..]),
            text => text,
        });
        let expected = [
            thousands(live, 1),
            thousands(planned, 0),
            format!("{efficiency:.4}"),
            thousands(online, 0),
            format!("{of_online:.3}"),
            format!("{gained}"),
            format!("{waits} ({online_waits})"),
        ];
        assert_eq!(row("Plans", job)[..7], expected, "{job} in {MEASURED}");
        if job == "gnn_sampled" {
            let gib = |key: &str| found[key].as_f64().unwrap() / f64::from(1 << 30);
            let (reserved, held) = (gib("reserve_bytes"), gib("online_bytes"));
            let sentence = format!("{reserved:.2} GiB, where the job with stitching holds {held:.2} GiB");
            assert!(page("docs/steps.md").contains(&sentence), "docs/steps.md: {sentence}");
        }
        least = least.min(efficiency);
    }
    for (name, text) in [
        (COSTS, format!("| **{:.4}** | |", 1.0 / least)),
        ("docs/steps.md", format!("live divided by planned is at least {least:.4}")),
    ] {
        assert!(page(name).contains(&text), "{name} has no {text}");
    }
}

/// The page about recording states the sizes of recordings.
#[test]
fn the_page_states_the_sizes_of_recordings() {
    let folder = Folder::new();
    let text = page("docs/recording.md");
    let grouped = |number: u64| {
        let digits = number.to_string();
        let groups: Vec<&str> =
            digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap()).collect();
        groups.join(",")
    };
    for (job, name) in JOBS {
        let record = folder.path("job.trace.zst");
        let output = symmalloc(&format!("replay {name} --ranks 1 --passes 1 --json --record {{}}"), &[&record]).json(0);
        let (ops, bytes) = (output[0]["ops"].as_u64().unwrap(), fs::metadata(&record).unwrap().len());
        let row = format!("| {job} | {} | {} | {:.2} |", grouped(ops), grouped(bytes), bytes as f64 / ops as f64);
        assert!(text.contains(&row), "docs/recording.md has no row {row}");
    }
}

/// A page states the differences between the two ranks of the recorded FSDP job.
#[test]
fn the_page_states_the_differences_between_two_ranks() {
    let [one, other] = [0, 1].map(|rank| recorded(&format!("fsdp1_train_rank{rank}.pickle.gz")));
    let folder = Folder::new();
    let output = symmalloc("chart {} --beside {} -o {} --json", &[&one, &other, &folder.path("ranks.svg")]).json(0);
    let caption =
        format!("Segments and blocks of both ranks, {} live allocations marked", output["beside"]["differing_live"]);
    assert!(page("docs/pictures.md").contains(&caption), "docs/pictures.md: {caption}");
}
