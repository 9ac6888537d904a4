//! Checks that the reference makes the same decisions as symmalloc, which is required for comparable times.

use symmalloc_benches::workload::{Bench, Subject, Workload};
use symmalloc_benches::{Segments, micro, ours, reference};
use symmalloc_core::config::StreamPolicy;
use symmalloc_harness::jobs;

fn agrees(name: &str, workload: &Workload) {
    for segments in [Segments::Expandable, Segments::Fixed] {
        let mut ours = Bench::warm(ours(segments, StreamPolicy::Separate), workload.clone());
        let mut reference = Bench::warm(reference(segments), workload.clone());
        let (one, other) = (ours.placements(), reference.placements());
        let first = one.iter().zip(&other).position(|(one, other)| one != other);
        assert_eq!(first, None, "{name}, {segments:?}: an allocation is placed differently");
        assert_eq!(ours.subject().reserved_bytes(), reference.subject().reserved_bytes(), "{name}, {segments:?}");
    }
}

#[test]
fn the_reference_places_every_recorded_job_as_we_do() {
    for job in jobs::JOBS {
        agrees(job, &Workload::from(&jobs::program(job)));
    }
}

#[test]
fn the_reference_places_the_micro_cases_as_we_do() {
    agrees("replacement", &micro::replacement());
    agrees("cross-stream", &micro::cross_stream(1 << 20));
    agrees("pair", &micro::pair(64 << 20));
}
