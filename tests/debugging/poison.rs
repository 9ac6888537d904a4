//! When freed memory is filled: at its stream's next allocation, if it is still free then.

use super::{FREED, NEW, allocator, named};
use proptest::prelude::*;
use symmalloc_core::debug::MemoryDamage;
use symmalloc_core::op::Contents;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Backend, PoolId, StreamId};
use symmalloc_sim::SimBackend;

/// Makes `stream` wait for the work of `on`.
fn wait(device: &SimBackend, stream: StreamId, on: StreamId) {
    let event = device.record(on).expect("no fault was injected");
    device.wait(stream, event).expect("no fault was injected");
    device.recycle(event);
}

/// Waits on the host for the work of a stream.
fn synchronize(device: &SimBackend, allocator: &Allocator<&SimBackend>, stream: StreamId) {
    device.synchronize(stream).expect("no fault was injected");
    allocator.note_synchronized(stream).expect("the stream is registered");
}

/// Regression test: FSDP updates parameters on the main stream with gradients of a side stream, frees them without `record_use`, and makes the
/// side stream wait before it allocates again. Poison replaced the gradients before the update had read them.
#[test]
fn memory_that_is_used_until_its_stream_waits_is_not_poisoned_early() {
    for options in ["debug:poison", "debug:[poison,quarantine_mb:64]", "streams:shared,debug:poison"] {
        let device = SimBackend::builder().build();
        let (allocator, [main, side]) = allocator(&device, options);
        let gradients = named(&allocator, side, 4 * MIB, "gradients");
        device.write(gradients.address, gradients.size_bytes, 5);
        wait(&device, main, side);
        device.submit(main, gradients.address, gradients.size_bytes).expect("main has waited for side");
        let _after = named(&allocator, side, 4 * MIB, "after");
        allocator.free(gradients.handle).expect("the allocation is live");
        let _on_main = named(&allocator, main, 16 * MIB, "activations");
        assert_eq!(device.read(gradients.address, gradients.size_bytes), Some(5), "{options}: main still uses them");
        wait(&device, side, main);
        // The simulator panics at a fill that is not ordered after the work on main.
        let _on_side = named(&allocator, side, 16 * MIB, "next gradients");
        assert_eq!(device.read(gradients.address, gradients.size_bytes), Some(FREED), "{options}");
        assert_eq!(allocator.check_memory(), Ok(0));
    }
}

#[test]
fn memory_that_was_allocated_again_is_not_poisoned() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, other]) = allocator(&device, "streams:shared,debug:poison");
    let first = named(&allocator, stream, 4 * MIB, "first");
    let _second = named(&allocator, stream, MIB, "second");
    allocator.free(first.handle).expect("the allocation is live");
    let part = named(&allocator, other, 3 * MIB, "part");
    assert_eq!(part.address, first.address, "best fit");
    let _next = named(&allocator, stream, 32 * MIB, "next");
    assert_eq!(device.read(part.address, 3 * MIB), Some(NEW));
    // Nor after a second free: the other stream may still use the memory.
    allocator.free(part.handle).expect("the allocation is live");
    let _next = named(&allocator, stream, 32 * MIB, "next");
    assert_eq!(device.read(part.address, 3 * MIB), Some(NEW));
    let _next = named(&allocator, other, 32 * MIB, "next");
    assert_eq!(device.read(part.address, 3 * MIB), Some(FREED));
}

/// Regression test: a stream that had waited for the freeing stream took the block before it was filled, and its data was overwritten.
#[test]
fn the_next_user_of_a_shared_block_waits_for_its_poison() {
    for waits in [false, true] {
        let device = SimBackend::builder().build();
        let (allocator, [stream, other]) = allocator(&device, "streams:shared,debug:poison");
        let blocks = [4, 1, 2, 1].map(|mib| named(&allocator, stream, mib * MIB, "block"));
        allocator.free(blocks[0].handle).expect("the allocation is live");
        if waits {
            synchronize(&device, &allocator, stream);
        } else {
            // The other stream waits for the first one to reuse this block.
            allocator.free(blocks[2].handle).expect("the allocation is live");
            assert_eq!(named(&allocator, other, 2 * MIB, "third").address, blocks[2].address);
        }
        let _fills = named(&allocator, stream, 32 * MIB, "fills");
        assert_eq!(device.read(blocks[0].address, 4 * MIB), Some(FREED));
        // The simulator panics at work that is not ordered after the fill.
        assert_eq!(named(&allocator, other, 4 * MIB, "next").address, blocks[0].address);
    }
}

