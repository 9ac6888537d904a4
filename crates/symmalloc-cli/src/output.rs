//! Output of the program: results to stdout, errors to stderr, colors only to people. Hidden characters in the text of others are shown
//! by number here (`escape`).
//!
//! With `--json` a command prints one document, whatever happens: its result, or what went wrong. Each object at the top says
//! which version of its keys it has ([`SCHEMA_VERSION`]); a version adds keys, and a new one may change them.

use crate::destination::Destination;
use crate::error::CliError;
use crate::escape::{for_json, for_terminal, styled, visible_line};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::io::{self, IsTerminal, Write};

/// The version of what `--json` prints. It counts up when a key changes its meaning or goes away.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// Writes a result to stdout, all at once. A reader that went away (`| head`) is no failure.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    Channel::Stdout.print(text)
}

/// Writes a result to stdout as JSON.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn print_json(result: Value) -> Result<(), CliError> {
    Channel::Stdout.print_json(result)
}

/// Where a command says what it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Stdout,
    /// Where stdout has the result itself.
    Stderr,
}

impl Channel {
    /// The channel that a destination leaves.
    pub(crate) fn beside(out: &Destination) -> Self {
        if out.is_stream() { Channel::Stderr } else { Channel::Stdout }
    }

    pub(crate) fn palette(self) -> Palette {
        match self {
            Channel::Stdout => Palette::of_stdout(),
            Channel::Stderr => Palette { is_colourful: is_colourful(&io::stderr()) },
        }
    }

    pub(crate) fn print(self, text: &str) -> Result<(), CliError> {
        self.write(&for_terminal(text))
    }

    fn write(self, text: &str) -> Result<(), CliError> {
        let written = match self {
            Channel::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
            }
            Channel::Stderr => io::stderr().write_all(text.as_bytes()),
        };
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CliError::Print(error)),
            _ => Ok(()),
        }
    }

    pub(crate) fn print_json(self, result: Value) -> Result<(), CliError> {
        self.write(&for_json(&document(result)))
    }
}

/// A result as text, with the version of its keys.
fn document(result: Value) -> String {
    let versioned = |value| match value {
        Value::Object(object) => {
            let mut with_version = Map::from_iter([("schema_version".to_owned(), json!(SCHEMA_VERSION))]);
            with_version.extend(object);
            Value::Object(with_version)
        }
        other => other,
    };
    let result = match result {
        Value::Array(objects) => Value::Array(objects.into_iter().map(versioned).collect()),
        one => versioned(one),
    };
    format!("{result:#}\n")
}

/// An error as JSON. Its keys are an interface: `symmalloc --help` lists them.
pub(crate) fn report_json(message: &str, causes: &[String], help: Option<&str>) {
    let error = json!({ "error": { "message": message, "causes": causes, "help": help, "exit_code": 2 } });
    // Nothing is left to do where that fails.
    let _ = print_json(error);
}

/// What an error says, the errors behind it, and what to do.
pub(crate) fn told(error: &CliError) -> (String, Vec<String>, Option<String>) {
    let message = error.to_string();
    let mut causes: Vec<String> = Vec::new();
    for cause in std::iter::successors(error.source(), |&error: &&dyn Error| error.source()) {
        let cause = cause.to_string();
        // Some messages have their cause.
        if !causes.last().unwrap_or(&message).contains(&cause) {
            causes.push(cause);
        }
    }
    (message, causes, error.help().map(Into::into))
}

/// Returns what went wrong, and because of what, in one line. A path in front is left out: the line stands where the file is known.
pub(crate) fn reason(error: &CliError) -> String {
    let (message, causes, _) = told(error);
    let message = match error {
        CliError::Job { path, .. } | CliError::NotPlanned { path, .. } | CliError::Contradictory { path, .. } => {
            message.strip_prefix(&format!("{}: ", path.display())).map(str::to_owned).unwrap_or(message)
        }
        _ => message,
    };
    std::iter::once(message).chain(causes).collect::<Vec<_>>().join(": ")
}

/// Tells on stderr what went wrong, because of what, and what to do.
pub(crate) fn report(error: &CliError) {
    let palette = Palette::of_stderr();
    let (message, causes, help) = told(error);
    let mut text = format!("  {} {}\n", palette.bad("×"), visible_line(&message));
    for (index, cause) in causes.iter().enumerate() {
        let branch = if index + 1 < causes.len() { "├─▶" } else { "╰─▶" };
        text += &format!("  {} {}\n", palette.bad(branch), visible_line(cause));
    }
    if let Some(help) = help {
        text += &format!("  {} {help}\n", palette.aside("help:"));
    }
    tell(&text);
}

/// Writes text to stderr, all at once. Nobody needs to read it.
pub(crate) fn tell(text: &str) {
    let _ = io::stderr().write_all(for_terminal(text).as_bytes());
}

/// Whether the reader sees colours and wants them (<https://no-color.org>).
fn is_colourful(stream: &impl IsTerminal) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The colours of stdout, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    is_colourful: bool,
}

impl Palette {
    pub(crate) fn of_stdout() -> Self {
        Palette { is_colourful: is_colourful(&io::stdout()) }
    }

    pub(crate) fn of_stderr() -> Self {
        Palette { is_colourful: is_colourful(&io::stderr()) }
    }

    pub(crate) fn title(self, text: &str) -> String {
        self.paint(text, "1")
    }

    pub(crate) fn aside(self, text: &str) -> String {
        self.paint(text, "2")
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.paint(text, "1;32")
    }

    pub(crate) fn bad(self, text: &str) -> String {
        self.paint(text, "1;31")
    }

    /// With one of the terminal's styles.
    fn paint(self, text: &str, style: &str) -> String {
        if self.is_colourful { styled(text, style) } else { visible_line(text).into_owned() }
    }
}

/// A table of text: the first column to the left, the others to the right, two blanks between them.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<Cell>>,
}

/// A cell, and how it is painted.
pub(crate) type Cell = (String, Option<fn(Palette, &str) -> String>);

impl Table {
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let visible = |(text, paint): Cell| (visible_line(&text).into_owned(), paint);
        self.rows.push(cells.into_iter().map(visible).collect());
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|(text, _)| text.chars().count()).max().unwrap_or(0)
        };
        (0..columns).map(width).collect()
    }

    /// The number of characters in a line.
    pub(crate) fn width(&self) -> usize {
        self.widths().iter().map(|width| width + 2).sum::<usize>().saturating_sub(2)
    }

    /// The lines of the table.
    pub(crate) fn lines(&self, palette: Palette) -> Vec<String> {
        let widths = self.widths();
        let line = |row: &Vec<Cell>| {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, ((text, paint), width))| {
                let blanks = " ".repeat(width - text.chars().count());
                let shown = paint.map_or_else(|| text.clone(), |paint| paint(palette, text));
                if column == 0 { shown + &blanks } else { blanks + &shown }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }
}
