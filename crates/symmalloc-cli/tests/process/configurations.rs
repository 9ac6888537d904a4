//! Recordings with every configuration: no setting of the recorded job stops a command.

use super::hostile::{COMMANDS, run_all};
use super::{Folder, symmalloc};
use symmalloc_core::config_text::key_names;

/// Configurations that together contain every key.
const CONFIGURATIONS: [&str; 18] = [
    "expandable_segments:True,reclaim:pool",
    "segments:expandable,range_mb:4096,growth_mb:4",
    "segments:expandable,stitching:true,stitching_granule_mb:4,stitching_least_mb:8",
    "segments:expandable,stitching:true,stitching_maps:64,stitching_aliases:64",
    "segments:fixed,large_segment_size_mb:24,max_split_size_mb:64,max_non_split_rounding_mb:8",
    "segments:fixed,unsplit:true,release_threshold_mb:4",
    "segments:reserved,segment_mb:2048,reclaim:never",
    "roundup_power2_divisions:4,streams:grouped",
    "streams:shared,symmetric:true,tag:weights",
    "limit_mb:2048,reclaim:heap,retries_max:1",
    "total_limit_mb:2048,history_ops:16,pointer_lookup:exact",
    "base:slot:3,backend:native",
    "plan:learn",
    "debug:poison",
    "debug:canary",
    "debug:unmap",
    "debug:[quarantine_mb:4]",
    "segments:expandable,stitching:true,streams:shared,debug:[poison,canary,quarantine_mb:4,unmap]",
];

#[test]
fn every_command_accepts_recordings_of_every_configuration() {
    let missing = |key: &&str| {
        !key.ends_with("_bytes")
            && !CONFIGURATIONS.iter().any(|text| text.split(',').any(|part| part.split(':').next() == Some(*key)))
    };
    assert_eq!(key_names().find(missing), None, "a key that no configuration has");
    for config in CONFIGURATIONS {
        let folder = Folder::new();
        let config = format!("config {config}");
        let mut lines = vec![&*config, "stream s0", "stream s1"];
        // Blocks of several sizes, with uses on another stream, a write that fills freed memory again, a trim and a sleep.
        lines.extend([
            "a 0 512 s0 \"small\"",
            "a 1 3145728 s0",
            "a 2 41943040 s1",
            "a 3 134217728 s0",
            "u 1 s1",
            "f 1",
            "f 2",
            "a 4 3145728 s0",
            "f 4",
            "synchronize s0",
            "synchronize s1",
            "trim",
            "a 5 20971520 s1",
            "f 3",
            "a 6 160432128 s1",
            "f 6",
            "f 5",
            "f 0",
        ]);
        let job = folder.trace("job.trace", &lines);
        for (command, printed) in run_all(&COMMANDS, &folder, "-t 60", &[], &job) {
            let is_accepted = printed.stderr.is_empty() && matches!(printed.code, Some(0 | 3));
            assert!(is_accepted, "{config}, {command}: {:?} {}{}", printed.code, printed.stderr, printed.stdout);
            // Regression test: memory in a quarantine counted as left behind.
            let has_failed = command.starts_with("simulate") && printed.code != Some(0);
            assert!(!has_failed, "{config}, {command}: {}", printed.stdout);
        }
        symmalloc("diff {} {} --json", &[&job, &job]).json(0);
    }
}
