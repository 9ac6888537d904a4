//! The core on the simulated device, which works on every machine with practically unlimited device memory.

use crate::subject::{Memory, Subject};
use symmalloc_core::{Config, Handle, PoolId, SharedAllocator, StreamId};
use symmalloc_sim::SimBackend;

/// The shared allocator of the core, with handles.
pub(crate) struct Simulated(SharedAllocator<SimBackend>);

impl Simulated {
    pub(crate) fn new(config: &Config, streams: usize) -> Self {
        let allocator = SharedAllocator::new(SimBackend::builder().build(), config.clone())
            .expect("the configuration fits the device");
        for _ in 0..streams {
            allocator.register_stream().expect("at most 65,535 streams");
        }
        Simulated(allocator)
    }
}

impl Subject for Simulated {
    type Stream<'a> = StreamId;
    type Block<'a> = Handle;

    fn stream(&self, number: usize) -> StreamId {
        StreamId(number as u16)
    }

    #[inline]
    fn allocate(&self, stream: &StreamId, size_bytes: u64) -> Handle {
        self.0.allocate(PoolId::DEFAULT, *stream, size_bytes).expect("the device has free memory").handle
    }

    #[inline]
    fn free(&self, _: &StreamId, block: Handle) {
        self.0.free(block).expect("freed once");
    }

    fn record_use(&self, block: &Handle, stream: &StreamId) {
        self.0.record_use(*block, *stream).expect("the allocation should be live");
    }

    fn memory(&self) -> Option<Memory> {
        let stats = self.0.stats();
        Some(Memory { reserved_peak_bytes: stats.reserved_bytes.peak, segments: stats.segment_count })
    }

    fn driver_calls(&self) -> Option<u64> {
        None
    }
}
