//! Counters of what the device is asked. Each costs at least one driver call, and none happens on a cache hit.

use std::sync::atomic::{AtomicU64, Ordering};

/// How often the device was asked for what, since the allocator was made. Calls that the driver refused count, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCalls {
    /// Address ranges taken.
    pub reserves: u64,
    /// Ranges, or parts of them, backed with memory: a segment is made or grows.
    pub maps: u64,
    /// Memory given back.
    pub unmaps: u64,
    /// Address ranges given back.
    pub releases: u64,
    /// Events recorded: one for each other stream that used the memory when it is freed, or one for a wait.
    pub records: u64,
    /// Times that a stream was told to wait for an event.
    pub waits: u64,
    /// Events asked whether they are over.
    pub queries: u64,
    /// Times that the host waited for a stream.
    pub synchronizations: u64,
}

/// One of [`DeviceCalls`].
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

/// Counts what one allocator asks.
#[derive(Debug, Default)]
pub(crate) struct CallCounters([AtomicU64; 8]);

impl CallCounters {
    #[inline]
    pub(crate) fn count(&self, call: DeviceCall) {
        self.0[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call that may take long. With the feature `metrics`, it also reports how long the call takes.
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
    use symmalloc_metrics::{Metric, Publisher};

    const CALL_SECONDS: Metric =
        Metric::histogram("symmalloc_device_call_seconds", Some(Unit::Seconds), "how long the device took to answer");

    /// A call under way: reports how long it took when it is dropped.
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
            to.tell(&CALL_SECONDS, seconds);
        }
    }
}
