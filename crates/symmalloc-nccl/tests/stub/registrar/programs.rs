//! Random programs on 2 to 4 ranks: hundreds of seeds with allocations, frees, trims, pools, syncs, sleeps, communicators that are created,
//! shrunk, grown, revoked and destroyed, and faults, by the rules of several versions of NCCL. After every sync, all-reduces in windows are
//! correct and the stub detects no violations. At the end, no resource is left.

use super::support::{IMPATIENT, Job, MIB, PATIENT, Rank, nothing_is_left};
use std::collections::BTreeSet;
use std::sync::Mutex;
use stub_process::{nccl, nccl_test, scaled_to_load, until};
use symmalloc_agreement::Mode;
use symmalloc_core::op::Contents;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{
    Capability, CommState, Communicator, Invalidated, InvalidationCursor, SegmentKey, UniqueId, WatchdogMode,
};
use symmalloc_sim::SplitMix64;

/// Number of programs per test. `SYMMALLOC_SEEDS` overrides it, as a separate step of CI does.
const SEEDS: u64 = 60;
const STEPS: u64 = 40;

/// The state of one rank's program. All ranks draw the same random numbers.
struct Program<'a> {
    it: &'a Rank,
    draw: SplitMix64,
    id: &'a Mutex<Option<UniqueId>>,
    /// Each tensor with the index of its pool.
    tensors: Vec<(usize, DeviceBuffer<f32>)>,
    pools: Vec<Pool<CudaBackend>>,
    comms: Vec<CommunicatorState>,
    made: u32,
    /// `true` if calls of syncs occasionally fail or hang.
    faults: bool,
    /// Names of communicators that ended on some rank.
    ended: &'a Mutex<BTreeSet<String>>,
}

/// A communicator with its attached pools.
struct CommunicatorState {
    comm: Communicator,
    /// Indices of the attached pools.
    pools: Vec<usize>,
    cursor: InvalidationCursor,
    /// Keys that were seen in windows and have not been invalidated.
    keys: Vec<SegmentKey>,
    is_aborted: bool,
}

