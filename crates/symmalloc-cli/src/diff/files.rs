//! The files of `symmalloc diff`, which are two recordings or any number of flight records, depending on their content.

use super::{flights, report};
use crate::args::DiffArgs;
use crate::error::CliError;
use crate::verdict::Verdict;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Number of bytes at the start of a file that identify its kind.
const HEAD_BYTES: u64 = 4096;

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    FlightRecord,
    Recording,
}

/// Compares the files. The verdict is `Differ` if ranks differ.
pub(crate) fn run(args: &DiffArgs) -> Result<Verdict, CliError> {
    let first = |kind| args.files.iter().find(|path| kind_of(path) == Some(kind));
    match (first(FileKind::FlightRecord), first(FileKind::Recording)) {
        (Some(record), Some(recording)) => {
            Err(CliError::DiffOfBoth { record: record.clone(), recording: recording.clone() })
        }
        (Some(_), None) => flights::run(args),
        (None, _) => match &args.files[..] {
            [a, b] => report::run(a, b, args),
            files => Err(CliError::DiffOfNotTwo { recordings: files.len() }),
        },
    }
}

/// Returns the kind of a file. A flight record is JSON, and a recording is not. Returns `None` if the kind cannot be determined;
/// reading the file then reports the error. Pipes are not opened, because reading would consume their data.
fn kind_of(path: &Path) -> Option<FileKind> {
    let file = path.is_file().then(|| File::open(path).ok())??;
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    let first = head.trim_ascii_start().first()?;
    Some(if *first == b'{' { FileKind::FlightRecord } else { FileKind::Recording })
}
