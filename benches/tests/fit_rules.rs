//! Checks that the model of fit rules places like the core under the core's rule. Results for other rules are valid only then.

use symmalloc_benches::fit_rules::FitRule;
use symmalloc_benches::workload::{Bench, Subject, Workload};
use symmalloc_benches::{Segments, ours};
use symmalloc_core::config::StreamPolicy;
use symmalloc_harness::jobs;

#[test]
fn best_fit_of_the_model_reserves_as_much_as_the_core() {
    for job in jobs::JOBS {
        let workload = Workload::from(&jobs::program(job));
        for streams in [StreamPolicy::Separate, StreamPolicy::Shared] {
            let core = Bench::warm(ours(Segments::Expandable, streams), workload.clone());
            let model = FitRule::BEST_FIT.place(&workload, streams);
            assert_eq!(model.reserved_bytes, core.subject().reserved_bytes(), "{job}, {streams:?}");
        }
    }
}
