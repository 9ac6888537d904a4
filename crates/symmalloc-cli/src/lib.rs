//! `symmalloc`, the program: replays recorded GPU jobs on many simulated ranks, compares two ranks' recordings, and
//! turns what users have into traces. No GPU is needed.
//!
//! ```text
//!             ┌─ replay ─► job ──► ranks ──► sequence   our allocator          ─┐
//! args ───────┤                          └─► address    address_order (model)  ─┴─► screen, or JSON
//!             ├─ simulate ► whole jobs on adverse ranks (symmalloc-sim)
//!             ├─ diff ───► comparison of two recordings, or of all ranks' flight records
//!             ├─ import ─► a trace
//!             ├─ export ─► a PyTorch snapshot
//!             ├─ chart ──► pictures
//!             ├─ report ─► a page about a job, and settings to try
//!             ├─ run ────► any CUDA program under symmalloc, or recorded
//!             └─ plan ───► where every allocation of a job goes, and what to reserve without that
//! ```
//!
//! [`job`] is the part that others use, too: the golden tests replay the recorded jobs through it. [`address_order`] is
//! the model of the old rule that `replay` shows beside ours.
//!
//! Exit codes: 0 fine, 3 the ranks differ, 2 bad input. Results go to stdout, what went wrong and progress to stderr.
#![forbid(unsafe_code)]

pub mod address_order;
mod args;
mod chart;
pub mod diff;
mod error;
mod export;
mod import;
pub mod job;
mod output;
mod picture;
mod plan;
mod planned;
mod progress;
mod quantity;
mod recorded;
mod replay;
mod report;
mod run;
mod simulate;
pub mod timing;

use args::{Args, Command};
use clap::Parser;
use error::CliError;
use std::ffi::OsString;
use std::process::ExitCode;

/// Whether ranks agree: what the exit code tells when the input was good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Agree,
    Differ,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Agree => ExitCode::SUCCESS,
            Verdict::Differ => ExitCode::from(3),
        }
    }
}

/// Runs the program with these arguments, the first of which is its name. Returns its exit code.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = match Args::try_parse_from(arguments) {
        Ok(args) => args,
        Err(error) => {
            // Help and version are "errors" that go to stdout. A reader that went away is no failure.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let done = match args.command {
        Command::Replay(args) => replay::replay(&args),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Import(args) => import::import(&args),
        Command::Export(args) => export::export(&args),
        Command::Chart(args) => chart::chart(&args),
        Command::Report(args) => report::report(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Run(args) => return run::run(&args).unwrap_or_else(|error| failed(&error)),
    };
    done.map_or_else(|error| failed(&error), ExitCode::from)
}

fn failed(error: &CliError) -> ExitCode {
    output::report(error);
    ExitCode::from(error.exit_code())
}
