//! Compares the effects of two orders of free blocks on NCCL's windows, and prints a table.
//!
//! NCCL's symmetric kernels address a peer's buffer by (window, own offset). They reduce whatever data is there, and report success. In
//! this example, every rank allocates eight tensors of 1 MiB from 2 MiB segments, with one window per segment, reduces them over all ranks
//! and checks every element. Then it frees the tensors and allocates them again. Odd ranks get their segments at descending addresses:
//!
//! ```text
//!             first allocation       freed and allocated again
//!             segment 0   segment 1  old order: by (size, address)   symmalloc: by (size, birth, offset)
//!  rank 0     t0 t1       t2 t3      t0 t1       t2 t3               t0 t1       t2 t3
//!  rank 1     t0 t1       t2 t3      t2 t3       t0 t1    wrong      t0 t1       t2 t3
//! ```
//!
//! The old order is modeled below (`OldOrder`). PyTorch's allocator used it up to 2.11. Further rounds free at random with both orders.
//! With symmalloc, they also use random sizes, trims and new pools. (With random sizes, the old order would need different numbers of
//! segments on the ranks, and their registration would hang.)
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example all_reduce -- --rounds 1000            # one thread for each GPU
//! torchrun --no-python --nproc-per-node 2 target/release/examples/all_reduce -- --rounds 1000   # a process for each
//! ```
//!
//! Exits with 0 if symmalloc was correct in every round and the old order was not.

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::mem::ManuallyDrop;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::backend::{Backend, Range};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, Pool};
use symmalloc_nccl::{
    Communicator, Launch, LaunchError, Nccl, ReduceOp, Registered, Registrar, Registration, UniqueId,
};

const MIB: u64 = 1 << 20;
const SEGMENT_BYTES: u64 = 2 * MIB;
const TENSORS: usize = 8;
/// Number of rounds between trims. Every second trim is followed by a new pool.
const TRIM_EVERY: u32 = 10;
const POOL_EVERY: u32 = 20;
/// Address space for the segments of a rank with descending addresses.
const ADDRESS_SPACE_BYTES: u64 = 64 << 30;
const DEADLINE: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error + Send + Sync>;

