//! Passes the commit to `--version`. Git is optional: a published crate names its commit in `.cargo_vcs_info.json`, and without
//! either, `--version` prints the version alone.

use std::path::Path;
use std::process::Command;

const PACKAGED: &str = ".cargo_vcs_info.json";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let commit = if Path::new(PACKAGED).exists() {
        println!("cargo::rerun-if-changed={PACKAGED}");
        packaged_commit()
    } else {
        checkout_commit()
    };
    let version = env!("CARGO_PKG_VERSION");
    let version = commit.map_or(version.to_owned(), |commit| format!("{version} ({commit:.12})"));
    println!("cargo::rustc-env=SYMMALLOC_VERSION={version}");
}

/// Returns the commit that `cargo package` wrote down.
fn packaged_commit() -> Option<String> {
    let text = std::fs::read_to_string(PACKAGED).ok()?;
    let (_, after) = text.split_once("\"sha1\"")?;
    let commit = after.split('"').nth(1)?;
    commit.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| commit.to_owned())
}

/// Returns the commit of the checkout that tracks this package, if it is one.
fn checkout_commit() -> Option<String> {
    // An unpacked package may lie in an unrelated repository.
    git(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
    // This file changes with each commit and each checkout.
    println!("cargo::rerun-if-changed={}", git(&["rev-parse", "--git-path", "logs/HEAD"])?);
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
