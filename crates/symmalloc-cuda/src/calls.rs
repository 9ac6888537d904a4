//! What is asked of the device, counted: all of it costs a driver call at least, and none of it happens on a cache hit.
//!
//! Counting is an addition to a number that nobody reads at that moment, beside a call that takes a hundred times as long.

use crate::allocator::CachingAllocator;
use crate::backend::CudaMemory;
use crate::rows::EventCalls;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often the device was asked for what, since the allocator was made. Calls that the driver refused count, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCalls {
    /// Address ranges taken.
    pub reserves: u64,
    /// Ranges, or parts of them, backed with memory: a segment's birth or growth.
    pub maps: u64,
    /// Memory given back.
    pub unmaps: u64,
    /// Address ranges given back.
    pub releases: u64,
    /// Events recorded: a free of memory that other streams used, two at most for a row of buffers that are dropped one after
    /// another, or a wait.
    pub records: u64,
    /// Times that a stream was told to wait for an event.
    pub waits: u64,
    /// Events asked whether they are over.
    pub queries: u64,
    /// Times that the host waited for a stream.
    pub synchronizations: u64,
}

/// One of [`DeviceCalls`], but for records and waits: those are counted in the [books](crate::rows) of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Reserve,
    Map,
    Unmap,
    Release,
    Query,
    Synchronize,
}

impl Call {
    #[cfg(feature = "metrics")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Call::Reserve => "reserve",
            Call::Map => "map",
            Call::Unmap => "unmap",
            Call::Release => "release",
            Call::Query => "query",
            Call::Synchronize => "synchronize",
        }
    }
}

/// The counts while they are counted.
#[derive(Debug, Default)]
pub(crate) struct CallCounters([AtomicU64; 6]);

impl CallCounters {
    #[inline]
    pub(crate) fn count(&self, call: Call) {
        self.0[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call that may take long; with the feature `metrics`, how long it takes is told as well.
    pub(crate) fn watch<T>(&self, call: Call, ordinal: usize, work: impl FnOnce() -> T) -> T {
        self.count(call);
        #[cfg(not(feature = "metrics"))]
        let _untold = ordinal;
        #[cfg(feature = "metrics")]
        let _timed = crate::metrics::TimedCall::begin(call, ordinal);
        work()
    }

    fn get(&self, call: Call) -> u64 {
        self.0[call as usize].load(Ordering::Relaxed)
    }
}

impl<B: CudaMemory> CachingAllocator<B> {
    /// How often the device was asked for what.
    pub fn device_calls(&self) -> DeviceCalls {
        let calls = &self.state.order().calls;
        let EventCalls { records, waits } = self.state.order().event_calls();
        DeviceCalls {
            reserves: calls.get(Call::Reserve),
            maps: calls.get(Call::Map),
            unmaps: calls.get(Call::Unmap),
            releases: calls.get(Call::Release),
            records,
            waits,
            queries: calls.get(Call::Query),
            synchronizations: calls.get(Call::Synchronize),
        }
    }
}
