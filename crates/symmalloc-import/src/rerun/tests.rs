//! Tests of reruns.

use symmalloc_core::config::Config;
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::op::Record;
use symmalloc_core::units::MIB;
use symmalloc_trace::TraceReader;
use symmalloc_trace::replay::Program;

use super::*;

fn program(lines: &[&str]) -> Program {
    let text = format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len());
    let records: Vec<Record> = TraceReader::new(text.as_bytes()).unwrap().collect::<Result<_, _>>().unwrap();
    Program::new(&records).unwrap()
}

/// Returns a short description of the outcome of each op.
fn steps(lines: &[&str], config: &str) -> Vec<String> {
    let program = program(lines);
    told_by(Rerun::new(&program, &config.parse::<Config>().unwrap()).unwrap())
}

/// Same as `steps`, with memory in use while its free is pending.
fn steps_with_pending_frees(lines: &[&str], config: &str) -> Vec<String> {
    let program = program(lines);
    told_by(Rerun::new(&program, &config.parse::<Config>().unwrap()).unwrap().with_pending_frees())
}

fn told_by(mut rerun: Rerun<'_>) -> Vec<String> {
    let mut steps = Vec::new();
    let watch = |moment: &Moment<'_>| {
        let mut words = match &moment.happened {
            Happened::Allocated(live) => {
                format!("allocated {} of {} for {:?}", live.requested_bytes, live.block_bytes, live.heap.stream())
            }
            Happened::Freed(live) => format!("freed {}", live.id),
            Happened::FreeRequested(live) => format!("{} is pending at op {}", live.id, moment.number),
            Happened::FreeCompleted(live) => format!("{} is completed after op {}", live.id, moment.number),
            Happened::Used { live, stream } => format!("{} used by {stream}", live.id),
            Happened::Refused { requested_bytes, left_bytes, .. } => {
                format!("refused {requested_bytes}, {left_bytes} left")
            }
            Happened::WasRefused { requested_bytes, left_bytes, .. } => {
                format!("was refused {requested_bytes}, {left_bytes:?} left")
            }
            Happened::Nothing => "nothing".to_owned(),
        };
        for change in moment.memory {
            let sign = if change.is_mapped { '+' } else { '-' };
            words += &format!(" {sign}{} MiB of {}", change.size_bytes / MIB, change.heap.pool);
        }
        steps.push(words);
        Ok::<(), RerunError>(())
    };
    rerun.run(usize::MAX, watch).unwrap();
    steps
}

