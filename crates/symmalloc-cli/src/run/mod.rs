//! `symmalloc run`: any CUDA program, unchanged, with its memory from symmalloc, or only recorded.
//!
//! ```text
//!  arguments ─► environment: LD_PRELOAD, SYMMALLOC_RUN_* ─┬─ nothing to do afterwards ─► exec
//!                                                         ╰─► child ─► wait, forward signals ─► summaries of its processes
//!                                                                                  table, report, check of ranks ◄─╯
//! ```
//!
//! The library that does the work is `symmalloc-preload`. It writes a summary for each process into a folder of the run, and this
//! program reads them when the child has ended.

mod check;
mod environment;
mod library;
mod process;
mod summary;
mod table;

use crate::args::RunArgs;
use crate::error::CliError;
use crate::{output, report};
use environment::Environment;
use process::Ended;
use std::path::Path;
use std::process::ExitCode;
use summary::Summaries;
use symmalloc_files::TemporaryFolder;

/// Runs the program, and says what it did. The exit code is the program's, unless ranks were compared and differ.
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
    // What the processes of the run tell. It goes away with the run.
    let folder = TemporaryFolder::new();
    let folder = folder.map_err(|source| CliError::Create { path: std::env::temp_dir(), source })?;
    let environment = Environment::new(args, &library, Some(folder.path()))?;
    let ended = process::run(args, &environment)?;
    let summaries = Summaries::read(folder.path())?;
    output::tell(&table::text(&summaries, args, &ended));
    if let Some(page) = &args.report {
        write_reports(&summaries, page, args)?;
    }
    let ranks_differ = args.check && check::tell(&summaries, environment.is_watched())?;
    Ok(match ended {
        Ended::Code(0) if ranks_differ => ExitCode::from(3),
        ended => ended.exit_code(),
    })
}

/// One page for each trace, numbered from the second on.
fn write_reports(summaries: &Summaries, page: &Path, args: &RunArgs) -> Result<(), CliError> {
    for (index, trace) in summaries.traces().enumerate() {
        let numbered = page.with_extension(format!("{}.html", index + 1));
        report::write(trace, if index == 0 { page } else { &numbered }, &args.reading)?;
    }
    Ok(())
}
