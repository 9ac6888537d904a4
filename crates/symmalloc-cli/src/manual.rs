//! `symmalloc completions` and `symmalloc man`, generated from the same command descriptions as `--help`.

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::collection;
use crate::error::CliError;
use crate::output;
use crate::verdict::Verdict;
use clap::CommandFactory;
use clap::builder::PossibleValuesParser;
use clap_complete::Shell;
use clap_mangen::Man;
use std::io;

/// The arguments that name recordings, by command.
const RECORDINGS: [(&str, &str); 9] = [
    ("replay", "traces"),
    ("simulate", "traces"),
    ("diff", "files"),
    ("address", "input"),
    ("import", "input"),
    ("export", "input"),
    ("chart", "input"),
    ("report", "input"),
    ("plan", "traces"),
];

/// Prints a shell's completions. Where a recording is expected, bash, zsh and fish offer files and the jobs that come with the program.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<Verdict, CliError> {
    let mut program = Args::command();
    for (command, argument) in RECORDINGS {
        let names = PossibleValuesParser::new(collection::short_names());
        program = program.mut_subcommand(command, |it| it.mut_arg(argument, |it| it.value_parser(names)));
    }
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut program, "symmalloc", &mut text);
    let mut script = String::from_utf8_lossy(&text).into_owned();
    let names = collection::short_names().collect::<Vec<_>>().join(" ");
    match args.shell {
        // The generated script offers the names alone.
        Shell::Zsh => script = script.replace(&format!(":({names})"), &format!(":{{compadd {names}; _files}}")),
        // The generated script has nothing for arguments without a flag.
        Shell::Fish => {
            let commands = RECORDINGS.map(|(command, _)| command).join(" ");
            let condition = format!("__fish_symmalloc_using_subcommand {commands}");
            script += &format!("complete -c symmalloc -n \"{condition}\" -a \"{names}\"\n");
        }
        _ => {}
    }
    output::print(&script)?;
    Ok(Verdict::Agree)
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
