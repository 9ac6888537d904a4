//! The generator: turns a seed into a configuration and ops that are valid in order.

use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{AllocationId, PoolId, StreamId};
use symmalloc_core::op::{Contents, Op, Record};
use symmalloc_core::units::MIB;
use symmalloc_sim::SplitMix64;

/// A job under construction.
pub(super) struct Draft {
    random: SplitMix64,
    config: Config,
    records: Vec<Record>,
    /// The existing pools, with their open steps and sleeps.
    pools: BTreeMap<PoolId, PoolState>,
    live: Vec<(AllocationId, PoolId)>,
    streams: u16,
    groups: Groups,
    pools_made: u32,
    allocations: u64,
    has_steps: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct PoolState {
    step: bool,
    asleep: bool,
}

impl Draft {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let total =
            if random.below(4) == 0 { format!("total_limit_mb:{},", 16 + random.below(240)) } else { String::new() };
        let config = (total + &pool_text(&mut random)).parse().expect("the configuration should be valid");
        let has_steps = random.below(4) == 0;
        let pools = BTreeMap::from([(PoolId::DEFAULT, PoolState::default())]);
        Draft {
            random,
            config,
            records: Vec::new(),
            pools,
            live: Vec::new(),
            streams: 0,
            groups: Groups::default(),
            pools_made: 1,
            allocations: 0,
            has_steps,
        }
    }

    fn chance(&mut self, of: u64) -> bool {
        self.random.below(of) == 0
    }

    fn push(&mut self, op: Op) {
        self.records.push(op.into());
    }

    fn stream(&mut self) -> StreamId {
        StreamId(self.random.below(self.streams.into()) as u16)
    }

    fn pool(&mut self) -> PoolId {
        let pools: Vec<PoolId> = self.pools.keys().copied().collect();
        pools[self.random.below(pools.len() as u64) as usize]
    }

    /// Returns a random size. Some sizes recur, and others do not.
    fn size_bytes(&mut self) -> u64 {
        match self.random.below(8) {
            0 => self.random.below(3),
            1 | 2 => 1 + self.random.below(MIB),
            3 => 1 + self.random.below(64 * MIB),
            4 => (1 + self.random.below(4)) * 16 * MIB,
            _ => (1 + self.random.below(8)) * MIB,
        }
    }

    pub(super) fn make(mut self) -> (Config, Vec<Record>) {
        for _ in 0..=self.random.below(3) {
            self.register_stream();
        }
        for _ in 0..self.random.below(3) {
            self.create_pool();
        }
        self.fill_quota(PoolId::DEFAULT, self.config.default_pool().has_quota());
        for _ in 0..10 + self.random.below(60) {
            self.step();
        }
        // Half of the jobs end abruptly, with live allocations, open steps and sleeping pools.
        if self.chance(2) {
            self.wake_all();
            self.free_of(None);
            self.end_steps();
        }
        (self.config, self.records)
    }

    fn register_stream(&mut self) {
        let stream = StreamId(self.streams);
        let others = u64::from(self.streams);
        let group = if others > 0 && self.chance(3) {
            self.groups.first_of(StreamId(self.random.below(others) as u16))
        } else {
            stream
        };
        let op = Op::RegisterStream { stream, group };
        op.note_group(&mut self.groups);
        self.push(op);
        self.streams += 1;
    }

    fn create_pool(&mut self) {
        let config: PoolConfig = pool_text(&mut self.random).parse().expect("the configuration should be valid");
        let pool = PoolId(self.pools_made);
        let has_quota = config.has_quota();
        self.pools_made += 1;
        self.push(Op::CreatePool { pool, config: Box::new(config) });
        self.pools.insert(pool, PoolState::default());
        self.fill_quota(pool, has_quota);
    }

    /// Usually fills a pool with a quota at its creation.
    fn fill_quota(&mut self, pool: PoolId, has_quota: bool) {
        if has_quota && !self.chance(4) {
            let (stream, size_bytes) = (self.stream(), (1 + self.random.below(96)) * MIB);
            self.push(Op::Reserve { pool, stream, size_bytes });
        }
    }

    fn wake_all(&mut self) {
        let asleep: Vec<PoolId> = self.pools.iter().filter(|(_, state)| state.asleep).map(|(pool, _)| *pool).collect();
        for pool in asleep {
            self.push(Op::Wake { pool });
            self.pools.insert(pool, PoolState { asleep: false, ..self.pools[&pool] });
        }
    }

    fn end_steps(&mut self) {
        let open: Vec<PoolId> = self.pools.iter().filter(|(_, state)| state.step).map(|(pool, _)| *pool).collect();
        for pool in open {
            self.push(Op::EndStep { pool });
            self.pools.insert(pool, PoolState { step: false, ..self.pools[&pool] });
        }
    }

