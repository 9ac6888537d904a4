//! The checker: a program on the real allocator, beside the oracle, on a simulated device that notices races.
//!
//! ```text
//!           ┌─► Oracle ──────────────► outcome ─┐
//!  op ──────┤                                   ├─ equal? snapshot equal? check() green?
//!           └─► Allocator ─► SimBackend ► outcome┘
//!                               ▲
//!   submit: work on every byte of an allocation, on each stream that uses it ─► Race if a wait is missing
//! ```
//!
//! The program is a correct one: a stream that uses another one's allocation waits for it first. All other order between
//! streams is the allocator's responsibility.

use crate::generate::{Access, Scenario};
use crate::oracle::{Content, Heap, Oracle, Outcome, Refusal};
use crate::run::Run;
use std::collections::BTreeMap;
use symmalloc_core::backend::Backend;
use symmalloc_core::errors::{AllocateError, OutOfMemory, OutOfMemoryCause, PoolError, RecordUseError, UnknownError};
use symmalloc_core::lock::{Exclusive, Lock};
use symmalloc_core::op::Contents;
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_core::{Allocation, AllocationId, Allocator, Digest, Op, PoolId, StreamId};
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::StepError;

/// What a run came to: equal for two runs exactly when every decision was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Per op.
    pub outcomes: Vec<Outcome>,
    /// Per live pool, at the end.
    pub digests: Vec<(PoolId, Digest)>,
}

/// Carries a scenario out and compares every decision, block and counter with the oracle's.
///
/// # Panics
/// At the first difference, violated invariant, race, breach of the backend's contract, or leak.
pub fn compare_with_oracle(scenario: &Scenario, device: &SimBackend) -> Decisions {
    compare_at(scenario, device, |_| true)
}

/// As [`compare_with_oracle`], but looks at blocks and invariants only after the ops with these numbers. Decisions are
/// compared in any case: a wrong state shows at the next look, or in a later decision.
///
/// # Panics
/// As [`compare_with_oracle`].
pub fn compare_at(scenario: &Scenario, device: &SimBackend, looks: impl Fn(usize) -> bool) -> Decisions {
    let mut oracle = Oracle::new(&scenario.config, scenario.granularity_bytes);
    decisions::<Exclusive>(scenario, device, |index, op, outcome, allocator| {
        let expected = oracle.step(op);
        assert_eq!(outcome, expected, "op {index}, {op:?}: the allocator decided otherwise than the oracle (right)");
        if looks(index) {
            allocator.check().unwrap_or_else(|violation| panic!("op {index}, {op:?}: {violation}"));
            compare_state(allocator, &oracle, index);
        }
    })
}

/// Carries a scenario out with this kind of lock, and shows every decision to `look`.
///
/// # Panics
/// At a violated invariant at the end, a race, a breach of the backend's contract, or a leak.
pub fn decisions<L: Lock>(
    scenario: &Scenario,
    device: &SimBackend,
    look: impl FnMut(usize, &Op, Outcome, &Allocator<&SimBackend, L>),
) -> Decisions {
    decisions_through(scenario, device, device, look)
}

/// As [`decisions`], through a backend that leads to the device.
///
/// # Panics
/// As [`decisions`].
pub fn decisions_through<B: Backend, L: Lock>(
    scenario: &Scenario,
    backend: B,
    device: &SimBackend,
    mut look: impl FnMut(usize, &Op, Outcome, &Allocator<B, L>),
) -> Decisions {
    let _report = PrintOnPanic(scenario);
    let mut decisions = Decisions::default();
    {
        let allocator = Allocator::<_, L>::new(backend, scenario.config.clone()).expect("a valid granularity");
        let mut run = Run::new(&allocator, scenario);
        let mut work = DeviceWork::new(device);
        for (index, op) in scenario.program.ops().iter().enumerate() {
            let result = run.step(index);
            work.submit(op, &result);
            if let Err(StepError::Allocate(AllocateError::OutOfMemory(error))) = &result {
                check_refusal(&allocator, error, index);
            }
            let outcome = outcome(result);
            look(index, op, outcome, &allocator);
            decisions.outcomes.push(outcome);
        }
        allocator.check().unwrap_or_else(|violation| panic!("at the end: {violation}"));
        let pools = (0..allocator.pool_count()).map(PoolId);
        decisions.digests = pools.filter_map(|pool| Some((pool, allocator.digest(pool).ok()?))).collect();
    }
    assert!(device.leaks().is_empty(), "the allocator was dropped and left behind: {}", device.leaks());
    decisions
}

