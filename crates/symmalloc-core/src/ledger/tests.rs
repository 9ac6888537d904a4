//! Unit tests of `ledger.rs`.

use super::*;
use crate::types::ids::{HeapNumber, SegmentId};

const S0: StreamId = StreamId(0);

/// Returns the slot and the location of the block with this number.
fn block(number: u32) -> (Slot, Location) {
    (number, Location::new(SegmentId(0), number))
}

#[test]
fn a_freed_allocation_leaves_the_counts_the_names_and_the_pointers() {
    let mut ledger = Ledger::new(Digest::new(1));
    ledger.enable_pointers();
    let before = ledger.digest();
    for number in [3, 4] {
        ledger.note_allocation(block(number).1, 2, S0, 1000);
        ledger.note_pointer(number, || DeviceAddress(u64::from(number)));
        ledger.set_name(block(number), &"weights".into());
    }
    assert_eq!((ledger.usage().allocations(), ledger.usage().allocated_bytes()), (2, 2048));
    assert_eq!(ledger.take_at(DeviceAddress(3)), Some(3));
    ledger.note_free(block(3), 2, S0, 1000);
    assert_eq!((ledger.usage().allocations(), ledger.name_count()), (1, 1));
    assert_eq!((ledger.name_of(3), ledger.name_of(4).map(|name| &**name)), (None, Some("weights")));
    assert_eq!((ledger.take_at(DeviceAddress(3)), ledger.take_at(DeviceAddress(4))), (None, Some(4)));
    assert_eq!(ledger.digest().ops, before.ops + 3);
}

#[test]
fn equal_decisions_have_equal_digests_and_names_affect_none() {
    let run = |name: Option<&str>, number| {
        let mut ledger = Ledger::new(Digest::new(1));
        ledger.note_allocation(block(number).1, 2, S0, 1000);
        if let Some(name) = name {
            ledger.set_name(block(number), &name.into());
        }
        ledger.note_use(block(number), StreamId(1));
        ledger.note_free(block(number), 2, S0, 1000);
        ledger.digest()
    };
    assert_eq!(run(None, 3), run(Some("weights"), 3));
    assert_ne!(run(None, 3), run(None, 4));
}

#[test]
fn frees_of_zero_bytes_after_the_end_of_their_pool_are_not_recorded() {
    let mut ledger = Ledger::new(Digest::new(1));
    let handle = |serial| Handle::new(HeapNumber(0), Slot::MAX, serial);
    let [first, second] = [(); 2].map(|()| handle(ledger.allocate_nothing(S0)));
    assert_eq!(ledger.free_nothing(first), Ok(()));
    assert_eq!(ledger.free_nothing(first), Err(HandleError::Stale { handle: first }));
    let mut next = Ledger::new(Digest::new(1));
    assert_eq!(next.free_nothing(second), Err(HandleError::Foreign { handle: second }));
    next.inherit_handles(&mut ledger);
    let before = next.digest();
    assert_eq!((next.free_nothing(second), next.digest()), (Ok(()), before));
    assert_eq!(next.free_nothing(second), Err(HandleError::Stale { handle: second }));
}

#[test]
fn a_settled_history_ends_with_the_destruction_of_its_pool() {
    let mut ledger = Ledger::new(Digest::new(1));
    ledger.close();
    assert!(!ledger.has_history(), "a heap without ops has no history");
    let mut ledger = Ledger::new(Digest::new(1));
    ledger.note_allocation(block(0).1, 1, S0, 1);
    let agreed = ledger.digest();
    ledger.close();
    assert_eq!(ledger.digest().ops, agreed.ops + 1);
    ledger.settle(agreed);
    assert!(!ledger.is_settled(), "ranks have not compared the destruction");
    ledger.settle(ledger.digest());
    assert!(ledger.is_settled());
}
