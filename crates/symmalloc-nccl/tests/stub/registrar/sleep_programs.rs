//! Random programs on 2 to 4 ranks in which pools sleep and wake: with suspended communicators, on full devices, and with every way in
//! which one rank makes room alone. Each wake succeeds after one recovery, kept contents are unchanged, all-reduces in windows are correct,
//! and symmetric pools have equal digests.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Mutex;
use stub_process::{nccl, nccl_test};
use symmalloc_core::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{CollectiveSleepError, Communicator, SyncError};
use symmalloc_sim::SplitMix64;

/// Number of programs; `SYMMALLOC_SEEDS` overrides it.
const SEEDS: u64 = 30;
const STEPS: usize = 10;
/// Maximum number of bytes of all symmetric pools. The stub's devices have more.
const SYMMETRIC_MAX: u64 = 160 * MIB;

/// The state of one rank's program. All ranks draw the same random numbers.
struct Program<'a> {
    it: &'a Rank,
    draw: SplitMix64,
    pools: Vec<Sleeper>,
    /// The world, and another communicator of all ranks.
    comms: [Communicator; 2],
}

/// A symmetric pool with its tensors.
struct Sleeper {
    pool: Pool<CudaBackend>,
    /// Each tensor with its first element, which identifies its contents.
    tensors: Vec<(DeviceBuffer<f32>, f32)>,
    /// The index of the communicator that it sleeps over.
    over: usize,
}

/// Private memory that fills a device.
struct Full {
    pool: Pool<CudaBackend>,
    buffers: Vec<DeviceBuffer<u8>>,
    /// The number of the way in which the rank makes room.
    way: usize,
}

