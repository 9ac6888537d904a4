//! Tests of the program as a process: its exit codes and its output.

mod address;
mod bad_input;
mod chart;
mod configurations;
mod diff;
mod exhausted;
mod export;
mod flights;
mod hostile;
mod import;
mod manual;
mod numbers;
mod pages;
mod plan;
mod problems;
mod replay;
mod report;
mod run;
mod simulate;
mod six;
mod snapshots;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A temporary folder of files.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Writes a trace with these lines between a header and an end line.
    fn trace(&self, name: &str, lines: &[&str]) -> PathBuf {
        let records = lines.iter().filter(|line| !line.starts_with("config")).count();
        self.file(name, format!("symmalloc-trace 1\n{}\nend {records}\n", lines.join("\n")))
    }
}

/// Result of a process.
struct CommandOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl CommandOutput {
    /// Returns the JSON on stdout. Asserts that the process exited with `code` and wrote nothing to stderr.
    #[track_caller]
    fn json(&self, code: i32) -> Value {
        self.exited(code);
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in:\n{}", self.stdout))
    }

    #[track_caller]
    fn exited(&self, code: i32) -> &Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(code), ""), "stdout:\n{}", self.stdout);
        self
    }
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        CommandOutput {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_symmalloc"));
    command.env_remove("COLUMNS");
    command
}

/// Runs `symmalloc ARGS`. Arguments are separated by spaces; each `{}` is replaced by the next path.
fn symmalloc(args: &str, paths: &[&Path]) -> CommandOutput {
    let mut paths = paths.iter();
    let mut command = command();
    for arg in args.split(' ') {
        match arg {
            "{}" => command.arg(paths.next().expect("a path for each {}")),
            arg => command.arg(arg),
        };
    }
    assert_eq!(paths.next(), None, "a path without its {{}}");
    command.output().unwrap().into()
}

/// Returns the path of a job from the project's collection, recorded on a GPU.
fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(name)
}

/// Writes a program with two streams and everything that makes ranks differ under PyTorch's rule: many segments that are
/// freed and reused, and uses by the other stream.
fn busy_trace(folder: &Folder) -> PathBuf {
    let mut lines = vec!["stream s0".to_owned(), "stream s1".to_owned()];
    for round in 0..3 {
        let id = |n: u64| round * 100 + n;
        lines.extend((0..40).map(|n| format!("a {} {} s{}", id(n), (n + 1) << 19, n % 2)));
        lines.extend((0..40).step_by(4).map(|n| format!("u {} s1", id(n))));
        lines.extend((0..40).map(|n| format!("f {}", id(n))));
    }
    lines.push("a 999 4096 s1 \"the last one\"".to_owned());
    folder.trace("busy.trace", &lines.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns a PyTorch snapshot of one device: a segment with its final blocks (address, size, state), and a trace of entries
/// (action, address, size).
fn snapshot(segment_bytes: u64, blocks: &[(u64, u64, &str)], entries: &[(&str, u64, u64)]) -> Vec<u8> {
    let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes()].concat();
    let number = |number: u64| [&[0x8a, 9], &number.to_le_bytes()[..], &[0]].concat();
    let dict = |fields: &[(&str, Vec<u8>)]| {
        let fields: Vec<u8> = fields.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
        [b"}(", &fields[..], b"u"].concat()
    };
    let list = |items: Vec<Vec<u8>>| [b"](", &items.concat()[..], b"e"].concat();
    let block = |(address, size, state): &(u64, u64, &str)| {
        dict(&[("address", number(*address)), ("size", number(*size)), ("state", text(state))])
    };
    let entry = |(action, address, size): &(&str, u64, u64)| {
        let fields = [("addr", number(*address)), ("size", number(*size)), ("stream", number(0))];
        dict(&[&[("action", text(action))][..], &fields].concat())
    };
    let segment = dict(&[
        ("device", number(0)),
        ("address", number(0x1000)),
        ("total_size", number(segment_bytes)),
        ("stream", number(0)),
        ("blocks", list(blocks.iter().map(block).collect())),
    ]);
    let traces = list(vec![list(entries.iter().map(entry).collect())]);
    let root = dict(&[("segments", list(vec![segment])), ("device_traces", traces)]);
    [b"\x80\x04", &root[..], b"."].concat()
}
