//! What can go wrong in the program: each error says what to do, and ends it with exit code 2.

use crate::args::FlagContradiction;
use crate::collection;
use crate::content::Content;
use crate::job::{JobError, UnknownToModel};
use crate::picture::png::TooLargeForPixels;
use crate::planned::{Contradiction, JobDifference};
use crate::quantity::memory;
use std::borrow::Cow;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use symmalloc_core::ids::PoolId;
use symmalloc_core::plans::PlanError;
use symmalloc_import::rerun::RerunError;
use symmalloc_import::{ImportError, ImportErrorKind, SnapshotError};
use symmalloc_sim::job::story::StoryError;
use symmalloc_trace::plan::{PlanContradiction, PlanTextError};
use symmalloc_trace::replay::ReplayError;
use symmalloc_trace::{TraceError, TraceWriteError};
use symmalloc_watchdog::FlightRecordError;
use thiserror::Error;

/// Why a command could not be carried out.
#[derive(Debug, Error)]
pub(crate) enum CliError {
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error("{}: the recorded ops contradict each other", path.display())]
    Program { path: PathBuf, source: ReplayError },
    #[error("{}: cannot be replayed", path.display())]
    Job { path: PathBuf, source: JobError },
    #[error("{}: cannot be planned, in pool {pool}", path.display())]
    NotPlanned { path: PathBuf, pool: PoolId, source: PlanError },
    #[error("{}: its plans contradict each other", path.display())]
    Contradictory { path: PathBuf, source: PlanContradiction },
    #[error("{}: there is nothing to plan", path.display())]
    NothingToPlan { path: PathBuf },
    #[error("{}: cannot be opened", path.display())]
    OpenPlan { path: PathBuf, source: io::Error },
    #[error("{}: cannot be read as a plan", path.display())]
    PlanText { path: PathBuf, source: PlanTextError },
    #[error("{}: is for another configuration", path.display())]
    PlanContradicted { path: PathBuf, source: Contradiction },
    #[error("{} is not a plan of {}", plan.display(), job.display())]
    PlanOfAnotherJob { plan: PathBuf, job: PathBuf, source: JobDifference },
    #[error("{}: cannot be followed, in pool {pool}", path.display())]
    PlanRefused { path: PathBuf, pool: PoolId, source: PlanError },
    #[error(transparent)]
    FlagsContradict(#[from] FlagContradiction),
    #[error(transparent)]
    UnknownToModel(#[from] UnknownToModel),
    #[error("there is no command {name} to write a page about")]
    NoSuchCommand { name: String },
    #[error("--plan is for one job, but {traces} are given")]
    PlanForSeveral { traces: usize },
    #[error("{}: cannot be carried out", path.display())]
    Rerun { path: PathBuf, source: RerunError },
    #[error("{} is the input, too: writing it would lose the recording", path.display())]
    OutputIsInput { path: PathBuf },
    #[error("{} is written to a file, not to standard output", content.word())]
    NoStream { content: Content },
    #[error("{}: the name says {}, and this is {}", path.display(), named.word(), content.word())]
    NamedOtherwise { path: PathBuf, named: Content, content: Content },
    #[error(transparent)]
    TooLargeForPixels(#[from] TooLargeForPixels),
    #[error("{}: --share draws one picture, and a page has several", path.display())]
    SharedPage { path: PathBuf },
    #[error("{}: no kind of picture goes by this name", path.display())]
    UnknownPicture { path: PathBuf },
    #[error("{}: the placement that op {op} records lies beyond any device's memory", path.display())]
    ImpossiblePlacement { path: PathBuf, op: usize },
    #[error("{}: a report is a page, and pages are called .html", path.display())]
    UnknownPage { path: PathBuf },
    #[error("{}: there is no op {op} to look at: the recording has {ops}", path.display())]
    NoSuchOp { path: PathBuf, op: usize, ops: usize },
    #[error("{}: there is no memory to show", path.display())]
    NothingToShow { path: PathBuf, heaps: Vec<String> },
    /// Its message has its cause.
    #[error("{0}")]
    FlightRecord(FlightRecordError),
    #[error("{} is a flight record, and {} is a recording", record.display(), recording.display())]
    DiffOfBoth { record: PathBuf, recording: PathBuf },
    #[error("diff compares two recordings, and is given {recordings}")]
    DiffOfNotTwo { recordings: usize },
    #[error("--record writes the decisions of one trace, but {traces} are given")]
    RecordOfSeveral { traces: usize },
    #[error("{flag} writes a file for one recording, but {traces} are given")]
    PlanOfSeveral { flag: &'static str, traces: usize },
    #[error("{} and {} configure pool {pool} differently", path.display(), other.display())]
    PlanOfOtherSettings { path: PathBuf, other: PathBuf, pool: PoolId },
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
    #[error("{}: what it says about a simulated job makes no sense", path.display())]
    Story { path: PathBuf, source: StoryError },
    #[error("the library that goes between the program and libcuda is not at {}", listed(tried))]
    NoPreloadLibrary { tried: Vec<PathBuf> },
    #[error("{}: a path with a blank or a colon cannot be preloaded", path.display())]
    PreloadPath { path: PathBuf },
    #[error("{} cannot be started", program.display())]
    NotStarted { program: OsString, source: io::Error },
    #[error("{}: the processes of the run could not tell what they did", path.display())]
    RunFolder { path: PathBuf, source: io::Error },
    #[error("{}: what a process told is damaged", path.display())]
    RunSummary { path: PathBuf, source: serde_json::Error },
    #[error("--check was started as one rank of a job, and sees no other")]
    CheckOfOneRank,
    #[error("--check compares ranks, and {ranks} of them ended and allocated")]
    NothingToCheck { ranks: usize },
    #[error("the result cannot be written to stdout")]
    Print(#[source] io::Error),
}

/// Paths after each other.
fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" nor ")
}

/// What a plan asks for.
fn needs(pool: Option<&PoolId>, bytes: u64) -> String {
    match pool {
        Some(pool) => format!("pool {pool} needs {}", memory(bytes)),
        None => format!("all pools together need {}", memory(bytes)),
    }
}

impl CliError {
    /// The exit code of the program.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // As a shell does.
            CliError::NotStarted { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            CliError::NotStarted { .. } => 126,
            _ => 2,
        }
    }

    /// What to do about it.
    pub(crate) fn help(&self) -> Option<Cow<'static, str>> {
        let help = match self {
            CliError::NothingToShow { heaps, .. } if !heaps.is_empty() => {
                return Some(format!("choose with --pool and --stream among: {}", heaps.join("; ")).into());
            }
            CliError::NothingToShow { .. } => "record a job that allocates something",
            CliError::UnknownPicture { .. } => "name it .svg or .png for one picture, or .html for a page of them",
            CliError::SharedPage { .. } => "name it .png or .svg",
            CliError::TooLargeForPixels(_) => return None,
            CliError::ImpossiblePlacement { .. } => {
                "record the job again, or leave the placement out: without placements the job is carried out"
            }
            CliError::UnknownPage { .. } => "name it .html",
            CliError::NoSuchOp { .. } => "ops are counted from 0; without --op, the map shows the peak",
            CliError::Import(error) => return import_help(error),
            CliError::NoStream { .. } => "give the file's name; only import and export write to standard output",
            CliError::OutputIsInput { .. } => "write to another file",
            CliError::NamedOtherwise { .. } => "give it another name, or leave the ending out",
            CliError::Program { .. } => "record the job again, or repair the trace at that op",
            CliError::Job { source: JobError::Config(_) | JobError::Addresses { .. }, .. }
            | CliError::Rerun { source: RerunError::Config(_), .. } => {
                "change the trace's configuration, or choose with --segments, --streams and --config"
            }
            CliError::Job { .. } | CliError::Rerun { .. } | CliError::Contradictory { .. } => {
                "record the job again, or repair the trace at that op (counted from 0)"
            }
            CliError::FlightRecord(FlightRecordError::Version { .. }) => "read it with the version that wrote it",
            CliError::FlightRecord(_) => {
                "give flight records as the ranks wrote them (symmalloc-flight-*.json), or two recordings"
            }
            CliError::DiffOfBoth { .. } | CliError::DiffOfNotTwo { .. } => {
                "give two recordings, or flight records alone: one of each rank"
            }
            CliError::NoSuchCommand { .. } => "`symmalloc --help` lists the commands",
            CliError::FlagsContradict(_) => "leave one of them out",
            CliError::UnknownToModel(_) => "leave the setting out, or use our rule: --order sequence, the default",
            CliError::RecordOfSeveral { .. } => "replay the traces one by one",
            CliError::PlanOfSeveral { .. } => "plan the recordings one by one",
            CliError::PlanForSeveral { .. } => "replay the jobs one by one, each with its plan",
            CliError::NothingToPlan { .. } => {
                "record a job that allocates something; steps of its own must come at least twice alike"
            }
            CliError::NotPlanned { source: PlanError::Memory(_), .. }
            | CliError::PlanRefused { source: PlanError::Memory(_), .. } => {
                "raise the pool's limit_mb or segment_mb, or total_limit_mb: the plan needs no less"
            }
            CliError::NotPlanned { .. } => "record a shorter part of the job",
            CliError::PlanRefused { .. } => "plan the job again: the file was edited, or damaged",
            CliError::PlanText { .. } | CliError::OpenPlan { .. } => "write one with `symmalloc plan JOB -o FILE`",
            CliError::PlanContradicted { .. } => "leave the flag out, or plan the job again with it",
            CliError::PlanOfAnotherJob { .. } => "give the plan that was made for this job, or plan it now",
            CliError::NotRanksOfOneJob { .. } => {
                "ranks of one job make the same calls, only sizes may differ; leave --one-job out to plan each by itself"
            }
            CliError::PlanOfOtherSettings { .. } => {
                "give --one-job the recordings of one job's ranks; --config puts one configuration in the place of theirs"
            }
            CliError::PlanBeyondLimit { pool: Some(_), .. } => {
                "raise the pool's limit_mb, let its streams share, or make the job smaller"
            }
            CliError::PlanBeyondLimit { pool: None, .. } => "raise total_limit_mb, or make the job smaller",
            CliError::PlanBeyondRange { .. } => "raise range_mb",
            CliError::Create { .. } | CliError::Write { .. } => {
                "choose a path in a folder that exists and that you may write to, on a disk with room"
            }
            CliError::Story { .. } => {
                "repair the lines that begin with `#!`, or leave them out: the rest is a plain trace"
            }
            CliError::NoPreloadLibrary { .. } => {
                "build it with `cargo build --release -p symmalloc-preload`, or name it with --library or SYMMALLOC_PRELOAD"
            }
            CliError::PreloadPath { .. } => "move the library, or name a link to it with --library",
            CliError::NotStarted { .. } => "give the program and its arguments after `--`",
            CliError::RunFolder { .. } | CliError::RunSummary { .. } => {
                "set TMPDIR to a folder that the program may write to"
            }
            CliError::CheckOfOneRank => {
                "start it before the launcher: symmalloc run --check -- torchrun ...; or --record, and compare with symmalloc diff"
            }
            CliError::NothingToCheck { .. } => {
                "start the job with its launcher behind `--`: torchrun, mpirun or srun, which tell each process its rank"
            }
            CliError::Print(_) => "send it elsewhere, or make room",
        };
        Some(help.into())
    }
}

