//! Finds all pages with Rust listings, so that none is missed.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let here = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let root = Path::new(&here).join("../..").canonicalize()?;
    let mut pages = vec![root.join("README.md")];
    for folder in ["docs", "docs/measured"] {
        pages.extend(markdown(&root.join(folder))?);
    }
    for entry in fs::read_dir(root.join("crates"))? {
        pages.extend(markdown(&entry?.path())?);
    }
    pages.sort();

    let mut modules = String::new();
    for page in pages.iter().filter(|page| page.exists()) {
        println!("cargo::rerun-if-changed={}", page.display());
        if fs::read_to_string(page)?.lines().any(|line| line.starts_with("```rust")) {
            let name = page.strip_prefix(&root).expect("below the root").with_extension("");
            let name = name.to_string_lossy().replace(['/', '-'], "_").to_lowercase();
            writeln!(modules, "#[doc = include_str!({page:?})]\npub mod {name} {{}}").expect("a string");
        }
    }
    // Rerun when pages are added.
    for folder in ["docs", "docs/measured", "crates"] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
    }
    fs::write(Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("pages.rs"), modules)
}

fn markdown(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if folder.exists() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    Ok(found)
}
