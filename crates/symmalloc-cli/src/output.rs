//! Output of the program: results on stdout, errors on stderr, colors on terminals only. Hidden characters in foreign text are
//! escaped here (see `escape`).
//!
//! With `--json` a command always prints exactly one document: its result or its error. Each top-level object has the version of its keys
//! ([`SCHEMA_VERSION`]). New keys may appear within a version; other changes require a new version.

use crate::destination::Destination;
use crate::error::CliError;
use crate::escape::{for_json, for_terminal, styled};
use rustix::termios::tcgetwinsize;
use serde_json::{Map, Value, json};
use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use symmalloc_text::visible_line;

/// Version of the `--json` output. It increases when a key is removed or changes its meaning.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// Writes a result to stdout in one call. A closed pipe (`| head`) is not an error.
///
/// # Errors
/// Returns an error if stdout cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    Channel::Stdout.print(text)
}

/// Writes a result to stdout as JSON.
///
/// # Errors
/// Returns an error if stdout cannot be written.
pub(crate) fn print_json(result: Value) -> Result<(), CliError> {
    Channel::Stdout.print_json(result)
}

#[cfg(test)]
thread_local! {
    /// The text that commands of this thread print to stdout in unit tests.
    static PRINTED: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

/// Returns what the thread has printed to stdout since the last call.
#[cfg(test)]
pub(crate) fn take_printed() -> String {
    PRINTED.take()
}

/// Output stream for a command's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    Stdout,
    /// Used when stdout carries the result itself.
    Stderr,
}

impl Channel {
    /// Returns the stream that the destination does not occupy.
    pub(crate) fn beside(out: &Destination) -> Self {
        if out.is_stream() { Channel::Stderr } else { Channel::Stdout }
    }

    pub(crate) fn palette(self) -> Palette {
        match self {
            Channel::Stdout => Palette::of_stdout(),
            Channel::Stderr => Palette::of_stderr(),
        }
    }

    pub(crate) fn print(self, text: &str) -> Result<(), CliError> {
        self.write(&for_terminal(text))
    }

    fn write(self, text: &str) -> Result<(), CliError> {
        #[cfg(test)]
        if self == Channel::Stdout {
            PRINTED.with_borrow_mut(|printed| printed.push_str(text));
            return Ok(());
        }
        let written = match self {
            Channel::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
            }
            Channel::Stderr => {
                // The command's result is on stdout. It counts even if nobody can read this text.
                let _unread = io::stderr().write_all(text.as_bytes());
                return Ok(());
            }
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

/// Formats a result, with the version of its keys in each top-level object.
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

/// Prints an error as JSON. The keys are an interface: `symmalloc --help` lists them.
pub(crate) fn report_json(message: &str, causes: &[String], help: Option<&str>) {
    let error = json!({ "error": { "message": message, "causes": causes, "help": help, "exit_code": 2 } });
    // A failure to print the error cannot be reported.
    let _ = print_json(error);
}

/// Returns an error's message, its causes, and its advice.
pub(crate) fn parts(error: &CliError) -> (String, Vec<String>, Option<String>) {
    let message = error.to_string();
    let mut causes: Vec<String> = Vec::new();
    for cause in std::iter::successors(error.source(), |&error: &&dyn Error| error.source()) {
        let cause = cause.to_string();
        // Some messages include their cause.
        if !causes.last().unwrap_or(&message).contains(&cause) {
            causes.push(cause);
        }
    }
    (message, causes, error.help().map(Into::into))
}

/// Returns an error and its causes in one line, without a leading path: the context already names the file.
pub(crate) fn reason(error: &CliError) -> String {
    let (message, causes, _) = parts(error);
    let message = match error {
        CliError::Job { path, .. }
        | CliError::NotPlanned { path, .. }
        | CliError::NotFollowed { path, .. }
        | CliError::Contradictory { path, .. } => {
            message.strip_prefix(&format!("{}: ", path.display())).map(str::to_owned).unwrap_or(message)
        }
        _ => message,
    };
    std::iter::once(message).chain(causes).collect::<Vec<_>>().join(": ")
}

/// Prints an error, its causes and its advice on stderr.
pub(crate) fn report(error: &CliError) {
    let palette = Palette::of_stderr();
    let (message, causes, help) = parts(error);
    let mut text = format!("  {} {}\n", palette.bad("×"), visible_line(&message));
    for (index, cause) in causes.iter().enumerate() {
        let branch = if index + 1 < causes.len() { "├─▶" } else { "╰─▶" };
        text += &format!("  {} {}\n", palette.bad(branch), visible_line(cause));
    }
    if let Some(help) = help {
        text += &format!("  {} {help}\n", palette.aside("help:"));
    }
    write_stderr(&text);
}

/// Writes text to stderr in one call and ignores failures.
pub(crate) fn write_stderr(text: &str) {
    let _ = io::stderr().write_all(for_terminal(text).as_bytes());
}

/// Returns `true` if the stream is a terminal that shows colors and the user has not disabled them (<https://no-color.org>).
fn is_colorful(stream: &impl IsTerminal) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Colors of a stream, or none, and its width.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    is_colorful: bool,
    /// Maximum number of characters in a line of a table; `None` if neither `COLUMNS` nor a terminal states it.
    columns: Option<u16>,
}

/// Returns the number of columns that `COLUMNS` states, or that the terminal has.
fn columns_of(stream: &(impl IsTerminal + AsFd)) -> Option<u16> {
    let stated = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let of_terminal = || stream.is_terminal().then(|| tcgetwinsize(stream).ok()).flatten().map(|size| size.ws_col);
    stated.or_else(of_terminal).filter(|&columns| columns > 0)
}

impl Palette {
    pub(crate) fn of_stdout() -> Self {
        Palette { is_colorful: is_colorful(&io::stdout()), columns: columns_of(&io::stdout()) }
    }

