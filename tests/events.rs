//! Events for `tracing`: stable names and fields that programs may rely on, and no event on a cache hit.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use symmalloc_agreement::{Point, ThreadTransport, Transport, agree};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::recording::{Sink, SinkError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Config, PoolId};
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A subscriber that records every event as `name field=value ...`, and every span as `> name field=value ...`.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<String>>>);

impl Listener {
    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no thread should panic"))
    }
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").expect("writing to a string cannot fail");
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "symmalloc"
    }
    fn event(&self, event: &Event<'_>) {
        let mut line = event.metadata().name().to_owned();
        event.record(&mut Fields(&mut line));
        self.0.lock().expect("no thread should panic").push(line);
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = format!("> {}", span.metadata().name());
        span.record(&mut Fields(&mut line));
        self.0.lock().expect("no thread should panic").push(line);
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn rare_events_have_stable_names_and_fields_and_a_cache_hit_has_none() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let pool = PoolConfig::builder().limit_bytes(Some(8 * MIB)).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    assert_eq!(listener.heard(), ["stream.registered stream=0 group=0"]);
    let allocate = |size_bytes| allocator.allocate(PoolId::DEFAULT, stream, size_bytes);

    let first = allocate(2 * MIB).expect("the request should stay within the limit");
    let birth = [
        "> heap.obtain pool=0 stream=0 size_bytes=2097152",
        "segment.birth pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152",
    ];
    assert_eq!(listener.heard(), birth);
    let second = allocate(2 * MIB).expect("the request should stay within the limit");
    let growth = [
        "> heap.obtain pool=0 stream=0 size_bytes=2097152",
        "segment.growth pool=0 stream=0 segment=0 offset_bytes=2097152 size_bytes=2097152",
    ];
    assert_eq!(listener.heard(), growth);

    allocator.free(first.handle).expect("the allocation should be live");
    let first = allocate(MIB).expect("the memory should be cached");
    assert!(listener.heard().is_empty());
    allocator.free(first.handle).expect("the allocation should be live");

    allocate(100 * MIB).expect_err("more than the limit");
    let heard = listener.heard();
    assert_eq!(heard.len(), 3, "nothing is released for a request that can never fit: {heard:?}");

    allocate(7 * MIB).expect_err("more than the limit leaves");
    let missing = "missing_bytes=8388608";
    let refused = format!(
        "memory.refused pool=0 stream=0 requested_bytes=7340032 {missing} reserved_bytes=2097152 \
         allocated_bytes=2097152 largest_free_bytes=0 cause=Limit {{ scope: Pool, limit_bytes: 8388608 }}"
    );
    let path = [
        "> heap.obtain pool=0 stream=0 size_bytes=7340032",
        "> memory.shortage pool=0 stream=0 requested_bytes=7340032",
        "> heap.trim pool=0 stream=0 goal_bytes=8388608",
        "segment.shrink pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152",
        "heap.trimmed pool=0 stream=0 released_bytes=2097152 mapped_bytes=2097152",
        &format!("memory.retry pool=0 stream=0 requested_bytes=7340032 {missing} after=\"reclaim\""),
        "> heap.obtain pool=0 stream=0 size_bytes=7340032",
        &refused,
    ];
    assert_eq!(listener.heard(), path);

    allocator.free(second.handle).expect("the allocation should be live");
    assert!(listener.heard().is_empty());
    assert_eq!(allocator.trim_all(), Ok(2 * MIB));
    let death = [
        "> heap.trim pool=0 stream=0",
        "segment.death pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152",
        "segment.release pool=0 stream=0 size_bytes=2097152",
        "heap.trimmed pool=0 stream=0 released_bytes=2097152 mapped_bytes=0",
    ];
    assert_eq!(listener.heard(), death);
    let stats = allocator.stats();
    assert_eq!((stats.growth_count, stats.trim_count, stats.retry_count, stats.out_of_memory_count), (2, 2, 1, 2));
}

