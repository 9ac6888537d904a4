//! `symmalloc run`: runs an unmodified CUDA program with memory from symmalloc, or records it.
//!
//! ```text
//!  arguments ─► environment: LD_PRELOAD, SYMMALLOC_RUN_* ─┬─ no work afterwards ─► exec
//!                                                         ╰─► child ─► wait, forward signals ─► summaries of its processes
//!                                                                                 table, report, comparison of ranks ◄─╯
//! ```
//!
//! The preload library is `symmalloc-preload`. It writes a summary of each process to a folder, which this program reads when
//! the child has ended.

mod check;
mod environment;
mod library;
mod process;
mod summary;
mod table;

use crate::args::{ReadingArgs, RunArgs};
use crate::error::CliError;
use crate::{output, report};
use environment::Environment;
use process::Ended;
use std::path::Path;
use std::process::ExitCode;
use summary::Summaries;
use symmalloc_files::{TemporaryFolder, block_write_signals};

/// Runs the program and prints its results. The exit code is the program's. If the program exits with 0, the exit code is 2 if a process
/// could not write its recording or its summary, and 3 if a comparison finds that ranks differ.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, CliError> {
    if let Some(page) = &args.report {
        report::check_name(page)?;
    }
    let library = library::find(args.library.as_deref())?;
    if !args.stats && !args.check && args.record.is_none() && args.report.is_none() {
        return Err(process::replace(args, &Environment::new(args, &library, None)?));
    }
    if args.check && environment::has_rank() {
        return Err(CliError::CheckOfOneRank);
    }
    // The summaries of the processes. The folder is removed at the end of the run.
    let folder = TemporaryFolder::new();
    let folder = folder.map_err(|source| CliError::Create { path: std::env::temp_dir(), source })?;
    let environment = Environment::new(args, &library, Some(folder.path()))?;
    let ended = process::run(args, &environment)?;
    block_write_signals();
    let summaries = Summaries::read(folder.path())?;
    output::write_stderr(&table::text(&summaries, args, &ended));
    if let Some(page) = &args.report {
        write_reports(&summaries, page)?;
    }
    let ranks_differ = args.check && check::print_comparison(&summaries, environment.is_watched())?;
    Ok(match ended {
        Ended::Code(0) if summaries.has_failed() => ExitCode::from(2),
        Ended::Code(0) if ranks_differ => ExitCode::from(3),
        ended => ended.exit_code(),
    })
}

/// Writes one page per trace. Pages after the first are numbered.
fn write_reports(summaries: &Summaries, page: &Path) -> Result<(), CliError> {
    for (index, trace) in summaries.traces().enumerate() {
        let numbered = page.with_extension(format!("{}.html", index + 1));
        report::write(trace, if index == 0 { page } else { &numbered }, &ReadingArgs::default())?;
    }
    Ok(())
}
