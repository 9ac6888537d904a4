//! What `tracing` is told: the names and fields that programs may rely on, and nothing on the way through a cache hit.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use symmalloc_core::agreement::{Point, ThreadTransport, Transport, agree};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::recording::{Sink, SinkError};
use symmalloc_core::sim::SimBackend;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Config, PoolId};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Writes down every event as `name field=value ...`.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<String>>>);

impl Listener {
    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no panic"))
    }
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").expect("a string takes all");
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "symmalloc"
    }
    fn event(&self, event: &Event<'_>) {
        let mut line = event.metadata().name().to_owned();
        event.record(&mut Fields(&mut line));
        self.0.lock().expect("no panic").push(line);
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn what_is_rare_is_told_with_stable_names_and_fields_and_a_cache_hit_is_silent() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let pool = PoolConfig::builder().limit_bytes(Some(8 * MIB)).build().expect("valid");
    let config = Config::builder().default_pool(pool).build().expect("valid");
    let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), config).expect("a device");
    let stream = allocator.register_stream().expect("the first");
    let allocate = |size_bytes| allocator.allocate(PoolId::DEFAULT, stream, size_bytes);

    let first = allocate(2 * MIB).expect("within the limit");
    assert_eq!(listener.heard(), ["segment.birth pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152"]);
    let second = allocate(2 * MIB).expect("within the limit");
    assert_eq!(listener.heard(), ["segment.growth pool=0 stream=0 segment=0 offset_bytes=2097152 size_bytes=2097152"]);

    allocator.free(first.handle).expect("live");
    let first = allocate(MIB).expect("cached");
    assert!(listener.heard().is_empty());
    allocator.free(first.handle).expect("live");

    allocate(100 * MIB).expect_err("more than the limit");
    assert_eq!(listener.heard().len(), 1, "nothing is given back for what can never fit");

    allocate(7 * MIB).expect_err("more than is left");
    let heard = listener.heard();
    assert_eq!(heard[0], "segment.shrink pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152");
    assert_eq!(heard[1], "heap.trim pool=0 stream=0 released_bytes=2097152 mapped_bytes=2097152");
    let refused = "memory.refused pool=0 stream=0 requested_bytes=7340032 reserved_bytes=2097152 allocated_bytes=2097152 \
                   cause=Limit { scope: Pool, limit_bytes: 8388608 }";
    assert_eq!(heard[2..], [refused]);

    allocator.free(second.handle).expect("live");
    assert!(listener.heard().is_empty());
    assert_eq!(allocator.trim(None), Ok(2 * MIB));
    assert_eq!(
        listener.heard(),
        [
            "segment.death pool=0 stream=0 segment=0 offset_bytes=0 size_bytes=2097152",
            "heap.trim pool=0 stream=0 released_bytes=2097152 mapped_bytes=0",
        ]
    );
}

#[test]
fn ranks_that_diverge_are_told_on_every_rank() {
    let heard = std::thread::scope(|scope| {
        let ranks = ThreadTransport::group(2, Duration::from_secs(60)).into_iter().map(|transport| {
            scope.spawn(move || {
                let listener = Listener::default();
                let _guard = tracing::subscriber::set_default(listener.clone());
                let pool = PoolConfig::builder().symmetric(true).build().expect("valid");
                let config = Config::builder().default_pool(pool).build().expect("valid");
                let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), config).expect("a device");
                let stream = allocator.register_stream().expect("the first");
                let size_bytes = 2 * MIB + u64::from(transport.rank());
                allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("fits");
                agree(&allocator, &transport, Point::Sync).expect_err("they differ");
                listener.heard().pop().expect("the last event")
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
    });
    for (rank, line) in heard.iter().enumerate() {
        let expected = format!(
            "ranks.diverged rank={rank} ranks=2 rounds=5 difference=\"history\" pool=0 stream=0 op=0 \
             cause=\"other_request\" report=the 2 ranks differ in symmetric pool 0, stream 0, at op 0\n"
        );
        assert!(line.starts_with(&expected), "{line}");
    }
}

/// A sink without room.
struct Full;

impl Sink for Full {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        Ok(())
    }
    fn record(&mut self, _: symmalloc_core::Record) -> Result<(), SinkError> {
        Err("no room".into())
    }
    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

#[test]
fn a_recording_that_ends_early_is_told_once() {
    let listener = Listener::default();
    let _guard = tracing::subscriber::set_default(listener.clone());
    let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default()).expect("a device");
    allocator.start_recording(Full).expect("nothing was allocated");
    for _ in 0..3 {
        allocator.register_stream().expect("few");
    }
    let ended = "recording.ended records=0 error=the recording ended after 0 records, because its sink failed: no room";
    assert_eq!(listener.heard(), [ended]);
    allocator.stop_recording().expect_err("it ended early");
    assert!(listener.heard().is_empty());
}
