//! The error type of the program. Each error states how to fix it, and the program exits with code 2 unless noted.

mod job_difference;

pub(crate) use job_difference::JobDifference;

use crate::args::{FlagContradiction, PlanFlagContradiction};
use crate::collection;
use crate::content::Content;
use crate::job::{JobError, UnknownToModel};
use crate::quantity::memory;
use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::PlanError;
use symmalloc_import::rerun::RerunError;
use symmalloc_import::{ImportError, ImportErrorKind, PickleError, RmmError, SnapshotError};
use symmalloc_plan::TableError;
use symmalloc_sim::job::story::StoryError;
use symmalloc_trace::plan::{PlanContradiction, PlanTextError};
use symmalloc_trace::replay::{ReplayError, StepError};
use symmalloc_trace::{TraceError, TraceWriteError};
use symmalloc_watchdog::FlightRecordError;
use thiserror::Error;

/// Error that ends a command.
#[derive(Debug, Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error("{}: a trace contains no addresses, which differ between ranks", path.display())]
    NoAddresses { path: PathBuf },
    #[error("{}: the recorded ops contradict each other", path.display())]
    Program { path: PathBuf, source: ReplayError },
    #[error("{}: cannot be replayed", path.display())]
    Job { path: PathBuf, source: JobError },
    #[error("{}: cannot be planned, in pool {pool}", path.display())]
    NotPlanned { path: PathBuf, pool: PoolId, source: PlanError },
    #[error("{}: cannot be carried out as planned", path.display())]
    NotFollowed { path: PathBuf, source: JobError },
    #[error("{}: its plans contradict each other", path.display())]
    Contradictory { path: PathBuf, source: PlanContradiction },
    #[error("{}: there is nothing to plan", path.display())]
    NothingToPlan { path: PathBuf },
    #[error("{}: {reason}, which a table cannot express", path.display())]
    PlanNotATable { path: PathBuf, reason: NotATable },
    #[error("{}: cannot be opened", path.display())]
    OpenPlan { path: PathBuf, source: io::Error },
    #[error("{}: cannot be read as a plan", path.display())]
    PlanText { path: PathBuf, source: PlanTextError },
    #[error("{}: made for a different configuration", path.display())]
    PlanContradicted { path: PathBuf, source: PlanFlagContradiction },
    #[error("{} is not a plan of {}", plan.display(), job.display())]
    PlanOfAnotherJob { plan: PathBuf, job: PathBuf, source: JobDifference },
    #[error("{}: cannot be followed, in pool {pool}", path.display())]
    PlanRefused { path: PathBuf, pool: PoolId, source: PlanError },
    #[error(transparent)]
    FlagsContradict(#[from] FlagContradiction),
    #[error(transparent)]
    UnknownToModel(#[from] UnknownToModel),
    #[error("there is no command {name} to describe")]
    NoSuchCommand { name: String },
    #[error("--plan is for one job, but {traces} are given")]
    PlanForSeveral { traces: usize },
    #[error("{}: cannot be replayed", path.display())]
    Rerun { path: PathBuf, source: RerunError },
    #[error("{} is also an input: writing it would destroy the recording", path.display())]
    OutputIsInput { path: PathBuf },
    #[error("{} is written to a file, not to standard output", content.word())]
    NoStream { content: Content },
    #[error("{}: the file name is that of {}, but the content is {}", path.display(), named.word(), content.word())]
    NamedOtherwise { path: PathBuf, named: Content, content: Content },
    #[error("{}: unsupported picture extension", path.display())]
    UnknownPicture { path: PathBuf },
    #[error("{}: the recorded placement of op {op} exceeds the memory of any device", path.display())]
    ImpossiblePlacement { path: PathBuf, op: usize },
    #[error("{}: a report is an HTML page", path.display())]
    UnknownPage { path: PathBuf },
    #[error("{}: there is no op {op}: the recording has {ops}", path.display())]
    NoSuchOp { path: PathBuf, op: usize, ops: usize },
    #[error("{}: there is no memory to show", path.display())]
    NothingToShow { path: PathBuf, heaps: Vec<String> },
    /// The message includes the cause.
    #[error("{0}")]
    FlightRecord(FlightRecordError),
    #[error("{} is a flight record, and {} is a recording", record.display(), recording.display())]
    DiffOfBoth { record: PathBuf, recording: PathBuf },
    #[error("{}: a state without history has no ops to compare", path.display())]
    DiffOfState { path: PathBuf },
    #[error("diff compares two recordings, but {recordings} are given")]
    DiffOfNotTwo { recordings: usize },
    #[error("--record writes the decisions of one trace, but {traces} are given")]
    RecordOfSeveral { traces: usize },
    #[error("{flag} writes a file for one recording, but {traces} are given")]
    PlanOfSeveral { flag: &'static str, traces: usize },
    #[error("{}: cannot be read as a table of rectangles", path.display())]
    Rectangles { path: PathBuf, source: TableError },
    #[error("{flag} is for recordings, not for tables of rectangles")]
    PlanOfRectangles { flag: &'static str },
    #[error("{} is a recording, but other inputs are tables of rectangles", recording.display())]
    PlanOfBoth { recording: PathBuf },
    #[error("{} and {} configure pool {pool} differently", path.display(), other.display())]
    PlanOfOtherSettings { path: PathBuf, other: PathBuf, pool: PoolId },
    #[error("{} and {} register {stream} in different groups of streams", path.display(), other.display())]
    PlanOfOtherGroups { path: PathBuf, other: PathBuf, stream: StreamId },
    #[error(
        "{path} and {other} are not ranks of one job: {path} {did}, {other} {other_did}",
        path = path.display(),
        other = other.display()
    )]
    NotRanksOfOneJob { path: PathBuf, other: PathBuf, did: String, other_did: String },
    #[error("{}, but the limit is {}", needs(pool.as_ref(), *needed_bytes), memory(*limit_bytes))]
    PlanBeyondLimit { pool: Option<PoolId>, needed_bytes: u64, limit_bytes: u64 },
    #[error("{}, which is more than a segment or a range of the pool can have", needs(Some(pool), *needed_bytes))]
    PlanBeyondRange { pool: PoolId, needed_bytes: u64 },
    #[error("{}: cannot be written", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("{}: cannot be written", path.display())]
    Write { path: PathBuf, source: TraceWriteError },
    #[error("{}: invalid simulated-job metadata", path.display())]
    Story { path: PathBuf, source: StoryError },
    #[error("the preload library was not found at {}", listed(tried))]
    NoPreloadLibrary { tried: Vec<PathBuf> },
    #[error("{}: a path with a space or a colon cannot be preloaded", path.display())]
    PreloadPath { path: PathBuf },
    #[error("{} cannot be started", program.display())]
    NotStarted { program: OsString, source: io::Error },
    #[error("no thread can be started")]
    Thread { source: io::Error },
    #[error("{}: the processes of the run could not write their statistics", path.display())]
    RunFolder { path: PathBuf, source: io::Error },
    #[error("{}: the statistics of a process are damaged", path.display())]
    RunSummary { path: PathBuf, source: serde_json::Error },
    #[error("--check runs as one rank of a job and cannot see the other ranks")]
    CheckOfOneRank,
    #[error("--check compares at least two ranks, but only {ranks} ended and allocated memory")]
    NothingToCheck { ranks: usize },
    #[error("the result cannot be written to stdout")]
    Print(#[source] io::Error),
}

/// A reason for which a table of rectangles cannot express the plan of a job.
#[derive(Debug, Error)]
pub(crate) enum NotATable {
    #[error("the job has {0} plans")]
    Plans(usize),
    #[error("allocation {allocation} of a step does not end with the step")]
    EndsLater { allocation: usize },
}

/// Joins paths with "nor".
fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" nor ")
}

