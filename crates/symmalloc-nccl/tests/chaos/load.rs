//! The load of one rank.

use crate::status::{Order, Phase, Status, add_line, file, read_number, replace};
use crate::{RANKS, clock, number, samples};
use cudarc::driver::{CudaSlice, CudaStream};
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stub_process::{WAIT_MAX, cuda, nccl};
use symmalloc_core::errors::AllocateError;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase as PoolPhase;
use symmalloc_core::{Allocator, Config, PoolConfig, PoolId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer, GraphPool, Pool};
use symmalloc_files::write_whole;
use symmalloc_import::{ReadOptions, TraceFile, TraceFileOptions, read_path};
use symmalloc_nccl::{Communicator, Launch, ReduceOp, Registrar, Registration, UniqueId};
use symmalloc_sim::{SimBackend, SplitMix64};
use symmalloc_trace::layout;
use symmalloc_trace::replay::{Program, Replay};

/// Deadline of collectives.
pub(crate) const DEADLINE: Duration = Duration::from_secs(8);
/// Time for which ranks wait for each other before they connect.
const MEETING: Duration = Duration::from_secs(30);
/// Number of rounds of a generation.
pub(crate) const ROUNDS: u64 = 24;
/// Pause after a round, so that the load leaves the processor to others.
const PAUSE: Duration = Duration::from_millis(20);
/// Time by which a rank arrives late at a meeting.
const LATE: Duration = Duration::from_secs(1);
/// On average, one driver call in this many fails.
const FAILS_ONE_IN: u64 = 10_000;
/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: i32 = 999;
/// Elements of a buffer that is kept.
const KEPT: usize = 64 << 10;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Runs a rank until the test stops it.
pub(crate) fn run(rank: usize) {
    let mut rank = Rank::new(rank);
    let mut generation = number("CHAOS_GENERATION", 0);
    loop {
        rank.status = Status { generation, round: 0, phase: Phase::Meets, ..rank.status };
        rank.publish();
        let outcome = rank.generation();
        // The driver works again, and the device has free memory.
        rank.status.faults += rank.count_faults();
        cuda::heal();
        rank.filling.clear();
        rank.check_kept();
        rank.status.phase = match &outcome {
            Ok(()) => {
                nccl::assert_clean();
                Phase::Ended
            }
            Err(error) => {
                nccl::forget();
                let line = format!("generation {generation}, round {}: {error}", rank.status.round).replace('\n', " ");
                add_line(&file(&rank.folder, "errors", rank.number), &line);
                Phase::Failed
            }
        };
        if outcome.is_ok() {
            rank.sample();
        }
        rank.publish();
        match rank.next_generation() {
            Some(next) => generation = next,
            None => return,
        }
    }
}

/// A rank, with what it keeps for as long as it lives.
struct Rank {
    number: usize,
    folder: PathBuf,
    seed: u64,
    status: Status,
    device: Arc<CudaDevice>,
    allocator: CudaAllocator,
    streams: [Arc<CudaStream>; 2],
    kept: Vec<DeviceBuffer<u32>>,
    /// A pool that sleeps and wakes, and its contents.
    resting: Pool<CudaBackend>,
    rested: DeviceBuffer<u32>,
    /// Memory that fills the device.
    filling: Vec<CudaSlice<u8>>,
    is_full: bool,
    /// Seed of the calls that fail by chance, until one has failed.
    failing: Option<u64>,
    /// Number of meetings at which this rank arrives late.
    late_meetings: u32,
    /// Number of meetings so far.
    meetings: u64,
    sampled: Option<Instant>,
}

impl Rank {
    fn new(number: usize) -> Self {
        let device = CudaDevice::new(number).expect("the stub should have a device");
        let allocator = CudaAllocator::new(&device, Config::default()).expect("the allocator is created");
        let stream = || device.context().new_stream().expect("the driver should create a stream");
        let streams = [stream(), stream()];
        let fill = |mut buffer: DeviceBuffer<u32>, salt: usize| {
            streams[0].memcpy_htod(&contents(number, salt), &mut buffer).expect("the copy should succeed");
            buffer
        };
        let new = |allocator: &CudaAllocator| {
            allocator.alloc_zeroed::<u32>(&streams[0], KEPT).expect("the allocation should succeed")
        };
        let kept = (0..4).map(|salt| fill(new(&allocator), salt)).collect();
        let resting = allocator.create_pool(PoolConfig::default()).expect("the pool is created");
        let rested = fill(new(&allocator.with_pool(&resting)), 4);
        Rank {
            number,
            folder: PathBuf::from(std::env::var("CHAOS_FOLDER").expect("the test sets it")),
            seed: crate::number("SYMMALLOC_FIRST_SEED", 1),
            status: Status::new(0),
            device: Arc::clone(&device),
            allocator,
            streams,
            kept,
            resting,
            rested,
            filling: Vec::new(),
            is_full: false,
            failing: None,
            late_meetings: 0,
            meetings: 0,
            sampled: None,
        }
    }