#[test]
fn every_op_is_shown_with_the_memory_it_moved() {
    let lines = ["stream s0", "a 0 1000 s0", "a 1 0 s0", "u 0 s0", "f 0", "f 1", "trim"];
    assert_eq!(
        steps(&lines, "segments:fixed"),
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
    assert_eq!(steps(&lines, "segments:expandable")[2], "allocated 512 of 512 for None +2 MiB of p1");
}

#[test]
fn a_refused_request_is_shown_and_its_free_is_ignored() {
    let lines = ["stream s0", "a 0 512 s0", "a 1 5000000 s0", "u 1 s0", "f 1"];
    assert_eq!(
        steps(&lines, "limit_mb:4")[1..],
        [
            "allocated 512 of 512 for Some(StreamId(0)) +2 MiB of p0",
            "refused 5000000, 2097152 left",
            "nothing",
            "nothing"
        ]
    );
}

#[test]
fn a_program_that_cannot_run_names_the_op() {
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
fn a_rerun_stops_at_the_given_op() {
    let program = program(&["stream s0", "a 0 512 s0", "f 0"]);
    let mut rerun = Rerun::new(&program, &Config::default()).unwrap();
    rerun.run::<RerunError>(2, |_| Ok(())).unwrap();
    let snapshot = rerun.snapshot();
    assert_eq!(snapshot.segments[0].blocks[0].size_bytes, 512);
}

#[test]
fn completions_keep_their_recorded_times_and_order() {
    let lines = [
        "stream s0",
        "a 0 512 s0",
        "a 1 512 s0",
        "a 2 512 s0",
        "f 0 pending 4",
        "f 1 pending",
        "f 2 pending 1",
        "a 3 512 s0",
        "f 3",
    ];
    assert_eq!(
        steps_with_pending_frees(&lines, "segments:fixed")[4..],
        [
            "a0 is pending at op 4",
            "a1 is pending at op 5",
            "a2 is pending at op 6",
            "allocated 512 of 512 for Some(StreamId(0))",
            "a2 is completed after op 7",
            "a0 is completed after op 7",
            "freed a3",
        ]
    );
    assert_eq!(steps(&lines, "segments:fixed")[4..7], ["freed a0", "freed a1", "freed a2"]);
}

#[test]
fn pending_memory_is_not_reallocated() {
    let lines = ["stream s0", "a 0 2097152 s0", "f 0 pending 1", "a 1 2097152 s0", "a 2 2097152 s0"];
    let steps = steps_with_pending_frees(&lines, "segments:expandable");
    assert!(steps[3].ends_with("+2 MiB of p0"), "{steps:?}");
    assert_eq!(steps[4..], ["a0 is completed after op 3", "allocated 2097152 of 2097152 for Some(StreamId(0))"]);
}

#[test]
fn a_pool_is_destroyed_without_pending_memory() {
    let lines = ["stream s0", "pool p1", "a 0 512 s0 p1", "f 0 pending", "destroy p1"];
    let steps = steps_with_pending_frees(&lines, "segments:fixed");
    assert_eq!(steps[3..], ["a0 is pending at op 3", "a0 is completed after op 3", "nothing -2 MiB of p1"]);
}

#[test]
fn simultaneous_completions_follow_the_order_of_their_frees() {
    let lines = ["stream s0", "a 0 512 s0", "a 1 512 s0", "f 0 pending 2", "f 1 pending 1", "a 2 512 s0"];
    let steps = steps_with_pending_frees(&lines, "segments:fixed");
    assert_eq!(steps[6..], ["a0 is completed after op 5", "a1 is completed after op 5"]);
}

/// Plans reserve memory before the program allocates anything. It belongs to the heaps of the plans.
#[test]
fn a_rerun_follows_plans_and_their_memory_has_an_owner() {
    use symmalloc_core::plans::{Plan, SearchBudget, StepAllocation};
    let config = Config::default();
    let mut plans = PlanFile::new(config.clone());
    for stream in [StreamId(0), StreamId(1)] {
        let wanted = |requested_bytes, until| StepAllocation { stream, requested_bytes, until: Some(until) };
        let step = [wanted(6 * MIB, 1), wanted(4 * MIB, 2)];
        let plan =
            Plan::solve(config.default_pool(), 2 * MIB, StreamGroup::One(stream), 0, &step, SearchBudget::default())
                .unwrap();
        plans.add_plan(PoolId::DEFAULT, plan).unwrap();
    }
    let of = |stream: u16, id: u16| {
        [format!("a {id} {} s{stream}", 6 * MIB), format!("f {id}"), format!("a {} {} s{stream}", id + 1, 4 * MIB)]
    };
    let allocations = [of(0, 0), of(1, 2)].concat();
    let lines: Vec<&str> =
        ["stream s0", "stream s1"].into_iter().chain(allocations.iter().map(String::as_str)).collect();
    let program = program(&lines);
    let mut rerun = Rerun::following(&program, &plans).unwrap();
    let (mut mapped, mut placements) = (Vec::new(), Vec::new());
    rerun
        .run::<RerunError>(program.ops().len(), |moment| {
            mapped.extend(moment.memory.iter().map(|change| (change.heap.stream(), change.stream, change.size_bytes)));
            if let Happened::Allocated(live) = moment.happened {
                placements.push((live.heap.stream(), live.placement.offset_bytes));
            }
            Ok(())
        })
        .unwrap();
    let [one, other] = [StreamId(0), StreamId(1)];
    assert_eq!(mapped, [(Some(one), one, 6 * MIB), (Some(other), other, 6 * MIB)]);
    assert_eq!(placements, [(Some(one), 0), (Some(one), 0), (Some(other), 0), (Some(other), 0)]);
}

#[test]
fn a_recorded_refusal_states_what_the_limits_left() {
    let lines = [
        "stream s0",
        "pool p1 limit_mb:8",
        "a 0 4194304 s0 p1",
        "a 1 2097152 s0",
        "refuse 9000000 s0 p1 limit",
        "refuse 9000000 s0 driver",
    ];
    let left = |config: &str| steps(&lines, config)[4..].to_vec();
    let mib = |mib: u64| format!("was refused 9000000, Some({}) left", mib * MIB);
    assert_eq!(left("total_limit_mb:64"), [mib(4), mib(58)]);
    assert_eq!(left("total_limit_mb:8"), [mib(2), mib(2)]);
    assert_eq!(left("limit_mb:32"), [mib(4), mib(30)]);
    assert_eq!(left("segments:expandable"), [mib(4), "was refused 9000000, None left".to_owned()]);
}
