//! Agreement: the next agreement catches and names a difference of any kind, at any op, on any rank (rule D7).
//!
//! `SYMMALLOC_INJECTIONS=1000000 cargo test --release -p symmalloc-harness --test agreement -- --nocapture` runs more injections, and
//! prints the table.

use std::collections::BTreeMap;
use symmalloc_agreement::{
    Action, AgreementError, Cause, Difference, Disagreement, Point, RankHistory, agree_in_lockstep,
};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::ids::HeapId;
use symmalloc_core::op::{Op, Record};
use symmalloc_core::{Allocator, Config, PoolId};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::jobs;
use symmalloc_harness::mutation::{Kind, Mutant, SymmetricProgram};
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Number of injections in a default run, over all kinds.
const INJECTIONS: u64 = 10_000;

/// Number of ops in a generated program, and in a window of a recorded job.
const OPS: usize = 100;

/// The ops of the program that caused the ops of each heap.
#[derive(Default)]
struct Origins {
    /// Entries by heap: (number of heap ops after it, op of the program, digest), ascending.
    heaps: BTreeMap<HeapId, Vec<(u64, usize, u64)>>,
}

impl Origins {
    fn note(&mut self, index: usize, allocator: &Allocator<SimBackend>) {
        for pool in (0..allocator.pool_count()).map(PoolId) {
            for (group, digest) in allocator.heap_digests(pool).unwrap_or_default() {
                let heap = self.heaps.entry(HeapId { pool, group }).or_default();
                if heap.last().is_none_or(|(ops, _, _)| *ops < digest.ops) {
                    heap.push((digest.ops, index, digest.value));
                }
            }
        }
    }

    /// Returns the op of the program that caused this op of the heap.
    fn of(&self, heap: HeapId, op: u64) -> Option<usize> {
        let heap = self.heaps.get(&heap)?;
        heap.get(heap.partition_point(|(ops, _, _)| *ops <= op)).map(|(_, index, _)| *index)
    }

    /// Returns `true` if this op of the program caused several heap ops, because it released memory before a limit
    /// refused it. If the next op of the program first releases the same memory, omitting either op leads to the same
    /// first difference, and the report cannot distinguish the two.
    fn gives_back_on_the_way(&self, index: usize) -> bool {
        let ops_of = |heap: &Vec<(u64, usize, u64)>| {
            let at = heap.iter().position(|(_, origin, _)| *origin == index)?;
            let before = at.checked_sub(1).map_or(0, |before| heap[before].0);
            Some(heap[at].0 - before)
        };
        self.heaps.values().filter_map(ops_of).sum::<u64>() > 1
    }

    /// Returns `true` if the other rank has the same history after the effects of this op of the program. A later op of
    /// its program then had the same effects, with nothing recorded in between, so omitting either is equivalent.
    fn is_made_up_for(&self, index: usize, other: &Origins) -> bool {
        self.heaps.iter().any(|(heap, ops)| {
            let after = ops.iter().find(|(_, origin, _)| *origin == index).map(|(ops, _, digest)| (*ops, *digest));
            let others = other.heaps.get(heap).into_iter().flatten();
            after.is_some() && others.map(|(ops, _, digest)| Some((*ops, *digest))).any(|other| other == after)
        })
    }

    /// Returns the range of heap ops that contains the heap's first difference, from the digests after each op of the program.
    fn first_difference(&self, other: &Origins, heap: HeapId) -> Option<(u64, u64)> {
        let none = Vec::new();
        let [one, other] = [self, other].map(|origins| origins.heaps.get(&heap).unwrap_or(&none));
        let digests: BTreeMap<u64, u64> = other.iter().map(|(ops, _, digest)| (*ops, *digest)).collect();
        let mut equal = 0;
        for (ops, _, digest) in one {
            match digests.get(ops) {
                Some(same) if same == digest => equal = *ops,
                Some(_) => return Some((equal, *ops)),
                None => {}
            }
        }
        let [end, other_end] = [one, other].map(|heap| heap.last().map_or(0, |(ops, _, _)| *ops));
        (end != other_end).then_some((equal, end.min(other_end) + 1))
    }
}

/// A rank of the job.
struct Rank<'a> {
    allocator: &'a Allocator<SimBackend>,
    replay: Replay<'a, SimBackend, symmalloc_core::lock::Exclusive>,
    program: &'a Program,
}

