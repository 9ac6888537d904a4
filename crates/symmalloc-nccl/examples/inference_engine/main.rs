//! An inference engine that embeds symmalloc: a transformer with a paged KV cache and continuous batching. Prompts run on separate streams
//! next to a batch whose steps are CUDA graphs, with tensor parallelism over several GPUs through symmetric windows.
//!
//! | file | contents |
//! |---|---|
//! | `model.rs` | the model, whose weights are generated from a seed, and each rank's part of it |
//! | `requests.rs` | requests: arrivals, prompts, maximum lengths of answers |
//! | `memory.rs` | the source of device memory: symmalloc, or cudarc's own allocator |
//! | `forward.rs`, `kernels.cu` | the forward pass on the device |
//! | `serving.rs` | continuous batching |
//! | `reference.rs` | the answers, computed on the host with the same arithmetic |
//!
//! Every token of every answer is compared with the reference, bit for bit. For comparison, the same engine also serves the same requests
//! on cudarc's allocator (`cuMemAllocAsync`), in alternation.
//!
//! ```sh
//! cargo run --release -p symmalloc-nccl --example inference_engine -- --ranks 1
//! cargo run --release -p symmalloc-nccl --example inference_engine                    # a thread for each GPU
//! torchrun --no-python --nproc-per-node 2 target/release/examples/inference_engine    # a process for each
//! ```
//!
//! Exits with 0 if every token was correct and no memory was mapped or registered after the warm-up, with 1 otherwise, and with 2 if it
//! could not run.

mod forward;
mod memory;
mod model;
mod reference;
mod report;
mod requests;
mod serving;

pub(crate) use report::{Report, Table};

use memory::{Cudarc, Memory, Symmalloc};
use model::Model;
use report::{Holdings, Run};
use requests::Request;
use serving::{Engine, PREFILLS_MAX};
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use symmalloc_core::units::MIB;
use symmalloc_core::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaDevice, PinnedAllocator};
use symmalloc_nccl::{Communicator, Launch, LaunchError, Nccl, Registrar, Registration, UniqueId};

const DEADLINE: Duration = Duration::from_secs(60);
/// Memory for the weights, the pages of the largest batch, and prompts. As in other engines, it is fixed in advance.
const BATCH_BYTES: u64 = 128 * MIB;
const PREFILL_BYTES: u64 = 8 * MIB;
/// Memory for reduced buffers, per stream.
const REDUCED_BYTES: u64 = 2 * MIB;
/// Number of warm-up requests, which are served before anything is counted.
const WARM_UP: usize = 40;
const MODEL_SEED: u64 = 1;

type Failure = Box<dyn Error + Send + Sync>;

/// Command-line options.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// 1, 2, 4 or 8 ranks. By default, as many as there are devices for, or as set by the launcher.
    pub(crate) ranks: Option<u32>,
    /// Number of requests.
    pub(crate) requests: usize,
    /// Number of times that the engine serves all requests with each allocator, in alternation.
    pub(crate) rounds: usize,
    /// Seed of the requests.
    pub(crate) seed: u64,
    /// Disables windows, for ranks that share a device.
    pub(crate) plain: bool,
    /// Runs one thread per rank, even if a launcher's variables are set.
    pub(crate) threads: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { ranks: None, requests: 1000, rounds: 3, seed: 1, plain: false, threads: false }
    }
}

