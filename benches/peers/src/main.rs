//! The symmalloc side of the comparison with its peers. The script `run` in this package makes the comparison.
//!
//! ```text
//!  run ─┬─ symmalloc-peers jobs DIR        the recorded jobs, as files that every program reads
//!       ├─ symmalloc-peers measure ...     this program: the cases on one of our interfaces
//!       ├─ symmalloc-peers scale ...       many live and many free blocks, host memory: symmalloc only
//!       ├─ symmalloc-peers processors ...  threads that share nothing: the scaling of the machine
//!       └─ cpp/*.cpp                       the same cases on PyTorch, RMM, cudaMallocAsync and malloc
//! ```
//!
//! Each figure is one line of JSON on stdout; see [`report`]. The interface `simulated` works without a GPU, and all
//! except `library` work with a stub of libcuda on the library path.

mod cases;
mod cuda;
mod job;
mod library;
mod linear;
mod processor;
mod report;
mod scale;
mod simulated;
mod stopwatch;
mod subject;

use crate::cases::Amounts;
use crate::cuda::{Borrowed, Counted, Cuda, Handles};
use crate::job::Job;
use crate::library::{Library, Pointers};
use crate::report::Report;
use crate::simulated::Simulated;
use crate::stopwatch::Stopwatch;
use crate::subject::Subject;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use symmalloc_core::Config;

/// Runs symmalloc on the cases of the comparison with its peers.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write the recorded jobs to a folder, in the format of all peer programs, and print their figures.
    Jobs {
        /// Folder to write to. It is created if necessary.
        folder: PathBuf,
        /// Write only jobs whose names contain this text.
        #[arg(long, default_value = "")]
        filter: String,
    },
    /// Run the cases that every peer runs.
    Measure {
        #[command(flatten)]
        subject: Which,
        /// Folder that `jobs` wrote.
        #[arg(long)]
        jobs: PathBuf,
        #[command(flatten)]
        amounts: Amounts,
    },
    /// Measure many live and many free blocks, and the host memory per block.
    Scale {
        #[command(flatten)]
        subject: Which,
        /// Numbers of live blocks to measure. None are measured if omitted.
        #[arg(long, value_delimiter = ',')]
        live: Vec<usize>,
        /// Numbers of free blocks to measure. None are measured if omitted.
        #[arg(long, value_delimiter = ',', required_unless_present = "live")]
        free: Vec<usize>,
        #[command(flatten)]
        amounts: Amounts,
    },
    /// Measure threads that do arithmetic and share nothing: the scaling of this machine.
    Processors {
        #[command(flatten)]
        amounts: Amounts,
    },
}

/// The interface and configuration to measure.
#[derive(Debug, Args)]
struct Which {
    /// Name of the peer in the figures.
    #[arg(long, default_value = "symmalloc")]
    peer: String,
    /// Interface through which the program calls symmalloc.
    #[arg(long, value_enum)]
    interface: Interface,
    /// Configuration, in the syntax of docs/configuration.md.
    #[arg(long, default_value = "")]
    conf: String,
    /// Maximum MiB of memory to create ahead of growth, for the interfaces to CUDA memory. For `library`, use --conf
    /// instead.
    #[arg(long, default_value_t = 0)]
    prefetch_mib: u64,
    /// Path of libsymmalloc_torch.so, for the interface `library`.
    #[arg(long, required_if_eq("interface", "library"))]
    library: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Interface {
    /// `StreamAllocator`, with a `DeviceBuffer` that borrows it.
    Buffer,
    /// `CudaAllocator`, with a `DeviceBuffer` that holds a reference count of it.
    Counted,
    /// `CudaAllocator::allocate` and `free`, with handles.
    Handle,
    /// The C interface, with raw pointers.
    Library,
    /// The core with handles, on the simulated device.
    Simulated,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("symmalloc-peers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    match cli.command {
        Command::Jobs { folder, filter } => job::write_all(&folder, &filter),
        Command::Measure { subject, jobs, amounts } => {
            let jobs = Job::read_all(&jobs)?;
            let streams = jobs.iter().map(Job::streams).chain(amounts.threads.iter().copied()).max().unwrap_or(1);
            subject.with(streams, &Measure { jobs, amounts })
        }
        Command::Scale { subject, live, free, amounts } => subject.with(1, &Scale { live, free, amounts }),
        Command::Processors { amounts } => {
            linear::measure(&amounts);
            Ok(())
        }
    }
}

/// A task that runs on a subject whose type is known only at run time.
trait Task {
    fn run<S: Subject>(&self, report: &Report, make: &dyn Fn() -> S);
}

struct Measure {
    jobs: Vec<Job>,
    amounts: Amounts,
}

impl Task for Measure {
    fn run<S: Subject>(&self, report: &Report, make: &dyn Fn() -> S) {
        cases::measure(&self.amounts, &self.jobs, report, make);
    }
}

struct Scale {
    live: Vec<usize>,
    free: Vec<usize>,
    amounts: Amounts,
}

impl Task for Scale {
    fn run<S: Subject>(&self, report: &Report, make: &dyn Fn() -> S) {
        let Scale { live, free, amounts } = self;
        let stopwatch = &mut Stopwatch::new();
        live.iter().for_each(|count| scale::live_blocks(amounts, *count, stopwatch, report, make));
        free.iter().for_each(|count| scale::free_blocks(amounts, *count, stopwatch, report, make));
    }
}

impl Which {
    fn with(&self, streams: usize, task: &impl Task) -> Result<(), Box<dyn Error>> {
        let report = Report::new(&self.peer);
        let config: Config = if self.conf.is_empty() { Config::default() } else { self.conf.parse()? };
        if self.prefetch_mib > 0 && matches!(self.interface, Interface::Simulated | Interface::Library) {
            return Err("--prefetch-mib is for the interfaces buffer, counted and handle: omit it".into());
        }
        let prefetch_bytes = self.prefetch_mib << 20;
        match self.interface {
            Interface::Simulated => task.run(&report, &|| Simulated::new(&config, streams)),
            Interface::Library => {
                let path = self
                    .library
                    .as_ref()
                    .ok_or("the interface `library` needs --library with the path of libsymmalloc_torch.so")?;
                let (cuda, library) = (Cuda::new(streams, 0)?, Arc::new(Library::open(path)?));
                task.run(&report, &|| Pointers::new(&library, &cuda, &self.conf));
            }
            Interface::Buffer => {
                let cuda = Cuda::new(streams, prefetch_bytes)?;
                task.run(&report, &|| Borrowed::new(&cuda, &config));
            }
            Interface::Counted => {
                let cuda = Cuda::new(streams, prefetch_bytes)?;
                task.run(&report, &|| Counted::new(&cuda, &config));
            }
            Interface::Handle => {
                let cuda = Cuda::new(streams, prefetch_bytes)?;
                task.run(&report, &|| Handles::new(&cuda, &config));
            }
        }
        Ok(())
    }
}