/// Describes the memory that a plan needs.
fn needs(pool: Option<&PoolId>, bytes: u64) -> String {
    match pool {
        Some(pool) => format!("pool {pool} needs {}", memory(bytes)),
        None => format!("all pools together need {}", memory(bytes)),
    }
}

impl CliError {
    /// Returns the exit code of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // The exit codes of a shell.
            CliError::NotStarted { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            CliError::NotStarted { .. } | CliError::Thread { .. } => 126,
            _ => 2,
        }
    }

    /// Returns advice on how to fix the error.
    pub(crate) fn help(&self) -> Option<Cow<'static, str>> {
        let help = match self {
            CliError::NothingToShow { heaps, .. } if !heaps.is_empty() => {
                return Some(format!("select a heap with --pool and --stream: {}", heaps.join("; ")).into());
            }
            CliError::NothingToShow { .. } => "record a job that allocates something",
            CliError::UnknownPicture { .. } => {
                "use .svg, or `symmalloc report` for a page (.html); to convert an .svg, use `rsvg-convert -z 2 in.svg -o out.png`"
            }
            CliError::ImpossiblePlacement { .. } => {
                "record the job again, or delete the placement: without placements, our allocator places the allocations"
            }
            CliError::NoAddresses { .. } => {
                "give a place, SEGMENT@OFFSET, or a snapshot or log of the process; in the process itself, call explain_address"
            }
            CliError::UnknownPage { .. } => "use a file name that ends in .html",
            CliError::NoSuchOp { .. } => "ops are counted from 0; omit --op to show the peak",
            CliError::Import(error) => return import_help(error),
            CliError::NoStream { .. } => "give a file name; only import and export write to standard output",
            CliError::OutputIsInput { .. } => "write to another file",
            CliError::NamedOtherwise { .. } => "change the extension, or omit it",
            CliError::Program { .. } => "record the job again, or repair the trace at that op",
            CliError::Job { source: JobError::Config(_) | JobError::Addresses { .. }, .. }
            | CliError::Rerun { source: RerunError::Config(_), .. } => {
                "change the trace's configuration, or override it with --segments, --streams and --config"
            }
            CliError::Job { source: JobError::SharedStreams { .. }, .. } => {
                "let streams be separate (--streams separate), or use a shorter part of the recording"
            }
            CliError::Job { source: JobError::Comparisons { .. }, .. } => {
                "remove `sync` lines from the trace, or use a shorter part of the recording"
            }
            CliError::Job { source: JobError::TooMuchWork { .. }, .. }
            | CliError::Job { source: JobError::Step { error: StepError::TooMuchWork(_), .. }, .. }
            | CliError::Rerun { source: RerunError::Step { error: StepError::TooMuchWork(_), .. }, .. } => {
                "use a shorter part of the recording: import --accept-torn keeps the beginning of a file that is cut"
            }
            CliError::Job { .. } | CliError::Rerun { .. } | CliError::Contradictory { .. } => {
                "record the job again, or repair the trace at that op (counted from 0)"
            }
            CliError::FlightRecord(FlightRecordError::Version { .. }) => "read it with the version that wrote it",
            CliError::FlightRecord(_) => {
                "give flight records as the ranks wrote them (symmalloc-flight-*.json), or two recordings"
            }
            CliError::DiffOfState { .. } => {
                "call torch.cuda.memory._record_memory_history() before the job, so that the snapshot has a history; `symmalloc \
                 report` shows a state"
            }
            CliError::DiffOfBoth { .. } | CliError::DiffOfNotTwo { .. } => {
                "give two recordings, or flight records alone, one per rank"
            }
            CliError::NoSuchCommand { .. } => "`symmalloc --help` lists the commands",
            CliError::FlagsContradict(_) => "remove one of the two",
            CliError::UnknownToModel(_) => "remove the setting, or use our rule: --order sequence, the default",
            CliError::RecordOfSeveral { .. } => "replay the traces one by one",
            CliError::PlanOfSeveral { .. } => "plan the recordings one by one",
            CliError::Rectangles { .. } => {
                "begin with the columns id, lower, upper (exclusive) and size, separated by commas, and give whole numbers; an \
                 `end` column is inclusive"
            }
            CliError::PlanOfRectangles { .. } => "remove the flag",
            CliError::PlanOfBoth { .. } => "plan tables and recordings in separate calls",
            CliError::PlanForSeveral { .. } => "replay the jobs one by one, each with its plan",
            CliError::NothingToPlan { .. } => {
                "record a job that allocates memory; if it has steps, the same step must occur at least twice"
            }
            CliError::PlanNotATable { .. } => "write a plan file: -o FILE.plan",
            CliError::NotPlanned { source: PlanError::Memory(_), .. }
            | CliError::PlanRefused { source: PlanError::Memory(_), .. } => {
                "raise the pool's limit_mb or segment_mb, or total_limit_mb: the plan needs this much memory"
            }
            CliError::NotPlanned { .. } => "record a shorter part of the job",
            CliError::NotFollowed { .. } => "raise total_limit_mb, or let the job run without a plan",
            CliError::PlanRefused { .. } => "plan the job again: the file was edited, or damaged",
            CliError::PlanText { .. } | CliError::OpenPlan { .. } => "write one with `symmalloc plan JOB -o FILE`",
            CliError::PlanContradicted { .. } => "remove the flag, or plan the job again with it",
            CliError::PlanOfAnotherJob { .. } => "give the plan that was made for this job, or plan it now",
            CliError::NotRanksOfOneJob { .. } => {
                "ranks of one job make the same calls, and only sizes may differ; omit --one-job to plan each recording separately"
            }
            CliError::PlanOfOtherGroups { .. } => {
                "register the streams in the same groups on every rank, and record again"
            }
            CliError::PlanOfOtherSettings { .. } => {
                "give --one-job the recordings of one job's ranks, or replace their configurations with --config"
            }
            CliError::PlanBeyondLimit { pool: Some(_), .. } => {
                "raise the pool's limit_mb, let its streams share, or make the job smaller"
            }
            CliError::PlanBeyondLimit { pool: None, .. } => "raise total_limit_mb, or make the job smaller",
            CliError::PlanBeyondRange { .. } => "raise range_mb",
            CliError::Create { .. } | CliError::Write { .. } => {
                "choose a path in an existing, writable folder, on a disk with enough space"
            }
            CliError::Story { .. } => {
                "repair the lines that begin with `#!`, or delete them: the rest is a plain trace"
            }
            CliError::NoPreloadLibrary { .. } => {
                "build it with `cargo build --release -p symmalloc-preload`, or give its path with --library or SYMMALLOC_PRELOAD"
            }
            CliError::PreloadPath { .. } => "move the library, or give a link to it with --library",
            CliError::Thread { .. } => "raise the limit on threads: `ulimit -u`, or `pids.max` of the cgroup",
            CliError::NotStarted { .. } => "give the program and its arguments after `--`",
            CliError::RunFolder { .. } | CliError::RunSummary { .. } => {
                "set TMPDIR to a folder that the program can write to"
            }
            CliError::CheckOfOneRank => {
                "start symmalloc before the launcher: symmalloc run --check -- torchrun ...; or use --record and symmalloc diff"
            }
            CliError::NothingToCheck { .. } => {
                "start the job with its launcher after `--`: torchrun, mpirun or srun, which assign each process a rank"
            }
            CliError::Print(_) => "redirect stdout to another file, or free some disk space",
        };
        Some(help.into())
    }
}

