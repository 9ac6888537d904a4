//! The metrics of an allocator of this crate: those of the core's, labelled with the device, and what the device was asked.
//! Feature `metrics`.

use crate::allocator::CachingAllocator;
use crate::backend::CudaMemory;
use crate::call_counters::DeviceCall;
use metrics::Unit;
pub use symmalloc_metrics::{Metric, Publisher, Source};

const COUNT: Option<Unit> = Some(Unit::Count);

const CALLS: Metric = Metric::counter("symmalloc_device_calls_total", COUNT, "times that the device was asked");
const IDLE: Metric =
    Metric::gauge("symmalloc_idle_bytes", Some(Unit::Bytes), "memory given up that the device could not take back yet");
const SPARE: Metric =
    Metric::gauge("symmalloc_spare_bytes", Some(Unit::Bytes), "memory made ahead of growth that nobody has yet");
const DROP_ERRORS: Metric = Metric::counter(
    "symmalloc_drop_errors_total",
    COUNT,
    "errors that no call could return, of buffers that were dropped",
);

impl<B: CudaMemory> Source for CachingAllocator<B> {
    /// The metrics of memory, and what the device was asked, all labelled `device` (its ordinal) and `memory` (`device` or
    /// `pinned`). Pools are those of the whole allocator, whatever this name of it takes memory from.
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
            to.with_label("call", call).tell(&CALLS, times as f64);
        }
        to.tell(&IDLE, self.core().backend().idle_bytes() as f64);
        to.tell(&SPARE, self.core().backend().spare_bytes() as f64);
        to.tell(&DROP_ERRORS, self.drop_errors().count as f64);
    }
}
