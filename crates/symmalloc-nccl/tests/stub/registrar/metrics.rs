//! Tests of the registration metrics that the `metrics` facade receives.

use super::support::{Job, MIB};
use metrics_exporter_prometheus::PrometheusBuilder;
use stub_process::nccl_test;
use symmalloc_nccl::metrics::Publisher;

/// Returns the value of a series.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse().expect("it should be a number")
}

nccl_test!(syncs_and_windows_are_published_under_device_and_communicator, {
    Job::new(2).run(|it| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let pool = it.attached_pool();
        let tensor = it.take(&pool, 30 * MIB);
        let _other = it.take(&pool, MIB);
        let text = metrics::with_local_recorder(&recorder, || {
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            drop(tensor);
            it.trim(&pool);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            Publisher::new().publish(&it.registrar);
            recorder.handle().render()
        });
        let of_device = |name: &str| value(&text, &format!("{name}{{device=\"{}\"}}", it.rank));
        assert_eq!((of_device("symmalloc_syncs_total"), of_device("symmalloc_sync_rounds_total")), (2.0, 2.0));
        assert_eq!(of_device("symmalloc_registrations_total"), 2.0);
        assert_eq!(of_device("symmalloc_deregistrations_total"), 1.0);
        assert_eq!(of_device("symmalloc_sync_seconds_count"), 2.0);
        let of_world = |name: &str| value(&text, &format!("{name}{{device=\"{}\",communicator=\"world\"}}", it.rank));
        assert_eq!((of_world("symmalloc_windows"), of_world("symmalloc_window_bytes")), (1.0, (2 * MIB) as f64));
        assert_eq!(of_world("symmalloc_registered_buffers"), 0.0);
    });
});
