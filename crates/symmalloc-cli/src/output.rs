//! Where words go: results to stdout, errors to stderr, colours only to people.

use crate::error::CliError;
use std::error::Error;
use std::io::{self, IsTerminal, Write};

/// Writes a result to stdout, all at once. A reader that went away (`| head`) is no failure.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CliError::Print(error)),
        _ => Ok(()),
    }
}

/// Writes a result to stdout as JSON.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn print_json(object: &impl serde::Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(object).expect("plain numbers and strings have a JSON form");
    text.push('\n');
    print(&text)
}

/// Tells on stderr what went wrong, because of what, and what to do.
pub(crate) fn report(error: &CliError) {
    let palette = Palette::of_stderr();
    let mut text = format!("  {} {error}\n", palette.bad("×"));
    let causes: Vec<_> = std::iter::successors(error.source(), |&error: &&dyn Error| error.source()).collect();
    for (index, cause) in causes.iter().enumerate() {
        let branch = if index + 1 < causes.len() { "├─▶" } else { "╰─▶" };
        text += &format!("  {} {cause}\n", palette.bad(branch));
    }
    if let Some(help) = error.help() {
        text += &format!("  {} {help}\n", palette.aside("help:"));
    }
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Writes text to stderr, all at once. Nobody needs to read it.
pub(crate) fn tell(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
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
        if self.is_colourful { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
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
        self.rows.push(cells.into_iter().collect());
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