/// Result of a job with several ranks.
struct Outcome {
    disagreement: Option<Disagreement>,
    /// Op of the program after which the ranks disagreed.
    caught_at: usize,
    regular: Origins,
    mutant: Origins,
    /// The mutant's first op with a failed driver call.
    refused: Option<usize>,
    /// Op of the program at which the ranks last agreed.
    agreed_at: Option<usize>,
}

/// Runs a job in which one rank differs, with an agreement after each op in `agreements`, up to the first that fails.
fn run(
    program: &SymmetricProgram,
    mutant: &SymmetricProgram,
    ranks: u32,
    odd: u32,
    fault: Option<(Call, u64)>,
    agreements: &[usize],
) -> Outcome {
    let regular_ops = Program::new(&program.records).expect("the arguments should be valid");
    let mutant_ops = Program::new(&mutant.records).expect("the arguments should be valid");
    let allocators: Vec<Allocator<SimBackend>> = (0..ranks)
        .map(|rank| {
            let mut device = SimBackend::builder().seed(ranks.into()).rank(rank).memory_bytes(1 << 50);
            if let (true, Some((call, ordinal))) = (rank == odd, fault) {
                device = device.fail(Some(call), FaultRule::At { ordinal }, Fault::OutOfMemory);
            }
            let config = if rank == odd { &mutant.config } else { &program.config };
            Allocator::new(device.build(), config.clone()).expect("the arguments should be valid")
        })
        .collect();
    let mut running: Vec<Rank<'_>> = (0..ranks)
        .zip(&allocators)
        .map(|(rank, allocator)| {
            let program = if rank == odd { &mutant_ops } else { &regular_ops };
            Rank { allocator, replay: Replay::new(allocator, program), program }
        })
        .collect();
    let regular = u32::from(odd == 0);
    let mut outcome = Outcome {
        disagreement: None,
        caught_at: 0,
        regular: Origins::default(),
        mutant: Origins::default(),
        refused: None,
        agreed_at: None,
    };
    for index in 0..program.records.len() {
        for (rank, running) in (0..ranks).zip(&mut running) {
            let result = running.replay.step(&running.program.ops()[index]);
            if rank == odd {
                outcome.mutant.note(index, running.allocator);
                if outcome.refused.is_none() && is_refused_by_driver(&result) {
                    outcome.refused = Some(index);
                }
            } else if rank == regular {
                outcome.regular.note(index, running.allocator);
            }
        }
        if agreements.contains(&index) || index + 1 == program.records.len() {
            let histories: Vec<RankHistory<'_>> =
                allocators.iter().map(|allocator| RankHistory::new(allocator, Point::Sync)).collect();
            match agree_in_lockstep(&histories) {
                Ok(_) => outcome.agreed_at = Some(index),
                Err(AgreementError::Disagreed(disagreement)) => {
                    outcome.disagreement = Some(*disagreement);
                    outcome.caught_at = index;
                    return outcome;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    outcome
}

fn is_refused_by_driver<T>(result: &Result<T, StepError>) -> bool {
    let Err(StepError::Allocate(AllocateError::OutOfMemory(error))) = result else { return false };
    matches!(error.cause, OutOfMemoryCause::Driver(_))
}

#[derive(Default)]
struct Row {
    injected: u64,
    /// Number of mutations that changed nothing.
    unchanged: u64,
    /// Number of caught injections that are not counted as injected: see [`Origins::gives_back_on_the_way`] and
    /// [`Origins::is_made_up_for`].
    blurred: u64,
    caught: u64,
    named: u64,
    cause: u64,
    /// Number of injected ops whose name is in the report.
    reported_names: u64,
    rounds: u32,
}

/// The programs: generated ones, and windows of recorded jobs.
struct Programs {
    jobs: Vec<Vec<Record>>,
}

impl Programs {
    fn new() -> Self {
        let jobs = ["fsdp1_train_rank0", "fsdp_train_rank0", "moe_train", "gpt2_train_varlen"];
        Programs { jobs: jobs.map(jobs::records).into() }
    }

    fn pick(&self, random: &mut SplitMix64, kind: Kind) -> SymmetricProgram {
        // Only jobs with several streams record uses.
        let jobs = if kind == Kind::MissingRecordUse { 1 } else { self.jobs.len() };
        if random.below(3) > 0 {
            let scenario = Scenario::from_seed(random.next_u64(), OPS);
            // A wake that is refused on one rank does not change its digest: only later ops differ.
            let is_meant = |op: &&Op| kind != Kind::RefusedMemory || !matches!(op, Op::Sleep { .. } | Op::Wake { .. });
            let records: Vec<Record> =
                scenario.program.ops().iter().filter(is_meant).cloned().map(Record::from).collect();
            return SymmetricProgram::new(&scenario.config, &records);
        }
        let job = &self.jobs[random.below(jobs as u64) as usize];
        let first = random.below((job.len() - OPS) as u64) as usize;
        let streams = job.iter().filter(|record| matches!(record.op, Op::RegisterStream { .. }));
        let pools = job[..first].iter().filter(|record| matches!(record.op, Op::CreatePool { .. }));
        let window = job[first..first + OPS].iter().filter(|record| !matches!(record.op, Op::RegisterStream { .. }));
        let config = Config::builder();
        SymmetricProgram::new(
            &config.build().expect("the configuration should be valid"),
            streams.chain(pools).chain(window),
        )
    }
}

#[test]
fn every_injected_difference_is_caught_at_the_next_agreement_and_named() {
    let injections =
        std::env::var("SYMMALLOC_INJECTIONS").map_or(INJECTIONS, |text| text.parse().expect("it should be a number"));
    let programs = Programs::new();
    let mut table: BTreeMap<Kind, Row> = BTreeMap::new();
    let mut seed = 0;
    for kind in Kind::ALL {
        let row = table.entry(kind).or_default();
        while row.injected < injections.div_ceil(Kind::ALL.len() as u64) {
            seed += 1;
            inject(kind, seed, &programs, row);
        }
    }
    println!(
        "{:<18} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>7}",
        "kind", "injected", "caught", "named", "cause", "blurred", "unchanged", "rounds"
    );
    for (kind, row) in &table {
        let Row { injected, unchanged, blurred, caught, named, cause, reported_names: _, rounds } = row;
        println!(
            "{:<18} {injected:>9} {caught:>9} {named:>9} {cause:>9} {blurred:>9} {unchanged:>10} {rounds:>7}",
            format!("{kind:?}")
        );
        assert_eq!((caught, named), (injected, injected), "{kind:?}");
        assert!(blurred * 100 <= *injected, "{kind:?}: {blurred} of {injected} blurred");
        assert!(
            cause * 100 >= injected * 90,
            "{kind:?}: the cause is guessed correctly in {cause} of {injected} cases"
        );
    }
    let reported_names: u64 = table.values().map(|row| row.reported_names).sum();
    assert!(reported_names * 20 >= injections, "only {reported_names} of the injected ops had a name to report");
}

/// Injects one difference, and checks the reports of the ranks.
fn inject(kind: Kind, seed: u64, programs: &Programs, row: &mut Row) {
    let mut random = SplitMix64::new(seed);
    let mut program = programs.pick(&mut random, kind);
    let ranks = 2 + random.below(7) as u32;
    let odd = random.below(ranks.into()) as u32;
    let mut fault = None;
    let mutant = if kind == Kind::RefusedMemory {
        let call = [Call::Map, Call::Reserve][random.below(2) as usize];
        fault = Some((call, random.below(12)));
        Some(Mutant { program: program.clone(), op: 0, key: None })
    } else {
        program.mutate(kind, &mut random)
    };
    let Some(mut mutant) = mutant else {
        row.unchanged += 1;
        return;
    };
    let len = program.records.len() as u64;
    let agreements: Vec<usize> = (0..4).map(|_| random.below(len) as usize).collect();
    let outcome = run(&program, &mutant.program, ranks, odd, fault, &agreements);
    let at_end = |origins: &Origins| {
        origins
            .heaps
            .iter()
            .map(|(heap, ops)| (*heap, ops.last().map(|(ops, _, digest)| (*ops, *digest))))
            .collect::<Vec<_>>()
    };
    let Some(disagreement) = outcome.disagreement else {
        // An uncaught injection is acceptable only if it made no difference.
        assert_eq!(at_end(&outcome.regular), at_end(&outcome.mutant), "{kind:?}, seed {seed}: not caught");
        assert_ne!(kind, Kind::Configuration, "seed {seed}: not caught");
        row.unchanged += 1;
        return;
    };
    if kind == Kind::RefusedMemory {
        mutant.op = outcome.refused.expect("nothing else differs");
    }
    row.injected += 1;
    row.rounds = row.rounds.max(disagreement.rounds);
    let place = || {
        let ops = [&program, &mutant.program].map(|program| &program.records[mutant.op].op);
        format!("{kind:?}, seed {seed}, op {} on rank {odd}, {ops:?}: {disagreement}", mutant.op)
    };
    // Caught at the next agreement: no agreement succeeded from the injected op on.
    assert!(outcome.agreed_at.is_none_or(|agreed| agreed < mutant.op), "{}", place());
    assert!(outcome.caught_at >= mutant.op, "{}", place());
    row.caught += 1;
    match &disagreement.difference {
        Difference::Configuration(policies) => {
            assert_eq!(kind, Kind::Configuration, "{}", place());
            assert_eq!(policies.len(), 1, "{}", place());
            assert_eq!(Some(&*policies[0].key), mutant.key, "{}", place());
            let is_odd = policies[0].values.iter().any(|(ranks, _)| ranks.iter().eq([odd]));
            assert!(is_odd && policies[0].values.len() == 2, "{}", place());
            row.named += 1;
            row.cause += 1;
        }
        Difference::History { first, .. } => {
            assert_ne!(kind, Kind::Configuration, "{}", place());
            let heap = HeapId { pool: PoolId(first.pool), group: first.streams };
            let origins = [&outcome.regular, &outcome.mutant].map(|origins| origins.of(heap, first.first_op));
            if !origins.contains(&Some(mutant.op)) {
                let runs = [&outcome.regular, &outcome.mutant];
                let is_excused = runs.iter().any(|run| run.gives_back_on_the_way(mutant.op))
                    || runs[0].is_made_up_for(mutant.op, runs[1])
                    || runs[1].is_made_up_for(mutant.op, runs[0]);
                assert!(is_excused, "of {origins:?}: {}", place());
                (row.injected, row.caught, row.blurred) = (row.injected - 1, row.caught - 1, row.blurred + 1);
                return;
            }
            let (equal, differs) = outcome.regular.first_difference(&outcome.mutant, heap).expect("it differs");
            assert!(first.first_op == first.last_op && (equal..differs).contains(&first.first_op), "{}", place());
            let is_odd = first.groups.iter().any(|group| group.ranks.iter().eq([odd]));
            assert!(is_odd && first.groups.len() == 2, "{}", place());
            row.reported_names += check_names(&program, &mutant, first, odd);
            row.named += 1;
            row.cause += u64::from(first.cause == expected_cause(kind));
            if first.cause != expected_cause(kind) && std::env::var_os("SYMMALLOC_SHOW").is_some() {
                println!("{}\n", place());
            }
        }
        other => panic!("{other:?}"),
    }
}

fn expected_cause(kind: Kind) -> Cause {
    match kind {
        Kind::Size => Cause::DifferentRequest,
        Kind::Swap => Cause::DifferentOrder,
        Kind::MissingFree => Cause::MissingFree,
        Kind::MissingRecordUse => Cause::MissingRecordUse,
        Kind::DifferentStream => Cause::DifferentStream,
        Kind::ExtraOp => Cause::OpOnSomeRanks,
        Kind::Contents => Cause::DifferentRequest,
        Kind::RefusedMemory => Cause::RefusedMemory,
        Kind::Configuration => Cause::Unknown,
    }
}

/// Checks that the report names the injected op if it is an allocation with a name. Returns the number of such names.
fn check_names(
    program: &SymmetricProgram,
    mutant: &Mutant,
    first: &symmalloc_agreement::HeapDifference,
    odd: u32,
) -> u64 {
    let mut reported_names = 0;
    for (records, is_odd) in [(&program.records, false), (&mutant.program.records, true)] {
        let Record { op: Op::Allocate { size_bytes, stream, .. }, name: Some(name), .. } = &records[mutant.op] else {
            continue;
        };
        let group = first.groups.iter().find(|group| group.ranks.contains(odd) == is_odd).expect("two groups");
        if let Action::Allocated { stream: reported, size_bytes: bytes, .. } = group.action
            && (reported, bytes) == (*stream, *size_bytes)
            && bytes > 0
        {
            assert!(group.name.is_some(), "{name} is not reported");
            reported_names += 1;
        }
    }
    reported_names
}