impl Program<'_> {
    fn below(&mut self, limit: usize) -> usize {
        (self.draw.next_u64() % limit.max(1) as u64) as usize
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn step(&mut self) {
        let index = self.below(self.pools.len());
        match self.below(10) {
            0..4 => self.allocate(index),
            4 if !self.pools[index].tensors.is_empty() => {
                let tensor = self.below(self.pools[index].tensors.len());
                self.pools[index].tensors.swap_remove(tensor);
            }
            5 => drop(self.it.trim(&self.pools[index].pool)),
            _ => self.cycle(),
        }
        self.it.check();
    }

    fn allocate(&mut self, index: usize) {
        let size_bytes = MIB * (1 + self.below(6) as u64);
        let value = self.below(1000) as f32;
        let held: u64 = self.pools.iter().map(|it| self.reserved_bytes(it)).sum();
        if held + size_bytes.next_multiple_of(20 * MIB) > SYMMETRIC_MAX {
            return;
        }
        let mut tensor = self.it.take(&self.pools[index].pool, size_bytes);
        self.write(&mut tensor, value);
        self.pools[index].tensors.push((tensor, value));
        let comms: Vec<&Communicator> = self.comms.iter().collect();
        self.it.registrar.sync(&comms).expect("the ranks should agree");
    }

    fn reserved_bytes(&self, sleeper: &Sleeper) -> u64 {
        self.it.allocator.core().pool_stats(sleeper.pool.id()).expect("the pool should exist").reserved_bytes.current
    }

    fn write(&self, tensor: &mut DeviceBuffer<f32>, value: f32) {
        self.it
            .stream
            .memcpy_htod(&[value, self.it.rank as f32], &mut tensor.slice_mut(0..2))
            .expect("the copy should succeed");
    }

    /// Puts pools to sleep, does other work, and wakes them.
    fn cycle(&mut self) {
        let mut asleep: Vec<usize> = (0..self.pools.len()).collect();
        if self.coin() {
            let index = self.below(asleep.len());
            asleep.swap_remove(index);
        }
        let contents: Vec<Contents> =
            asleep.iter().map(|_| if self.coin() { Contents::Keep } else { Contents::Drop }).collect();
        for (index, contents) in asleep.iter().zip(&contents) {
            let Sleeper { pool, over, .. } = &self.pools[*index];
            self.it.registrar.sleep(&self.comms[*over], pool.id(), *contents).expect("all ranks should sleep together");
        }
        // Communicators can be suspended once all pools with windows on them sleep.
        let suspends = self.coin();
        let is_unused =
            self.it.registrar.communicator_stats(&self.comms[0]).expect("the pool should be attached").windows == 0;
        if let (true, Some(last)) = (suspends, asleep.last()) {
            let Sleeper { pool, over, .. } = &self.pools[*last];
            let slept = self.it.registrar.sleep_and_suspend(&self.comms[*over], pool.id(), Contents::Drop);
            if is_unused {
                assert_eq!(slept.expect("all pools sleep").suspended_bytes, 2 * 64 * MIB);
            } else {
                assert!(matches!(slept, Err(CollectiveSleepError::Refused { .. })), "{slept:?}");
            }
        }
        let is_suspended = self.comms[0].is_suspended();
        assert_eq!(is_suspended, suspends && is_unused);
        let synced = self.it.registrar.sync(&[&self.comms[0], &self.comms[1]]);
        assert_eq!(matches!(synced, Err(SyncError::Suspended { .. })), is_suspended, "{synced:?}");
        self.private();
        let at = self.below(asleep.len());
        if self.coin() && !self.pools[asleep[at]].tensors.is_empty() {
            self.pools[asleep[at]].tensors.pop();
        }
        let (full_rank, way) = (self.below(2 * self.it.ranks), self.below(5));
        let mut full = (full_rank == self.it.rank).then(|| self.fill(way));
        for index in &asleep {
            self.wake(*index, &mut full);
        }
        drop(full);
        self.it.allocator.trim_private();
        for (index, contents) in asleep.into_iter().zip(contents) {
            self.check_contents(index, contents);
        }
    }

    /// Allocates and frees private memory on one rank, which may stay cached.
    fn private(&mut self) {
        if self.below(self.it.ranks) == self.it.rank {
            let stream = &self.it.stream;
            drop(self.it.allocator.alloc_zeroed::<u8>(stream, 30 << 20).expect("the allocation should fit"));
        }
    }

    /// Fills this rank's device with private memory.
    fn fill(&self, way: usize) -> Full {
        let config = PoolConfig::builder().fixed().build().expect("the configuration should be valid");
        let pool = self.it.allocator.create_pool(config).expect("the pool should fit into the device");
        let mut buffers = Vec::new();
        for mib in [64, 16, 2] {
            // SAFETY: every bit pattern is a valid `u8`.
            while let Ok(buffer) = unsafe { self.it.allocator.with_pool(&pool).alloc(&self.it.stream, mib << 20) } {
                buffers.push(buffer);
            }
        }
        Full { pool, buffers, way }
    }

    /// Wakes a pool. If it is refused because a device is full, that rank makes room, and the next wake succeeds.
    fn wake(&mut self, index: usize, full: &mut Option<Full>) {
        let Sleeper { pool, over, .. } = &self.pools[index];
        let (comm, pool) = (&self.comms[*over], pool.id());
        let mut kept = None;
        for attempt in 0.. {
            let before = self.it.allocator.digest(pool);
            match self.it.registrar.wake(comm, pool) {
                Ok(_) => break,
                Err(CollectiveSleepError::NoRoom { .. }) => {
                    assert!(full.is_some(), "only the full device has no room");
                    assert_eq!(self.it.allocator.digest(pool), before, "the call is no op");
                }
                Err(CollectiveSleepError::Refused { ranks, .. }) => {
                    assert_eq!((ranks.len(), attempt), (1, 0), "{ranks:?}");
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(self.it.registrar.phase(pool), Ok(Phase::Asleep));
            let refused = self.it.allocator.digest(pool);
            if let Some(full) = full.take() {
                kept = self.recover(full);
            }
            assert_eq!(self.it.allocator.digest(pool), refused, "a recovery is no op of the pool");
        }
        drop(kept);
    }

    /// Makes room on this rank alone. Returns what must live until the wake.
    fn recover(&self, full: Full) -> Option<(Pool<CudaBackend>, Vec<DeviceBuffer<u8>>)> {
        let Full { pool, buffers, way } = full;
        // A symmetric pool that is awake must not be trimmed on one rank alone.
        let may_trim = self.pools.iter().all(|it| self.it.registrar.phase(it.pool.id()) == Ok(Phase::Asleep));
        match way {
            0 => {
                self.it.allocator.sleep(pool.id(), Contents::Drop).expect("no work uses it");
                return Some((pool, buffers));
            }
            1 => {
                drop((buffers, pool));
                return None;
            }
            2 if may_trim => {
                drop(buffers);
                self.it.allocator.trim_all().expect("the trim should succeed");
            }
            3 => {
                drop(buffers);
                self.it.allocator.trim_private();
            }
            _ => drop(buffers),
        }
        Some((pool, Vec::new()))
    }

    /// Checks kept contents, and reduces each tensor of the pool on both communicators.
    fn check_contents(&mut self, index: usize, contents: Contents) {
        let (rank, mut tensors) = (self.it.rank as f32, std::mem::take(&mut self.pools[index].tensors));
        for (tensor, value) in &mut tensors {
            if contents == Contents::Keep {
                let held = self.it.stream.clone_dtoh(&tensor.slice(0..2)).expect("the copy should succeed");
                assert_eq!(held, [*value, rank]);
            }
            self.comms.iter().for_each(|comm| self.it.reduce_right(comm, tensor));
            self.write(tensor, *value);
        }
        self.pools[index].tensors = tensors;
        nccl::assert_clean();
    }
}

fn run(seed: u64, id: &Mutex<Option<symmalloc_nccl::UniqueId>>) {
    let digests = Job::new(2 + (seed % 3) as usize).run(|it| {
        let other = it.connect("other", id);
        let comms = [it.world.clone(), other];
        let pools = (0..2).map(|over| {
            let pool = it.attached_pool();
            it.registrar
                .attach(&comms[1], &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            Sleeper { pool, tensors: Vec::new(), over }
        });
        let mut program = Program { it, draw: SplitMix64::new(seed), pools: pools.collect(), comms };
        (0..STEPS).for_each(|_| program.step());
        let digests: Vec<_> = program.pools.iter().map(|sleeper| it.allocator.digest(sleeper.pool.id())).collect();
        program.comms[1].destroy().expect("the communicator is idle");
        it.meet();
        digests
    });
    assert!(digests.iter().all(|other| *other == digests[0]), "seed {seed}: placements differ");
    nothing_is_left();
}

nccl_test!(
    random_programs_with_sleeps_and_recoveries_are_correct,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64", "STUB_MEMORY_BYTES" = "268435456"],
    {
        let seeds = std::env::var("SYMMALLOC_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS);
        for seed in 0..seeds {
            run(seed, &Mutex::new(None));
        }
    }
);