    fn free_of(&mut self, pool: Option<PoolId>) {
        let (gone, kept) = self.live.iter().partition(|(_, of)| pool.is_none_or(|pool| pool == *of));
        self.live = kept;
        let gone: Vec<(AllocationId, PoolId)> = gone;
        gone.into_iter().for_each(|(id, _)| self.push(Op::Free { id }));
    }

    fn step(&mut self) {
        let pool = self.pool();
        let PoolState { step, asleep } = self.pools[&pool];
        match self.random.below(24) {
            0..=9 if !asleep => {
                let (id, stream, size_bytes) = (AllocationId(self.allocations), self.stream(), self.size_bytes());
                self.allocations += 1;
                self.push(Op::Allocate { id, pool, stream, size_bytes });
                self.live.push((id, pool));
            }
            10..=15 if !self.live.is_empty() => {
                let index = self.random.below(self.live.len() as u64) as usize;
                // The blocks of a sleeping pool must not change.
                if !self.pools[&self.live[index].1].asleep {
                    let (id, _) = self.live.swap_remove(index);
                    self.push(Op::Free { id });
                }
            }
            16 if !self.live.is_empty() => {
                let index = self.random.below(self.live.len() as u64) as usize;
                let (id, of) = self.live[index];
                if !self.pools[&of].asleep {
                    let stream = self.stream();
                    self.push(Op::RecordUse { id, stream });
                }
            }
            17 => {
                let (stream, on) = (self.stream(), self.stream());
                let waits = self.chance(2);
                self.push(if waits { Op::Wait { stream, on } } else { Op::Synchronize { stream } });
            }
            18 if !asleep => {
                let pool = if self.chance(2) { None } else { Some(pool) };
                self.push(Op::Trim { pool });
            }
            19 if !asleep => {
                let (stream, size_bytes) = (self.stream(), self.random.below(32) * MIB);
                self.push(Op::Reserve { pool, stream, size_bytes });
            }
            20 if self.has_steps && !asleep => {
                let key = self.random.below(2);
                self.push(if step { Op::EndStep { pool } } else { Op::BeginStep { pool, key } });
                self.pools.insert(pool, PoolState { step: !step, asleep });
            }
            21 if !step && self.chance(2) => {
                let contents = if self.chance(2) { Contents::Keep } else { Contents::Drop };
                self.push(if asleep { Op::Wake { pool } } else { Op::Sleep { pool, contents } });
                self.pools.insert(pool, PoolState { step, asleep: !asleep });
            }
            22 if pool != PoolId::DEFAULT && !asleep && !step && self.chance(2) => {
                self.free_of(Some(pool));
                self.push(Op::DestroyPool { pool });
                self.pools.remove(&pool);
            }
            23 if self.chance(3) => self.register_stream(),
            _ => {}
        }
    }
}

/// Returns random settings of a pool, in the notation of `config` lines and pools.
fn pool_text(random: &mut SplitMix64) -> String {
    if random.below(8) == 0 {
        return quota_text(random);
    }
    let mut text = match random.below(6) {
        0 => "segments:fixed".to_owned(),
        1 => format!("segments:fixed,max_split_size_mb:{}", 20 + random.below(100)),
        2 => "segments:fixed,unsplit:true".to_owned(),
        3 => format!("segments:reserved,segment_mb:{}", [4, 32, 128][random.below(3) as usize]),
        4 => "segments:expandable,stitching_granule_mb:2,stitching_least_mb:4".to_owned(),
        _ => "segments:expandable".to_owned(),
    };
    text += [",streams:shared", ",streams:grouped", "", ""][random.below(4) as usize];
    if random.below(4) == 0 && !text.contains("stitching") {
        text += ",symmetric:true";
    }
    if random.below(4) == 0 {
        text += &format!(",limit_mb:{}", 8 + random.below(160));
    }
    if random.below(8) == 0 {
        text += ",roundup_power2_divisions:4";
    }
    if random.below(8) == 0 {
        text += &format!(",release_threshold_mb:{}", random.below(32));
    }
    if random.below(6) == 0 {
        text += [",reclaim:never", ",reclaim:pool"][random.below(2) as usize];
    }
    text
}

/// Returns random settings of a pool with a quota.
fn quota_text(random: &mut SplitMix64) -> String {
    let mut text = "segments:expandable,growth_mb:0,streams:shared".to_owned();
    if random.below(2) == 0 {
        text += &format!(",range_mb:{}", [32, 64, 128][random.below(3) as usize]);
    }
    if random.below(4) == 0 {
        text += &format!(",limit_mb:{}", 8 + random.below(160));
    }
    if random.below(4) == 0 {
        text += ",symmetric:true";
    }
    text
}