impl Program<'_> {
    fn below(&mut self, limit: usize) -> usize {
        (self.draw.next_u64() % limit.max(1) as u64) as usize
    }

    fn step(&mut self) {
        match self.below(100) {
            0..35 => self.allocate(),
            35..60 if !self.tensors.is_empty() => {
                let index = self.below(self.tensors.len());
                self.tensors.swap_remove(index);
            }
            60..68 => {
                let pool = self.below(self.pools.len());
                self.it.trim(&self.pools[pool]);
            }
            68..84 => self.sync(),
            84..87 => self.sleep(),
            87..88 => self.shrink(),
            90 if self.comms.len() > 1 => self.revoke(),
            88..91 if self.pools.len() < 4 => self.make_pool(),
            91..94 if self.comms.len() < 4 => self.connect(),
            94..96 if self.comms.len() > 1 => self.destroy(),
            96..98 => self.detach(),
            98..100 if self.comms.len() > 1 => self.end_without_a_word(),
            _ => self.private(),
        }
    }

    fn allocate(&mut self) {
        let pool = self.below(self.pools.len());
        let size = match self.below(4) {
            0 => 512 * (1 + self.below(64) as u64),
            1 => MIB * (1 + self.below(9) as u64),
            _ => MIB * (11 + self.below(40) as u64),
        };
        // SAFETY: every bit pattern is a valid `f32`.
        let taken = unsafe { self.it.allocator.with_pool(&self.pools[pool]).alloc(&self.it.stream, size as usize / 4) };
        // A reserved segment may be full. It is then full on all ranks.
        self.tensors.extend(taken.ok().map(|tensor| (pool, tensor)));
    }

    /// Allocates in a private pool on one rank, which must not affect the others.
    fn private(&mut self) {
        if self.it.rank == 1 {
            let stream = &self.it.stream;
            drop(self.it.allocator.alloc_zeroed::<u8>(stream, 30 << 20).expect("the allocation should fit"));
        }
    }

    fn make_pool(&mut self) {
        let pool =
            if self.below(3) == 0 { self.it.pool_with(|config| config.reserved(128 * MIB)) } else { self.it.pool() };
        let index = self.pools.len();
        for lane in &mut self.comms {
            if self.draw.next_u64().is_multiple_of(2) {
                attach(self.it, lane, index, &pool);
            }
        }
        self.pools.push(pool);
    }

    fn connect(&mut self) {
        self.made += 1;
        let comm = self.it.connect(&format!("c{}", self.made), self.id);
        self.add(comm);
    }

    fn add(&mut self, comm: Communicator) {
        let (cursor, keys, pools) = (InvalidationCursor::default(), Vec::new(), Vec::new());
        let mut lane = CommunicatorState { comm, pools, cursor, keys, is_aborted: false };
        for index in 0..self.pools.len() {
            if index == 0 || self.draw.next_u64().is_multiple_of(2) {
                attach(self.it, &mut lane, index, &self.pools[index]);
            }
        }
        self.comms.push(lane);
    }

    fn destroy(&mut self) {
        let index = 1 + self.below(self.comms.len() - 1);
        let lane = self.comms.remove(index);
        lane.comm.destroy().expect("the communicator is idle");
    }

    /// Aborts a communicator on every rank. Some ranks detect the end only at the next sync.
    fn end_without_a_word(&mut self) {
        let index = 1 + self.below(self.comms.len() - 1);
        let lane = &mut self.comms[index];
        lane.comm.abort().expect("the abort ends in time");
        lane.is_aborted = true;
    }

    /// Shrinks a communicator by one rank. The others reduce in windows of the smaller one. Where the library can, the rank rejoins half of the
    /// time.
    fn shrink(&mut self) {
        let (index, excluded) = (self.below(self.comms.len()), self.below(self.it.ranks));
        let grows = self.below(2) == 0 && self.comms[index].comm.nccl().supports(Capability::Grow);
        if self.comms[index].is_aborted {
            return;
        }
        let rest = self.shrink_by(index, excluded);
        if grows {
            self.grow(rest.as_ref(), &self.comms[index].pools.clone());
        }
        if let Some(rest) = rest {
            rest.destroy().expect("the communicator is idle");
        }
        self.it.registrar.sweep();
        self.check();
    }

    /// Shrinks a communicator on all ranks but the excluded one, and reduces in windows.
    fn shrink_by(&mut self, index: usize, excluded: usize) -> Option<Communicator> {
        let lane = &self.comms[index];
        if lane.comm.rank() as usize == excluded {
            return None;
        }
        let rest = lane.comm.shrink(&[excluded as u32]).expect("the remaining ranks shrink");
        self.reduce_in(&rest, &lane.pools.clone());
        Some(rest)
    }

    /// Grows a communicator by the rank without one, reduces in windows of all ranks, and destroys it.
    fn grow(&mut self, rest: Option<&Communicator>, pools: &[usize]) {
        let it = self.it;
        if let Some(rest) = rest.filter(|rest| rest.rank() == 0) {
            *self.id.lock().expect("the lock is not poisoned") = Some(rest.grow_id().expect("rank 0 creates an id"));
        }
        it.meet();
        let id = self.id.lock().expect("the lock is not poisoned").expect("rank 0 set it");
        let ranks = it.ranks as u32;
        let builder = Communicator::builder(&it.device).deadline(it.deadline).watchdog(WatchdogMode::Off).name("grown");
        let grown = match rest {
            Some(rest) => builder.grow(rest, id, ranks),
            None => builder.join(id, ranks - 1, ranks),
        };
        let grown = grown.expect("all ranks should arrive");
        self.reduce_in(&grown, pools);
        grown.destroy().expect("the communicator is idle");
    }

    /// Revokes a communicator on every rank. All but one shrink it and reduce in windows of the smaller one.
    fn revoke(&mut self) {
        let (index, excluded) = (1 + self.below(self.comms.len() - 1), self.below(self.it.ranks));
        let lane = &mut self.comms[index];
        if lane.is_aborted {
            return;
        }
        lane.comm.revoke().expect("nothing is in progress");
        lane.is_aborted = true;
        if let Some(rest) = self.shrink_by(index, excluded) {
            rest.destroy().expect("the communicator is idle");
        }
        self.it.registrar.sweep();
        self.check();
    }

    /// Attaches pools to a new communicator, syncs, and reduces a tensor of each pool in its window.
    fn reduce_in(&mut self, comm: &Communicator, pools: &[usize]) {
        let ids: Vec<_> = pools.iter().map(|pool| self.pools[*pool].id()).collect();
        self.it.registrar.attach(comm, &ids, self.it.windows()).expect("the pool should be symmetric and registrable");
        self.it.registrar.sync(&[comm]).expect("the ranks should agree");
        for pool in pools {
            let Some((_, tensor)) = self.tensors.iter_mut().rev().find(|(index, _)| index == pool) else { continue };
            self.it.registrar.window_of(comm, tensor).expect("the buffer should have been synced");
            self.it.reduce_right(comm, tensor);
        }
    }

    fn detach(&mut self) {
        let index = self.below(self.comms.len());
        let lane = &mut self.comms[index];
        if lane.is_aborted || lane.pools.len() < 2 {
            return;
        }
        let pool = lane.pools.pop().expect("there are at least two pools");
        self.it.registrar.detach(&lane.comm, &[self.pools[pool].id()]).expect("the pool should have been attached");
        // The sync completes the detachment before the pool is used further.
        let comm = lane.comm.clone();
        self.it.registrar.sync(&[&comm]).expect("the ranks should agree");
        self.check();
    }

    fn sync(&mut self) {
        let mut chosen: Vec<usize> =
            (0..self.comms.len()).filter(|_| !self.draw.next_u64().is_multiple_of(3)).collect();
        // Each rank passes the communicators in a different order.
        let turn = self.it.rank % chosen.len().max(1);
        chosen.rotate_left(turn);
        let comms: Vec<Communicator> = chosen.iter().map(|index| self.comms[*index].comm.clone()).collect();
        let gone = chosen.iter().any(|index| self.comms[*index].is_aborted);
        let comm_refs: Vec<&Communicator> = comms.iter().collect();
        if self.faults && self.below(3) == 0 {
            self.strike();
            let _outcome = self.it.registrar.sync(&comm_refs);
            return self.clear_up();
        }
        let outcome = self.it.registrar.sync(&comm_refs);
        assert_eq!(outcome.is_err(), gone, "{outcome:?}");
        self.comms.retain(|lane| !(lane.is_aborted && comms.iter().any(|comm| comm.order() == lane.comm.order())));
        self.check();
        if !gone {
            // Collectives run in the same order on all ranks.
            chosen.sort_unstable();
            for index in chosen {
                let comm = self.comms[index].comm.clone();
                self.use_windows(&comm);
            }
        }
    }

    /// Puts a pool to sleep and wakes it, with unrelated ops in between.
    fn sleep(&mut self) {
        let index = self.below(self.pools.len());
        let pool = self.pools[index].id();
        let contents = if self.below(2) == 0 { Contents::Keep } else { Contents::Drop };
        let over = self.comms.iter().find(|lane| !lane.is_aborted && lane.pools.contains(&index));
        let Some(over) = over.map(|lane| lane.comm.clone()) else { return };
        let strikes = self.faults && self.below(2) == 0;
        if strikes {
            self.strike();
        }
        let slept = self.it.registrar.sleep(&over, pool, contents);
        if !strikes {
            slept.expect("the ranks should agree");
            if self.below(2) == 0 && !self.tensors.is_empty() {
                let index = self.below(self.tensors.len());
                self.tensors.swap_remove(index);
            }
            self.private();
            if self.below(2) == 0 {
                self.it.registrar.sync(&[&over]).expect("the ranks should agree");
            }
        }
        let woken = self.it.registrar.wake(&over, pool);
        if !strikes {
            woken.expect("the ranks should agree");
            return self.check();
        }
        self.clear_up();
        self.wake_again(index);
    }

    /// Puts the pool to sleep and wakes it over a live communicator, after any outcome of the previous attempt.
    fn wake_again(&mut self, index: usize) {
        let pool = self.pools[index].id();
        if self.comms.iter().all(|lane| lane.is_aborted) {
            self.connect();
        }
        let lane = self.comms.iter_mut().find(|lane| !lane.is_aborted).expect("just connected");
        if !lane.pools.contains(&index) {
            attach(self.it, lane, index, &self.pools[index]);
        }
        let over = lane.comm.clone();
        self.it.registrar.sleep(&over, pool, Contents::Drop).expect("the communicator is ready");
        self.it.registrar.wake(&over, pool).expect("the communicator is ready");
        self.it.registrar.sync(&[&over]).expect("the communicator is ready");
        self.check();
    }

    /// Makes a call of the next sync fail or hang on one rank.
    fn strike(&mut self) {
        // Deregistration does not fail here, because NCCL would then keep the window's memory.
        let call = ["ncclCommWindowRegister", "ncclAllGather"][self.below(2)];
        let (rank, nth, hangs) = (self.below(self.it.ranks), 1 + self.below(4) as u64, self.below(3) == 0);
        self.it.meet();
        if self.it.rank == 0 {
            if hangs { nccl::hang(call, Some(rank), nth) } else { nccl::fail(call, Some(rank), nth, 3) }
        }
        self.it.meet();
    }

    /// Exchanges the names of ended communicators, and aborts them on all ranks, which continue with the others.
    fn clear_up(&mut self) {
        self.it.meet();
        if self.it.rank == 0 {
            nccl::heal();
        }
        let is_gone = |lane: &&CommunicatorState| lane.comm.state() != CommState::Ready;
        let ended = self.comms.iter().filter(is_gone).map(|lane| lane.comm.name().to_owned());
        self.ended.lock().expect("the lock is not poisoned").extend(ended);
        self.it.meet();
        let ended = self.ended.lock().expect("the lock is not poisoned").clone();
        for lane in self.comms.extract_if(.., |lane| ended.contains(lane.comm.name())) {
            // The communicator is lost while a thread is inside NCCL.
            until(|| lane.comm.abort().is_ok());
        }
        self.it.registrar.sweep();
        self.check();
        self.it.meet();
        if self.comms.is_empty() {
            self.connect();
        }
    }

    /// Reduces a tensor of each attached pool in its window.
    fn use_windows(&mut self, comm: &Communicator) {
        let lane = self
            .comms
            .iter_mut()
            .find(|lane| lane.comm.order() == comm.order())
            .expect("the communicator is in the list");
        let it = self.it;
        match it.registrar.invalidations(comm, &mut lane.cursor) {
            Invalidated::Keys(dead) => lane.keys.retain(|key| !dead.contains(key)),
            Invalidated::Everything => lane.keys.clear(),
        }
        for pool in &lane.pools {
            let Some((_, tensor)) = self.tensors.iter_mut().rev().find(|(index, _)| index == pool) else { continue };
            let span = it.registrar.window_of(comm, tensor).expect("the buffer should have been synced");
            assert_eq!(span.segment, it.registrar.key_of(tensor).expect("the buffer lies in a live segment"));
            if !lane.keys.contains(&span.segment) {
                lane.keys.push(span.segment);
            }
            it.reduce_right(comm, tensor);
        }
        // The segments of live keys do not overlap.
        for key in &lane.keys {
            let overlaps = |other: &&SegmentKey| {
                *other != key && key.base < other.base + other.size_bytes && other.base < key.base + key.size_bytes
            };
            assert_eq!(lane.keys.iter().find(overlaps), None, "{key}");
        }
    }

    fn check(&self) {
        self.it.check();
        nccl::assert_clean();
    }
}