/// Command-line options.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Number of ranks. By default, the number of devices, or as set by the launcher.
    pub(crate) ranks: Option<u32>,
    /// Rounds with random frees.
    pub(crate) rounds: u32,
    /// Runs one thread per rank, even if a launcher's variables are set.
    pub(crate) threads: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { ranks: None, rounds: 100, threads: false }
    }
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = Options::default();
        while let Some(argument) = arguments.next() {
            let mut number = || -> Result<u32, Failure> {
                let value = arguments.next().ok_or_else(|| format!("{argument} needs a number"))?;
                value.parse().map_err(|_| format!("{argument} needs a number, not \"{value}\"").into())
            };
            match argument.as_str() {
                "--ranks" => options.ranks = Some(number()?),
                "--rounds" => options.rounds = number()?,
                "--threads" => options.threads = true,
                "--" => {}
                _ => return Err("usage: all_reduce [--ranks N] [--rounds R] [--threads]".into()),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(Some(table)) => {
            print!("{table}");
            if table.is_as_claimed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("all_reduce: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the ranks. Returns the table of rank 0, or `None` in the processes of other ranks.
pub(crate) fn run(options: &Options) -> Result<Option<Table>, Failure> {
    Nccl::load()?;
    let devices = CudaDevice::count()? as u32;
    match Launch::from_env() {
        Ok(launch) if !options.threads => {
            let device = CudaDevice::for_local_rank(launch.local_rank)?;
            let comm = Communicator::builder(&device).deadline(DEADLINE).connect_env()?;
            let table = Rank::new(&device, comm)?.run(options.rounds)?;
            if launch.rank != 0 {
                // The exit status of this process reports the verdict.
                return if table.is_as_claimed() {
                    Ok(None)
                } else {
                    Err(format!("rank {}: {table}", launch.rank).into())
                };
            }
            Ok(Some(table))
        }
        Err(error) if error != LaunchError::NotLaunched && !options.threads => Err(error.into()),
        _ => {
            let ranks = options.ranks.unwrap_or(devices);
            if ranks < 2 {
                return Err(format!("{devices} devices: pass --ranks 2 or more").into());
            }
            let id = UniqueId::new()?;
            let tables = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..ranks)
                    .map(|rank| {
                        scope.spawn(move || {
                            let run = || {
                                let device = CudaDevice::for_local_rank(rank)?;
                                let comm =
                                    Communicator::builder(&device).deadline(DEADLINE).connect(id, rank, ranks)?;
                                Rank::new(&device, comm)?.run(options.rounds)
                            };
                            // Report the error immediately, because the other ranks may wait for this rank until the deadline.
                            run().inspect_err(|error: &Failure| eprintln!("all_reduce, rank {rank}: {error}"))
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("no rank should panic")).collect::<Vec<_>>()
            });
            tables.into_iter().collect::<Result<Vec<_>, Failure>>().map(|mut tables| Some(tables.swap_remove(0)))
        }
    }
}

/// The number of tensors that were correct on every rank.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    ranks: u32,
    library: String,
    rows: Vec<Row>,
    elapsed: Duration,
}

#[derive(Clone, Debug)]
struct Row {
    name: String,
    tensors: u64,
    old_right: u64,
    ours_right: u64,
    /// Rounds in which all tensors were correct.
    rounds: u64,
    old_rounds: u64,
    ours_rounds: u64,
}

impl Row {
    fn new(name: impl Into<String>) -> Self {
        Row { name: name.into(), tensors: 0, old_right: 0, ours_right: 0, rounds: 0, old_rounds: 0, ours_rounds: 0 }
    }

    fn add(&mut self, old: u64, ours: u64) {
        let all = TENSORS as u64;
        self.tensors += all;
        self.rounds += 1;
        self.old_right += old;
        self.ours_right += ours;
        self.old_rounds += u64::from(old == all);
        self.ours_rounds += u64::from(ours == all);
    }
}

impl Table {
    /// Returns the number of tensors that were wrong with the old order.
    pub(crate) fn old_wrong(&self) -> u64 {
        self.rows.iter().map(|row| row.tensors - row.old_right).sum()
    }

    /// Returns `true` if symmalloc was correct in every round and the old order was not.
    pub(crate) fn is_as_claimed(&self) -> bool {
        let ours = self.rows.iter().all(|row| row.ours_right == row.tensors);
        ours && self.old_wrong() > 0
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ranks, {}; tensors that are correct on every rank", self.ranks, self.library)?;
        writeln!(f, "{:<28} {:>22} {:>22}", "", "(size, address)", "symmalloc")?;
        for row in &self.rows {
            let of = |right: u64, rounds: u64| match row.rounds {
                1 => format!("{right} of {}", row.tensors),
                _ => format!("{right} of {} ({rounds})", row.tensors),
            };
            let (old, ours) = (of(row.old_right, row.old_rounds), of(row.ours_right, row.ours_rounds));
            writeln!(f, "{:<28} {old:>22} {ours:>22}", row.name)?;
        }
        writeln!(f, "(n): rounds with all {TENSORS} correct. {:.1} s", self.elapsed.as_secs_f64())
    }
}

/// One rank.
struct Rank {
    comm: Communicator,
    stream: Arc<CudaStream>,
    allocator: CudaAllocator,
    registrar: Registrar,
    old: OldOrder,
    random: Random,
}

impl Rank {
    fn new(device: &Arc<CudaDevice>, comm: Communicator) -> Result<Self, Failure> {
        let backend = || {
            let builder = CudaBackend::builder(device);
            let is_odd = comm.rank() % 2 == 1;
            if is_odd { builder.descending_addresses(ADDRESS_SPACE_BYTES) } else { builder }.build()
        };
        let stream = device.context().new_stream()?;
        let config = Config::builder().default_pool(PoolConfig::builder().fixed().build()?).build()?;
        let allocator = CudaAllocator::with_backend(backend()?, config)?;
        allocator.register_stream(&stream)?;
        let registrar = Registrar::builder(&allocator).build()?;
        let old = OldOrder::new(backend()?);
        Ok(Rank { comm, stream, allocator, registrar, old, random: Random(7) })
    }

    fn run(mut self, rounds: u32) -> Result<Table, Failure> {
        let begun = Instant::now();
        let mut pool = self.new_pool()?;
        let mut rows = vec![Row::new("first allocation"), Row::new("freed and allocated again")];
        let whole = [(MIB / 4) as usize; TENSORS];
        for row in &mut rows {
            let (old, ours) = (self.old_round(0)?, self.our_round(&pool, &whole, 0)?);
            self.count(row, &old, &ours)?;
        }
        let mut churn = Row::new(format!("{rounds} random rounds"));
        for round in 1..=rounds {
            if round.is_multiple_of(POOL_EVERY) {
                self.registrar.detach(&self.comm, &[pool.id()])?;
                drop(pool);
                self.registrar.sync(&[&self.comm])?;
                self.allocator.trim_all()?;
                pool = self.new_pool()?;
            }
            if round.is_multiple_of(TRIM_EVERY) {
                self.allocator.core().trim_pool(pool.id())?;
            }
            let lengths: [usize; TENSORS] = std::array::from_fn(|_| 1 + self.random.below(MIB / 4) as usize);
            let (old, ours) = (self.old_round(round)?, self.our_round(&pool, &lengths, round)?);
            self.count(&mut churn, &old, &ours)?;
        }
        if rounds > 0 {
            rows.push(churn);
        }
        self.registrar.detach(&self.comm, &[pool.id()])?;
        self.registrar.sync(&[&self.comm])?;
        let Rank { comm, old, .. } = self;
        old.give_back(&comm)?;
        let library = format!("NCCL {}", comm.nccl().version());
        let table = Table { ranks: comm.ranks(), library, rows, elapsed: begun.elapsed() };
        comm.destroy()?;
        Ok(table)
    }

    /// Creates a symmetric pool with PyTorch's segment sizes: 2 MiB for allocations up to 1 MiB.
    fn new_pool(&self) -> Result<Pool<CudaBackend>, Failure> {
        let pool = self.allocator.create_pool(PoolConfig::builder().fixed().symmetric(true).build()?)?;
        self.registrar.attach(&self.comm, &[pool.id()], Registration::Windows)?;
        Ok(pool)
    }

    /// Allocates tensors, syncs, reduces, and frees in random order. Returns the number of wrong elements of each tensor.
    fn our_round(&mut self, pool: &Pool<CudaBackend>, lengths: &[usize], round: u32) -> Result<Vec<u32>, Failure> {
        let allocator = self.allocator.with_pool(pool);
        let mut tensors: Vec<DeviceBuffer<f32>> = Vec::new();
        for &length in lengths {
            // SAFETY: the memory is written before it is read.
            tensors.push(unsafe { allocator.alloc(&self.stream, length) }?);
        }
        // Free some tensors immediately and allocate others in their place.
        for _ in 0..self.random.below(if round == 0 { 1 } else { TENSORS as u64 }) {
            let at = self.random.below(TENSORS as u64) as usize;
            let length = tensors[at].len();
            drop(tensors.remove(at));
            // SAFETY: as above.
            tensors.push(unsafe { allocator.alloc(&self.stream, length) }?);
        }
        self.registrar.sync(&[&self.comm])?;
        let wrong = self.reduce(&mut tensors.iter_mut().collect::<Vec<_>>(), round)?;
        while !tensors.is_empty() {
            let at = self.random.below(tensors.len() as u64) as usize;
            drop(tensors.swap_remove(at));
        }
        Ok(wrong)
    }

    /// Like `our_round`, with the old order and eight tensors of 1 MiB.
    fn old_round(&mut self, round: u32) -> Result<Vec<u32>, Failure> {
        let mut addresses = Vec::new();
        for _ in 0..TENSORS {
            addresses.push(self.old.take(MIB, &self.comm)?);
        }
        let mut tensors: Vec<_> = addresses
            .iter()
            .map(|address| {
                // SAFETY: the block of 1 MiB was just allocated. The slice never frees it, because it is not dropped.
                ManuallyDrop::new(unsafe { self.stream.upgrade_device_ptr::<f32>(*address, (MIB / 4) as usize) })
            })
            .collect();
        let slices = tensors.iter_mut().map(|tensor| &mut **tensor);
        let wrong = self.reduce::<CudaSlice<f32>>(&mut slices.collect::<Vec<_>>(), round)?;
        while !addresses.is_empty() {
            let at = self.random.below(addresses.len() as u64) as usize;
            self.old.free(addresses.swap_remove(at), MIB);
        }
        Ok(wrong)
    }

    /// Reduces each tensor in place over all ranks. Returns the number of wrong elements of each tensor.
    fn reduce<T>(&self, tensors: &mut [&mut T], round: u32) -> Result<Vec<u32>, Failure>
    where
        T: DevicePtr<f32> + DevicePtrMut<f32>,
    {
        let (ranks, rank) = (self.comm.ranks(), self.comm.rank());
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let own = |element| given(index, round, element) + 1000.0 * rank as f32;
            let host: Vec<f32> = (0..tensor.len()).map(own).collect();
            self.stream.memcpy_htod(&host, *tensor)?;
        }
        for tensor in tensors.iter_mut() {
            self.comm.all_reduce_in_place(*tensor, ReduceOp::Sum, &self.stream)?;
        }
        // Synchronize before the copies, because they block the host without a deadline.
        self.comm.synchronize(&self.stream)?;
        let mut wrong = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            let host = self.stream.clone_dtoh(&**tensor)?;
            self.comm.synchronize(&self.stream)?;
            let ranks_sum = 1000.0 * (0..ranks).sum::<u32>() as f32;
            let expected = |element| ranks as f32 * given(index, round, element) + ranks_sum;
            wrong.push(host.iter().enumerate().filter(|(element, value)| **value != expected(*element)).count() as u32);
        }
        Ok(wrong)
    }

    /// Counts the tensors that were correct on every rank.
    fn count(&self, row: &mut Row, old: &[u32], ours: &[u32]) -> Result<(), Failure> {
        // The counts are not in a symmetric pool, because they must be correct.
        let mut wrong = self.allocator.alloc_zeroed::<u32>(&self.stream, 2 * TENSORS)?;
        self.stream.memcpy_htod(&[old, ours].concat(), &mut wrong)?;
        self.comm.all_reduce_in_place(&mut wrong, ReduceOp::Sum, &self.stream)?;
        self.comm.synchronize(&self.stream)?;
        let wrong = self.stream.clone_dtoh(&wrong)?;
        self.comm.synchronize(&self.stream)?;
        let right = |of: &[u32]| of.iter().filter(|wrong| **wrong == 0).count() as u64;
        row.add(right(&wrong[..TENSORS]), right(&wrong[TENSORS..]));
        Ok(())
    }
}

/// Returns the value of an element before the rank's number is added. Values are small integers, so sums are exact.
fn given(tensor: usize, round: u32, element: usize) -> f32 {
    (100 * tensor + (round % 50) as usize + element % 61) as f32
}

/// An allocator with free blocks ordered by (size, address), and segments of 2 MiB, each with a window.
///
/// It uses best fit, splits blocks at the requested size and merges them with free neighbors in their segment. PyTorch's allocator did the
/// same before its blocks had a creation order.
struct OldOrder {
    backend: CudaBackend,
    /// Segments in order of creation, which is also the order of registration.
    segments: Vec<(Range, Registered)>,
    /// Free blocks as (size, address).
    free: BTreeSet<(u64, u64)>,
}

impl OldOrder {
    fn new(backend: CudaBackend) -> Self {
        OldOrder { backend, segments: Vec::new(), free: BTreeSet::new() }
    }

    fn take(&mut self, size_bytes: u64, comm: &Communicator) -> Result<u64, Failure> {
        let (size, address) = match self.free.range((size_bytes, 0)..).next() {
            Some(block) => *block,
            None => self.new_segment(comm)?,
        };
        self.free.remove(&(size, address));
        if size > size_bytes {
            self.free.insert((size - size_bytes, address + size_bytes));
        }
        Ok(address)
    }

    fn free(&mut self, address: u64, size_bytes: u64) {
        let segment_of = |address: u64| {
            let holds = |range: &Range| (range.base.0..range.base.0 + range.size_bytes).contains(&address);
            self.segments.iter().position(|(range, _)| holds(range))
        };
        let is_neighbor = |(size, other): &&(u64, u64)| {
            (*other + *size == address || address + size_bytes == *other) && segment_of(*other) == segment_of(address)
        };
        let neighbors: Vec<_> = self.free.iter().filter(is_neighbor).copied().collect();
        let mut joined = (size_bytes, address);
        for neighbor in neighbors {
            self.free.remove(&neighbor);
            joined = (joined.0 + neighbor.0, joined.1.min(neighbor.1));
        }
        self.free.insert(joined);
    }

    fn new_segment(&mut self, comm: &Communicator) -> Result<(u64, u64), Failure> {
        let range = self.backend.reserve(SEGMENT_BYTES)?;
        self.backend.map(range, 0, SEGMENT_BYTES)?;
        let registered = comm.register_window(range.base.0, SEGMENT_BYTES)?;
        self.segments.push((range, registered));
        let block = (SEGMENT_BYTES, range.base.0);
        self.free.insert(block);
        Ok(block)
    }

    fn give_back(self, comm: &Communicator) -> Result<(), Failure> {
        for (range, registered) in self.segments {
            match registered {
                Registered::Window(window) => comm.deregister_window(window)?,
                Registered::Plain(registration) => comm.deregister_buffer(registration)?,
            }
            self.backend.unmap(range, 0, range.size_bytes)?;
            self.backend.release(range)?;
        }
        Ok(())
    }
}

/// A pseudorandom generator with the same sequence on all ranks.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}
