//! Checks that the model of shared heaps places and synchronizes like the core under the core's rule. Results for other
//! rules are valid only then.

use symmalloc_benches::affinity::Candidates;
use symmalloc_benches::metered::Metered;
use symmalloc_benches::workload::Workload;
use symmalloc_core::Allocator;
use symmalloc_harness::jobs;
use symmalloc_trace::replay::Replay;

const PASSES: usize = 3;

#[test]
fn best_fit_of_the_model_records_and_waits_as_often_as_the_core() {
    for job in jobs::JOBS {
        let program = jobs::program(job);
        let config = "segments:expandable,streams:shared".parse().expect("the configuration should be valid");
        let allocator = Allocator::new(Metered::new(2 << 20), config).expect("the granularity should be valid");
        let mut replay = Replay::new(&allocator, &program);
        let model = Candidates::BestFit.run(&Workload::from(&program), PASSES);
        let mut before = allocator.backend().asked();
        for pass in &model.passes {
            replay.run(|_, _| {}).expect("no limit should be reached");
            replay.free_all().expect("events are endless");
            let calls = allocator.backend().asked().since(before);
            assert_eq!((pass.records, pass.waits), (calls.records, calls.waits), "{job}");
            before = allocator.backend().asked();
        }
        assert_eq!(model.reserved_bytes, allocator.stats().reserved_bytes.peak, "{job}");
    }
}
