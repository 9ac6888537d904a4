//! Mixture of experts: an all-to-all-v sends tokens to their experts, and a second one returns them.
//!
//! ```text
//!  tokens of a rank, by expert      rows of a rank's experts           tokens again
//!  │ e0 e0 │ e1 │ e2 e2 │ e3 │ ──►  │ from rank 0 │ from rank 1 │ ──►  │ e0 e0 │ e1 │ e2 e2 │ e3 │
//!                          dispatch              │ the experts        combine: the splits reversed
//!                                                ▼
//!                                    2 · element + expert, computed on the host
//! ```
//! A seeded router gives the experts loads that change every few steps: even loads, a favorite expert, an idle rank, and a rank that
//! receives everything. The splits are exchanged only when the loads change. Every rank allocates buffers for the maximum number of rows
//! that any rank receives, so all ranks request the same sizes from their symmetric pool, and all buffers have the same offsets in one
//! window. Every row is checked after the dispatch and after the combination.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example moe_dispatch                # a thread for each GPU
//! torchrun --no-python --nproc-per-node 2 target/release/examples/moe_dispatch -- --steps 200   # a process for each
//! ```
//!
//! Exits with 0 if every row was correct and nothing was registered or grew after the warm-up, with 1 otherwise, and with 2 if it could
//! not run.

mod report;
mod router;

pub use report::{Report, Table};

use cudarc::driver::CudaStream;
use report::{Holdings, Times, resident_bytes};
use router::{Router, Routing, element, expert_output};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, DeviceBuffer, Pool};
use symmalloc_nccl::{
    AllToAll, Communicator, Launch, LaunchError, Nccl, ReduceOp, Registrar, Registration, Splits, UniqueId,
};

const DEADLINE: Duration = Duration::from_secs(60);
/// Spare memory of the pool for rounding.
const SPARE_BYTES: u64 = 2 << 20;
/// Number of steps with the same splits.
const STEPS_PER_LOAD: u64 = 3;
/// Number of warm-up steps, in which every load pattern occurs once.
const WARM_UP_STEPS: u64 = 4 * STEPS_PER_LOAD;

type Failure = Box<dyn Error + Send + Sync>;

/// Command-line options.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of ranks. By default, the number of devices, or as set by the launcher.
    pub ranks: Option<u32>,
    /// Steps after the warm-up.
    pub steps: u64,
    /// Tokens per rank.
    pub tokens: usize,
    /// Elements per token.
    pub hidden: usize,
    /// Experts per rank.
    pub experts: usize,
    /// Seed of the router.
    pub seed: u64,
    /// Runs one thread per rank, even if a launcher's variables are set.
    pub threads: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { ranks: None, steps: 60, tokens: 2048, hidden: 1024, experts: 8, seed: 1, threads: false }
    }
}