/// What an error says there is, is what there is.
fn check_refusal<B: Backend, L: Lock>(allocator: &Allocator<B, L>, error: &OutOfMemory, index: usize) {
    let stats = allocator.pool_stats(error.pool).expect("the pool that was asked");
    let held = (stats.reserved_bytes.current, stats.usage.all.allocated_bytes.current);
    assert_eq!((error.reserved_bytes, error.allocated_bytes), held, "op {index}: {error}");
    let snapshot = allocator.snapshot();
    let is_of_heap = |segment: &&SegmentSnapshot| {
        segment.pool == error.pool && segment.stream.is_none_or(|stream| stream == error.stream)
    };
    let blocks = snapshot.segments.iter().filter(is_of_heap).flat_map(|segment| &segment.blocks);
    let free = blocks.filter(|block| matches!(block.state, BlockStateSnapshot::Free { .. }));
    let largest = free.map(|block| block.size_bytes).max().unwrap_or(0);
    assert_eq!(error.largest_free_bytes, largest, "op {index}: the largest free block");
}

/// Prints the trace of a scenario that failed: the bug report.
#[derive(Debug)]
pub struct PrintOnPanic<'a>(pub &'a Scenario);

impl Drop for PrintOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let is_by_address = |index: &usize| self.0.access[*index] == Access::Address;
            let by_address: Vec<usize> = (0..self.0.access.len()).filter(is_by_address).collect();
            println!("granularity {} bytes\n{}", self.0.granularity_bytes, self.0.trace());
            println!("ops that go in by address: {by_address:?}");
        }
    }
}

/// What the allocator's answer means to the oracle.
///
/// # Panics
/// When the answer means nothing that a valid program can meet.
pub fn outcome(result: Result<Option<Allocation>, StepError>) -> Outcome {
    let error = match result {
        Ok(None) => return Outcome::Done,
        Ok(Some(Allocation { placement, size_bytes, .. })) => return Outcome::Placed { placement, size_bytes },
        Err(error) => error,
    };
    Outcome::Refused(match error {
        StepError::NotLive { .. } => Refusal::NotLive,
        StepError::Allocate(AllocateError::Sleeps(_)) => Refusal::Sleeps,
        StepError::Sleep(SleepError { cause: SleepCause::Unknown(_), .. }) => Refusal::UnknownPool,
        StepError::Sleep(SleepError {
            cause: SleepCause::Memory { cause: OutOfMemoryCause::Limit { scope, .. }, .. },
            ..
        }) => Refusal::Limit(scope),
        StepError::Allocate(AllocateError::TooLarge { .. }) => Refusal::TooLarge,
        StepError::Allocate(AllocateError::OutOfMemory(error)) => match error.cause {
            OutOfMemoryCause::Limit { scope, .. } => Refusal::Limit(scope),
            OutOfMemoryCause::SegmentFull { .. } => Refusal::SegmentFull,
            _ => Refusal::Driver,
        },
        StepError::Pool(PoolError::InUse { .. } | PoolError::Default) => Refusal::PoolInUse,
        StepError::Unknown(UnknownError::Stream { .. })
        | StepError::RecordUse(RecordUseError::Unknown(UnknownError::Stream { .. }))
        | StepError::Allocate(AllocateError::Unknown(UnknownError::Stream { .. })) => Refusal::UnknownStream,
        StepError::Unknown(_) | StepError::Allocate(AllocateError::Unknown(_)) => Refusal::UnknownPool,
        _ => Refusal::Driver,
    })
}

