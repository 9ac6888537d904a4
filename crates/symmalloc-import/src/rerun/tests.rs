//! Tests of reruns.

use symmalloc_core::config::Config;
use symmalloc_core::op::Record;
use symmalloc_core::replay::Program;
use symmalloc_core::trace::TraceReader;
use symmalloc_core::units::MIB;

use super::*;

fn program(lines: &[&str]) -> Program {
    let text = format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len());
    let records: Vec<Record> = TraceReader::new(text.as_bytes()).unwrap().collect::<Result<_, _>>().unwrap();
    Program::new(&records).unwrap()
}

/// What happened, op by op, in a few words.
fn told(lines: &[&str], config: &str) -> Vec<String> {
    let program = program(lines);
    let mut rerun = Rerun::new(&program, &config.parse::<Config>().unwrap()).unwrap();
    let mut told = Vec::new();
    let watch = |moment: &Moment<'_>| {
        let mut words = match &moment.happened {
            Happened::Allocated(live) => {
                format!("allocated {} of {} for {:?}", live.requested_bytes, live.block_bytes, live.owner.stream)
            }
            Happened::Freed(live) => format!("freed {}", live.id),
            Happened::Used { live, stream } => format!("{} used by {stream}", live.id),
            Happened::Refused { requested_bytes, left_bytes, .. } => {
                format!("refused {requested_bytes}, {left_bytes} left")
            }
            Happened::Nothing => "nothing".to_owned(),
        };
        for change in moment.memory {
            let sign = if change.is_mapped { '+' } else { '-' };
            words += &format!(" {sign}{} MiB of {}", change.size_bytes / MIB, change.owner.pool);
        }
        told.push(words);
        Ok::<(), RerunError>(())
    };
    rerun.run(usize::MAX, watch).unwrap();
    told
}

#[test]
fn every_op_is_shown_with_the_memory_it_moved() {
    let lines = ["stream s0", "a 0 1000 s0", "a 1 0 s0", "u 0 s0", "f 0", "f 1", "trim"];
    assert_eq!(
        told(&lines, "segments:fixed"),
        [
            "nothing",
            "allocated 1000 of 1024 for Some(StreamId(0)) +2 MiB of p0",
            "nothing",
            "a0 used by s0",
            "freed a0",
            "nothing",
            "nothing -2 MiB of p0",
        ]
    );
}

#[test]
fn memory_of_a_shared_heap_belongs_to_no_stream() {
    let lines = ["stream s0", "pool p1 streams:shared", "a 0 512 s0 p1"];
    assert_eq!(told(&lines, "segments:expandable")[2], "allocated 512 of 512 for None +2 MiB of p1");
}

#[test]
fn what_a_limit_refuses_is_shown_and_its_free_is_nothing() {
    let lines = ["stream s0", "a 0 512 s0", "a 1 5000000 s0", "u 1 s0", "f 1"];
    assert_eq!(
        told(&lines, "limit_mb:4")[1..],
        [
            "allocated 512 of 512 for Some(StreamId(0)) +2 MiB of p0",
            "refused 5000000, 2097152 left",
            "nothing",
            "nothing"
        ]
    );
}

#[test]
fn a_program_that_cannot_be_carried_out_names_the_op() {
    let program = program(&["stream s0", "a 0 512 s0", "f 0"]);
    let mut twice = program.ops().to_vec();
    twice.push(twice[2].clone());
    let records: Vec<Record> = twice.into_iter().map(Record::from).collect();
    let program = Program::new(&records).unwrap();
    let mut rerun = Rerun::new(&program, &Config::default()).unwrap();
    let error = rerun.run::<RerunError>(usize::MAX, |_| Ok(())).unwrap_err();
    assert!(matches!(error, RerunError::Step { op: 3, error: StepError::NotLive { .. } }), "{error}");
}

#[test]
fn a_rerun_stops_where_it_is_told_to() {
    let program = program(&["stream s0", "a 0 512 s0", "f 0"]);
    let mut rerun = Rerun::new(&program, &Config::default()).unwrap();
    rerun.run::<RerunError>(2, |_| Ok(())).unwrap();
    let snapshot = rerun.snapshot();
    assert_eq!(snapshot.segments[0].blocks[0].size_bytes, 512);
}