    fn publish(&self) {
        self.status.write(&self.folder, self.number);
    }

    /// Checks the contents that must not change.
    ///
    /// # Panics
    /// Panics if they differ, or if the pool cannot wake.
    fn check_kept(&self) {
        if self.allocator.core().phase(self.resting.id()).expect("the pool exists") != PoolPhase::Awake {
            self.allocator.wake(self.resting.id()).expect("the driver works, and memory is free");
        }
        for (salt, buffer) in self.kept.iter().chain([&self.rested]).enumerate() {
            let read = self.streams[salt % 2].clone_dtoh(buffer).expect("the driver works");
            assert!(read == contents(self.number, salt), "buffer {salt} of rank {} has changed", self.number);
        }
    }

    /// Meets the other ranks, runs all rounds, and records them.
    fn generation(&mut self) -> Outcome<()> {
        self.is_full = false;
        if self.late_meetings > 0 {
            self.late_meetings -= 1;
            std::thread::sleep(LATE);
        }
        self.meetings += 1;
        let id = UniqueId::for_job(&self.launch(), MEETING)?;
        let allocator = CudaAllocator::new(&self.device, Config::default())?;
        let trace = self.folder.join("disk").join(format!("rank{}.trace", self.number));
        let is_recording = TraceFile::create(&trace, TraceFileOptions::default())
            .is_ok_and(|sink| allocator.core().start_recording(sink).is_ok());
        let pool = allocator.create_pool(PoolConfig::builder().fixed().symmetric(true).build()?)?;
        let outcome = self.rounds(&allocator, &pool, id);
        let digest = allocator.digest(pool.id())?;
        let is_recorded = is_recording && allocator.core().stop_recording().is_ok();
        if is_recorded {
            let recording = read_path(&trace, &ReadOptions::default()).expect("the recording is complete");
            let program = Program::new(&recording.records).expect("the recording is consistent");
            let config = recording.config.expect("a recording has a configuration");
            let again = Allocator::new(SimBackend::builder().seed(7).build(), config).expect("the simulator works");
            let mut replay = Replay::new(&again, &program);
            replay.run(|_, _| {}).expect("the recording can be replayed");
            let pool = replay.pool_of(pool.id()).expect("the pool exists");
            let replayed = again.digest(pool).expect("the pool exists");
            let text = || fs::read_to_string(&trace).expect("the recording exists");
            assert_eq!(replayed, digest, "after {outcome:?}, the recording of rank {}:\n{}", self.number, text());
        }
        if is_recorded && self.save_layout() {
            self.status.recorded += 1;
        } else {
            self.status.unrecorded += 1;
        }
        outcome
    }

    /// Saves the layout of the pool that is kept. Returns `false` if the disk refuses; the last saved layout is then still there.
    fn save_layout(&self) -> bool {
        let path = file(&self.folder.join("disk"), "layout", self.number);
        let saved = self.allocator.core().save_layout(PoolId::DEFAULT).expect("the pool can be saved");
        let is_written = write_whole(&path, layout::to_text(&saved).as_bytes()).is_ok();
        if let Ok(text) = fs::read_to_string(&path) {
            layout::parse(&text).expect("a layout is replaced as a whole");
        }
        is_written
    }

