//! Mutations: a single difference, injected into one rank's program.
//!
//! A program and its mutant have the same number of ops, so an op index means the same in both. A missing op is replaced with [`Op::Sync`],
//! and an extra op replaces a `Sync` of the program.
//!
//! *The injected op* is the first at which the two differ. One case is ambiguous: among consecutive equal requests in a heap (two
//! allocations of 512 bytes in a row), omitting any is the same as omitting the last, so the last one counts. Mutations that change
//! nothing, such as swapping equal requests, are not generated.

use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig, Reclaim, RoundupPower2Divisions, StreamPolicy};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::op::{Contents, Op, Record};
use symmalloc_core::units::{MIB, SEGMENT_BYTES_MAX};
use symmalloc_core::{AllocationId, PoolId, StreamId};
use symmalloc_sim::SplitMix64;

/// A kind of difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An allocation is one byte larger.
    Size,
    /// Two consecutive ops of a heap are swapped.
    Swap,
    /// A free is missing.
    MissingFree,
    /// A record use is missing, and with it the resulting fence.
    MissingRecordUse,
    /// An allocation is on another stream, possibly one that only this rank registers.
    DifferentStream,
    /// An additional allocation or reservation on this rank.
    ExtraOp,
    /// A sleeping pool keeps contents that it drops on the other ranks, or vice versa.
    Contents,
    /// A value of the configuration differs.
    Configuration,
    /// The driver is out of memory once.
    RefusedMemory,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Size,
        Kind::Swap,
        Kind::MissingFree,
        Kind::MissingRecordUse,
        Kind::DifferentStream,
        Kind::ExtraOp,
        Kind::Contents,
        Kind::Configuration,
        Kind::RefusedMemory,
    ];
}

/// A program whose pools are all symmetric, with positions for additional ops.
#[derive(Clone, Debug)]
pub struct SymmetricProgram {
    /// The allocator's configuration.
    pub config: Config,
    /// Its ops: stream registrations, a `Sync` at each position for an additional op, and the rest.
    pub records: Vec<Record>,
    streams: u16,
    groups: Groups,
    /// Heap and size of each allocation.
    allocations: BTreeMap<AllocationId, (Heap, u64)>,
    pools: BTreeMap<PoolId, PoolConfig>,
}

/// A heap, as the program identifies it.
type Heap = (PoolId, StreamGroup);

/// A mutated program and its difference.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// Its program.
    pub program: SymmetricProgram,
    /// Index of the injected op.
    pub op: usize,
    /// The configuration's key, for [`Kind::Configuration`].
    pub key: Option<&'static str>,
}