/// What a correct program does on the device.
#[derive(Debug)]
pub struct DeviceWork<'a> {
    device: &'a SimBackend,
    live: BTreeMap<AllocationId, Live>,
    /// Pools that sleep, with what becomes of their contents.
    asleep: BTreeMap<PoolId, Contents>,
}

/// A live allocation.
#[derive(Debug)]
struct Live {
    allocation: Allocation,
    /// Streams that use it.
    users: Vec<StreamId>,
    /// `None` after a restore.
    pool: Option<PoolId>,
    /// What it holds, if that is known.
    value: Option<u64>,
}

impl<'a> DeviceWork<'a> {
    /// Nothing yet.
    pub fn new(device: &'a SimBackend) -> Self {
        DeviceWork { device, live: BTreeMap::new(), asleep: BTreeMap::new() }
    }

    /// Submits the work that belongs to an op which the allocator answered so.
    ///
    /// # Panics
    /// At a race: the allocator did not order the memory's earlier users before this one. When an allocation does not hold what it
    /// should.
    pub fn submit(&mut self, op: &Op, result: &Result<Option<Allocation>, StepError>) {
        match (op, result) {
            (Op::Allocate { id, pool, stream, .. }, Ok(Some(allocation))) => {
                self.use_all(*stream, allocation);
                if allocation.size_bytes > 0 {
                    self.device.write(allocation.address, allocation.size_bytes, id.0);
                }
                let (users, value) = (vec![*stream], (allocation.size_bytes > 0).then_some(id.0));
                self.live.insert(*id, Live { allocation: *allocation, users, pool: Some(*pool), value });
            }
            (Op::RecordUse { id, stream }, Ok(None)) => {
                let Some(Live { allocation, users, pool, .. }) = self.live.get_mut(id) else { return };
                if !users.contains(stream) && users.iter().all(|earlier| waits(self.device, *stream, *earlier)) {
                    users.push(*stream);
                }
                // An earlier user may not use it again without waiting for the later ones, and nobody what sleeps.
                if users.last() == Some(stream) && !pool.is_some_and(|pool| self.asleep.contains_key(&pool)) {
                    let allocation = *allocation;
                    self.use_all(*stream, &allocation);
                }
            }
            (Op::Free { id }, Ok(None)) => {
                self.live.remove(id);
            }
            (
                Op::Sleep { pool, contents },
                Ok(None) | Err(StepError::Sleep(SleepError { cause: SleepCause::Held { .. }, .. })),
            ) => {
                self.asleep.entry(*pool).or_insert(*contents);
            }
            (Op::Wake { pool }, Ok(None)) => {
                let Some(contents) = self.asleep.remove(pool) else { return };
                for live in self.live.values_mut().filter(|live| live.pool == Some(*pool)) {
                    live.value = match contents {
                        Contents::Keep => live.value,
                        Contents::Zero => live.value.map(|_| 0),
                        _ => None,
                    };
                }
                self.live.values().filter(|live| live.pool == Some(*pool)).for_each(|live| self.check_value(live));
            }
            _ => {}
        }
    }

    /// An allocation holds what was written.
    fn check_value(&self, live: &Live) {
        let Live { allocation, value, .. } = live;
        if value.is_some() {
            let held = self.device.read(allocation.address, allocation.size_bytes);
            assert_eq!(held, *value, "what lies at {}", allocation.placement);
        }
    }

    /// An allocation is live again after a restore, and its stream uses it at once.
    ///
    /// # Panics
    /// At a race: the restore did not order the memory's earlier users before this one.
    pub fn adopt(&mut self, id: AllocationId, stream: StreamId, allocation: Allocation) {
        self.use_all(stream, &allocation);
        self.live.insert(id, Live { allocation, users: vec![stream], pool: None, value: None });
    }

    fn use_all(&self, stream: StreamId, allocation: &Allocation) {
        let used = self.device.submit(stream, allocation.address, allocation.size_bytes);
        used.unwrap_or_else(|race| panic!("a wait is missing at {}: {race}", allocation.placement));
    }
}