/// What to do about an unreadable recording, where its message does not say that yet.
fn import_help(error: &ImportError) -> Option<Cow<'static, str>> {
    let help = match error.kind() {
        ImportErrorKind::Open(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Some(not_found(error).into());
        }
        ImportErrorKind::Open(_) | ImportErrorKind::Read(_) => {
            "give a file that you may read: a PyTorch memory snapshot, an RMM log or a symmalloc trace"
        }
        ImportErrorKind::Snapshot(SnapshotError::NoSuchTrace { .. } | SnapshotError::SeveralDevices { .. }) => {
            "choose a device that has entries with --device"
        }
        ImportErrorKind::TooLarge { .. } => "raise --memory-limit-mb",
        ImportErrorKind::Trace(TraceError::Torn { .. }) | ImportErrorKind::TornTrace { .. } => {
            "or take what there is with --accept-torn"
        }
        ImportErrorKind::Empty => "dump the snapshot after the job has allocated something, or record again",
        _ => return None,
    };
    Some(help.into())
}

/// What may have been meant by a name that is neither a file's nor a recorded job's.
fn not_found(error: &ImportError) -> String {
    let name = error.path().and_then(Path::to_str).unwrap_or_default();
    // One slip in three characters.
    let distance = |job: &&str| strsim::damerau_levenshtein(name, job);
    let meant = collection::short_names().min_by_key(distance).filter(|job| distance(job) <= name.len() / 3);
    let meant = meant.map_or_else(String::new, |job| format!("did you mean {job}? "));
    format!(
        "{meant}check the path; a recording is a PyTorch memory snapshot, an RMM log or a symmalloc trace, or one of the jobs that \
         come with the program: {}",
        collection::short_names().collect::<Vec<_>>().join(", ")
    )
}
