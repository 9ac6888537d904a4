//! Metrics of a registrar. Requires the feature `metrics`.

use crate::registrar::Registrar;
use crate::registrar::stats::{CommunicatorStats, RegistrarStats};
use metrics::Unit;
pub use symmalloc_cuda::metrics::{Metric, Publisher, Source};

const BYTES: Option<Unit> = Some(Unit::Bytes);
const COUNT: Option<Unit> = Some(Unit::Count);

const SYNCS: Metric = Metric::counter("symmalloc_syncs_total", COUNT, "calls of sync");
const QUIET_SYNCS: Metric =
    Metric::counter("symmalloc_quiet_syncs_total", COUNT, "syncs that found nothing to do and ran no collective");
const SYNC_ROUNDS: Metric = Metric::counter("symmalloc_sync_rounds_total", COUNT, "collectives of syncs");
const SYNC_FAILURES: Metric =
    Metric::counter("symmalloc_sync_failures_total", COUNT, "syncs that ended a communicator");
const REGISTRATIONS: Metric =
    Metric::counter("symmalloc_registrations_total", COUNT, "windows and buffers that were registered");
const DEREGISTRATIONS: Metric =
    Metric::counter("symmalloc_deregistrations_total", COUNT, "windows and buffers that were deregistered");
const COMMUNICATORS: Metric =
    Metric::gauge("symmalloc_communicators", COUNT, "live communicators that pools are attached to");
const WINDOWS: Metric = Metric::gauge("symmalloc_windows", COUNT, "live windows");
const WINDOW_BYTES: Metric = Metric::gauge("symmalloc_window_bytes", BYTES, "bytes of live windows");
const BUFFERS: Metric = Metric::gauge("symmalloc_registered_buffers", COUNT, "live registrations of buffers");
const SPACE_USED: Metric =
    Metric::gauge("symmalloc_symmetric_space_used_bytes", BYTES, "symmetric address space in use");
const SPACE_LIMIT: Metric =
    Metric::gauge("symmalloc_symmetric_space_limit_bytes", BYTES, "size of the symmetric address space");

impl Source for Registrar {
    /// Publishes the metrics of syncs with the label `device`, and those of registrations with the labels `device` and `communicator`. The
    /// allocator publishes the metrics of memory.
    fn publish(&self, to: &Publisher) {
        let to = to.with_label("device", self.allocator().device().ordinal().to_string());
        let RegistrarStats {
            communicators, syncs, quiet_syncs, rounds, registrations, deregistrations, failures, ..
        } = self.stats();
        for (metric, value) in [
            (&COMMUNICATORS, communicators),
            (&SYNCS, syncs),
            (&QUIET_SYNCS, quiet_syncs),
            (&SYNC_ROUNDS, rounds),
            (&SYNC_FAILURES, failures),
            (&REGISTRATIONS, registrations),
            (&DEREGISTRATIONS, deregistrations),
        ] {
            to.record(metric, value as f64);
        }
        for (name, stats) in self.stats_by_communicator() {
            let CommunicatorStats { windows, window_bytes, buffers, space_used_bytes, space_budget_bytes } = stats;
            let to = to.with_label("communicator", name);
            for (metric, value) in [
                (&WINDOWS, windows),
                (&WINDOW_BYTES, window_bytes),
                (&BUFFERS, buffers),
                (&SPACE_USED, space_used_bytes),
                (&SPACE_LIMIT, space_budget_bytes),
            ] {
                to.record(metric, value as f64);
            }
        }
    }
}