/// What the program itself does before it uses another stream's memory, behind the allocator's back. A program that
/// cannot wait does not use the memory.
fn waits(device: &SimBackend, stream: StreamId, on: StreamId) -> bool {
    let Ok(event) = device.record(on) else { return false };
    let waited = device.wait(stream, event);
    device.recycle(event);
    waited.is_ok()
}

/// The allocator's blocks are the oracle's, one by one.
fn compare_state<B: Backend, L: Lock>(allocator: &Allocator<B, L>, oracle: &Oracle, index: usize) {
    let stats = allocator.stats();
    let (live, requested) = oracle.live();
    assert_eq!(stats.reserved_bytes.current, oracle.reserved_bytes(), "op {index}: reserved bytes");
    assert_eq!(stats.usage.all.allocations.current, live, "op {index}: live allocations");
    assert_eq!(stats.usage.all.requested_bytes.current, requested, "op {index}: requested bytes");
    let snapshot = allocator.snapshot();
    let mut segments = snapshot.segments.iter();
    for (pool, entry) in oracle.pools() {
        // The program's pools and the allocator's have the same ids: both are dense, and none is made twice.
        assert_eq!(allocator.pool_stats(pool).map(|stats| stats.reserved_bytes.current), Ok(entry.reserved_bytes()));
        for (stream, heap) in &entry.heaps {
            for ordinal in 0..heap.segments.len() {
                let segment = segments.next().unwrap_or_else(|| panic!("op {index}: {pool} lacks a segment"));
                assert_eq!((segment.pool, segment.stream), (pool, *stream), "op {index}");
                compare_segment(segment, heap, ordinal, index);
            }
        }
    }
    assert_eq!(segments.next(), None, "op {index}: a segment too many");
}

/// Neighbours that are elsewhere count as one: no decision depends on where one ends.
fn joined(blocks: &[BlockSnapshot]) -> Vec<BlockSnapshot> {
    let mut joined: Vec<BlockSnapshot> = Vec::new();
    for block in blocks {
        match joined.last_mut() {
            Some(last) if [&last.state, &block.state] == [&BlockStateSnapshot::Elsewhere; 2] => {
                last.size_bytes += block.size_bytes;
            }
            _ => joined.push(block.clone()),
        }
    }
    joined
}

fn compare_segment(segment: &SegmentSnapshot, heap: &Heap, nth: usize, index: usize) {
    let expected = &heap.segments[nth];
    let place = format!("op {index}, {} {:?} segment {}", segment.pool, segment.stream, segment.segment.0);
    assert_eq!(segment.segment.0, expected.ordinal, "{place}");
    assert_eq!((segment.size_bytes, segment.mapped_bytes), (expected.end(), expected.mapped()), "{place}");
    let blocks = joined(&segment.blocks);
    assert_eq!(blocks.len(), expected.blocks.len(), "{place}: {segment:?}\n{expected:?}");
    for (block, expected) in blocks.iter().zip(&expected.blocks) {
        assert_eq!((block.offset_bytes, block.size_bytes), (expected.offset, expected.size), "{place}");
        match (&block.state, expected.content) {
            (BlockStateSnapshot::Allocated { used_by, .. }, Content::Allocated(_)) => {
                assert!(used_by.iter().all(|user| expected.users.contains(user)), "{place}: {block:?}");
            }
            (BlockStateSnapshot::Free { fenced_by }, Content::Free) => {
                let stranger = fenced_by.iter().find(|user| !expected.users.contains(user));
                assert_eq!(stranger, None, "{place}: fenced by a stream that never used it: {block:?}");
            }
            (BlockStateSnapshot::Hole, Content::Hole) | (BlockStateSnapshot::Elsewhere, Content::Elsewhere) => {}
            (state, content) => panic!("{place} at {}: {state:?} is not {content:?}", block.offset_bytes),
        }
    }
}
