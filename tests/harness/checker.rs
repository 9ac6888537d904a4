//! The checker: runs a program on the real allocator and the oracle, on a simulated device that detects races.
//!
//! ```text
//!           ┌─► Oracle ──────────────► outcome ─┐
//!  op ──────┤                                   ├─ equal? snapshot equal? check() green?
//!           └─► Allocator ─► SimBackend ► outcome┘
//!                               ▲
//!   submit: work on every byte of an allocation, on each stream that uses it ─► Race if a wait is missing
//! ```
//!
//! The program is correct: a stream that uses another one's allocation waits for it first. The allocator must ensure all other order
//! between streams.

use crate::generate::{Access, Scenario};
use crate::oracle::{Content, Heap, Oracle, Outcome, Refusal};
use crate::run::Run;
use std::collections::BTreeMap;
use symmalloc_core::backend::Backend;
use symmalloc_core::errors::{AllocateError, OutOfMemory, OutOfMemoryCause, PoolError, RecordUseError, UnknownError};
use symmalloc_core::ids::HeapId;
use symmalloc_core::lock::{Exclusive, Lock};
use symmalloc_core::op::Contents;
use symmalloc_core::report::{BlockSnapshot, BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_core::{Allocation, AllocationId, Digest, Op, PoolId, StreamId, generic};
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::StepError;

/// Decisions of a run. Two runs are equal exactly if all their decisions are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Outcome of each op.
    pub outcomes: Vec<Outcome>,
    /// Digest of each live pool, at the end.
    pub digests: Vec<(PoolId, Digest)>,
}

/// Executes a scenario and compares every decision, block and counter with the oracle.
///
/// # Panics
/// Panics on the first difference, violated invariant, race, violation of the backend's contract, or leak.
pub fn compare_with_oracle(scenario: &Scenario, device: &SimBackend) -> Decisions {
    compare_at(scenario, device, |_| true)
}

/// Same as [`compare_with_oracle`], but checks blocks and invariants only after the selected ops. Decisions are always compared: a wrong
/// state shows at the next check or in a later decision.
///
/// # Panics
/// Same as [`compare_with_oracle`].
pub fn compare_at(scenario: &Scenario, device: &SimBackend, looks: impl Fn(usize) -> bool) -> Decisions {
    let mut oracle = Oracle::new(&scenario.config, scenario.granularity_bytes);
    decisions::<Exclusive>(scenario, device, |index, op, outcome, allocator| {
        let expected = oracle.step(op);
        assert_eq!(outcome, expected, "op {index}, {op:?}: the allocator decided differently from the oracle (right)");
        if looks(index) {
            allocator.check().unwrap_or_else(|violation| panic!("op {index}, {op:?}: {violation}"));
            compare_state(allocator, &oracle, index);
        }
    })
}

/// Executes a scenario with this kind of lock, and passes every decision to `look`.
///
/// # Panics
/// Panics on a violated invariant at the end, a race, a violation of the backend's contract, or a leak.
pub fn decisions<L: Lock>(
    scenario: &Scenario,
    device: &SimBackend,
    look: impl FnMut(usize, &Op, Outcome, &generic::Allocator<&SimBackend, L>),
) -> Decisions {
    decisions_through(scenario, device, device, look)
}

/// Same as [`decisions`], through a backend that wraps the device.
///
/// # Panics
/// Same as [`decisions`].
pub fn decisions_through<B: Backend, L: Lock>(
    scenario: &Scenario,
    backend: B,
    device: &SimBackend,
    mut look: impl FnMut(usize, &Op, Outcome, &generic::Allocator<B, L>),
) -> Decisions {
    let _report = PrintOnPanic(scenario);
    let mut decisions = Decisions::default();
    {
        let allocator = generic::Allocator::<_, L>::with_lock(backend, scenario.config.clone())
            .expect("the granularity should be valid");
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
    assert!(device.leaks().is_empty(), "the dropped allocator leaked: {}", device.leaks());
    decisions
}

/// Checks that the numbers in an error match the statistics.
fn check_refusal<B: Backend, L: Lock>(allocator: &generic::Allocator<B, L>, error: &OutOfMemory, index: usize) {
    let stats = allocator.pool_stats(error.pool).expect("the pool of the request");
    let held = (stats.reserved_bytes.current, stats.usage.all.allocated_bytes.current);
    assert_eq!((error.reserved_bytes, error.allocated_bytes), held, "op {index}: {error}");
    let snapshot = allocator.snapshot();
    let config = allocator.pool_config(error.pool).expect("the pool of the request");
    let streams = config.streams();
    let heap = HeapId { pool: error.pool, group: streams.group_of(error.stream, &allocator.groups()) };
    let is_of_heap = |segment: &&SegmentSnapshot| segment.heap == heap;
    let blocks = snapshot.segments.iter().filter(is_of_heap).flat_map(|segment| &segment.blocks);
    let free = blocks.filter(|block| matches!(block.state, BlockStateSnapshot::Free { .. }));
    let largest = free.map(|block| block.size_bytes).max().unwrap_or(0);
    // Blocks in a quarantine are free for the program only.
    let is_equal = error.largest_free_bytes == largest;
    let is_below = config.debug().quarantine_bytes > 0 && error.largest_free_bytes < largest;
    assert!(is_equal || is_below, "op {index}: the largest free block: {} and {largest}", error.largest_free_bytes);
}

/// A guard that prints the trace of a failed scenario as a bug report.
#[derive(Debug)]
pub struct PrintOnPanic<'a>(pub &'a Scenario);