const USAGE: &str =
    "usage: inference_engine [--ranks 1|2|4|8] [--requests N] [--rounds N] [--seed N] [--plain] [--threads]";

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
                "--requests" => options.requests = number()? as usize,
                "--rounds" => options.rounds = number()? as usize,
                "--seed" => options.seed = number()?.into(),
                "--plain" => options.plain = true,
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
            eprintln!("inference_engine: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs this process's ranks: one if a launcher started it, otherwise all of them, one thread each.
pub(crate) fn run(options: &Options) -> Result<Vec<Report>, Failure> {
    Nccl::load()?;
    let devices = CudaDevice::count()? as u32;
    let task = &Task::new(options);
    match Launch::from_env() {
        Ok(launch) if !options.threads => {
            check_ranks(launch.ranks)?;
            let device = CudaDevice::for_local_rank(launch.local_rank)?;
            let comm = Communicator::builder(&device).name("engine").deadline(DEADLINE).connect_env()?;
            Ok(vec![rank(&comm, options, task)?])
        }
        Err(error) if error != LaunchError::NotLaunched && !options.threads => Err(error.into()),
        _ => {
            let ranks = options.ranks.unwrap_or(1 << devices.clamp(1, model::PARTS as u32).ilog2());
            check_ranks(ranks)?;
            let id = UniqueId::new()?;
            std::thread::scope(|scope| {
                let thread = |number| {
                    scope.spawn(move || {
                        let rank_program = || {
                            let device = CudaDevice::for_local_rank(number)?;
                            let builder = Communicator::builder(&device).name("engine").deadline(DEADLINE);
                            rank(&builder.connect(id, number, ranks)?, options, task)
                        };
                        rank_program().unwrap_or_else(|error: Failure| {
                            // Print the error immediately, because the other ranks may wait on their devices for this rank.
                            eprintln!("inference_engine: rank {number}: {error}");
                            std::process::exit(2)
                        })
                    })
                };
                let threads: Vec<_> = (0..ranks).map(thread).collect();
                Ok(threads.into_iter().map(|thread| thread.join().expect("no rank should panic")).collect())
            })
        }
    }
}

fn check_ranks(ranks: u32) -> Result<(), Failure> {
    if ranks > 0 && model::PARTS.is_multiple_of(ranks as usize) {
        return Ok(());
    }
    Err(format!("the model has {} parts and cannot be split over {ranks} ranks: use 1, 2, 4 or 8", model::PARTS).into())
}

/// The inputs of all ranks of a process: the model, the requests and the expected answers.
struct Task {
    model: Model,
    requests: Vec<Request>,
    expected: Vec<Vec<u32>>,
}

impl Task {
    fn new(options: &Options) -> Self {
        let model = Model::new(MODEL_SEED);
        let requests = Request::generate(options.seed, options.requests);
        let expected = reference::answers(&model, &requests);
        Task { model, requests, expected }
    }
}

/// Runs one rank: both engines serve the same requests, in alternation.
fn rank(comm: &Communicator, options: &Options, task: &Task) -> Result<Report, Failure> {
    let device = comm.device();
    let mut streams = Vec::new();
    for _ in 0..1 + PREFILLS_MAX {
        streams.push(device.context().new_stream()?);
    }
    let private = CudaAllocator::new(device, Config::default())?;
    let symmetric = PoolConfig::builder().reserved(REDUCED_BYTES).symmetric(true).build()?;
    let pool = private.create_pool(symmetric)?;
    let ours = Symmalloc { symmetric: private.with_pool(&pool), private };
    for (stream, size_bytes) in streams.iter().zip([BATCH_BYTES, PREFILL_BYTES, PREFILL_BYTES]) {
        let id = ours.private.register_stream(stream)?;
        ours.private.core().reserve(ours.private.pool(), id, size_bytes)?;
        // The pool's only segment per stream is created with the first buffer, so all windows are registered once.
        drop(ours.take_reduced(stream, 1)?);
    }
    let registrar = Registrar::builder(&ours.private).build()?;
    if !options.plain {
        registrar.attach(comm, &[pool.id()], Registration::Windows)?;
        registrar.sync(&[comm])?;
    }
    let pinned = PinnedAllocator::pinned(device, Config::default())?;
    streams.iter().try_for_each(|stream| pinned.register_stream(stream).map(drop))?;

    let mut report = Report::new(comm, task.expected.iter().map(Vec::len).sum());
    let mut engine = Engine::new(&ours, &pinned, comm, &streams, &task.model)?;
    let mut other = Engine::new(&Cudarc, &pinned, comm, &streams, &task.model)?;
    let warm_up = &task.requests[..WARM_UP.min(task.requests.len())];
    engine.serve(warm_up)?;
    other.serve(warm_up)?;
    let before = Holdings::now(&ours.private, &registrar);
    for _ in 0..options.rounds {
        report.symmalloc.push(timed(&mut engine, task)?);
        report.cudarc.push(timed(&mut other, task)?);
    }
    report.grown = Holdings::now(&ours.private, &registrar).since(before);
    streams.iter().try_for_each(|stream| comm.synchronize(stream))?;
    report.digest = Some(ours.private.digest(ours.private.pool())?);
    drop((engine, other));
    if !options.plain {
        registrar.detach(comm, &[pool.id()])?;
        registrar.sync(&[comm])?;
    }
    Ok(report)
}

fn timed<M: Memory>(engine: &mut Engine<'_, M>, task: &Task) -> Result<Run, Failure> {
    let begun = Instant::now();
    let served = engine.serve(&task.requests)?;
    let seconds = begun.elapsed().as_secs_f64();
    let wrong = |(found, expected): (&Vec<u32>, &Vec<u32>)| {
        let same = found.iter().zip(expected).filter(|(found, expected)| found == expected).count();
        found.len().max(expected.len()) - same
    };
    let wrong_tokens = served.answers.iter().zip(&task.expected).map(wrong).sum();
    Ok(Run { seconds, wrong_tokens, launches: served.launches, most_at_once: served.most_at_once })
}