    pub(crate) fn of_stderr() -> Self {
        Palette { is_colorful: is_colorful(&io::stderr()), columns: columns_of(&io::stderr()) }
    }

    /// Returns the maximum number of characters in a line of a table, if there is one.
    pub(crate) fn columns(self) -> Option<u16> {
        self.columns
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

    /// Applies one of the terminal's styles.
    fn paint(self, text: &str, style: &str) -> String {
        if self.is_colorful { styled(text, style) } else { visible_line(text).into_owned() }
    }
}

/// A text table: the first column is left-aligned, the others right-aligned, with two spaces between columns.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<Cell>>,
}

/// Text of a cell and its style.
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

    /// Returns the number of characters in a line.
    pub(crate) fn width(&self) -> usize {
        self.widths().iter().map(|width| width + 2).sum::<usize>().saturating_sub(2)
    }

    /// Returns the table in parts that fit into the stream's width, if possible. Each part repeats the first column.
    pub(crate) fn parts(&self, palette: Palette) -> Vec<Table> {
        let columns = palette.columns.map_or(usize::MAX, usize::from);
        let widths = self.widths();
        let first = widths.first().copied().unwrap_or(0);
        let (mut groups, mut used) = (vec![Vec::new()], first);
        for (column, width) in widths.iter().enumerate().skip(1) {
            used += width + 2;
            if used > columns && groups.last().is_some_and(|group| !group.is_empty()) {
                groups.push(Vec::new());
                used = first + width + 2;
            }
            groups.last_mut().expect("there should be at least one group").push(column);
        }
        let cells = |row: &Vec<Cell>, group: &[usize]| {
            std::iter::once(&0).chain(group).filter_map(|&column| row.get(column).cloned()).collect()
        };
        groups.iter().map(|group| Table { rows: self.rows.iter().map(|row| cells(row, group)).collect() }).collect()
    }

    /// Returns the lines of the table. An empty line separates the parts of a table that is wider than the stream.
    pub(crate) fn lines(&self, palette: Palette) -> Vec<String> {
        let parts = self.parts(palette);
        parts.iter().map(|part| part.lines_of_part(palette)).collect::<Vec<_>>().join(&String::new())
    }

    fn lines_of_part(&self, palette: Palette) -> Vec<String> {
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