    /// Returns what a launcher would tell this rank. In every other generation, each rank counts as a machine, so that ranks use the network.
    fn launch(&self) -> Launch {
        let generation = self.status.generation;
        // An address of this machine means a Unix socket if all ranks are on it.
        let is_network = std::env::var_os("SYMMALLOC_RENDEZVOUS").is_some() && generation % 2 == 1;
        let (local_rank, local_ranks) = if is_network { (0, 1) } else { (self.number, RANKS) };
        let variables = [
            ("RANK", self.number.to_string()),
            ("WORLD_SIZE", RANKS.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", local_ranks.to_string()),
            ("TORCHELASTIC_RUN_ID", format!("{} {generation}", self.folder.display())),
        ];
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        Launch::from_variables(variable).expect("the variables are complete")
    }

    fn rounds(&mut self, allocator: &CudaAllocator, pool: &Pool<CudaBackend>, id: UniqueId) -> Outcome<()> {
        let stream = Arc::clone(&self.streams[0]);
        let registrar = Registrar::builder(allocator).build()?;
        let mut windows: Vec<DeviceBuffer<f32>> = Vec::new();
        // An error drops the communicator first, and then the memory that its kernels may still use.
        let comm =
            Communicator::builder(&self.device).deadline(DEADLINE).connect(id, self.number as u32, RANKS as u32)?;
        registrar.attach(&comm, &[pool.id()], Registration::Windows)?;
        // The same numbers on all ranks.
        let mut random = SplitMix64::new(self.seed).split(self.status.generation);
        self.status.phase = Phase::Runs;
        if let Some(seed) = self.failing {
            cuda::fail_by_chance(FAILS_ONE_IN, seed ^ self.status.generation, UNKNOWN);
        }
        for round in 0..ROUNDS {
            self.status.round = round;
            self.publish();
            self.take_order();
            self.refill();
            // Before the collectives, so that an error ends the round of every rank.
            self.serve(round)?;
            if windows.len() > 3 || random.below(3) == 0 && !windows.is_empty() {
                drop(windows.swap_remove(random.below(windows.len() as u64) as usize));
            } else {
                windows.push(allocator.with_pool(pool).alloc_zeroed(&stream, 256 << random.below(12))?);
            }
            registrar.sync(&[&comm])?;
            if random.below(8) == 0 {
                registrar.sleep(&comm, pool.id(), Contents::Keep)?;
                registrar.wake(&comm, pool.id())?;
            }
            self.reduce(&comm, &mut windows, round)?;
            if random.below(8) == 0 {
                let part = comm.split(Some(0), comm.rank())?.expect("every rank has a color");
                self.reduce(&part, &mut windows, round)?;
                part.destroy()?;
            }
            self.status.faults += self.count_faults();
            std::thread::sleep(PAUSE);
        }
        self.status.round = ROUNDS;
        drop(windows);
        comm.destroy()?;
        Ok(())
    }

    /// Sums up every window over all ranks, and checks the sums.
    fn reduce(&self, comm: &Communicator, windows: &mut [DeviceBuffer<f32>], round: u64) -> Outcome<()> {
        let stream = &self.streams[0];
        let mine = (self.number as u64 + 1 + round) as f32;
        for window in &mut *windows {
            stream.memcpy_htod(&vec![mine; window.len()], window)?;
            comm.all_reduce_in_place(window, ReduceOp::Sum, stream)?;
        }
        comm.synchronize(stream)?;
        let sum = (0..RANKS as u64).map(|rank| rank + 1 + round).sum::<u64>() as f32;
        for window in &*windows {
            let read = stream.clone_dtoh(window)?;
            assert!(read.iter().all(|value| *value == sum), "rank {}: {:?} instead of {sum}", self.number, read[0]);
        }
        Ok(())
    }

    /// Executes the test's order.
    fn take_order(&mut self) {
        match Order::take(&self.folder, self.number) {
            Some(Order::FillDevice) => self.is_full = true,
            Some(Order::ArriveLate) => self.late_meetings = 2,
            Some(Order::MoveClock(seconds)) => {
                clock::jump(seconds);
                self.status.clock_jumps += 1;
            }
            Some(Order::FailCalls(seed)) => {
                self.failing = Some(seed);
                cuda::fail_by_chance(FAILS_ONE_IN, seed, UNKNOWN);
            }
            None => {}
        }
    }

    /// Ends the faults once one call has failed. Returns the number of failed calls.
    fn count_faults(&mut self) -> u64 {
        let failed = cuda::failed_by_chance();
        if !failed.is_empty() {
            add_line(&file(&self.folder, "faults", self.number), &failed.join(" "));
            cuda::heal();
            self.failing = None;
        }
        failed.len() as u64
    }

    /// Takes all free memory of the device, if it is to be full.
    fn refill(&mut self) {
        let mut size_bytes = if self.is_full { 64 << 20 } else { 0 };
        while size_bytes >= 64 << 10 {
            match self.streams[0].alloc_zeros::<u8>(size_bytes) {
                Ok(memory) => self.filling.push(memory),
                Err(_) => size_bytes /= 2,
            }
        }
    }

    /// Work without the other ranks. Counts requests that the full device refuses.
    fn serve(&mut self, round: u64) -> Outcome<()> {
        match self.serve_all(round) {
            Err(error) if self.is_full && is_out_of_memory(&*error) => {
                self.status.refused += 1;
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn serve_all(&self, round: u64) -> Outcome<()> {
        let [stream, other] = &self.streams;
        let label = self.status.generation * ROUNDS + round;
        let mut random = SplitMix64::new(self.seed ^ self.number as u64).split(label);
        let mut live: Vec<(DeviceBuffer<u8>, u8)> = Vec::new();
        for _ in 0..12 {
            if live.len() > 4 {
                let (buffer, salt) = live.swap_remove(random.below(live.len() as u64) as usize);
                let read = other.clone_dtoh(&buffer)?;
                assert!(read.iter().all(|byte| *byte == salt), "rank {}: a buffer has changed", self.number);
            }
            let salt = random.below(256) as u8;
            let len = 512 << random.below(10);
            let mut buffer = self.allocator.alloc_zeroed::<u8>(stream, len)?;
            stream.memcpy_htod(&vec![salt; len], &mut buffer)?;
            live.push((buffer, salt));
        }
        drop(live);
        match round % 8 {
            1 => self.capture()?,
            3 => {
                self.allocator.sleep(self.resting.id(), Contents::Keep)?;
                self.allocator.wake(self.resting.id())?;
            }
            5 => self.overreach()?,
            7 => drop(self.allocator.trim_all()?),
            _ => {}
        }
        Ok(())
    }

    fn capture(&self) -> Outcome<()> {
        let stream = &self.streams[0];
        let pool = GraphPool::new(&self.allocator, "segments:reserved,segment_mb:16".parse()?)?;
        let capture = pool.begin(stream)?;
        let output = self.allocator.alloc_zeroed::<u8>(stream, 1 << 20)?;
        let graph = capture.end()?;
        graph.launch(stream)?;
        assert_eq!(stream.clone_dtoh(&output.slice(..8))?, [0; 8]);
        Ok(())
    }

    /// Requests more memory than the device has.
    fn overreach(&self) -> Outcome<()> {
        match self.allocator.alloc_zeroed::<u8>(&self.streams[1], 1 << 30) {
            Ok(_) => panic!("rank {}: a request beyond the device succeeded", self.number),
            Err(error) if is_out_of_memory(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a sample, if the last one is old enough.
    fn sample(&mut self) {
        let interval = Duration::from_secs((number("SYMMALLOC_SOAK_SECONDS", 0) / 240).min(15));
        if self.sampled.is_none_or(|time| time.elapsed() >= interval) {
            // Threads of the communicator may still be ending.
            std::thread::sleep(Duration::from_millis(50));
            samples::take(&self.folder, self.number, &self.allocator, self.meetings);
            self.sampled = Some(Instant::now());
        }
    }

    /// Waits for the next generation: the one that the test has published, or else the one after this, once all ranks have ended it.
    /// Returns `None` after the last one.
    fn next_generation(&self) -> Option<u64> {
        let generation = self.status.generation;
        if self.status.phase == Phase::Ended {
            replace(&file(&self.folder, "ended", self.number), &generation.to_string());
        }
        let has_ended = |rank: usize| {
            read_number::<u64>(&file(&self.folder, "ended", rank)).is_some_and(|ended| ended >= generation)
        };
        let begun = Instant::now();
        loop {
            if let Some(published) = read_number(&self.folder.join("generation"))
                && published > generation
            {
                return Some(published);
            }
            if self.status.phase == Phase::Ended && (0..RANKS).all(has_ended) {
                let is_last = read_number::<u64>(&self.folder.join("last")).is_some_and(|last| generation >= last);
                return (!is_last).then_some(generation + 1);
            }
            assert!(begun.elapsed() < WAIT_MAX, "rank {}: no generation after {generation}", self.number);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns the contents of a buffer that is kept.
fn contents(rank: usize, salt: usize) -> Vec<u32> {
    (0..KEPT as u32).map(|at| at.wrapping_mul(2_654_435_761).wrapping_add((rank * 16 + salt) as u32)).collect()
}

fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(CudaError::Allocate(AllocateError::OutOfMemory(_))))
}
