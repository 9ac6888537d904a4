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

/// Prints the manual page of a command or of the program, or writes all pages to a folder.
pub(crate) fn man(args: &ManArgs) -> Result<Verdict, CliError> {
    // The page of the program cites a page per subcommand, and `help` has none.
    let mut program = Args::command().disable_help_subcommand(true);
    if let Some(folder) = &args.all {
        let written = clap_mangen::generate_to(program, folder);
        written.map_err(|source| CliError::Create { path: folder.clone(), source })?;
        return Ok(Verdict::Agree);
    }
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
