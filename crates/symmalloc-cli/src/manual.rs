//! `symmalloc completions` and `symmalloc man`, generated from the same command descriptions as `--help`.

use crate::Verdict;
use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::error::CliError;
use crate::output;
use clap::CommandFactory;
use clap_mangen::Man;
use std::io;

/// Prints a shell's completions.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<Verdict, CliError> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "symmalloc", &mut text);
    print(&text)
}

/// Prints the manual page of a command or of the program.
pub(crate) fn man(args: &ManArgs) -> Result<Verdict, CliError> {
    let mut program = Args::command();
    program.build();
    let page = match &args.command {
        None => program,
        Some(name) => {
            let found = program.find_subcommand(name).filter(|command| !command.is_hide_set());
            let command = found.ok_or_else(|| CliError::NoSuchCommand { name: name.clone() })?.clone();
            command.display_name(format!("symmalloc-{name}"))
        }
    };
    let mut text = Vec::new();
    Man::new(page).render(&mut text).map_err(|error: io::Error| CliError::Print(error))?;
    print(&text)
}

fn print(text: &[u8]) -> Result<Verdict, CliError> {
    output::print(&String::from_utf8_lossy(text))?;
    Ok(Verdict::Agree)
}
