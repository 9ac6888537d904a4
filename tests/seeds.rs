//! The seed corpus of the fuzz targets, as plain tests: `fuzz/seeds/<target>/*`.

use std::fs;
use std::path::Path;
use symmalloc_harness::targets::TARGETS;

#[test]
fn every_seed_passes_its_target() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for (name, target) in TARGETS {
        let folder = fs::read_dir(seeds.join(name)).unwrap_or_else(|error| panic!("no seeds for {name}: {error}"));
        let mut paths: Vec<_> = folder.map(|entry| entry.expect("readable").path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "no seeds for {name}");
        for path in paths {
            println!("{}", path.display());
            target(&fs::read(&path).expect("readable"));
        }
    }
}

/// A seed folder without a target would never be run.
#[test]
fn every_seed_folder_has_its_target() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for entry in fs::read_dir(seeds).expect("the folder of seeds") {
        let name = entry.expect("readable").file_name();
        assert!(TARGETS.iter().any(|(target, _)| name == *target), "{name:?} has no target");
    }
}