fn attach(it: &Rank, lane: &mut CommunicatorState, index: usize, pool: &Pool<CudaBackend>) {
    if !lane.is_aborted {
        it.registrar
            .attach(&lane.comm, &[pool.id()], it.windows())
            .expect("the pool should be symmetric and registrable");
        lane.pools.push(index);
    }
}

fn run(first_seed: u64, mode: Mode, faults: bool) {
    let seeds = std::env::var("SYMMALLOC_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS);
    // A call that hangs ends at its deadline, so each of these programs takes about 5 s.
    let seeds = if faults { seeds.div_ceil(20) } else { seeds };
    for seed in first_seed..first_seed + seeds {
        let (id, ended) = (Mutex::new(None), Mutex::default());
        // The deadline is longer than in other tests, because ranks wait while a sleeping pool is copied, and the machine may be busy.
        let deadline = if faults { scaled_to_load(5 * IMPATIENT) } else { PATIENT };
        let prefetch_bytes = if seed % 2 == 0 { 0 } else { 40 << 20 };
        let job = Job { mode, deadline, prefetch_bytes, ..Job::new(2 + (seed % 3) as usize) };
        let digests = job.run(|it| {
            let draw = SplitMix64::new(seed);
            let mut program = Program {
                it,
                draw,
                id: &id,
                tensors: Vec::new(),
                pools: Vec::new(),
                comms: Vec::new(),
                made: 0,
                faults,
                ended: &ended,
            };
            program.make_pool();
            program.add(it.world.clone());
            (0..STEPS).for_each(|_| program.step());
            let digests: Vec<_> = program
                .pools
                .iter()
                .map(|pool| it.allocator.digest(pool.id()).expect("the pool should exist"))
                .collect();
            it.meet();
            for lane in program.comms.drain(..) {
                lane.comm.destroy().expect("the communicator is idle");
            }
            digests
        });
        assert!(digests.iter().all(|other| *other == digests[0]), "seed {seed}: placements differ");
        nothing_is_left();
    }
}

nccl_test!(random_programs_are_correct_with_agreement, {
    run(0, Mode::AtSync, false);
});

nccl_test!(random_programs_are_correct_without_agreement, {
    run(1_000_000, Mode::Off, false);
});

nccl_test!(random_programs_are_correct_when_calls_fail_and_hang, {
    run(2_000_000, Mode::AtSync, true);
});

nccl_test!(random_programs_are_correct_by_the_rules_of_2_30, ["STUB_NCCL_VERSION" = "23007"], {
    run(3_000_000, Mode::AtSync, false);
});

nccl_test!(random_programs_are_correct_by_the_rules_of_2_32, ["STUB_NCCL_VERSION" = "23203"], {
    run(4_000_000, Mode::AtSync, false);
});
