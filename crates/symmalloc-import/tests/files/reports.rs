//! Files that people attached to reports of problems, in `tests/reports`.

use std::path::Path;

use symmalloc_core::op::{Op, Refusal};
use symmalloc_core::units::{GIB, MIB};
use symmalloc_import::{ImportError, ImportErrorKind, ReadOptions, Recording, read_path};

fn read_with(name: &str, options: &ReadOptions) -> Result<Recording, ImportError> {
    read_path(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reports").join(name), options)
}

fn read(name: &str) -> Recording {
    read_with(name, &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_failed_request_is_a_record_with_the_memory_that_was_held_then() {
    for (name, requested, allocated, free, largest) in
        [("oom.pickle", 10, 2, 0, 0), ("oom_fragmented.pickle", 3, 2, 4, 2)]
    {
        let recording = read(name);
        let failure = recording.failure.unwrap();
        let op = &recording.records[failure.record].op;
        assert!(
            matches!(op, Op::Refuse { size_bytes, refusal: Refusal::Driver, .. } if *size_bytes == requested * GIB),
            "{op:?}"
        );
        let held = failure.held.unwrap();
        assert_eq!(held.reserved_bytes, (allocated + free) * GIB, "{name}");
        assert_eq!((held.allocated_bytes, held.free_bytes()), (allocated * GIB, free * GIB), "{name}");
        assert_eq!((held.largest_free_bytes, failure.device_free_bytes), (largest * GIB, Some(512 * MIB)), "{name}");
    }
}

#[test]
fn a_state_without_history_is_not_a_history() {
    let state = read("cached_state_only.pickle").summary.state_only.unwrap();
    assert_eq!((state.reserved_bytes, state.allocated_bytes), (11 * GIB, GIB));
    assert_eq!((state.free_segments, state.free_segment_bytes, state.free_blocks), (1, 10 * GIB, 0));
    assert_eq!(read("cached_full_history.pickle").summary.state_only, None);
    let list = read("segments_list.pickle");
    assert_eq!(list.summary.lived_before_bytes, 12 * MIB);
    assert_eq!(list.summary.state_only.unwrap().free_block_bytes, 8 * MIB);
}

#[test]
fn the_question_about_devices_states_their_live_bytes() {
    let error = read_with("two_devices_state_only.pickle", &ReadOptions::default()).unwrap_err().to_string();
    let listed = "device 0: no history and 8.00 MiB live, device 1: no history and 4.00 MiB live";
    assert!(error.contains(listed), "{error}");
    for (device, bytes) in [(0, 8 * MIB), (1, 4 * MIB)] {
        let recording = read_with("two_devices_state_only.pickle", &ReadOptions::default().device(device)).unwrap();
        assert_eq!(recording.summary.lived_before_bytes, bytes);
    }
}

#[test]
fn the_innermost_frame_of_the_program_names_an_allocation() {
    for name in ["frames_windows.pickle", "frames_torchdir.pickle"] {
        let recording = read(name);
        let names: Vec<&str> = recording.records.iter().filter_map(|record| record.name.as_deref()).collect();
        assert!(names.len() == 2 && names.iter().all(|name| name.ends_with("proj/model.py:40 forward")), "{names:?}");
    }
}

#[test]
fn data_after_a_compressed_snapshot_is_ignored() {
    let recording = read("c_gz_trailing.pickle");
    assert_eq!((recording.summary.allocations, recording.summary.frees), (4, 4));
}

#[test]
fn a_debug_log_is_told_from_an_event_log() {
    let error = read_with("rmm_debuglog.txt", &ReadOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ImportErrorKind::RmmDebugLog), "{error}");
}
