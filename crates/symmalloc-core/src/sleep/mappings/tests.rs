//! Unit tests of `sleep/mappings.rs`.

use super::*;
use crate::types::backend::DeviceAddress;

const HOME: Range = Range { base: DeviceAddress(0), size_bytes: 1 << 30 };
const STITCHED: Range = Range { base: DeviceAddress(1 << 30), size_bytes: 20 };

/// Returns two pieces of memory, of 40 and 60 bytes, and an alias of 20 bytes.
fn mappings() -> Mappings {
    let memory = |offset, size_bytes| Mapping { at: (HOME, offset), size_bytes, source: None };
    let alias = Mapping { at: (STITCHED, 0), size_bytes: 20, source: Some((HOME, 100)) };
    Mappings::new(vec![memory(0, 40), memory(100, 60), alias])
}

/// Passes mappings on to a log, and fails at the call with this number.
fn log(seen: &mut Vec<u64>, fails_at: usize) -> impl FnMut(&Mapping) -> Result<(), usize> {
    let mut calls = 0;
    move |mapping| {
        if calls == fails_at {
            return Err(calls);
        }
        calls += 1;
        seen.push(mapping.at.0.base.0 + mapping.at.1);
        Ok(())
    }
}

#[test]
fn aliases_are_unmapped_before_their_memory_and_mapped_after_it() {
    let (mut mappings, mut seen) = (mappings(), Vec::new());
    assert_eq!(mappings.unmap_all(log(&mut seen, usize::MAX)), Ok(()));
    assert_eq!((mappings.mapped_bytes(), mappings.unmapped_bytes()), (0, 100));
    assert_eq!(mappings.map_all(log(&mut seen, usize::MAX)), Ok(()));
    assert_eq!((mappings.mapped_bytes(), mappings.unmapped_bytes()), (100, 0));
    assert_eq!(seen, [1 << 30, 100, 0, 0, 100, 1 << 30]);
}

#[test]
fn a_failed_call_leaves_a_prefix_that_a_second_attempt_completes() {
    let (mut mappings, mut seen) = (mappings(), Vec::new());
    assert_eq!(mappings.unmap_all(log(&mut seen, 2)), Err(2));
    assert_eq!((mappings.mapped_bytes(), mappings.unmapped_bytes()), (40, 60));
    assert_eq!(mappings.mapped_in(HOME).to_vec(), [(0, 40)]);
    assert!(mappings.mapped_in(STITCHED).is_empty());
    assert_eq!(mappings.map_all(log(&mut seen, 1)), Err(1));
    assert_eq!(mappings.mapped_in(HOME).to_vec(), [(0, 40), (100, 60)]);
    assert!(mappings.mapped_in(STITCHED).is_empty());
    assert_eq!(mappings.unmap_all(log(&mut seen, usize::MAX)), Ok(()));
    assert_eq!(seen, [1 << 30, 100, 100, 100, 0]);
}
