//! Lent streams, which other code owns: an id outlives its stream, and its work stays ordered.

use crate::process::{Logged, begin_log, device, hold, live, stub_test, take_log};
use cudarc::driver::result::memset_d8_async;
use cudarc::driver::sys::CUstream;
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::{PoolId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaDevice, LentStream};

fn allocator(device: &Arc<CudaDevice>, streams: StreamPolicy) -> CudaAllocator {
    let pool = PoolConfig::builder().streams(streams).build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    CudaAllocator::new(device, config).expect("made")
}

fn lend(allocator: &CudaAllocator, stream: CUstream) -> StreamId {
    // SAFETY: a stream of the test, which is returned before it is destroyed.
    unsafe { allocator.lend_stream(LentStream::of(stream)) }.expect("lent")
}

/// A stream that can be lent: its driver handle, and how to lend it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Created,
    Legacy,
    PerThread,
}

impl Kind {
    fn lent(self, created: CUstream) -> (CUstream, LentStream) {
        match self {
            Kind::Created => (created, LentStream::of(created)),
            Kind::Legacy => (std::ptr::null_mut(), LentStream::of(std::ptr::null_mut())),
            Kind::PerThread => (std::ptr::without_provenance_mut(2), LentStream::of_this_thread()),
        }
    }
}

stub_test!(the_next_stream_with_an_id_waits_for_the_previous_one, {
    let kinds = [Kind::Created, Kind::Legacy, Kind::PerThread];
    for (first, second) in kinds.into_iter().flat_map(|first| kinds.map(|second| (first, second))) {
        // The same default stream needs no order.
        if !matches!((first, second), (Kind::Legacy, Kind::Legacy) | (Kind::PerThread, Kind::PerThread)) {
            check_order(first, second);
        }
    }
});

/// Lends one kind of stream under an id, and then another one while work of the first one still runs.
fn check_order(first: Kind, second: Kind) {
    let device = device();
    let created = [(); 2].map(|()| device.context().new_stream().expect("a stream"));
    let [(earlier, lent_first), (later, lent_second)] =
        [(first, &created[0]), (second, &created[1])].map(|(kind, stream)| kind.lent(stream.cu_stream()));
    let allocator = allocator(&device, StreamPolicy::Separate);
    // SAFETY: a stream of the test, or a default stream, which is always alive.
    let id = unsafe { allocator.lend_stream(lent_first) }.expect("lent");
    let block = allocator.core().allocate(PoolId::DEFAULT, id, 1 << 20).expect("memory");
    begin_log();
    // SAFETY: memory of the allocator.
    let submit = |stream: CUstream| unsafe { memset_d8_async(block.address.0, 1, 8, stream) }.expect("submitted");
    submit(earlier);
    allocator.core().free(block.handle).expect("freed");
    allocator.return_stream(id).expect("returned");
    // SAFETY: as above.
    unsafe { allocator.relend_stream(id, lent_second) }.expect("lent again");
    let again = allocator.core().allocate(PoolId::DEFAULT, id, 1 << 20).expect("memory");
    assert_eq!(again.address, block.address, "the id keeps its heap");
    submit(later);
    assert!(is_ordered(&take_log()), "{second:?} after {first:?}: the second stream did not wait");
    allocator.core().free(again.handle).expect("freed");
}

/// Returns `true` if the last work of the log runs after its first one.
fn is_ordered(log: &[Logged]) -> bool {
    let work = |entry: &Logged| match *entry {
        Logged::Work { stream, seq, to, .. } if to != 0 => Some((stream, seq)),
        _ => None,
    };
    let (first, last) = (log.iter().find_map(work).expect("work"), log.iter().rev().find_map(work).expect("work"));
    // Work of each stream up to which everything is ordered before the last work.
    let mut before = std::collections::BTreeMap::from([(last.0, last.1)]);
    for entry in log.iter().rev() {
        if let Logged::StreamWait { stream, seq, other, last } = *entry
            && before.get(&stream).is_some_and(|known| seq <= *known)
        {
            let known = before.entry(other).or_default();
            *known = last.max(*known);
        }
    }
    before.get(&first.0).is_some_and(|known| first.1 <= *known)
}

stub_test!(memory_of_a_returned_stream_in_a_shared_heap_is_reused_after_its_work, {
    let device = device();
    let (gone, other) =
        (device.context().new_stream().expect("a stream"), device.context().new_stream().expect("a stream"));
    let allocator = allocator(&device, StreamPolicy::Shared);
    let (gone_id, other_id) = (lend(&allocator, gone.cu_stream()), lend(&allocator, other.cu_stream()));
    let block = allocator.core().allocate(PoolId::DEFAULT, gone_id, 1 << 20).expect("memory");
    let work = hold(gone.cu_stream() as u64);
    allocator.core().free(block.handle).expect("freed");
    allocator.return_stream(gone_id).expect("returned");
    drop(gone);
    let again = allocator.core().allocate(PoolId::DEFAULT, other_id, 1 << 20).expect("memory");
    assert_eq!(again.address, block.address);
    let waiting = std::thread::spawn({
        let other = Arc::clone(&other);
        move || other.synchronize()
    });
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(!waiting.is_finished(), "nothing waited for the returned stream");
    drop(work);
    waiting.join().expect("no panic").expect("synchronized");
});

stub_test!(only_lent_streams_are_returned, {
    let device = device();
    let stream = device.context().new_stream().expect("a stream");
    let allocator = allocator(&device, StreamPolicy::Separate);
    let id = lend(&allocator, stream.cu_stream());
    let host = allocator.register_host_stream().expect("registered");
    assert!(allocator.return_stream(host).is_err(), "the host was not lent");
    allocator.return_stream(id).expect("returned");
    drop(allocator);
    assert_eq!(live().streams, 1, "the stream that waits for returned streams is destroyed");
});
