//! Output destinations: a file, or standard output (`-`) for `import` and `export`.
//!
//! A destination is validated before any input is read: it must not be one of the inputs, and its extension must match
//! its content. A file is written under a temporary name in the same folder and renamed when it is complete. An
//! existing file stays unchanged until then.

use crate::args::STREAM;
use crate::content::Content;
use crate::error::CliError;
use crate::input::{is_pipe, open_pipe};
use std::borrow::Borrow;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use symmalloc_core::config::Config;
use symmalloc_core::op::Record;
use symmalloc_files::Draft;
use symmalloc_import::compression::{Compression, Compressor};
use symmalloc_text::visible_line;
use symmalloc_trace::TraceWriter;

/// A validated output destination.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    path: PathBuf,
}

impl Destination {
    /// Returns a file destination for `content` that is computed from `inputs`.
    ///
    /// # Errors
    /// Returns an error if the path is `-` or one of the inputs, or if its extension belongs to other content.
    pub(crate) fn file<'a>(
        path: &Path,
        content: Content,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<Self, CliError> {
        if path == Path::new(STREAM) {
            return Err(CliError::NoStream { content });
        }
        Self::file_or_stream(path, Some(content), inputs)
    }

    /// Returns a file destination, or standard output if the path is `-`. Without `content`, any extension is allowed.
    ///
    /// # Errors
    /// Returns an error if the path is one of the inputs, or if its extension belongs to other content.
    pub(crate) fn file_or_stream<'a>(
        path: &Path,
        content: Option<Content>,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<Self, CliError> {
        if let (Some(content), Some(named)) = (content, Content::of_name(path))
            && named != content
        {
            return Err(CliError::NamedOtherwise { path: path.to_path_buf(), named, content });
        }
        match inputs.into_iter().find(|input| is_same(path, input)) {
            Some(_) => Err(CliError::OutputIsInput { path: path.to_path_buf() }),
            None => Ok(Destination { path: path.to_path_buf() }),
        }
    }

    /// Returns `true` for standard output, which then carries no other output.
    pub(crate) fn is_stream(&self) -> bool {
        self.path == Path::new(STREAM)
    }

    /// Starts writing, compressed according to the extension.
    pub(crate) fn create(&self) -> io::Result<Writing> {
        let sink = if self.is_stream() {
            Sink::Stream(Box::new(StandardOutput))
        } else {
            match fs::metadata(&self.path) {
                Ok(metadata) if is_pipe(&metadata) => {
                    Sink::Stream(Box::new(open_pipe(&self.path, |path| File::options().write(true).open(path))?))
                }
                // A device, such as /dev/null, or a folder, which fails to open.
                Ok(metadata) if !metadata.is_file() => {
                    Sink::Stream(Box::new(File::options().write(true).open(&self.path)?))
                }
                found => {
                    let place = found.as_ref().map_or_else(|_| Ok(self.path.clone()), |_| self.path.canonicalize())?;
                    Sink::Draft(Draft::public(&place)?)
                }
            }
        };
        let compression = if self.is_stream() { Compression::Plain } else { Compression::of_extension(&self.path) };
        Ok(Writing { compressor: Compressor::new(sink, compression)? })
    }

    /// Writes records as a trace.
    pub(crate) fn write_trace(
        &self,
        config: Option<&Config>,
        records: impl IntoIterator<Item = impl Borrow<Record>>,
    ) -> Result<(), CliError> {
        let failed = |error| self.failed(error);
        let mut trace = TraceWriter::new(self.create().map_err(failed)?, config).map_err(failed)?;
        for record in records {
            let written = trace.write(record.borrow());
            written.map_err(|source| CliError::Write { path: self.path.clone(), source })?;
        }
        trace.finish().and_then(Writing::finish).map_err(failed)
    }

    /// Writes all bytes.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), CliError> {
        let written = self.create().and_then(|mut writing| {
            writing.write_all(bytes)?;
            writing.finish()
        });
        written.map_err(|error| self.failed(error))
    }

    pub(crate) fn failed(&self, source: io::Error) -> CliError {
        let path = if self.is_stream() { PathBuf::from("standard output") } else { self.path.clone() };
        CliError::Create { path, source }
    }
}

/// A destination that is being written. Dropping it before [`finish`](Writing::finish) leaves no file.
pub(crate) struct Writing {
    compressor: Compressor<Sink>,
}

impl Writing {
    /// Completes the output and renames the file to its final name.
    pub(crate) fn finish(self) -> io::Result<()> {
        let mut sink = self.compressor.finish()?;
        sink.flush()?;
        match sink {
            Sink::Draft(draft) => draft.finish(),
            Sink::Stream(_) => Ok(()),
        }
    }
}

impl Write for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.compressor.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.compressor.flush()
    }
}

/// Standard output. A closed pipe (`| head`) is not an error.
struct StandardOutput;

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match io::stdout().write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match io::stdout().flush() {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}

/// Receiver of the compressed bytes.
enum Sink {
    /// A file that is renamed when it is complete.
    Draft(Draft),
    /// Standard output, a pipe or a device.
    Stream(Box<dyn Write>),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Draft(draft) => draft.write(bytes),
            Sink::Stream(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sink::Draft(draft) => draft.flush(),
            Sink::Stream(stream) => stream.flush(),
        }
    }
}

/// Returns a file name for use within a line of text.
pub(crate) fn shown(path: &Path) -> String {
    if path == Path::new(STREAM) {
        "standard output".to_owned()
    } else {
        visible_line(&path.to_string_lossy()).into_owned()
    }
}

/// Returns `true` if two paths refer to the same file.
fn is_same(one: &Path, other: &Path) -> bool {
    if one == Path::new(STREAM) || other == Path::new(STREAM) {
        return false;
    }
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(a), Ok(b)) if a.is_file() && b.is_file() => {
            is_same_file(&a, &b) || one.canonicalize().ok() == other.canonicalize().ok()
        }
        _ => false,
    }
}

#[cfg(unix)]
fn is_same_file(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn is_same_file(_: &fs::Metadata, _: &fs::Metadata) -> bool {
    false
}