impl SymmetricProgram {
    /// Makes every pool of a program symmetric, and names every second allocation. Omits ops on allocations that were created before
    /// `records`.
    ///
    /// # Panics
    /// Panics if a configuration without a threshold is invalid, which never happens.
    pub fn new<'a>(config: &Config, records: impl IntoIterator<Item = &'a Record>) -> Self {
        let symmetric = |pool: &PoolConfig| {
            pool.to_builder().stitching(None).symmetric(true).build().expect("the configuration should be valid")
        };
        let config = config
            .to_builder()
            .default_pool(symmetric(config.default_pool()))
            .build()
            .expect("the configuration should be valid");
        let mut program = SymmetricProgram {
            pools: BTreeMap::from([(PoolId::DEFAULT, config.default_pool().clone())]),
            config,
            records: Vec::new(),
            streams: 0,
            groups: Groups::default(),
            allocations: BTreeMap::new(),
        };
        let mut body = Vec::new();
        for record in records {
            let mut record = record.clone();
            match &mut record.op {
                Op::RegisterStream { .. } => {
                    record.op.note_group(&mut program.groups);
                    program.records.push(record.op.into());
                    program.streams += 1;
                    continue;
                }
                Op::CreatePool { pool, config } => {
                    **config = symmetric(config);
                    program.pools.insert(*pool, (**config).clone());
                }
                Op::Allocate { id, pool, stream, size_bytes } => {
                    program.allocations.insert(*id, (program.heap(*pool, *stream), *size_bytes));
                    if id.0 % 2 == 0 {
                        record.name = Some(format!("tensor {}", id.0).into());
                    }
                }
                Op::Free { id } | Op::RecordUse { id, .. } if !program.allocations.contains_key(id) => continue,
                _ => {}
            }
            body.push(record);
        }
        program.records.push(Op::Sync.into());
        program.records.extend(body);
        program
    }

    /// Returns the index of the first op after the registrations.
    fn begin(&self) -> usize {
        usize::from(self.streams) + 1
    }

    fn heap(&self, pool: PoolId, stream: StreamId) -> Heap {
        let streams = self.pools.get(&pool).map(PoolConfig::streams).unwrap_or_default();
        (pool, streams.group_of(stream, &self.groups))
    }

    /// Returns the only heap that an op affects.
    fn heap_of(&self, op: &Op) -> Option<Heap> {
        match op {
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => Some(self.heap(*pool, *stream)),
            Op::Free { id } | Op::RecordUse { id, .. } => self.allocations.get(id).map(|(heap, _)| *heap),
            _ => None,
        }
    }

    fn touches(&self, op: &Op, heap: Heap) -> bool {
        match op {
            Op::Trim { pool } => pool.is_none_or(|pool| pool == heap.0),
            Op::DestroyPool { pool } | Op::Sleep { pool, .. } | Op::Wake { pool } => *pool == heap.0,
            _ => self.heap_of(op) == Some(heap),
        }
    }

    fn next_in(&self, heap: Heap, after: usize) -> Option<usize> {
        (after + 1..self.records.len()).find(|index| self.touches(&self.records[*index].op, heap))
    }

    /// Returns `true` if two ops make the same request.
    fn is_same(&self, one: &Op, other: &Op) -> bool {
        let is_empty = |id: &AllocationId| self.allocations.get(id).is_some_and(|(_, size_bytes)| *size_bytes == 0);
        match (one, other) {
            (Op::Allocate { stream, size_bytes, .. }, Op::Allocate { stream: other, size_bytes: other_bytes, .. }) => {
                (stream, size_bytes) == (other, other_bytes)
            }
            (Op::Free { id }, Op::Free { id: other }) => id == other || is_empty(id) && is_empty(other),
            _ => one == other,
        }
    }

    /// Returns the last of the consecutive equal requests in the heap, starting from here.
    fn last_equal(&self, heap: Heap, op: &Op, from: usize) -> usize {
        match self.next_in(heap, from) {
            Some(next) if self.is_same(&self.records[next].op, op) => self.last_equal(heap, op, next),
            _ => from,
        }
    }

    fn at(&self, index: usize) -> &Op {
        &self.records[index].op
    }

    /// Returns the index of a random op that satisfies the predicate.
    fn pick(&self, random: &mut SplitMix64, is_it: impl Fn(&Op) -> bool) -> Option<usize> {
        let (begin, len) = (self.begin(), self.records.len());
        let first = begin + random.below((len - begin) as u64) as usize;
        (first..len).chain(begin..first).find(|index| is_it(self.at(*index)))
    }

    fn mutant(&self, op: usize, change: impl FnOnce(&mut SymmetricProgram)) -> Option<Mutant> {
        let mut program = self.clone();
        change(&mut program);
        Some(Mutant { program, op, key: None })
    }

    /// Returns the program with one difference of this kind at a random position, or `None` if it would change nothing. Refused memory is
    /// not a difference in the program.
    ///
    /// For [`Kind::ExtraOp`], the program itself gets an additional `Sync`.
    pub fn mutate(&mut self, kind: Kind, random: &mut SplitMix64) -> Option<Mutant> {
        match kind {
            Kind::Size => {
                let index = self.pick(random, |op| matches!(op, Op::Allocate { size_bytes: 1.., .. }))?;
                self.mutant(index, |program| {
                    if let Op::Allocate { size_bytes, .. } = &mut program.records[index].op {
                        *size_bytes += 1;
                    }
                })
            }
            Kind::Swap => {
                let one = self.pick(random, |op| self.heap_of(op).is_some())?;
                let other = self.next_in(self.heap_of(self.at(one))?, one)?;
                self.heap_of(self.at(other))?;
                let (id, other_id) = (id_of(self.at(one)), id_of(self.at(other)));
                if self.is_same(self.at(one), self.at(other)) || id.is_some() && id == other_id {
                    return None;
                }
                self.mutant(one, |program| program.records.swap(one, other))
            }
            Kind::MissingFree => self.leave_out(self.pick(random, |op| matches!(op, Op::Free { .. }))?),
            Kind::MissingRecordUse => self.leave_out(self.pick(random, |op| matches!(op, Op::RecordUse { .. }))?),
            Kind::DifferentStream => self.move_stream(random),
            Kind::ExtraOp => self.add_op(random),
            Kind::Contents => {
                let index = self.pick(random, |op| matches!(op, Op::Sleep { .. }))?;
                self.mutant(index, |program| {
                    if let Op::Sleep { contents, .. } = &mut program.records[index].op {
                        *contents = if *contents == Contents::Keep { Contents::Drop } else { Contents::Keep };
                    }
                })
            }
            Kind::Configuration => self.reconfigure(random),
            Kind::RefusedMemory => None,
        }
    }

    fn leave_out(&self, index: usize) -> Option<Mutant> {
        let op = self.at(index);
        let index = self.last_equal(self.heap_of(op)?, op, index);
        self.mutant(index, |program| program.records[index] = Op::Sync.into())
    }

    fn move_stream(&self, random: &mut SplitMix64) -> Option<Mutant> {
        // A request larger than any segment is refused before it becomes an op of a heap.
        let fits = 0..=SEGMENT_BYTES_MAX;
        let index =
            self.pick(random, |op| matches!(op, Op::Allocate { size_bytes, .. } if fits.contains(size_bytes)))?;
        let mut moved = self.records[index].clone();
        let Op::Allocate { id, pool, stream, size_bytes } = &mut moved.op else { return None };
        let old = *stream;
        *stream = StreamId(random.below(u64::from(self.streams) + 1) as u16);
        let (new, id, heap) = (*stream, *id, (self.heap(*pool, *stream), *size_bytes));
        // If an equal request follows in either heap, it would be a different mutation.
        let is_last = |heap, op: &Op| self.last_equal(heap, op, index) == index;
        let is_exact = is_last(self.heap_of(self.at(index))?, self.at(index)) && is_last(heap.0, &moved.op);
        if new == old || !is_exact {
            return None;
        }
        let registers = self.begin() - 1;
        self.mutant(index, |program| {
            if new.0 == self.streams {
                program.records[registers] = Op::register(new).into();
            }
            program.records[index] = moved;
            program.allocations.insert(id, heap);
        })
    }

    fn add_op(&mut self, random: &mut SplitMix64) -> Option<Mutant> {
        let begin = self.begin();
        let at = begin + random.below((self.records.len() - begin) as u64) as usize;
        let created = self.records[..at].iter().filter_map(|record| match &record.op {
            Op::CreatePool { pool, .. } => Some(*pool),
            _ => None,
        });
        let pools: Vec<PoolId> = [PoolId::DEFAULT].into_iter().chain(created).collect();
        let pool = pools[random.below(pools.len() as u64) as usize];
        let stream = StreamId(random.below(self.streams.into()) as u16);
        let size_bytes = [1, 512, 70_000, 3 * MIB, 21 * MIB][random.below(5) as usize];
        let id = AllocationId(u64::MAX);
        let op = match random.below(4) {
            0 => Op::Reserve { pool, stream, size_bytes },
            _ => Op::Allocate { id, pool, stream, size_bytes },
        };
        let heap = self.heap(pool, stream);
        // A heap that this op creates has trims that the other ranks lack, because their heap does not exist yet.
        let is_first = !self.records[..at].iter().any(|record| self.heap_of(&record.op) == Some(heap));
        let next = self.records[at..].iter().find(|record| self.heap_of(&record.op) == Some(heap));
        if is_first && next.is_some_and(|next| self.is_same(&next.op, &op)) {
            return None;
        }
        // After the equal requests that follow.
        let index = self.last_equal(heap, &op, at - 1) + 1;
        self.records.insert(index, Op::Sync.into());
        self.mutant(index, |program| program.records[index] = op.into())
    }

    fn reconfigure(&self, random: &mut SplitMix64) -> Option<Mutant> {
        if random.below(6) == 0 {
            let limit = self.config.total_limit_bytes().map_or(70_000 * MIB, |limit| limit + MIB);
            let mut mutant = self.mutant(0, |program| {
                program.config = program
                    .config
                    .to_builder()
                    .total_limit_bytes(Some(limit))
                    .build()
                    .expect("the configuration should be valid");
            })?;
            mutant.key = Some("total_limit_bytes");
            return Some(mutant);
        }
        let created = self.pick(random, |op| matches!(op, Op::CreatePool { .. }));
        let index = created.filter(|_| random.below(2) == 0);
        let old = match index.map(|index| self.at(index)) {
            Some(Op::CreatePool { config, .. }) => (**config).clone(),
            _ => self.config.default_pool().clone(),
        };
        let (pool, key) = match random.below(4) {
            0 => (old.to_builder().limit_bytes(Some(old.limit_bytes().unwrap_or(0) + MIB)), "limit_bytes"),
            1 if !old.has_quota() => {
                let reclaim = if old.reclaim() == Reclaim::Never { Reclaim::Pool } else { Reclaim::Never };
                (old.to_builder().reclaim(reclaim), "reclaim")
            }
            2 if !old.has_quota() => {
                let is_shared = old.streams() == StreamPolicy::Shared;
                let streams = if is_shared { StreamPolicy::Separate } else { StreamPolicy::Shared };
                (old.to_builder().streams(streams), "streams")
            }
            _ => {
                let is_rounded = old.roundup_power2_divisions().divisions()[0] != 0;
                let divisions =
                    RoundupPower2Divisions::uniform(if is_rounded { 0 } else { 8 }).expect("the input should be valid");
                (old.to_builder().roundup_power2_divisions(divisions), "roundup_power2_divisions")
            }
        };
        let new = pool.build().expect("the configuration should be valid");
        let mut mutant = self.mutant(index.unwrap_or(0), |program| match index {
            Some(index) => {
                if let Op::CreatePool { config, .. } = &mut program.records[index].op {
                    **config = new;
                }
            }
            None => {
                program.config =
                    program.config.to_builder().default_pool(new).build().expect("the configuration should be valid");
            }
        })?;
        mutant.key = Some(key);
        Some(mutant)
    }
}

fn id_of(op: &Op) -> Option<AllocationId> {
    match op {
        Op::Allocate { id, .. } | Op::Free { id } | Op::RecordUse { id, .. } => Some(*id),
        _ => None,
    }
}