/// Returns advice for an unreadable recording whose message has none.
fn import_help(error: &ImportError) -> Option<Cow<'static, str>> {
    let help = match error.kind() {
        ImportErrorKind::Open(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Some(not_found(error).into());
        }
        ImportErrorKind::Open(_) | ImportErrorKind::Read(_) => {
            "give a readable file: a PyTorch memory snapshot, an RMM log or a symmalloc trace"
        }
        ImportErrorKind::Snapshot(SnapshotError::NoSuchTrace { .. } | SnapshotError::SeveralDevices { .. }) => {
            "select one of them with --device"
        }
        ImportErrorKind::TooLarge { .. }
        | ImportErrorKind::Rmm(RmmError::TooLarge { .. })
        | ImportErrorKind::Snapshot(
            SnapshotError::TooLarge { .. }
            | SnapshotError::StacksTooLarge { .. }
            | SnapshotError::Pickle(PickleError::TooLarge { .. }),
        ) => "raise --memory-limit-mb",
        ImportErrorKind::Trace(TraceError::Torn { .. }) | ImportErrorKind::TornTrace { .. } => {
            "or use --accept-torn to accept the part before the break"
        }
        ImportErrorKind::Empty => "dump the snapshot after the job has allocated something, or record again",
        _ => return None,
    };
    Some(help.into())
}

/// Returns advice for a name that is neither a file nor a recorded job, with the most similar job name.
fn not_found(error: &ImportError) -> String {
    let name = error.path().and_then(Path::to_str).unwrap_or_default();
    // At most one typo per three characters.
    let distance = |job: &&str| strsim::damerau_levenshtein(name, job);
    let meant = collection::short_names().min_by_key(distance).filter(|job| distance(job) <= name.len() / 3);
    let meant = meant.map_or_else(String::new, |job| format!("did you mean {job}? "));
    format!(
        "{meant}check the path; a recording is a PyTorch memory snapshot, an RMM log or a symmalloc trace, or one of the jobs that \
         come with the program: {}",
        collection::short_names().collect::<Vec<_>>().join(", ")
    )
}
