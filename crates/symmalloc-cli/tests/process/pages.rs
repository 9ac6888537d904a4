//! Numbers in the documentation that the program can verify.

use super::symmalloc;
use std::fs;
use std::path::Path;

fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)).unwrap()
}

/// The README states the lowest ratio of live to reserved memory of the recorded jobs, repeated six times with shared streams, for our
/// allocator and for PyTorch's expandable segments.
#[test]
fn the_front_page_has_the_least_efficiency_of_the_recorded_jobs() {
    let jobs = "replay gpt2 moe resnet50 llama fsdp fsdp1 --ranks 1 --passes 6 --streams shared --json";
    let output = symmalloc(jobs, &[]).json(0);
    let output = output.as_array().unwrap();
    let least = |of: &dyn Fn(&serde_json::Value) -> f64| output.iter().map(of).fold(1.0, f64::min);
    let ours = least(&|job| job["efficiency"].as_f64().unwrap());
    let theirs = least(&|job| job["pytorch"][0]["efficiency"].as_f64().unwrap());
    let row = format!("| **{ours:.3}** | {theirs:.3}, PyTorch's expandable segments |");
    assert!(page("README.md").contains(&row), "README.md has no cell {row}");
}