#[test]
fn pools_and_failed_trims_emit_events() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let device = SimBackend::builder().fail(Some(Call::Unmap), FaultRule::At { ordinal: 0 }, Fault::Refused).build();
    let allocator: Allocator<_> = Allocator::new(device, Config::default()).expect("the device should be created");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let config = PoolConfig::builder()
        .symmetric(true)
        .limit_bytes(Some(64 * MIB))
        .build()
        .expect("the configuration should be valid");
    listener.heard();
    let pool = allocator.create_pool(config).expect("the configuration should be valid");
    assert_eq!(listener.heard(), ["pool.created pool=1 symmetric=true limit_bytes=67108864"]);
    allocator.reserve(pool, stream, 4 * MIB).expect("the request should stay within the limit");
    assert_eq!(listener.heard()[0], "> heap.reserve pool=1 stream=0 size_bytes=4194304");
    allocator.trim_pool(pool).expect_err("the driver call fails");
    let failed = listener.heard().pop().expect("there should be a last event");
    assert!(failed.starts_with("trim.failed pool=1 stream=0 released_bytes=0 error="), "{failed}");
    allocator.destroy_pool(pool).expect("the driver works again");
    assert_eq!(listener.heard().pop().expect("there should be a last event"), "pool.destroyed pool=1");
}

#[test]
fn a_divergence_emits_an_event_on_every_rank() {
    let heard = std::thread::scope(|scope| {
        let ranks = ThreadTransport::group(2, Duration::from_secs(60)).into_iter().map(|transport| {
            scope.spawn(move || {
                let listener = Listener::default();
                let _guard = tracing::subscriber::set_default(listener.clone());
                let pool = PoolConfig::builder().symmetric(true).build().expect("the configuration should be valid");
                let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
                let allocator: Allocator<_> =
                    Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
                let stream = allocator.register_stream().expect("the first stream should be registered");
                let size_bytes = 2 * MIB + u64::from(transport.rank());
                let _live = allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("the allocation should fit");
                listener.heard();
                agree(&allocator, &transport, Point::Sync).expect_err("they differ");
                let mut heard = listener.heard();
                assert_eq!(heard[0], format!("> ranks.agree rank={} ranks=2 point=a sync", transport.rank()));
                heard.pop().expect("there should be a last event")
            })
        });
        ranks
            .collect::<Vec<_>>()
            .into_iter()
            .map(|rank| rank.join().expect("the thread should not panic"))
            .collect::<Vec<_>>()
    });
    for (rank, line) in heard.iter().enumerate() {
        let expected = format!(
            "ranks.diverged rank={rank} ranks=2 rounds=5 difference=\"history\" pool=0 stream=0 op=0 \
             cause=\"different_request\" report=the 2 ranks differ in symmetric pool 0, stream 0, at op 0\n"
        );
        assert!(line.starts_with(&expected), "{line}");
    }
}

/// A sink without capacity.
struct Full;

impl Sink for Full {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        Ok(())
    }
    fn record(&mut self, _: symmalloc_core::Record) -> Result<(), SinkError> {
        Err("the sink is full".into())
    }
    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

#[test]
fn the_early_end_of_a_recording_emits_one_event() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    allocator.start_recording(Full).expect("nothing should have been allocated");
    for _ in 0..3 {
        allocator.register_stream().expect("a stream id is available");
    }
    let ended = "recording.ended records=0 error=the recording ended after 0 records, because its sink failed: the sink is full";
    let streams = [
        "stream.registered stream=0 group=0",
        "stream.registered stream=1 group=1",
        "stream.registered stream=2 group=2",
    ];
    assert_eq!(listener.heard(), [&[ended], &streams[..]].concat());
    allocator.stop_recording().expect_err("it ended early");
    assert!(listener.heard().is_empty());
}

/// A block that begins in the middle of a granule releases only the granules after it.
#[test]
fn the_event_of_a_shrink_states_the_range() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let _live = allocator.allocate(PoolId::DEFAULT, stream, MIB).expect("no limit should be reached");
    let freed = allocator.allocate(PoolId::DEFAULT, stream, 5 * MIB).expect("no limit should be reached");
    allocator.free(freed.handle).expect("the allocation should be live");
    listener.heard();
    assert_eq!(allocator.trim_all(), Ok(4 * MIB));
    let shrink = "segment.shrink pool=0 stream=0 segment=0 offset_bytes=2097152 size_bytes=4194304";
    assert_eq!(listener.heard()[1], shrink);
}
