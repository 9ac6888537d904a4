//! Features together: one program with every feature alone, and with every two and three of them.
//!
//! ```text
//!  round 0 ── round 1 ── ... each:  body of allocations, uses and frees ── control calls of the features ── checks
//! ```
//! Every run is race-free, keeps the contents of live allocations, and leaks nothing. Two ranks make equal decisions, a replay of the
//! recorded ops ends with the same digests, and the oracle makes the same decisions where it knows the features. Each feature adds its own
//! exact checks.

use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::AllocateError;
use symmalloc_core::op::{Contents, Op, Record};
use symmalloc_core::plans::StepReport;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::segment_log::SegmentEvent;
use symmalloc_core::sleep::Phase;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Backend, Digest, ObserverId, Placement, PoolId, Quiesced, StreamId};
use symmalloc_harness::checker::compare_with_oracle;
use symmalloc_harness::generate::{Access, Scenario};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::{Delays, SimBackend};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;
const ROUNDS: usize = 10;
/// Round whose body has one more allocation.
const DEVIATION: usize = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feature {
    /// Rounds are steps that the pool plans.
    Plans,
    /// Rounds are steps of two keys, which differ.
    Keys,
    Stitching,
    /// The streams share a heap.
    Shared,
    /// Streams use allocations of each other.
    Uses,
    /// The pool sleeps after every round.
    Sleep,
    /// An observer, such as a communicator with windows, acknowledges after every round.
    Observer,
    /// An observer acknowledges after every other round.
    LateObserver,
    /// An observer is removed and added again after every round.
    Reattach,
    /// After every round, the pool returns to its layout before the round.
    Revival,
}

use Feature::*;

const FEATURES: [Feature; 10] =
    [Plans, Keys, Stitching, Shared, Uses, Sleep, Observer, LateObserver, Reattach, Revival];

/// Features that the oracle knows.
const OF_ORACLE: [Feature; 4] = [Stitching, Shared, Uses, Sleep];

/// The decisions of a run. They are equal on every rank.
#[derive(Debug, Default, PartialEq)]
struct Decisions {
    placements: Vec<(StreamId, Placement)>,
    digests: Vec<Digest>,
    reports: Vec<StepReport>,
    /// Events of the observers, without addresses.
    events: Vec<String>,
    /// Number of revivals.
    revivals: usize,
    /// Number of blocks under stitched ranges, summed over the rounds.
    stitched: usize,
    reserved_bytes: Vec<u64>,
}

/// A live allocation with the value that it holds.
#[derive(Clone, Copy)]
struct Live {
    stream: StreamId,
    allocation: Allocation,
    value: u64,
}

struct Run<'d> {
    features: &'d [Feature],
    device: &'d SimBackend,
    allocator: Allocator<&'d SimBackend>,
    /// Live allocations by the round and number of their allocation.
    live: BTreeMap<(usize, usize), Live>,
    observers: Vec<(Feature, ObserverId)>,
    /// Events that each observer read.
    events: [Vec<SegmentEvent>; 3],
    decisions: Decisions,
}

fn config(features: &[Feature]) -> Config {
    let mut text = String::from("segments:expandable");
    for (feature, option) in
        [(Shared, ",streams:shared"), (Stitching, ",stitching:true,stitching_granule_mb:2,stitching_least_mb:4")]
    {
        if features.contains(&feature) {
            text.push_str(option);
        }
    }
    if features.contains(&Plans) || features.contains(&Keys) {
        text.push_str(",plan:learn");
    }
    let pool: PoolConfig = text.parse().expect("the text should be valid");
    Config::builder().default_pool(pool).build().expect("the configuration should be valid")
}

impl<'d> Run<'d> {
    fn new(features: &'d [Feature], device: &'d SimBackend) -> Self {
        let allocator = Allocator::new(device, config(features)).expect("the arguments should be valid");
        let (live, observers, events) = (BTreeMap::new(), Vec::new(), [const { Vec::new() }; 3]);
        Run { features, device, allocator, live, observers, events, decisions: Decisions::default() }
    }

    fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }

    fn has_steps(&self) -> bool {
        self.has(Plans) || self.has(Keys)
    }

    fn key(&self, round: usize) -> u64 {
        u64::from(self.has(Keys) && round % 2 == 1)
    }

    fn start(&mut self) {
        (0..2).for_each(|_| _ = self.allocator.register_stream().expect("a stream id is available"));
        for feature in [Observer, LateObserver, Reattach].into_iter().filter(|feature| self.features.contains(feature))
        {
            let (observer, births) = self.allocator.observe(POOL).expect("the pool should exist");
            assert!(births.is_empty());
            self.observers.push((feature, observer));
        }
    }

    fn allocate(&mut self, round: usize, number: usize, stream: u16, size_bytes: u64) {
        let stream = StreamId(stream);
        let allocation = self.allocator.allocate(POOL, stream, size_bytes).expect("memory should suffice");
        self.device.submit(stream, allocation.address, size_bytes).unwrap_or_else(|race| panic!("{race}"));
        let value = (round * 100 + number) as u64;
        self.device.write(allocation.address, allocation.size_bytes, value);
        self.decisions.placements.push((stream, allocation.placement));
        self.live.insert((round, number), Live { stream, allocation, value });
    }

    /// Uses an allocation on the other stream, which the program orders after the owner.
    fn share(&mut self, round: usize, number: usize) {
        let Live { stream, allocation, .. } = self.live[&(round, number)];
        let other = StreamId(1 - stream.0);
        let event = self.device.record(stream).expect("no fault should be injected");
        self.device.wait(other, event).expect("no fault should be injected");
        self.device.recycle(event);
        self.allocator.note_stream_wait(other, stream).expect("the streams should be registered");
        self.device.submit(other, allocation.address, allocation.size_bytes).expect("no race should be found");
        self.allocator.record_use(allocation.handle, other).expect("the allocation should be live");
    }

    fn free(&mut self, round: usize, number: usize) {
        if let Some(freed) = self.live.remove(&(round, number)) {
            self.allocator.free(freed.allocation.handle).expect("the allocation should be live");
        }
    }

    /// Runs the round's allocations and frees. Allocations 0 and 4 are freed in the next round, and allocation 3 in the round after that.
    fn body(&mut self, round: usize) {
        let is_other = self.key(round) == 1;
        // The fourth one is larger than every gap, and fits two of them.
        let sizes = if is_other { [4, 6, 2, 9, 7, 1] } else { [6, 5, 2, 10, 3, 4] };
        for (number, size) in sizes.into_iter().enumerate() {
            self.allocate(round, number, u16::from(number % 3 == 2), size * MIB + 512 * number as u64);
            if self.has(Uses) && number % 2 == 0 {
                self.share(round, number);
            }
            match number {
                2 => {
                    self.free(round, 1);
                    self.free(round.wrapping_sub(1), 0);
                }
                3 if round > 0 => self.free(round - 1, 4),
                4 if round > 1 => self.free(round - 2, 3),
                5 => self.free(round, 2),
                _ => {}
            }
        }
        if round == DEVIATION {
            self.allocate(round, 6, 0, 11 * MIB);
            self.free(round, 6);
        }
        self.free(round, 5);
        let is_elsewhere = |state: &BlockStateSnapshot| *state == BlockStateSnapshot::Elsewhere;
        let segments = self.allocator.snapshot().segments;
        let stitched = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| is_elsewhere(&block.state));
        self.decisions.stitched += stitched.count();
    }

    fn round(&mut self, round: usize) {
        let before =
            (self.has(Revival) && self.live.len() > 1).then(|| (self.allocator.save_layout(POOL), self.live.clone()));
        if self.has_steps() {
            self.allocator.begin_step(POOL, self.key(round)).expect("no step should be open");
        }
        self.body(round);
        self.check();
        if self.has_steps() {
            self.end_step(round);
        }
        if let Some((layout, live)) = before {
            self.go_back(layout, &live);
        }
        if self.has(Sleep) {
            self.sleep(round);
        }
        self.allocator.trim_pool(POOL).expect("no fault should be injected");
        self.read_events(round);
        self.check();
        self.decisions.digests.push(self.allocator.digest(POOL).expect("the pool should exist"));
        self.decisions.reserved_bytes.push(self.allocator.stats().reserved_bytes.current);
    }

    /// Ends a step. A plan is learned from two equal steps, and followed from the next one on, up to the last allocation of the deviation.
    fn end_step(&mut self, round: usize) {
        let report = self.allocator.end_step(POOL).expect("a step should be open");
        assert_eq!(report.allocations, 6 + u64::from(round == DEVIATION));
        self.decisions.reports.push(report);
    }

    /// Returns to a layout: frees the allocations that it lacks, and revives those that were freed.
    fn go_back(&mut self, layout: Result<symmalloc_core::Layout, LayoutError>, saved: &BTreeMap<(usize, usize), Live>) {
        let layout = match layout {
            Ok(layout) => layout,
            Err(error) => {
                let is_expected = match error {
                    LayoutError::Planned { .. } => self.has_steps(),
                    LayoutError::Stitched { .. } => self.has(Stitching),
                    LayoutError::Retired { .. } => self.has(LateObserver),
                    _ => false,
                };
                assert!(is_expected, "{error}");
                return;
            }
        };
        let added: Vec<_> = self.live.keys().filter(|key| !saved.contains_key(key)).copied().collect();
        added.into_iter().for_each(|(round, number)| self.free(round, number));
        let restored = match self.allocator.revive_layout(POOL, &layout) {
            Ok(restored) => restored,
            Err(RestoreError::State(LayoutError::Stitched { .. })) if self.has(Stitching) => return,
            Err(error) => panic!("{:?}: {error}", self.features),
        };
        self.decisions.revivals += 1;
        let revived: BTreeMap<_, _> =
            restored.allocations().map(|one| ((one.stream, one.allocation.placement), one.allocation)).collect();
        assert_eq!(revived.len(), saved.len());
        for (key, live) in saved {
            let allocation = revived[&(live.stream, live.allocation.placement)];
            if !self.live.contains_key(key) {
                let Allocation { address, size_bytes, .. } = allocation;
                self.device.submit(live.stream, address, size_bytes).unwrap_or_else(|race| panic!("{race}"));
                self.device.write(address, size_bytes, live.value);
            }
            self.live.insert(*key, Live { allocation, ..*live });
        }
    }

    /// Puts the pool to sleep and wakes it. An allocation is freed during the sleep.
    fn sleep(&mut self, round: usize) {
        let reserved = self.allocator.stats().reserved_bytes.current;
        let kept: u64 = self.live.values().map(|live| live.allocation.size_bytes).sum();
        let quiesced = self.allocator.quiesce(POOL, Contents::Keep);
        let slept = quiesced.and_then(Quiesced::unmap);
        let slept = slept.unwrap_or_else(|error| panic!("{:?}: {error}", self.features));
        assert_eq!((slept.kept_bytes, self.device.mapped_bytes()), (kept, self.allocator.stats().retired_bytes));
        let refused = self.allocator.allocate(POOL, StreamId(0), MIB);
        assert!(matches!(refused, Err(AllocateError::Sleeps(_))), "{refused:?}");
        if round > 0 {
            self.free(round - 1, 3);
        }
        assert_eq!(self.allocator.phase(POOL), Ok(Phase::Asleep));
        let woken = self.allocator.wake(POOL).expect("memory should suffice");
        assert_eq!(woken.remapped_bytes, slept.released_bytes);
        assert_eq!(self.allocator.stats().reserved_bytes.current, reserved);
    }

    fn read_events(&mut self, round: usize) {
        for index in 0..self.observers.len() {
            let (feature, observer) = self.observers[index];
            if feature == LateObserver && round.is_multiple_of(2) {
                continue;
            }
            let unread = self.allocator.unread(observer);
            let text = |event: &SegmentEvent| format!("{:?} {:?} {:?}", event.kind, event.heap.stream(), event.segment);
            self.decisions.events.extend(unread.events.iter().map(text));
            self.events[index].extend(&unread.events);
            self.allocator.acknowledge(observer, &unread).expect("no fault should be injected");
            if feature == Reattach {
                self.allocator.forget(observer).expect("no fault should be injected");
                let (observer, births) = self.allocator.observe(POOL).expect("the pool should exist");
                assert_eq!(births.len() as u64, self.allocator.stats().segment_count, "one birth per live segment");
                self.observers[index].1 = observer;
            }
        }
        if round % 2 == 1 || !self.has(LateObserver) {
            assert_eq!(self.allocator.stats().retired_bytes, 0, "all observers have read everything");
            self.events.iter_mut().for_each(|events| events.sort_by_key(|event| event.heap.stream()));
            let read = &self.events[..self.observers.len()];
            assert!(read.windows(2).all(|pair| pair[0] == pair[1]), "{:?}: observers read other events", self.features);
        }
    }

    #[track_caller]
    fn check(&self) {
        self.allocator.check().expect("the invariants should hold");
        for (key, Live { allocation, value, .. }) in &self.live {
            let held = self.device.read(allocation.address, allocation.size_bytes);
            assert_eq!(held, Some(*value), "{:?}: the contents of {key:?}", self.features);
        }
        let current = self.allocator.stats().usage.all.allocations.current;
        assert_eq!(current, self.live.len() as u64);
    }

    fn finish(mut self) -> Decisions {
        let rest: Vec<_> = self.live.keys().copied().collect();
        rest.into_iter().for_each(|(round, number)| self.free(round, number));
        self.observers
            .iter()
            .for_each(|(_, observer)| _ = self.allocator.forget(*observer).expect("no fault should be injected"));
        if self.has_steps() {
            self.allocator.drop_plans(POOL).expect("no step is open");
        }
        self.allocator.trim_all().expect("no fault should be injected");
        self.check();
        assert_eq!(self.allocator.stats().reserved_bytes.current, 0);
        self.decisions.digests.push(self.allocator.digest(POOL).expect("the pool should exist"));
        self.decisions
    }
}

