//! Tests of the driver script: its processing of figures, and a complete run without a device.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns a command for a tool, or prints a note and returns `None` if this machine does not have it.
fn tool(name: &str) -> Option<Command> {
    let version = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_here = version.is_ok_and(|status| status.success());
    if !is_here {
        println!("skipped: {name} is not available");
    }
    is_here.then(|| {
        let mut command = Command::new(name);
        command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    })
}

#[track_caller]
fn passes(command: &mut Command) -> String {
    let output = command.output().expect("the command runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    stdout.into_owned()
}

#[test]
fn the_scripts_own_tests_pass() {
    let Some(mut python) = tool("python3") else { return };
    passes(python.args(["-m", "unittest", "comparison.tests"]));
}

#[test]
fn a_run_without_a_device_creates_the_table_the_chart_and_the_results() {
    let (Some(mut python), Some(_)) = (tool("python3"), tool("c++")) else { return };
    let folder = tempfile::tempdir().expect("a folder should be created");
    let out = folder.path().join("out");
    python.args(["run", "--no-device", "--quick", "--jobs", "resnet50", "--program"]);
    let printed = passes(python.arg(env!("CARGO_BIN_EXE_symmalloc-peers")).arg("--out").arg(&out));
    assert!(printed.contains("| resnet50_multiscale, steady, ns per op |"), "{printed}");
    assert!(!printed.contains("missing or incomplete"), "{printed}");
    assert!(printed.contains("| chained arithmetic | 1.00 |"), "{printed}");
    let results: Value = serde_json::from_slice(&read(&out, "results.json")).expect("the output should be JSON");
    let peers = |case: &str| -> Vec<String> {
        let figures = results["figures"].as_array().expect("figures").iter();
        let of = figures.filter(|figure| figure["case"] == case && figure["at"] == "resnet50_multiscale");
        of.map(|figure| figure["peer"].as_str().expect("it should have a name").to_owned()).collect()
    };
    let simulated = "symmalloc, simulated";
    assert_eq!(peers("steady_ns_per_op"), [simulated, "symmalloc, simulated, shared streams", "malloc"]);
    let figures = results["figures"].as_array().expect("figures");
    for peer in [simulated, "malloc"] {
        let readings = figures.iter().find(|it| it["peer"] == peer && it["case"] == "readings" && it["at"] == "all");
        // Two kinds of pairs, a replacement, the first pass and a later pass.
        assert!(readings.is_some_and(|it| it["median"].as_f64() >= Some(5.0)), "{peer}: {readings:?}");
    }
    assert!(String::from_utf8_lossy(&read(&out, "chart.svg")).starts_with("<svg"));
    assert!(String::from_utf8_lossy(&read(&out, "table.md")).contains(simulated));
}

fn read(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}
