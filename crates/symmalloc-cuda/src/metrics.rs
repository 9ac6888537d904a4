//! Metrics of this crate's allocators: the core's metrics, labeled with the device, and the number of device calls. Requires the feature
//! `metrics`.

use crate::allocator::CachingAllocator;
use crate::backend::CudaMemory;
use crate::call_counters::DeviceCall;
use metrics::Unit;
pub use symmalloc_core::metrics::{Metric, Publisher, Source};

const COUNT: Option<Unit> = Some(Unit::Count);

const CALLS: Metric = Metric::counter("symmalloc_device_calls_total", COUNT, "calls to the device");
const IDLE: Metric = Metric::gauge(
    "symmalloc_idle_bytes",
    Some(Unit::Bytes),
    "memory that was released but that the device could not take back yet",
);
const SPARE: Metric = Metric::gauge(
    "symmalloc_spare_bytes",
    Some(Unit::Bytes),
    "memory that was prefetched for growth and is not in use yet",
);
const DROP_ERRORS: Metric = Metric::counter(
    "symmalloc_drop_errors_total",
    COUNT,
    "errors that no call could return, such as those from dropped buffers",
);

impl<B: CudaMemory> Source for CachingAllocator<B> {
    /// Publishes the memory metrics and the device calls, all labeled `device` (the ordinal) and `memory` (`device` or `pinned`). Includes
    /// all pools of the allocator, regardless of the pool that this clone takes memory from.
    fn publish(&self, to: &Publisher) {
        let to = to.with_label("device", self.device().ordinal().to_string()).with_label("memory", B::KIND);
        to.publish(self.core());
        let calls = self.device_calls();
        for (call, times) in [
            (DeviceCall::Reserve.name(), calls.reserves),
            (DeviceCall::Map.name(), calls.maps),
            (DeviceCall::Unmap.name(), calls.unmaps),
            (DeviceCall::Release.name(), calls.releases),
            (DeviceCall::Record.name(), calls.records),
            (DeviceCall::Wait.name(), calls.waits),
            (DeviceCall::Query.name(), calls.queries),
            (DeviceCall::Synchronize.name(), calls.synchronizations),
        ] {
            to.with_label("call", call).record(&CALLS, times as f64);
        }
        to.record(&IDLE, self.core().backend().idle_bytes() as f64);
        to.record(&SPARE, self.core().backend().spare_bytes() as f64);
        to.record(&DROP_ERRORS, self.drop_errors().count as f64);
    }
}