impl Drop for PrintOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let is_by_address = |index: &usize| self.0.access[*index] == Access::Address;
            let by_address: Vec<usize> = (0..self.0.access.len()).filter(is_by_address).collect();
            println!("granularity {} bytes\n{}", self.0.granularity_bytes, self.0.trace());
            println!("ops that identify allocations by address: {by_address:?}");
        }
    }
}

/// Converts the allocator's result to an outcome of the oracle.
///
/// # Panics
/// Panics if a valid program cannot produce the result.
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
            OutOfMemoryCause::SegmentFull { .. } | OutOfMemoryCause::AddressesFull { .. } => Refusal::SegmentFull,
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

/// The device work of a correct program.
#[derive(Debug)]
pub struct DeviceWork<'a> {
    device: &'a SimBackend,
    live: BTreeMap<AllocationId, Live>,
    /// Sleeping pools, with what happens to their contents.
    asleep: BTreeMap<PoolId, Contents>,
}

/// A live allocation.
#[derive(Debug)]
struct Live {
    allocation: Allocation,
    /// Streams that use the allocation.
    users: Vec<StreamId>,
    /// `None` after a restore.
    pool: Option<PoolId>,
    /// Value that the allocation holds, if known.
    value: Option<u64>,
}

impl<'a> DeviceWork<'a> {
    /// Creates an empty state.
    pub fn new(device: &'a SimBackend) -> Self {
        DeviceWork { device, live: BTreeMap::new(), asleep: BTreeMap::new() }
    }

    /// Submits the device work that belongs to an op with this result.
    ///
    /// # Panics
    /// Panics on a race, if the allocator did not order the memory's earlier users before this one, or if an allocation does not hold its
    /// expected value.
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
                // An earlier user may not use the allocation again without waiting for the later ones, and no stream may use a sleeping
                // pool.
                if users.last() == Some(stream) && !pool.is_some_and(|pool| self.asleep.contains_key(&pool)) {
                    let allocation = *allocation;
                    self.use_all(*stream, &allocation);
                }
            }
            (Op::Free { id }, Ok(None)) => {
                self.live.remove(id);
            }
            (Op::ResetPool { pool }, Ok(None)) => {
                self.live.retain(|_, live| live.pool != Some(*pool) || live.allocation.size_bytes == 0);
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

    /// Checks that an allocation holds the value written to it.
    fn check_value(&self, live: &Live) {
        let Live { allocation, value, .. } = live;
        if value.is_some() {
            let held = self.device.read(allocation.address, allocation.size_bytes);
            assert_eq!(held, *value, "value at {}", allocation.placement);
        }
    }

    /// Registers an allocation that a restore made live. Its stream uses it at once.
    ///
    /// # Panics
    /// Panics on a race: the restore did not order the memory's earlier users before this one.
    pub fn adopt(&mut self, id: AllocationId, stream: StreamId, allocation: Allocation) {
        self.use_all(stream, &allocation);
        self.live.insert(id, Live { allocation, users: vec![stream], pool: None, value: None });
    }

    fn use_all(&self, stream: StreamId, allocation: &Allocation) {
        let used = self.device.submit(stream, allocation.address, allocation.size_bytes);
        used.unwrap_or_else(|race| panic!("missing wait at {}: {race}", allocation.placement));
    }
}

/// Makes a stream wait for another one before it uses that one's memory. The program does this itself, without the allocator. Returns
/// `false` if it cannot wait; the program then does not use the memory.
fn waits(device: &SimBackend, stream: StreamId, on: StreamId) -> bool {
    let Ok(event) = device.record(on) else { return false };
    let waited = device.wait(stream, event);
    device.recycle(event);
    waited.is_ok()
}

/// Checks that the allocator's blocks equal the oracle's.
fn compare_state<B: Backend, L: Lock>(allocator: &generic::Allocator<B, L>, oracle: &Oracle, index: usize) {
    let stats = allocator.stats();
    let (live, requested) = oracle.live();
    assert_eq!(stats.reserved_bytes.current, oracle.reserved_bytes(), "op {index}: reserved bytes");
    assert_eq!(stats.usage.all.allocations.current, live, "op {index}: live allocations");
    assert_eq!(stats.usage.all.requested_bytes.current, requested, "op {index}: requested bytes");
    let snapshot = allocator.snapshot();
    let mut segments = snapshot.segments.iter();
    for (pool, entry) in oracle.pools() {
        // The program's pools and the allocator's have the same ids: both are dense, and no pool is created twice.
        assert_eq!(allocator.pool_stats(pool).map(|stats| stats.reserved_bytes.current), Ok(entry.reserved_bytes()));
        for (group, heap) in &entry.heaps {
            for ordinal in 0..heap.segments.len() {
                let segment = segments.next().unwrap_or_else(|| panic!("op {index}: {pool} lacks a segment"));
                assert_eq!(segment.heap, HeapId { pool, group: *group }, "op {index}");
                compare_segment(segment, heap, ordinal, index);
            }
        }
    }
    assert_eq!(segments.next(), None, "op {index}: an extra segment");
}

/// Joins adjacent blocks whose memory is in use under other addresses: no decision depends on the boundary between
/// them.
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
    let place = format!("op {index}, {} segment {}", segment.heap, segment.segment.0);
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
