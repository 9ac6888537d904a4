//! The program `symmalloc`: replays recorded GPU jobs on many simulated ranks, compares the recordings of two ranks, and converts
//! recordings of other tools to traces. No command except `run` needs a GPU.
//!
//! ```text
//!             ┌─ replay ─► job ──► ranks ──► sequence   our allocator          ─┐
//! args ───────┤                          └─► address    address_order (model)  ─┴─► screen, or JSON
//!             ├─ simulate ► whole jobs on adverse ranks (symmalloc-sim)
//!             ├─ diff ───► comparison of two recordings, or of all ranks' flight records
//!             ├─ address ► the allocation that contained an address
//!             ├─ import ─► a trace
//!             ├─ export ─► a PyTorch snapshot
//!             ├─ chart ──► pictures
//!             ├─ report ─► a page about a job, and settings to try
//!             ├─ plan ───► a placement for every allocation of a job, and reservations without a plan
//!             ├─ run ────► any CUDA program under symmalloc, or recorded
//!             └─ completions, man
//! ```
//!
//! # Examples
//! ```sh
//! symmalloc replay fsdp1                        # a job that comes with the program, on eight ranks
//! symmalloc report job.pickle.gz -o job.html    # a PyTorch snapshot: what holds memory, and settings to try
//! symmalloc diff rank0.trace.zst rank3.trace.zst
//! ```
//!
//! # Implementation
//! Commands read through `input` (a file, standard input, or a job of `collection` by its name) and write through `destination`.
//!
//! [`job`] is also used elsewhere: the golden tests replay the recorded jobs through it. [`address_order`] is the model of
//! PyTorch's rule that `replay` compares with ours.
//!
//! Exit codes: 0 success, 3 ranks differ or memory is refused, 2 invalid input. Results go to stdout, errors and progress to stderr.
#![forbid(unsafe_code)]
// `println!` and `eprintln!` panic if the output is closed; the functions of `output` do not.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod address;
pub mod address_order;
mod args;
mod beginning;
mod chart;
mod collection;
mod config_text;
mod content;
mod destination;
pub mod diff;
mod error;
mod escape;
mod explorer;
mod export;
mod format;
mod import;
mod input;
pub mod job;
mod manual;
mod output;
mod picture;
mod plan;
mod planned;
mod progress;
mod quantity;
#[cfg(test)]
mod random_jobs;
mod recorded;
mod replay;
mod report;
mod run;
mod simulate;
mod streams;
pub mod timing;
mod verdict;

use args::{Args, Command};
use clap::Parser;
use error::CliError;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use symmalloc_files::block_write_signals;
use verdict::Verdict;

/// Runs the program with these arguments, whose first is the program's name, and returns its exit code.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let wants_json = arguments.iter().take_while(|argument| *argument != "--").any(|argument| argument == "--json");
    let args = match Args::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(error) => {
            block_write_signals();
            if error.use_stderr() {
                // The message repeats arguments, which may be file names. A line break in one must not start a new line of output. The
                // message's plain text has no styles.
                let visible =
                    |argument: &OsString| symmalloc_text::visible_line(&argument.to_string_lossy()).into_owned();
                let text = Args::try_parse_from(arguments.iter().map(visible)).err();
                let text = text.as_ref().unwrap_or(&error).render().to_string();
                output::write_stderr(&text);
            } else {
                // Help and version are "errors" that go to stdout.
                let printed = error.print().and_then(|()| io::stdout().flush());
                if let Err(error) = printed
                    && error.kind() != io::ErrorKind::BrokenPipe
                {
                    return failed(&CliError::Print(error), false);
                }
            }
            if wants_json && error.use_stderr() {
                output::report_json(error.to_string().trim_end(), &[], None);
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    if let Command::Run(args) = &args.command {
        return run::run(args).unwrap_or_else(|error| {
            block_write_signals();
            failed(&error, false)
        });
    }
    // A write beyond the limit on file sizes is an error. The program of `run` would inherit this.
    block_write_signals();
    let done = carry_out(&args.command);
    done.map_or_else(|error| failed(&error, wants_json && !args.command.writes_stdout()), ExitCode::from)
}

/// Executes a command.
fn carry_out(command: &Command) -> Result<Verdict, CliError> {
    if let Some(policy) = command.policy() {
        policy.check()?;
    }
    match command {
        Command::Replay(args) => replay::replay(args),
        Command::Simulate(args) => simulate::simulate(args),
        Command::Diff(args) => diff::run(args),
        Command::Address(args) => address::address(args),
        Command::Import(args) => import::import(args),
        Command::Export(args) => export::export(args),
        Command::Chart(args) => chart::chart(args),
        Command::Report(args) => report::report(args),
        Command::Plan(args) => plan::plan(args),
        Command::Run(_) => unreachable!("`run` returns above with its own exit code"),
        Command::Completions(args) => manual::completions(args),
        Command::Man(args) => manual::man(args),
    }
}

fn failed(error: &CliError, wants_json: bool) -> ExitCode {
    output::report(error);
    if wants_json && !matches!(error, CliError::Print(_)) {
        let (message, causes, help) = output::parts(error);
        output::report_json(&message, &causes, help.as_deref());
    }
    ExitCode::from(error.exit_code())
}
