//! Where words go: results to stdout, errors to stderr, colours only to people.

use crate::error::CliError;
use miette::{GraphicalReportHandler, GraphicalTheme};
use owo_colors::{OwoColorize, Style};
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
    let theme = if is_colourful(&io::stderr()) { GraphicalTheme::unicode() } else { GraphicalTheme::unicode_nocolor() };
    let mut text = String::new();
    let handler = GraphicalReportHandler::new_themed(theme).with_wrap_lines(false).with_cause_chain();
    if handler.render_report(&mut text, error).is_ok() {
        let _ = io::stderr().write_all(text.as_bytes());
    }
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

    pub(crate) fn is_colourful(self) -> bool {
        self.is_colourful
    }

    pub(crate) fn title(self, text: &str) -> String {
        self.paint(text, Style::new().bold())
    }

    pub(crate) fn aside(self, text: &str) -> String {
        self.paint(text, Style::new().dimmed())
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.paint(text, Style::new().green().bold())
    }

    pub(crate) fn bad(self, text: &str) -> String {
        self.paint(text, Style::new().red().bold())
    }

    fn paint(self, text: &str, style: Style) -> String {
        if self.is_colourful { text.style(style).to_string() } else { text.to_owned() }
    }
}
