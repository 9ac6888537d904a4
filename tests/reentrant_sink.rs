//! A sink that uses the allocator that it records ends the recording, and never hangs.

use std::sync::{Arc, Mutex, Weak};
use symmalloc_core::recording::{RecordingEnd, RecordingError, Sink, SinkError, StartRecordingError};
use symmalloc_core::{Config, Handle, PoolId, Record, SharedAllocator, StreamId};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::SimBackend;

/// A sink that uses the allocator that it records.
struct Reentrant {
    allocator: Arc<Mutex<Weak<SharedAllocator<SimBackend>>>>,
    /// The call in which the sink uses the allocator.
    when: &'static str,
    held: Vec<Handle>,
}

impl Reentrant {
    fn call(&mut self, name: &str) {
        let allocator = self.allocator.lock().expect("no thread should panic").upgrade();
        let Some(allocator) = allocator.filter(|_| self.when == name) else { return };
        let stream = StreamId(0);
        let made = allocator.allocate(PoolId::DEFAULT, stream, 4096).expect("memory should suffice");
        self.held.push(made.handle);
        allocator.record_use(made.handle, stream).expect("the allocation should be live");
        allocator.trim_all().expect("the trim should succeed");
        let _stats = (allocator.stats(), allocator.snapshot());
        assert!(matches!(allocator.stop_recording(), Err(RecordingError::InSink)));
        let again = allocator.start_recording(Memory::new());
        assert!(matches!(again, Err(StartRecordingError::AlreadyRecording)), "{again:?}");
        self.held.drain(..).for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
    }
}

impl Sink for Reentrant {
    fn begin(&mut self, _: &Config) -> Result<(), SinkError> {
        self.call("begin");
        Ok(())
    }
    fn record(&mut self, _: Record) -> Result<(), SinkError> {
        self.call("record");
        Ok(())
    }
    fn finish(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

impl Drop for Reentrant {
    fn drop(&mut self) {
        self.call("drop");
    }
}

/// Regression test: this used to deadlock, which the deadline turns into a failure.
#[test]
fn a_sink_that_uses_the_allocator_ends_the_recording_and_never_hangs() {
    for when in ["begin", "record", "drop"] {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let allocator = SimBackend::builder().build();
            let allocator =
                Arc::new(SharedAllocator::new(allocator, Config::default()).expect("the arguments should be valid"));
            let stream = allocator.register_stream().expect("a stream id is available");
            let reached = Arc::new(Mutex::new(Arc::downgrade(&allocator)));
            let begun = allocator.start_recording(Reentrant { allocator: reached, when, held: Vec::new() });
            if when == "begin" {
                assert!(matches!(begun, Err(StartRecordingError::Reentered)), "{begun:?}");
                assert!(!allocator.is_recording());
                allocator
                    .free(allocator.allocate(PoolId::DEFAULT, stream, 1).expect("memory should suffice").handle)
                    .expect("the allocation should be live");
            } else if when == "drop" {
                // Ends the recording, which drops the sink.
                begun.expect("it should have begun");
                allocator.set_total_limit_bytes(Some(1 << 30));
                assert!(!allocator.is_recording());
            } else {
                // Existing streams are also records.
                assert!(matches!(begun, Err(StartRecordingError::Reentered)), "{begun:?}");
            }
            allocator.check().expect("the invariants should hold");
            done.send(()).expect("the test waits");
        });
        is_done.recv_timeout(std::time::Duration::from_secs(60)).unwrap_or_else(|_| panic!("{when} hangs or failed"));
    }
}

#[test]
fn a_record_in_which_the_sink_uses_the_allocator_is_the_last() {
    let allocator = SimBackend::builder().build();
    let allocator =
        Arc::new(SharedAllocator::new(allocator, Config::default()).expect("the arguments should be valid"));
    let stream = allocator.register_stream().expect("a stream id is available");
    let reached = Arc::new(Mutex::new(Weak::new()));
    let sink = Reentrant { allocator: Arc::clone(&reached), when: "record", held: Vec::new() };
    allocator.start_recording(sink).expect("it should have begun");
    let first = allocator.allocate(PoolId::DEFAULT, stream, 1).expect("memory should suffice");
    *reached.lock().expect("no thread should panic") = Arc::downgrade(&allocator);
    let second = allocator.allocate(PoolId::DEFAULT, stream, 1).expect("memory should suffice");
    assert!(!allocator.is_recording());
    let ended = allocator.stop_recording();
    let Err(RecordingError::Ended { records: 3, source: RecordingEnd::Reentered }) = ended else {
        panic!("{ended:?}");
    };
    [first, second].iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
    allocator.check().expect("the invariants should hold");
}