/// Runs the program on one rank. Returns its decisions, its ops, and the digest after the last of them.
fn run(features: &[Feature], rank: u32) -> (Decisions, Vec<Record>, Digest) {
    // Events complete at different times on the two ranks.
    let delays = if rank == 0 { Delays::UntilSynchronized } else { Delays::Immediate };
    let device = SimBackend::builder().rank(rank).seed(37).delays(delays).build();
    let outcome = {
        let mut run = Run::new(features, &device);
        let records = Memory::new();
        run.allocator.start_recording(records.clone()).expect("no op should precede the recording");
        run.start();
        (0..ROUNDS).for_each(|round| run.round(round));
        run.allocator.stop_recording().expect("it did not end early");
        let digest = run.allocator.digest(POOL).expect("the pool should exist");
        (run.finish(), records.records(), digest)
    };
    assert!(device.leaks().is_empty(), "{features:?}: {}", device.leaks());
    outcome
}

fn check(features: &[Feature]) {
    let (decisions, records, digest) = run(features, 0);
    assert_eq!(run(features, 1).0, decisions, "{features:?}: ranks decide differently");
    let has = |feature| features.contains(&feature);
    let again: Allocator<_> =
        Allocator::new(SimBackend::builder().seed(1).build(), config(features)).expect("the arguments should be valid");
    let program = Program::new(&records).expect("the records should be consistent");
    Replay::new(&again, &program).run(|_, _| {}).unwrap_or_else(|error| panic!("{features:?}: {error}"));
    assert_eq!(again.digest(POOL), Ok(digest), "{features:?}: the replay decides differently");
    if features.iter().all(|feature| OF_ORACLE.contains(feature)) {
        let ops: Vec<(Op, Access)> = records.iter().map(|record| (record.op.clone(), Access::Handle)).collect();
        let device = SimBackend::builder().seed(2).build();
        let scenario = Scenario::new(config(features), device.granularity_bytes(), ops);
        compare_with_oracle(&scenario, &device);
    }
    // Three of six allocations outlive their step. A plan places one of them, if the next step has the same key and the allocation is freed
    // before its successor is made.
    let planned = if has(Keys) { 3 } else { 4 };
    let is_followed = |report: &&StepReport| report.planned == planned && report.difference.is_none();
    let followed = decisions.reports.iter().filter(is_followed).count();
    let Decisions { revivals, stitched, events, .. } = &decisions;
    let is_observed = [Observer, LateObserver, Reattach].into_iter().any(has);
    // Memory that is observed is not stitched. Plans and stitched ranges prevent revivals.
    let is_stitched = has(Stitching) && !is_observed;
    let is_revived = has(Revival) && !is_stitched && !has(Plans) && !has(Keys);
    assert_eq!(*revivals > 1, is_revived, "{features:?}");
    assert_eq!(followed > 0, (has(Plans) || has(Keys)), "{features:?}");
    let differ: Vec<usize> =
        (0..decisions.reports.len()).filter(|round| decisions.reports[*round].difference.is_some()).collect();
    assert!(decisions.reports.is_empty() || differ == [DEVIATION], "{features:?}: rounds {differ:?} differ");
    assert_eq!(!events.is_empty(), is_observed, "{features:?}");
    assert_eq!(*stitched > 0, is_stitched, "{features:?}");
}

#[test]
fn every_set_of_up_to_three_features_keeps_the_rules() {
    for (index, one) in FEATURES.into_iter().enumerate() {
        check(&[one]);
        let others = &FEATURES[index + 1..];
        for (index, other) in others.iter().enumerate() {
            check(&[one, *other]);
            others[index + 1..].iter().for_each(|third| check(&[one, *other, *third]));
        }
    }
}