#[test]
fn memory_that_was_released_is_not_poisoned() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:poison");
    let freed = named(&allocator, stream, 4 * MIB, "freed");
    allocator.free(freed.handle).expect("the allocation is live");
    allocator.trim_all().expect("no fault was injected");
    let next = named(&allocator, stream, MIB, "next");
    assert_eq!(device.read(next.address, MIB), Some(NEW));
}

#[test]
fn a_quarantined_block_is_checked_once_it_is_poisoned() {
    let device = SimBackend::builder().build();
    let (allocator, [stream, _]) = allocator(&device, "debug:[poison,quarantine_mb:64]");
    let freed = named(&allocator, stream, MIB, "freed");
    allocator.free(freed.handle).expect("the allocation is live");
    device.write(freed.address, 4, 7);
    assert_eq!(allocator.check_memory(), Ok(0), "correct programs may use it until the next allocation");
    let _next = named(&allocator, stream, MIB, "next");
    assert_eq!(allocator.check_memory(), Ok(0));
    device.write(freed.address, 4, 7);
    let damage = allocator.check_memory().expect_err("the block was written after its free");
    assert!(matches!(&*damage, MemoryDamage::WrittenAfterFree { .. }), "{damage}");
}

/// Settings under which free memory moves, is shared by streams, released and assembled again.
const SETTINGS: [&str; 4] = [
    "debug:poison",
    "streams:shared,debug:[poison,canary]",
    "streams:shared,segments:fixed,debug:[poison,quarantine_mb:3]",
    "streams:shared,stitching_granule_mb:2,stitching_least_mb:4,debug:poison",
];

/// Runs a program whose contents are known. `steps`: what to do, and with which block, stream and size.
fn live_memory_keeps_its_contents(settings: &str, steps: &[(u8, u16)]) -> Result<(), TestCaseError> {
    let device = SimBackend::builder().build();
    let (allocator, streams): (Allocator<_>, _) = allocator(&device, settings);
    let mut live = Vec::new();
    for (number, &(kind, which)) in (100_u64..).zip(steps) {
        let which = usize::from(which);
        match kind {
            0..6 => {
                let made = named(&allocator, streams[which % 2], 512 + MIB * (which as u64 / 2 % 12), "block");
                device.write(made.address, made.size_bytes, number);
                live.push((made, number));
            }
            6..11 if !live.is_empty() => {
                let (freed, _) = live.swap_remove(which % live.len());
                allocator.free(freed.handle).expect("the allocation is live");
            }
            11 => _ = allocator.trim_all().expect("no fault was injected"),
            13 => synchronize(&device, &allocator, streams[which % 2]),
            14 if !live.is_empty() => {
                let used = live[which % live.len()].0.handle;
                allocator.record_use(used, streams[which / 7 % 2]).expect("the allocation is live");
            }
            12 => {
                allocator.sleep(PoolId::DEFAULT, Contents::Keep).map(drop).expect("no fault was injected");
                allocator.wake(PoolId::DEFAULT).map(drop).expect("no fault was injected");
            }
            _ => {}
        }
        for (block, value) in &live {
            prop_assert_eq!(device.read(block.address, block.size_bytes), Some(*value), "step {}", number);
        }
        prop_assert!(allocator.check_memory().is_ok());
    }
    allocator.check().expect("the invariants should hold");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn poison_never_reaches_live_memory(
        settings in prop::sample::select(&SETTINGS[..]),
        steps in proptest::collection::vec((0_u8..15, any::<u16>()), 1..80),
    ) {
        live_memory_keeps_its_contents(settings, &steps)?;
    }
}
