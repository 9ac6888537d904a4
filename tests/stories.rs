//! Stories: a trace of every defect found so far, with a description at its top, as regression tests. If a story states a placement, the
//! allocation must be there, regardless of the oracle.

use std::fs;
use std::path::Path;
use symmalloc_core::units::MIB;
use symmalloc_harness::checker::compare_with_oracle;
use symmalloc_harness::generate::{Access, Scenario};
use symmalloc_harness::oracle::Outcome;
use symmalloc_trace::replay::Program;
use symmalloc_trace::{RecordLine, Trace};

#[test]
fn every_story_ends_as_the_oracle_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("stories");
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("the stories are part of the project") {
        let path = entry.expect("a readable folder").path();
        let text = fs::read_to_string(&path).expect("a readable story");
        let trace: Trace = text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let config = trace.config().cloned().unwrap_or_default();
        let program = Program::new(trace.records()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let access = vec![Access::Handle; program.ops().len()];
        let scenario = Scenario { config, granularity_bytes: 2 * MIB, program, access };
        for seed in 0..4 {
            let decisions = compare_with_oracle(&scenario, &scenario.device(seed));
            for (record, outcome) in trace.records().iter().zip(decisions.outcomes) {
                let Some(stated) = record.placement else { continue };
                assert!(
                    matches!(outcome, Outcome::Placed { placement, .. } if placement == stated),
                    "{}: {}, but {outcome:?}",
                    path.display(),
                    RecordLine(record)
                );
            }
        }
        count += 1;
    }
    assert!(count > 0, "no story was found");
}
