//! Counters of calls to the device. Each counted call makes at least one driver call. A cache hit makes none.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of calls to the device since the allocator was created, by kind. Failed calls are included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCalls {
    /// Address ranges reserved.
    pub reserves: u64,
    /// Ranges, or parts of them, backed with memory because a segment was created or grew.
    pub maps: u64,
    /// Parts of ranges whose memory was released.
    pub unmaps: u64,
    /// Address ranges released.
    pub releases: u64,
    /// Events recorded. A free records one event on each other stream that used the memory, and a wait for a stream records one event.
    pub records: u64,
    /// Waits for an event added to a stream.
    pub waits: u64,
    /// Event completion queries.
    pub queries: u64,
    /// Host waits for a stream.
    pub synchronizations: u64,
}

/// A kind of call in [`DeviceCalls`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceCall {
    Reserve,
    Map,
    Unmap,
    Release,
    Record,
    Wait,
    Query,
    Synchronize,
}

impl DeviceCall {
    #[cfg(feature = "metrics")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            DeviceCall::Reserve => "reserve",
            DeviceCall::Map => "map",
            DeviceCall::Unmap => "unmap",
            DeviceCall::Release => "release",
            DeviceCall::Record => "record",
            DeviceCall::Wait => "wait",
            DeviceCall::Query => "query",
            DeviceCall::Synchronize => "synchronize",
        }
    }
}

/// Call counters of one allocator.
#[derive(Debug, Default)]
pub(crate) struct CallCounters([AtomicU64; 8]);

impl CallCounters {
    #[inline]
    pub(crate) fn count(&self, call: DeviceCall) {
        self.0[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call that can take a long time. With the feature `metrics`, it also reports the call's duration.
    pub(crate) fn watch<T>(&self, call: DeviceCall, ordinal: usize, work: impl FnOnce() -> T) -> T {
        self.count(call);
        #[cfg(not(feature = "metrics"))]
        let _ = ordinal;
        #[cfg(feature = "metrics")]
        let _timed = timing::TimedCall::begin(call, ordinal);
        work()
    }

    pub(crate) fn read(&self) -> DeviceCalls {
        let get = |call| self.0[call as usize].load(Ordering::Relaxed);
        DeviceCalls {
            reserves: get(DeviceCall::Reserve),
            maps: get(DeviceCall::Map),
            unmaps: get(DeviceCall::Unmap),
            releases: get(DeviceCall::Release),
            records: get(DeviceCall::Record),
            waits: get(DeviceCall::Wait),
            queries: get(DeviceCall::Query),
            synchronizations: get(DeviceCall::Synchronize),
        }
    }
}

#[cfg(feature = "metrics")]
mod timing {
    use super::DeviceCall;
    use metrics::Unit;
    use std::time::Instant;
    use symmalloc_core::metrics::{Metric, Publisher};

    const CALL_SECONDS: Metric =
        Metric::histogram("symmalloc_device_call_seconds", Some(Unit::Seconds), "duration of calls to the device");

    /// A call in progress. Reports its duration when it is dropped.
    pub(super) struct TimedCall {
        call: DeviceCall,
        ordinal: usize,
        begun: Instant,
    }

    impl TimedCall {
        pub(super) fn begin(call: DeviceCall, ordinal: usize) -> Self {
            TimedCall { call, ordinal, begun: Instant::now() }
        }
    }

    impl Drop for TimedCall {
        fn drop(&mut self) {
            let seconds = self.begun.elapsed().as_secs_f64();
            let to =
                Publisher::new().with_label("device", self.ordinal.to_string()).with_label("call", self.call.name());
            to.record(&CALL_SECONDS, seconds);
        }
    }
}
