//! Sources of recordings and plans: a file, standard input (`-`), or one of the project's recorded jobs by name.
//!
//! Opening a named pipe blocks until a writer opens it. The program reports that it waits, and gives up after a timeout.

use crate::args::{ReadingArgs, STREAM};
use crate::collection;
use crate::error::CliError;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use symmalloc_import::{ImportError, ImportErrorKind, ReadOptions, Recording, read_from};
use symmalloc_text::visible_line;

/// Time after which the program reports on stderr that it waits for the other end of a pipe.
const PIPE_PATIENCE: Duration = Duration::from_secs(1);
/// Timeout for the other end of a pipe to open.
const PIPE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Copies of each record that a command makes: the ops of its program, a changed recording, and tables by allocation.
const COPIES: u32 = 3;

/// Reads a recording for a command that executes or compares it.
pub(crate) fn recording(path: &Path, reading: &ReadingArgs) -> Result<Recording, CliError> {
    recording_with(path, &ReadOptions::from(reading).copies(COPIES))
}

/// Reads a recording for a command that makes no copies of it.
pub(crate) fn records(path: &Path, reading: &ReadingArgs) -> Result<Recording, CliError> {
    recording_with(path, &ReadOptions::from(reading))
}

/// Reads a recording with the addresses of its allocations, if it has any, for a command that makes no copies of it.
pub(crate) fn recording_with_addresses(path: &Path, reading: &ReadingArgs) -> Result<Recording, CliError> {
    recording_with(path, &ReadOptions::from(reading).addresses())
}

/// Reads a recording with its Python stacks, if it has any.
pub(crate) fn recording_with_stacks(path: &Path, reading: &ReadingArgs) -> Result<Recording, CliError> {
    recording_with(path, &ReadOptions::from(reading).copies(COPIES).stacks())
}

fn recording_with(path: &Path, options: &ReadOptions) -> Result<Recording, CliError> {
    let source = open(path).map_err(|error| ImportError::new(Some(path), ImportErrorKind::Open(error)))?;
    let name = if path == Path::new(STREAM) { Path::new("standard input") } else { path };
    read_from(source, options).map_err(|error| error.with_path(name).into())
}

/// Opens a file, standard input or a recorded job. A file takes precedence over a job of the same name.
pub(crate) fn open(path: &Path) -> io::Result<Box<dyn Read>> {
    if path == Path::new(STREAM) {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            return Err(io::Error::other("standard input is a terminal: redirect a recording to it with < or |"));
        }
        return Ok(Box::new(stdin));
    }
    match (fs::metadata(path), collection::trace(path)) {
        (Err(error), Some(trace)) if error.kind() == io::ErrorKind::NotFound => Ok(Box::new(trace)),
        (Ok(metadata), _) if is_pipe(&metadata) => Ok(Box::new(open_pipe(path, |path| File::open(path))?)),
        _ => Ok(Box::new(File::open(path)?)),
    }
}

#[cfg(unix)]
pub(crate) fn is_pipe(metadata: &fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_fifo(&metadata.file_type())
}

#[cfg(not(unix))]
pub(crate) fn is_pipe(_: &fs::Metadata) -> bool {
    false
}

/// Opens a pipe as soon as its other end opens. On a timeout, the waiting thread ends with the process.
pub(crate) fn open_pipe(
    path: &Path,
    opens: impl FnOnce(&Path) -> io::Result<File> + Send + 'static,
) -> io::Result<File> {
    let (opened, opening) = mpsc::channel();
    let pipe = path.to_path_buf();
    let waiting = thread::Builder::new().name("open-pipe".to_owned()).spawn(move || opened.send(opens(&pipe)));
    waiting.map_err(|error| {
        let message =
            "no thread can be started that waits for the pipe: raise the limit on threads (ulimit -u, cgroup pids)";
        io::Error::new(error.kind(), format!("{message}: {error}"))
    })?;
    if let Ok(file) = opening.recv_timeout(PIPE_PATIENCE) {
        return file;
    }
    let report = format!("waiting for the other end of the pipe {}\n", visible_line(&path.display().to_string()));
    // Nobody may read it.
    let _written = io::stderr().write_all(report.as_bytes());
    opening.recv_timeout(PIPE_WAIT_MAX - PIPE_PATIENCE).unwrap_or_else(|_| {
        let seconds = PIPE_WAIT_MAX.as_secs();
        let message =
            format!("no program opened the other end of this pipe within {seconds} s: start that program first");
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    })
}
