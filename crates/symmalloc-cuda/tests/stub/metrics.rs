//! Metrics of a device on the `metrics` facade.

use crate::process::{device, fail, stub_test};
use metrics_exporter_prometheus::PrometheusBuilder;
use symmalloc_core::config::Config;
use symmalloc_cuda::metrics::Publisher;
use symmalloc_cuda::{CudaAllocator, PinnedAllocator};

/// Returns the value of a series.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse().expect("a number")
}

stub_test!(calls_of_the_device_are_counted_and_measured_under_its_label, {
    let recorder = PrometheusBuilder::new().build_recorder();
    let text = metrics::with_local_recorder(&recorder, || {
        let device = device();
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the stub supports it");
        let context = device.context();
        let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
        let taken = allocator.allocate(&a, 3 << 20).expect("allocated");
        allocator.register_stream(&b).expect("registered");
        allocator.core().record_use(taken.handle, allocator.stream_id(&b).expect("registered")).expect("live");
        allocator.free(taken.handle).expect("fenced");
        let again = allocator.allocate(&a, 3 << 20).expect("cached");
        let calls = allocator.device_calls();
        assert_eq!((calls.reserves, calls.maps, calls.unmaps, calls.records, calls.waits), (1, 1, 0, 1, 1));
        fail("cuMemCreate", 1, 2);
        allocator.allocate(&a, 30 << 20).expect_err("the driver call fails");
        allocator.free(again.handle).expect("live");
        allocator.trim_all().expect("trimmed");
        let publisher = Publisher::new().with_label("rank", "2");
        publisher.publish(&allocator);
        let pinned = PinnedAllocator::pinned(&device, Config::default()).expect("the stub supports it");
        publisher.publish(&pinned);
        recorder.handle().render()
    });
    let call = |call: &str| {
        let series = "symmalloc_device_calls_total{rank=\"2\",device=\"0\",memory=\"device\"";
        value(&text, &format!("{series},call=\"{call}\"}}"))
    };
    assert_eq!((call("reserve"), call("map"), call("unmap"), call("release")), (1.0, 2.0, 1.0, 1.0));
    assert_eq!((call("record"), call("wait")), (1.0, 1.0));
    assert_eq!(value(&text, "symmalloc_device_call_seconds_count{device=\"0\",call=\"map\"}"), 2.0);
    let heap = "{rank=\"2\",device=\"0\",memory=\"device\",pool=\"0\",stream=\"0\"}";
    assert_eq!(value(&text, &format!("symmalloc_out_of_memory_total{heap}")), 1.0);
    assert_eq!(value(&text, &format!("symmalloc_trims_total{heap}")), 1.0);
    assert_eq!(value(&text, "symmalloc_idle_bytes{rank=\"2\",device=\"0\",memory=\"pinned\"}"), 0.0);
});