const USAGE: &str =
    "usage: moe_dispatch [--ranks N] [--steps N] [--tokens N] [--hidden N] [--experts N] [--seed N] [--threads]";

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = Options::default();
        while let Some(argument) = arguments.next() {
            let mut number = || -> Result<u32, Failure> {
                let value = arguments.next().ok_or_else(|| format!("{argument} needs a number"))?;
                let number = value.parse().ok().filter(|number| *number > 0);
                number.ok_or_else(|| format!("{argument} needs a number from 1 on, not \"{value}\"").into())
            };
            match argument.as_str() {
                "--ranks" => options.ranks = Some(number()?),
                "--steps" => options.steps = number()?.into(),
                "--tokens" => options.tokens = number()? as usize,
                "--hidden" => options.hidden = number()? as usize,
                "--experts" => options.experts = number()? as usize,
                "--seed" => options.seed = number()?.into(),
                "--threads" => options.threads = true,
                "--" => {}
                _ => return Err(USAGE.into()),
            }
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(reports) => {
            print!("{}", Table(&reports));
            if reports.iter().all(Report::is_right) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("moe_dispatch: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs this process's ranks: one if a launcher started it, otherwise all of them, one thread each.
pub fn run(options: &Options) -> Result<Vec<Report>, Failure> {
    Nccl::load()?;
    let devices = CudaDevice::count()? as u32;
    match Launch::from_env() {
        Ok(launch) if !options.threads => {
            let device = CudaDevice::for_local_rank(launch.local_rank)?;
            let comm = Communicator::builder(&device).name("experts").deadline(DEADLINE).connect_env()?;
            Ok(vec![Rank::new(comm, options)?.run(options)?])
        }
        Err(error) if error != LaunchError::NotLaunched && !options.threads => Err(error.into()),
        _ => {
            let ranks = options.ranks.unwrap_or(devices);
            let id = UniqueId::new()?;
            std::thread::scope(|scope| {
                let rank = |rank| {
                    scope.spawn(move || {
                        let rank_program = || {
                            let device = CudaDevice::for_local_rank(rank)?;
                            let builder = Communicator::builder(&device).name("experts").deadline(DEADLINE);
                            Rank::new(builder.connect(id, rank, ranks)?, options)?.run(options)
                        };
                        rank_program().unwrap_or_else(|error: Failure| {
                            // Print the error immediately, because the other ranks may wait on their devices for this rank.
                            eprintln!("moe_dispatch: rank {rank}: {error}");
                            std::process::exit(2)
                        })
                    })
                };
                let threads: Vec<_> = (0..ranks).map(rank).collect();
                Ok(threads.into_iter().map(|thread| thread.join().expect("no rank should panic")).collect())
            })
        }
    }
}

/// One rank.
struct Rank {
    rank: usize,
    comm: Communicator,
    stream: Arc<CudaStream>,
    pool: Pool<CudaBackend>,
    allocator: CudaAllocator,
    registrar: Arc<Registrar>,
    all_to_all: AllToAll,
    router: Router,
    hidden: usize,
}

/// The state of one load pattern.
struct Load {
    routing: Routing,
    splits: Splits,
    /// The (source, token, expert) of every received row.
    received: Vec<(usize, usize, usize)>,
}

impl Rank {
    fn new(comm: Communicator, options: &Options) -> Result<Self, Failure> {
        let (rank, ranks) = (comm.rank() as usize, comm.ranks() as usize);
        let Options { tokens, hidden, experts, seed, .. } = *options;
        let router = Router { seed, ranks, experts_per_rank: experts, tokens_per_rank: tokens };
        let allocator = CudaAllocator::new(comm.device(), Config::default())?;
        let stream = comm.device().context().new_stream()?;
        allocator.register_stream(&stream)?;
        // The pool holds tokens and results, twice the maximum number of rows of one rank, and the row of `start_together`, each rounded
        // up.
        let rows_max = 2 * (tokens + router.rows_max()) + 1;
        let capacity_bytes =
            ((rows_max * hidden * size_of::<f32>()) as u64 + SPARE_BYTES).next_multiple_of(SPARE_BYTES);
        let pool = allocator.create_pool(PoolConfig::builder().reserved(capacity_bytes).symmetric(true).build()?)?;
        let registrar = Arc::new(Registrar::builder(&allocator).build()?);
        registrar.attach(&comm, &[pool.id()], Registration::Windows)?;
        let all_to_all = AllToAll::builder(&comm).require_registered(&registrar).build()?;
        let allocator = allocator.with_pool(&pool);
        Ok(Rank { rank, comm, stream, pool, allocator, registrar, all_to_all, router, hidden })
    }

    fn run(self, options: &Options) -> Result<Report, Failure> {
        // The pool's only segment is created with its first buffer, and registered once.
        drop(self.rows(1)?);
        self.registrar.sync(&[&self.comm])?;
        let mut report = Report::new(&self.comm);
        let (mut before, mut resident_before) = (Holdings::default(), 0);
        let mut load = self.load(0, &mut report.times)?;
        for step in 0..WARM_UP_STEPS + options.steps {
            if step == WARM_UP_STEPS {
                (before, resident_before) = (Holdings::now(&self.comm, &self.registrar)?, resident_bytes());
                report.times = Times::default();
            }
            if step > 0 && step.is_multiple_of(STEPS_PER_LOAD) {
                // Every rank knows that the loads change with this step, so all of them exchange splits here.
                load = self.load(step / STEPS_PER_LOAD, &mut report.times)?;
            }
            let wrong_rows = self.step(step, &load, &mut report.times)?;
            report.wrong_rows += wrong_rows;
            if step >= WARM_UP_STEPS {
                report.count(&load.splits, self.hidden);
            }
        }
        report.grown = Holdings::now(&self.comm, &self.registrar)?.since(before);
        report.resident_bytes = resident_bytes() - resident_before;
        self.registrar.detach(&self.comm, &[self.pool.id()])?;
        self.registrar.sync(&[&self.comm])?;
        Ok(report)
    }

    /// Starts the next load: routes this rank's tokens and exchanges the splits.
    fn load(&self, load: u64, times: &mut Times) -> Result<Load, Failure> {
        let routing = self.router.route(load, self.rank);
        let begun = self.start_together()?;
        let splits = self.all_to_all.exchange_splits(&routing.rows)?;
        times.exchange += begun.elapsed();
        times.exchanges += 1;
        // Compute the rows of other ranks with their routers, to check the received rows.
        let mine = |(expert, _): &(usize, usize)| expert / self.router.experts_per_rank == self.rank;
        let received = (0..self.router.ranks).flat_map(|source| {
            let theirs = self.router.route(load, source).order;
            theirs.into_iter().filter(mine).map(move |(expert, token)| (source, token, expert)).collect::<Vec<_>>()
        });
        Ok(Load { received: received.collect(), routing, splits })
    }

    /// Dispatches the tokens, runs the experts, and combines. Returns the number of rows that were wrong after a transfer.
    fn step(&self, step: u64, load: &Load, times: &mut Times) -> Result<u64, Failure> {
        let hidden = self.hidden;
        let tokens: Vec<f32> = load
            .routing
            .order
            .iter()
            .flat_map(|(_, token)| (0..hidden).map(|column| element(step, self.rank, *token, column)))
            .collect();
        let mut input = self.rows(self.router.tokens_per_rank)?;
        self.stream.memcpy_htod(&tokens, &mut input)?;

        // Every rank uses the same number of rows, so that the ranks' allocations are equal.
        let rows_max = load.splits.output_rows_max().expect("the splits were exchanged") as usize;
        let mut received = self.rows(rows_max)?;
        let begun = self.start_together()?;
        self.all_to_all.run(&self.stream, &input, &mut received, hidden, &load.splits)?;
        self.comm.synchronize(&self.stream)?;
        times.dispatch += begun.elapsed();

        let mut rows = self.stream.clone_dtoh(&received)?;
        self.comm.synchronize(&self.stream)?;
        let mut wrong_rows = 0;
        for (row, (source, token, expert)) in rows.chunks_exact_mut(hidden).zip(&load.received) {
            let is_right = |(column, found): (usize, &f32)| *found == element(step, *source, *token, column);
            wrong_rows += u64::from(!row.iter().enumerate().all(is_right));
            row.iter_mut().for_each(|element| *element = expert_output(*expert, *element));
        }
        let mut processed = self.rows(rows_max)?;
        self.stream.memcpy_htod(&rows, &mut processed)?;

        let mut combined = self.rows(self.router.tokens_per_rank)?;
        let back = load.splits.reversed();
        let begun = self.start_together()?;
        self.all_to_all.run(&self.stream, &processed, &mut combined, hidden, &back)?;
        // The buffers can be dropped immediately: the memory is not reused before the stream has completed the call.
        drop((input, received, processed));
        self.comm.synchronize(&self.stream)?;
        times.combine += begun.elapsed();

        let rows = self.stream.clone_dtoh(&combined)?;
        self.comm.synchronize(&self.stream)?;
        for (row, (expert, token)) in rows.chunks_exact(hidden).zip(&load.routing.order) {
            let expected = |column| expert_output(*expert, element(step, self.rank, *token, column));
            wrong_rows += u64::from(!row.iter().enumerate().all(|(column, found)| *found == expected(column)));
        }
        Ok(wrong_rows)
    }

    /// Waits for this rank's work and for the other ranks, which finish checking their rows at different times. The time measured
    /// afterwards is therefore that of the call.
    fn start_together(&self) -> Result<Instant, Failure> {
        let mut word = self.rows(1)?;
        self.comm.all_reduce_in_place(&mut word, ReduceOp::Max, &self.stream)?;
        self.comm.synchronize(&self.stream)?;
        Ok(Instant::now())
    }

    fn rows(&self, rows: usize) -> Result<DeviceBuffer<f32>, Failure> {
        Ok(self.allocator.alloc_zeroed(&self.stream, rows * self.hidden)?)
    }
}
